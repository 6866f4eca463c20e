"""Settings for training and scoring semantic segmentation; the defaults are those of MAE's transfer
to ADE20K.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dpvision.config.checks import check_choices, check_ranges
from dpvision.dense.training_settings import DenseHardware, DenseTrainSettings

if TYPE_CHECKING:
    from dpvision.dense.segmentation.semantic_augment import Augmentation
    from dpvision.encoders.encoder import Encoder

NormKind = Literal["batch", "group"]


@dataclass(frozen=True)
class SegmentationSettings:
    """Settings of training and scoring. The defaults are MAE's for ADE20K; docs/segmentation.md has
    the source of each.
    """

    epochs: float = 100.0
    """Passes over the training images."""
    batch_size: int = 16
    """Images per step, over all processes."""
    crop_size: int = 512
    """Side of training crops and of test windows in pixels, a multiple of the encoder's patch."""
    scale: tuple[float, float] = (0.5, 2.0)
    """Range of the factor by which the shorter side of training images is resized relative to
    crop_size.
    """
    flip: bool = True
    """Flip images horizontally with probability 1/2."""
    photometric: bool = True
    """Distort brightness, contrast, saturation and hue."""
    max_class_share: float = 0.75
    """Redraw crops in which one class has more of the pixels, at most ten times; 1 for never."""
    learning_rate: float = 1e-4
    """Learning rate of the head; the encoder's falls with depth by layer_decay."""
    layer_decay: float = 0.65
    """Factor between the rates of consecutive blocks."""
    weight_decay: float = 0.05
    """Not applied to norms, biases, class token and positions."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's betas."""
    warmup_steps: int = 1500
    """Number of warm-up steps, followed by linear decay to zero."""
    max_grad_norm: float = 0.0
    """Maximum norm of a step's gradient; 0 disables clipping."""
    drop_path: float = 0.1
    """Stochastic depth of the last block; it rises linearly from 0 at the first."""
    relative_positions: bool = True
    """Add relative positions, initialised to zero, to the encoder."""
    channels: int | None = None
    """Channels of UPerNet; if omitted, the encoder's width."""
    dropout: float = 0.1
    """Dropout of channels before the last layer."""
    auxiliary_weight: float = 0.4
    """Weight of the auxiliary head's loss."""
    norm: NormKind = "batch"
    """batch: BatchNorm over the images of one forward pass (over all GPUs under torchrun); group:
    GroupNorm per image.
    """
    stride: int | None = None
    """Stride of test windows in pixels; if omitted, two thirds of crop_size (341 of 512)."""
    seed: int = 0
    """Seed of the head's initial weights, the order and the views."""

    def __post_init__(self) -> None:
        check_choices(self)
        self.training()
        check_ranges(
            "segmentation",
            self,
            ("crop_size", self.crop_size >= 2, "at least 2"),
            ("scale", 0 < self.scale[0] <= self.scale[1] < math.inf, "0 < low <= high"),
            ("max_class_share", 0 < self.max_class_share <= 1, "0 < share <= 1"),
            ("learning_rate", 0 < self.learning_rate < math.inf, "more than 0"),
            ("layer_decay", 0 < self.layer_decay <= 1, "0 < decay <= 1"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "0 or more"),
            ("drop_path", 0 <= self.drop_path < 1, "0 <= drop_path < 1"),
            ("channels", self.channels is None or self.channels >= 1, "at least 1"),
            ("dropout", 0 <= self.dropout < 1, "0 <= dropout < 1"),
            ("auxiliary_weight", 0 <= self.auxiliary_weight < math.inf, "0 or more"),
            (
                "stride",
                self.stride is None or 1 <= self.stride <= self.crop_size,
                f"1 to crop_size ({self.crop_size})",
            ),
        )

    @property
    def window_stride(self) -> int:
        """Stride of test windows in pixels."""
        return self.stride if self.stride is not None else max(1, self.crop_size * 2 // 3)

    def training(self) -> DenseTrainSettings:
        """Return the settings of the training loop."""
        return DenseTrainSettings(
            epochs=self.epochs,
            batch_size=self.batch_size,
            warmup_steps=self.warmup_steps,
            schedule="polynomial",
            power=1.0,
            betas=self.betas,
            max_grad_norm=self.max_grad_norm,
            seed=self.seed,
        )

    def augmentation(self, encoder: "Encoder") -> "Augmentation":
        """Return the settings of training views, with the encoder's normalisation."""
        from dpvision.dense.segmentation.semantic_augment import Augmentation

        return Augmentation(
            self.crop_size,
            self.scale,
            self.flip,
            self.photometric,
            self.max_class_share,
            encoder.mean,
            encoder.std,
            self.seed,
        )

    def words(self, hardware: DenseHardware | None = None) -> str:
        """Return the settings as text for scores."""
        rate = (
            f"AdamW, lr {self.learning_rate:g}, layer decay {self.layer_decay:g}, decay "
            f"{self.weight_decay:g}"
        )
        if self.betas != SegmentationSettings.betas:
            rate += f", betas {self.betas[0]:g} {self.betas[1]:g}"
        if self.max_grad_norm:
            rate += f", gradients clipped to {self.max_grad_norm:g}"
        run = (
            f"{self.epochs:g} epochs, {self.warmup_steps:,} warm-up steps, then linear to 0, "
            f"batch {self.batch_size}"
        )
        most = (
            f" with at most {self.max_class_share:g} of one class"
            if self.max_class_share < 1
            else ""
        )
        changes = [
            name
            for name, on in (("flip", self.flip), ("colour distortion", self.photometric))
            if on
        ]
        views = ", ".join(
            [f"{self.crop_size} px crops at {self.scale[0]:g}-{self.scale[1]:g}{most}", *changes]
        )
        width = "the encoder's width" if self.channels is None else f"{self.channels} channels"
        precision = (
            f", {hardware.precision}"
            if hardware is not None and hardware.precision != "float32"
            else ""
        )
        norm = "BatchNorm" if self.norm == "batch" else "GroupNorm"
        norm += (
            f" over {hardware.physical_batch_size} images a pass"
            if hardware is not None and self.norm == "batch"
            else ""
        )
        head = (
            f"UPerNet of {width}, {norm}, dropout {self.dropout:g}, auxiliary loss x "
            f"{self.auxiliary_weight:g}"
        )
        net = f"{head}, drop path {self.drop_path:g}" + (
            ", relative positions" if self.relative_positions else ""
        )
        test = (
            f"windows of {self.crop_size} px every {self.window_stride} px, their probabilities "
            "averaged, one scale"
        )
        return f"{net}, {rate}, {run}, {views}, seed {self.seed}{precision}; {test}"
