"""The encoder type: a function from images to named features.

    encoder = dpvision.load("runs/demo")
    feature_BD = encoder(torch.from_numpy(encoder.preprocess("photo.jpg"))[None])

Legend: B images, L tokens, D width, C channels, H height, W width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from dpvision.config import DataConfig
from dpvision.data.rgb import Window
from dpvision.data.transform import (
    LibraryData,
    LibraryResize,
    Preprocess,
    in_use,
    preprocess_of,
)
from dpvision.errors import ConfigError
from dpvision.runs.lineage import shaped_in_confidence

Family = Literal["transformer", "convnet", "fixed"]
FeatureFunction = Callable[[Tensor], dict[str, Tensor]]
"""From normalised images x_BCHW to named features x_BD: several poolings share one forward pass."""


@dataclass(frozen=True)
class Encoder:
    """A frozen encoder in evaluation mode. Made by ``encoders.open.open_encoder`` from a name, a
    file or a run.
    """

    name: str
    """Name in tables; equal for equal weights."""
    image_size: int
    """Side of its input images, in pixels."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    poolings: FeatureFunction
    """From normalised images x_BCHW, float32 on ``device``, to features x_BD, float32, by name of
    pooling; the first is the default.
    """
    family: Family
    """Determines the optimizer of fine-tuning: AdamW for transformers, SGD for convnets. "fixed"
    features cannot be fine-tuned.
    """
    backbone: Callable[[], nn.Module] | None = None
    """Returns a new trainable copy on the CPU, from x_BCHW to the default pooling x_BD, float32.
    None for fixed features.
    """
    blocks: Callable[[Tensor], list[Tensor]] | None = None
    """From x_BCHW to the outputs of the transformer's blocks, class token first: each (B, 1 + L,
    D). None without blocks.
    """
    stages: Callable[[Tensor], Tensor] | None = None
    """From x_BCHW, as for ``poolings``, to features x_BD of pooling "stages"
    (``PooledNetwork.stages``); None for encoders without. Evaluations of all poolings leave it out.
    """
    lineage: tuple[dict[str, Any], ...] = field(default=(), compare=False)
    """Lineage of its weights (``runs.lineage``); empty for random weights, and for features without
    weights.
    """
    weights: Literal["trained", "random", "none"] = "trained"
    """"random": an architecture with untrained weights; "none": features without weights."""
    own_sizes: tuple[int, ...] = ()
    """Input resolutions in px, ascending up to ``image_size``; each image is used at its own. If
    empty, only ``image_size``.
    """
    resize: int | None = None
    crop: Literal["random", "centre"] = "random"
    """As in ``DataConfig``: for a run that resized its images, the part of an image to use
    (``evaluation_box``).
    """
    library: LibraryResize | None = None
    """How the library of a published encoder resizes images; None: as for runs, by ``resize`` and
    ``crop``.
    """
    standard_rows: bool = False
    """Whether its features are already centred, whitened and of length 1. A head then subtracts no
    other centre, its rate is not bounded for stability (``adapt.defaults``), and they are stored as
    float16, with a relative rounding error of at most 1 / 2,048.
    """
    order_D: Tensor | None = field(default=None, compare=False)
    """Spatial frequency of each feature dimension, int64 from 0 (the average over positions), or
    None. Private heads give low frequencies more weight under much noise (``adapt.defaults``).
    """
    precision: Literal["float32", "bfloat16"] = "float32"
    """In which the network computes features (``feature_precision``)."""
    window: Window | None = None
    """Declared range of the samples of more than 8 bits that a run was trained on; files are read
    by it.
    """
    network: nn.Module | None = field(default=None, compare=False)
    """The module on ``device`` that computes ``poolings``; None if that is another function."""
    licence: str | None = None
    """Licence of published weights as stated by their library or folder; None if not stated, and
    for runs, whose manifests have it.
    """
    arrays: Callable[[], dict[str, Tensor]] | None = None
    """Returns the weights by name, on the CPU, of an encoder that is no module; None for others."""

    def __call__(self, x_BCHW: Tensor, pooling: str | None = None) -> Tensor:
        """Return features x_BD of normalised images on the encoder's device.

        Args:
            pooling: if None, the default.

        Raises:
            ConfigError: there is no such pooling.
        """
        return self.named(x_BCHW, pooling)[1]

    def named(self, x_BCHW: Tensor, pooling: str | None = None) -> tuple[str, Tensor]:
        """Return the name of the pooling and its features. Raises like a call."""
        if pooling == "stages" and self.stages is not None:
            return pooling, self.stages(x_BCHW)
        found = self.poolings(x_BCHW)
        pooling = next(iter(found)) if pooling is None else pooling
        if pooling not in found:
            names = [*found, *([] if self.stages is None else ["stages"])]
            raise ConfigError(
                f"encoder: pooling={pooling!r}; expected one of {names} with {self.name}. "
                "Use one of them, or omit it."
            )
        return pooling, found[pooling]

    @property
    def data(self) -> DataConfig:
        """Preprocessing of its input images."""
        if self.library is None:
            return DataConfig(**in_use(self))
        return LibraryData(**in_use(self), library=self.library)

    @property
    def preprocess(self) -> Preprocess:
        """Preprocessing as a function from one image (path, bytes, PIL image or uint8 array) to
        float32 (3, H, W).
        """
        return preprocess_of(self.image_size, self.data, self.window)

    def state(self) -> dict[str, Tensor]:
        """Return its weights by name, on the CPU; empty for features without weights."""
        if self.arrays is not None:
            return self.arrays()
        return {} if self.backbone is None else self.backbone().state_dict()

    def tensors(self) -> Iterator[Tensor]:
        """Yield its weights, on the CPU; nothing for features without weights. Copies them
        lazily.
        """
        yield from self.state().values()

    @property
    def confidential(self) -> bool:
        """Whether these weights were trained on private images without a guarantee, so that
        everything computed with them is private.
        """
        return shaped_in_confidence(self.lineage)
