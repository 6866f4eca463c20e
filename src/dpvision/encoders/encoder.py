"""The one type of encoder, whoever made it: images in, named features out.

    encoder = dpvision.load("runs/demo")
    feature_BD = encoder(torch.from_numpy(encoder.preprocess(image))[None])

Legend: B images, L tokens, D width, C channels, H height, W width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from dpvision.config import DataConfig
from dpvision.data.transform import Preprocess, preprocess_of
from dpvision.errors import ConfigError
from dpvision.runs.lineage import shaped_in_confidence

Family = Literal["transformer", "convnet", "fixed"]
FeatureFunction = Callable[[Tensor], dict[str, Tensor]]
"""x_BCHW, normalised -> named features x_BD of the same images: several poolings share one forward pass."""


@dataclass(frozen=True)
class Encoder:
    """Frozen and in evaluation mode. Made by ``encoders.open.open_encoder`` from a name, a file or a run."""

    name: str
    """As tables print it; the same weights have the same name."""
    image_size: int
    """Side of the images it takes, in pixels."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    poolings: FeatureFunction
    """x_BCHW normalised float32, on ``device`` -> features x_BD float32 by the name of their pooling; the first is the default."""
    family: Family
    """Decides the optimizer of fine-tuning: AdamW for transformers, SGD for convnets; "fixed" has nothing to train."""
    backbone: Callable[[], nn.Module] | None = None
    """A fresh trainable copy, on the CPU: x_BCHW -> x_BD float32, the default pooling. None for fixed features."""
    blocks: Callable[[Tensor], list[Tensor]] | None = None
    """x_BCHW -> outputs of the transformer's blocks, first to last, class token first: each (B, 1 + L, D). None without blocks."""
    lineage: tuple[dict[str, Any], ...] = field(default=(), compare=False)
    """What shaped its weights (``runs.lineage``); empty for random weights, and for features without weights."""
    weights: Literal["trained", "random", "none"] = "trained"
    """"random": an architecture with untrained weights; "none": features without weights."""
    own_sizes: tuple[int, ...] = ()
    """Resolutions that it takes, px, ascending up to ``image_size``: each image is seen at its own. Empty: at ``image_size`` alone."""
    resize: int | None = None
    crop: Literal["random", "centre"] = "random"
    """As in ``DataConfig``: of a run that resized its images, which part of an image it sees (``evaluation_box``)."""
    standard_rows: bool = False
    """Whether its features have a public point taken off and length 1: a head then takes off no other (``centre``), and they are kept as
    float16, which rounds a number by at most one part in 2,048."""
    order_D: Tensor | None = field(default=None, compare=False)
    """Spatial frequency over the image of each dimension of its features, int64 from 0 (what all places have in common); None where they
    have none. Private heads weigh low frequencies more where there is much noise (``adapt.frequency``)."""
    licence: str | None = None
    """Of published weights, as their library states it; None where nothing is stated, and for runs, whose manifests say."""

    def __call__(self, x_BCHW: Tensor, pooling: str | None = None) -> Tensor:
        """Features x_BD of normalised images on its device; ``pooling`` None: the default.

        Raises:
            ConfigError: it has no such pooling.
        """
        return self.named(x_BCHW, pooling)[1]

    def named(self, x_BCHW: Tensor, pooling: str | None = None) -> tuple[str, Tensor]:
        """The name of the pooling and its features; raises as a call."""
        found = self.poolings(x_BCHW)
        pooling = next(iter(found)) if pooling is None else pooling
        if pooling not in found:
            raise ConfigError(f"encoder: pooling={pooling!r}; expected one of {list(found)} with {self.name}. Correct it, or leave it out.")
        return pooling, found[pooling]

    @property
    def data(self) -> DataConfig:
        """How its images are prepared."""
        return DataConfig(mean=self.mean, std=self.std, own_sizes=self.own_sizes, resize=self.resize, crop=self.crop)

    @property
    def preprocess(self) -> Preprocess:
        """The same as a function of one PIL image, or uint8 array (H, W, 3): float32 (3, H, W)."""
        return preprocess_of(self.image_size, self.data)

    def tensors(self) -> Iterator[Tensor]:
        """Its weights, on the CPU; none for features without weights. Nothing is copied before the first is asked for."""
        if self.backbone is not None:
            yield from self.backbone().state_dict().values()

    @property
    def confidential(self) -> bool:
        """Whether private images shaped these weights without a guarantee: whatever is computed with them is private too."""
        return shaped_in_confidence(self.lineage)
