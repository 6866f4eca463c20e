"""Leave out images that a declared classifier finds unsafe.

No classifier is shipped. One is a run of ``dpvision adapt`` on public examples with labels, such as
``safe`` and ``unsafe``: its head on the embedding of its encoder gives the probability.

Legend: B images, C channels, H height, W width, K classes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

import numpy as np

from dpvision.curate.record import Record
from dpvision.errors import ConfigError

NUM_ROWS = 32
"""Images of a pass, padded with zeros: an image's bits must not depend on others."""


@dataclass(frozen=True)
class Safety:
    """Step ``safety``."""

    name: ClassVar[str] = "safety"
    decodes: ClassVar[bool] = True
    run: Path | None = None
    """Run of the classifier, trained on public images only."""
    classes: tuple[str, ...] = ("unsafe",)
    """Names of its classes that are left out."""
    max_probability: float = 0.5
    """Largest probability of these classes together (of the largest, for a classifier of several
    labels) at which an image is kept.
    """

    def __post_init__(self) -> None:
        if not 0 <= self.max_probability < 1:
            raise ConfigError(
                f"safety: max_probability={self.max_probability}; expected 0 to below 1. Use 0.5."
            )

    def stated(self) -> dict[str, str]:
        """Return one digest of the run's manifest, which names its weights, and its calibration."""
        from dpvision.checkpoint import load_checkpoint
        from dpvision.encoders.calibration import calibration_path

        checkpoint = load_checkpoint(self._given())
        files = [checkpoint.path / "manifest.json", calibration_path(checkpoint)]
        digest = sha256(b"".join(file.read_bytes() for file in files if file.exists()))
        return {"run": f"sha256 {digest.hexdigest()}"}

    def _given(self) -> Path:
        if self.run is None:
            raise ConfigError(
                "safety: no classifier; expected a run of dpvision adapt on public examples of "
                "safe and unsafe images. Give --safety.run RUN."
            )
        return self.run

    def opened(self) -> Callable[[Sequence[Record]], None]:
        """See ``RecordStep``.

        Raises:
            ConfigError: no run, an unknown class, or the classifier's weights have seen private
                images: then what is left of these images would depend on those.
            CheckpointError: the run cannot be read.
        """
        import torch

        from dpvision.encoders.classifier import load_classifier
        from dpvision.threads import one_thread

        classifier = load_classifier(self._given())
        if any(entry["visibility"] != "public" for entry in classifier.lineage):
            raise ConfigError(
                f"safety: {self.run}: its weights have seen images that are not public; expected "
                "public ones, because the store would depend on the others too. Train it on a "
                "store imported with --public, from public weights."
            )
        if not self.classes or (odd := set(self.classes) - set(classifier.class_names)):
            got = ", ".join(sorted(odd)) if self.classes else "none"
            raise ConfigError(
                f"safety: classes={got}; expected some of {', '.join(classifier.class_names)}. "
                "Give their names: --safety.classes unsafe."
            )
        chosen = [k for k, name in enumerate(classifier.class_names) if name in self.classes]

        @torch.inference_mode()
        def probabilities(x_BCHW: torch.Tensor) -> torch.Tensor:
            with one_thread():
                p_BK = classifier.probabilities(x_BCHW).double()[:, chosen]
            return p_BK.amax(1) if classifier.multi_label else p_BK.sum(1)

        size = classifier.image_size
        noise = torch.randn(NUM_ROWS, 3, size, size, generator=torch.Generator().manual_seed(0))
        there_B = probabilities(noise)
        places = ([*range(NUM_ROWS)][::-1], [0] * NUM_ROWS)  # as encoders.identity.check_places
        if any(not torch.equal(probabilities(noise[rows]), there_B[rows]) for rows in places):
            raise ConfigError(
                f"safety: {self.run}: probabilities change in their last bits with an image's "
                "place among others; expected a function of one image. Use another encoder."
            )

        def apply(records: Sequence[Record]) -> None:
            for start in range(0, len(records), NUM_ROWS):
                some = records[start : start + NUM_ROWS]
                x_BCHW = np.zeros((NUM_ROWS, 3, size, size), dtype=np.float32)
                for b, record in enumerate(some):
                    x_BCHW[b] = classifier.preprocess(record.pixels())
                for record, p in zip(some, probabilities(torch.from_numpy(x_BCHW)), strict=False):
                    # not finite: not known to be safe
                    if not float(p) <= self.max_probability:
                        record.leave_out(", ".join(self.classes))

        return apply
