"""Settings for training and scoring a detector; the defaults are ViTDet-Base's."""

import math
from dataclasses import dataclass

from dpvision.config.checks import check_choices, check_ranges
from dpvision.dense.training_settings import DenseHardware, DenseTrainSettings


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of the heads; the defaults are ViTDet's."""

    channels: int = 256
    """Channels of the pyramid and of the heads' convolutions."""
    hidden: int = 1024
    """Width of the box head's linear layer."""
    anchors: int = 256
    """Anchors per image sampled for the proposals' loss."""
    proposals: int = 1000
    """Proposals per image after non-maximum suppression; in training, twice as many before it at
    each scale.
    """
    regions: int = 512
    """Regions per image sampled for the box loss."""
    detections: int = 100
    """Maximum number of detections per image."""


@dataclass(frozen=True)
class DetectionSettings:
    """Settings of training and scoring. The defaults are ViTDet-Base's; docs/detection.md has the
    source of each.
    """

    epochs: float = 100.0
    """Passes over the training images that have objects."""
    batch_size: int = 64
    """Images per step, over all processes."""
    image_size: int = 1024
    """Side of the square that images are fitted into, in pixels; a multiple of twice the encoder's
    patch.
    """
    jitter: tuple[float, float] = (0.1, 2.0)
    """Range of the factor by which training images are resized relative to image_size, before they
    are cropped to the square.
    """
    learning_rate: float = 1e-4
    """Learning rate of pyramid and heads; the encoder's falls with depth by layer_decay."""
    layer_decay: float = 0.7
    """Factor between the rates of consecutive blocks."""
    weight_decay: float = 0.1
    """Not applied to norms, biases and positions."""
    warmup_steps: int = 250
    """Number of warm-up steps."""
    step_at: tuple[float, ...] = (8 / 9, 0.963)
    """Fractions of the run after which the rate is divided by ten."""
    max_grad_norm: float = 0.0
    """Maximum norm of a step's gradient; 0 disables clipping."""
    drop_path: float = 0.1
    """Stochastic depth of the last block; it rises linearly from 0 at the first."""
    window: int = 14
    """Side of the attention windows in tokens, at most the image's; with 0 all blocks are
    global.
    """
    global_blocks: tuple[int, ...] | None = None
    """Indices of global blocks, from 0; if omitted, the last of each quarter (2, 5, 8, 11 of
    12).
    """
    relative_positions: bool = True
    """Add relative positions, initialised to zero, to the encoder."""
    channels: int = HeadSizes.channels
    """Channels of the pyramid and of the heads' convolutions."""
    hidden: int = HeadSizes.hidden
    """Width of the box head's linear layer."""
    anchors: int = HeadSizes.anchors
    """Anchors per image sampled for the proposals' loss."""
    proposals: int = HeadSizes.proposals
    """Proposals per image."""
    regions: int = HeadSizes.regions
    """Regions per image sampled for the box loss."""
    detections: int = HeadSizes.detections
    """Maximum number of detections per test image; COCO counts 100."""
    resamples: int = 200
    """Bootstrap resamples of the test images for the intervals; 0 for none."""
    seed: int = 0
    """Seed of the new layers' initial weights, the order and the crops."""

    def __post_init__(self) -> None:
        check_choices(self)
        self.training()
        check_ranges(
            "detection",
            self,
            ("image_size", self.image_size >= 2, "at least 2"),
            ("jitter", 0 < self.jitter[0] <= self.jitter[1] < math.inf, "0 < low <= high"),
            ("learning_rate", 0 < self.learning_rate < math.inf, "more than 0"),
            ("layer_decay", 0 < self.layer_decay <= 1, "0 < decay <= 1"),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "0 or more"),
            ("drop_path", 0 <= self.drop_path < 1, "0 <= drop_path < 1"),
            ("window", self.window >= 0, "0 (none) or more"),
            ("resamples", self.resamples >= 0, "0 (no interval) or more"),
            *(
                (name, getattr(self, name) >= 1, "at least 1")
                for name in HeadSizes.__dataclass_fields__
            ),
        )

    def training(self) -> DenseTrainSettings:
        """Return the settings of the training loop."""
        return DenseTrainSettings(
            epochs=self.epochs,
            batch_size=self.batch_size,
            warmup_steps=self.warmup_steps,
            warmup_start=1e-3,
            schedule="steps",
            step_at=self.step_at,
            step_factor=0.1,
            max_grad_norm=self.max_grad_norm,
            seed=self.seed,
        )

    def heads(self) -> HeadSizes:
        """Return the sizes of the detector's heads."""
        return HeadSizes(**{name: getattr(self, name) for name in HeadSizes.__dataclass_fields__})

    def words(self, hardware: DenseHardware | None = None) -> str:
        """Return the settings as text for scores."""
        usual = DetectionSettings()
        changed = [
            f"{name} {getattr(self, name)}"
            for name in HeadSizes.__dataclass_fields__
            if getattr(self, name) != getattr(usual, name)
        ]
        where = (
            "last of each quarter"
            if self.global_blocks is None
            else " ".join(map(str, self.global_blocks)) or "none"
        )
        windows = (
            f"windows of {self.window}, global blocks: {where}" if self.window else "no windows"
        )
        net = [
            "Mask R-CNN on ViTDet's simple pyramid",
            *changed,
            windows,
            *(["relative positions"] if self.relative_positions else []),
        ]
        rate = (
            f"AdamW, lr {self.learning_rate:g}, layer decay {self.layer_decay:g}, decay "
            f"{self.weight_decay:g}"
        )
        if self.max_grad_norm:
            rate += f", gradients clipped to {self.max_grad_norm:g}"
        steps = " ".join(f"{at:.3g}" for at in self.step_at)
        run = (
            f"{self.epochs:g} epochs, batch {self.batch_size}, {self.warmup_steps:,} warm-up "
            f"steps, rate / 10 at {steps} of the run"
        )
        precision = (
            f", {hardware.precision}"
            if hardware is not None and hardware.precision != "float32"
            else ""
        )
        views = (
            f"{self.image_size} px, large-scale jitter {self.jitter[0]:g}-{self.jitter[1]:g} + "
            f"flip, drop path {self.drop_path:g}"
        )
        return f"{', '.join(net)}, {rate}, {run}, {views}, seed {self.seed}{precision}"
