"""What every evaluation sees of an encoder, whoever made it: pictures in, named features out.

Legend: B pictures, L tokens, D width, C channels, H height, W width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn

from dpvision.config import DataConfig
from dpvision.data.transform import Preprocess, preprocess
from dpvision.features import FeatureFunction
from dpvision.train.lineage import shaped_in_confidence

Family = Literal["transformer", "convnet", "fixed"]


@dataclass(frozen=True)
class Encoder:
    """An encoder as the harness knows it. Made by ``encoders.open.open_encoder`` from a name, a file or a run."""

    name: str
    """As tables print it; the same weights have the same name."""
    image_size: int
    """Side of the pictures it takes, in pixels."""
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
    """What shaped its weights (``train.lineage``); empty for random weights, and for features without weights."""
    weights: Literal["trained", "random", "none"] = "trained"
    """"random": an architecture whose weights nobody trained; "none": features without weights."""
    own_sizes: tuple[int, ...] = ()
    """Resolutions that it takes, px, ascending up to ``image_size``: each image is seen at its own. Empty: at ``image_size`` alone."""
    standard_rows: bool = False
    """Whether its features have a public point taken off and length 1: a head then takes off no other (``centre``), and they are kept as
    float16, which rounds a number by at most one part in 2,048."""
    order_D: Tensor | None = field(default=None, compare=False)
    """Spatial frequency over the image of each dimension of its features, int64 from 0 (what all places have in common); None where they
    have none. Private heads weigh low frequencies more where there is much noise (``adapt.frequency``)."""
    licence: str | None = None
    """Of published weights, as their library states it; None where nothing is stated, and for runs, whose manifests say."""

    @property
    def data(self) -> DataConfig:
        """How its images are prepared."""
        return DataConfig(mean=self.mean, std=self.std, own_sizes=self.own_sizes)

    @property
    def preprocess(self) -> Preprocess:
        """The same as a function of one image."""
        return preprocess(self.image_size, self.mean, self.std, self.own_sizes)

    def tensors(self) -> Iterator[Tensor]:
        """Its weights, on the CPU; none for features without weights. Nothing is copied before the first is asked for."""
        if self.backbone is not None:
            yield from self.backbone().state_dict().values()

    @property
    def confidential(self) -> bool:
        """Whether private images shaped these weights without a guarantee: whatever is computed with them is private too."""
        return shaped_in_confidence(self.lineage)
