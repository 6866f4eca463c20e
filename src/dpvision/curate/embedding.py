"""The embedding of each image by any encoder that ``dpvision.load`` opens.

An embedding has the same bits whatever the batch, its place in it and the number of threads: images
are always computed ``NUM_ROWS`` at a time, padded with zeros, on one thread of a CPU; that their
place among these changes no bit is checked when the encoder is opened.

Legend: B images, D embedding dimension.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dpvision.curate.record import Record
from dpvision.errors import ConfigError

if TYPE_CHECKING:
    from dpvision.encoders.encoder import Encoder

NUM_ROWS = 32
"""Images of a pass."""


@dataclass(frozen=True)
class Embedding:
    """Compute the fact ``embedding``: features divided by their length, float16 (D,).

    Zeros where the encoder gives numbers that are not finite, or zeros only.

    Args:
        encoder: as for ``encoders.open.open_encoder``; the default needs no weights.
        pooling: if None, the encoder's default.
        device: of the encoder; embeddings by different kinds of devices differ in their last bits.
    """

    name: ClassVar[str] = "embedding"
    decodes: ClassVar[bool] = True
    encoder: str = "hog"
    pooling: str | None = None
    device: str = "cpu"

    def stated(self) -> dict[str, str]:
        """Return the encoder's public name and the digest of its weights, not a path."""
        return {"encoder": self._encoder_text}

    @cached_property
    def _encoder_text(self) -> str:
        from dpvision.encoders.identity import weights_digest

        encoder, _ = self._open()
        digest = weights_digest(encoder)
        return encoder.name if digest is None else f"{encoder.name}, sha256 {digest}"

    def _open(self) -> "tuple[Encoder, str]":
        from dpvision.config import FrozenEncoderConfig
        from dpvision.encoders.open import open_frozen
        from dpvision.threads import one_thread

        with one_thread():
            config = FrozenEncoderConfig(spec=self.encoder, pooling=self.pooling)
            encoder, config = open_frozen(config, self.device)
        assert config.pooling is not None
        if any(entry["visibility"] == "private" for entry in encoder.lineage):
            raise ConfigError(
                f"embedding: encoder={self.encoder} has seen private images; expected one that "
                "has not, because the store would depend on these too. Use hog."
            )
        return encoder, config.pooling

    def opened(self) -> Callable[[Sequence[Record]], None]:
        """Return the step.

        Raises:
            ConfigError: no such encoder, no weights for it, weights that have seen private images,
                or features that do not depend on one image alone. CheckpointError: it cannot be
                read.
        """
        from dpvision.encoders.identity import check_places
        from dpvision.threads import one_thread

        encoder, pooling = self._open()
        with one_thread():
            check_places(encoder, pooling, NUM_ROWS, self.device)
        return partial(_add_embeddings, encoder, pooling, self.device)


def _add_embeddings(
    encoder: "Encoder", pooling: str, device: str, records: Sequence[Record]
) -> None:
    import torch

    from dpvision.threads import one_thread

    seen = [(record, encoder.preprocess(record.pixels())) for record in records]
    for start in range(0, len(seen), NUM_ROWS):
        part = seen[start : start + NUM_ROWS]
        x_BCHW = torch.zeros(NUM_ROWS, *part[0][1].shape)
        for b, (_, x_CHW) in enumerate(part):
            x_BCHW[b] = torch.from_numpy(x_CHW)
        with torch.inference_mode(), one_thread():
            x_BD = encoder(x_BCHW.to(device), pooling).float().cpu().numpy()
        for (record, _), x_D in zip(part, x_BD, strict=False):
            record.facts[Embedding.name] = unit(x_D)


def unit(x_D: np.ndarray) -> np.ndarray:
    """Return features divided by their length, float16 (D,); zeros if they have none."""
    largest = np.abs(x_D).max()
    if not 0 < largest < np.inf:
        return np.zeros(x_D.shape, dtype=np.float16)
    scaled_D = x_D.astype(np.float64) / largest
    return (scaled_D / np.sqrt((scaled_D * scaled_D).sum())).astype(np.float16)
