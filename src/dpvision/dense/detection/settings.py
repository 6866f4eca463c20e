"""How a detector is trained and scored: the settings of ViTDet-Base, all of which may shrink."""

import math
from dataclasses import dataclass

from dpvision.config.checks import check_choices, check_ranges
from dpvision.dense.training_settings import DenseHardware, DenseTrainSettings


@dataclass(frozen=True)
class HeadSizes:
    """What may be made smaller; the defaults are ViTDet's."""

    channels: int = 256
    """Of the pyramid and of every convolution of the heads."""
    hidden: int = 1024
    """Width of the box head's linear layer."""
    anchors: int = 256
    """Anchors an image that the proposals' loss is taken from."""
    proposals: int = 1000
    """Proposals an image after non-maximum suppression; twice as many before it, in training, at each scale."""
    regions: int = 512
    """Regions an image that the box loss is taken from."""
    detections: int = 100
    """Detections of an image, at most."""


@dataclass(frozen=True)
class DetectionSettings:
    """What is learned and how it is scored. The defaults are ViTDet-Base's; docs/detection.md says where each is from."""

    epochs: float = 100.0
    """Passes over the training images that have objects."""
    batch_size: int = 64
    """Images of one step, over all processes."""
    image_size: int = 1024
    """Side of the square that images are fitted into, in pixels; a multiple of twice the encoder's patch."""
    jitter: tuple[float, float] = (0.1, 2.0)
    """In training images are resized to fit into image_size times a factor from here, then cut to the square."""
    learning_rate: float = 1e-4
    """Of pyramid and heads; the encoder's falls with depth by layer_decay."""
    layer_decay: float = 0.7
    """The rate of each block is this part of the one above it."""
    weight_decay: float = 0.1
    """Not of norms, biases and positions."""
    warmup_steps: int = 250
    """Steps in which the rate rises."""
    step_at: tuple[float, ...] = (8 / 9, 0.963)
    """Parts of the run after which the rate is divided by ten."""
    max_grad_norm: float = 0.0
    """Largest norm of a step's gradient; 0: not clipped."""
    drop_path: float = 0.1
    """Stochastic depth of the last block; it rises linearly from 0 at the first."""
    window: int = 14
    """Side of the attention's windows in tokens, at most that of the image; 0: all blocks attend everywhere."""
    global_blocks: tuple[int, ...] | None = None
    """Blocks from 0 on that attend everywhere; left out, the last of each quarter (2, 5, 8, 11 of 12)."""
    relative_positions: bool = True
    """Give the encoder relative positions that start at zero."""
    channels: int = HeadSizes.channels
    """Of the pyramid and of the heads' convolutions."""
    hidden: int = HeadSizes.hidden
    """Width of the box head's linear layer."""
    anchors: int = HeadSizes.anchors
    """Anchors an image that the proposals' loss is taken from."""
    proposals: int = HeadSizes.proposals
    """Proposals an image."""
    regions: int = HeadSizes.regions
    """Regions an image that the box loss is taken from."""
    detections: int = HeadSizes.detections
    """Detections of a test image, at most; COCO counts 100."""
    resamples: int = 200
    """Of the test images, for the intervals; 0: none."""
    seed: int = 0
    """Of the new parts' first weights, the order and the crops."""

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
            *((name, getattr(self, name) >= 1, "at least 1") for name in HeadSizes.__dataclass_fields__),
        )

    def training(self) -> DenseTrainSettings:
        """The part that the training loop knows."""
        return DenseTrainSettings(
            epochs=self.epochs, batch_size=self.batch_size, warmup_steps=self.warmup_steps, warmup_start=1e-3, schedule="steps",
            step_at=self.step_at, step_factor=0.1, max_grad_norm=self.max_grad_norm, seed=self.seed,
        )  # fmt: skip

    def heads(self) -> HeadSizes:
        """The part that the detector knows."""
        return HeadSizes(**{name: getattr(self, name) for name in HeadSizes.__dataclass_fields__})

    def words(self, hardware: DenseHardware | None = None) -> str:
        """The settings as scores name them."""
        usual = DetectionSettings()
        changed = [
            f"{name} {getattr(self, name)}" for name in HeadSizes.__dataclass_fields__ if getattr(self, name) != getattr(usual, name)
        ]
        where = "last of each quarter" if self.global_blocks is None else " ".join(map(str, self.global_blocks)) or "none"
        windows = f"windows of {self.window}, global blocks: {where}" if self.window else "no windows"
        net = ["Mask R-CNN on ViTDet's simple pyramid", *changed, windows, *(["relative positions"] if self.relative_positions else [])]
        rate = f"AdamW, lr {self.learning_rate:g}, layer decay {self.layer_decay:g}, decay {self.weight_decay:g}"
        if self.max_grad_norm:
            rate += f", gradients clipped to {self.max_grad_norm:g}"
        steps = " ".join(f"{at:.3g}" for at in self.step_at)
        run = f"{self.epochs:g} epochs, batch {self.batch_size}, {self.warmup_steps:,} warm-up steps, rate / 10 at {steps} of the run"
        precision = f", {hardware.precision}" if hardware is not None and hardware.precision != "float32" else ""
        views = f"{self.image_size} px, large-scale jitter {self.jitter[0]:g}-{self.jitter[1]:g} + flip, drop path {self.drop_path:g}"
        return f"{', '.join(net)}, {rate}, {run}, {views}, seed {self.seed}{precision}"
