"""Settings of detection and segmentation: training and hardware, the networks, files of images, and
where results go.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dpvision.config.checks import check_choices, check_ranges
from dpvision.environment import own_cores
from dpvision.errors import ConfigError

if TYPE_CHECKING:
    import torch

NormKind = Literal["batch", "group"]


@dataclass(frozen=True)
class DenseTrainSettings:
    """Settings of ``training_loop``; the schedule multiplies the rates of the parameter groups."""

    epochs: float = 100.0
    """Passes over the images, possibly fractional. Steps are epochs x images / batch, rounded down,
    at least 1.
    """
    batch_size: int = 16
    """Images per step, over all ranks."""
    warmup_steps: int = 1500
    """Steps in which the rate rises linearly from ``warmup_start`` times its scheduled value."""
    warmup_start: float = 1e-6
    schedule: Literal["polynomial", "steps", "constant"] = "polynomial"
    """"polynomial": (1 - t / T)^power; "steps": a factor ``step_factor`` at each t / T in
    ``step_at``.
    """
    power: float = 1.0
    step_at: tuple[float, ...] = (8 / 9, 0.963)
    step_factor: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float = 0.0
    """Maximum norm of the whole gradient; 0 disables clipping."""
    seed: int = 0

    def __post_init__(self) -> None:
        check_choices(self)
        check_ranges(
            "training",
            self,
            ("epochs", 0 < self.epochs < math.inf, "more than 0"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("warmup_steps", self.warmup_steps >= 0, "0 or more"),
            ("warmup_start", 0 <= self.warmup_start <= 1, "0 to 1"),
            ("power", 0 < self.power < math.inf, "more than 0"),
            (
                "step_at",
                all(0 < at < 1 for at in self.step_at),
                "parts of the run, between 0 and 1",
            ),
            ("step_factor", 0 < self.step_factor <= 1, "0 < factor <= 1"),
            ("betas", all(0 <= beta < 1 for beta in self.betas), "0 <= beta < 1"),
            ("max_grad_norm", 0 <= self.max_grad_norm < math.inf, "0 or more"),
            ("seed", 0 <= self.seed < 2**31, "between 0 and 2^31 - 1"),
        )

    def steps(self, num_images: int) -> int:
        """Return the number of steps of a run over ``num_images`` images."""
        return max(1, int(self.epochs * num_images / self.batch_size + 1e-9))


@dataclass(frozen=True)
class DenseHardware:
    """Hardware settings, which change results only by rounding and batch statistics."""

    physical_batch_size: int = 2
    """Images in one forward pass of one process; gradients of several passes are accumulated."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Autocast of the forward pass; weights, gradients and optimizer stay in float32. float16 needs
    a GPU.
    """
    workers: int = field(default_factory=own_cores)
    """Threads that read and augment images."""
    checkpoint_every_s: float = 600.0
    """Seconds between checkpoints in the work folder; one is also written at the end."""

    def __post_init__(self) -> None:
        check_choices(self)
        check_ranges(
            "hardware",
            self,
            ("physical_batch_size", self.physical_batch_size >= 1, "at least 1"),
            ("workers", self.workers >= 1, "at least 1"),
            ("checkpoint_every_s", 0 <= self.checkpoint_every_s < math.inf, "0 or more"),
        )

    def autocast(self, device: "torch.device") -> Any:
        """Return the context of a forward pass.

        Raises:
            ConfigError: float16 without a GPU, or bfloat16 on one that does not have it.
        """
        import torch

        from dpvision.devices import require_precision

        if self.precision == "float32":
            return nullcontext()
        if self.precision == "float16" and device.type != "cuda":
            raise ConfigError(
                "hardware: precision='float16'; expected float32 or bfloat16 without a GPU. Use "
                "--hardware.precision bfloat16."
            )
        require_precision(self.precision, device)
        return torch.autocast(device.type, dtype=getattr(torch, self.precision))


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of the detector's heads; the defaults are ViTDet's."""

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
    """Maximum number of detections per test image; COCO counts 100."""


@dataclass(frozen=True)
class DetectionSettings(HeadSizes):
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
            *_encoder_ranges(self),
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

    def check_patch(self, patch: int, encoder: str) -> None:
        """Raise ConfigError unless patches of ``patch`` px tile the square at all scales."""
        if self.image_size % (2 * patch):
            raise ConfigError(
                f"detection: image_size={self.image_size} with patches of {patch} px; expected a "
                f"multiple of {2 * patch}. Use "
                f"{max(1, round(self.image_size / (2 * patch))) * 2 * patch}."
            )

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
        steps = " ".join(f"{at:.3g}" for at in self.step_at)
        run = (
            f"{self.epochs:g} epochs, batch {self.batch_size}, {self.warmup_steps:,} warm-up "
            f"steps, rate / 10 at {steps} of the run"
        )
        views = (
            f"{self.image_size} px, large-scale jitter {self.jitter[0]:g}-{self.jitter[1]:g} + "
            f"flip, drop path {self.drop_path:g}"
        )
        optimizer, precision = _optimizer_words(self), _precision_words(hardware)
        return f"{', '.join(net)}, {optimizer}, {run}, {views}, seed {self.seed}{precision}"


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
            *_encoder_ranges(self),
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

    def check_patch(self, patch: int, encoder: str) -> None:
        """Raise ConfigError unless patches of ``patch`` px tile the crop, two a side at least."""
        if self.crop_size % patch or self.crop_size < 2 * patch:
            raise ConfigError(
                f"segmentation: crop_size={self.crop_size}; expected a multiple of {encoder}'s "
                f"patch, {patch} px, and two at least. Use "
                f"{max(2, round(self.crop_size / patch)) * patch}."
            )

    def words(self, hardware: DenseHardware | None = None) -> str:
        """Return the settings as text for scores."""
        changed = self.betas != SegmentationSettings.betas
        betas = f", betas {self.betas[0]:g} {self.betas[1]:g}" if changed else ""
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
        optimizer, precision = _optimizer_words(self, betas), _precision_words(hardware)
        return f"{net}, {optimizer}, {run}, {views}, seed {self.seed}{precision}; {test}"


TaskSettings = DetectionSettings | SegmentationSettings


def _encoder_ranges(settings: TaskSettings) -> Iterator[tuple[str, bool, str]]:
    """Yield the rules for the encoder's training, which both tasks share."""
    yield "learning_rate", 0 < settings.learning_rate < math.inf, "more than 0"
    yield "layer_decay", 0 < settings.layer_decay <= 1, "0 < decay <= 1"
    yield "weight_decay", 0 <= settings.weight_decay < math.inf, "0 or more"
    yield "drop_path", 0 <= settings.drop_path < 1, "0 <= drop_path < 1"


def _optimizer_words(settings: TaskSettings, betas: str = "") -> str:
    clipped = f", gradients clipped to {settings.max_grad_norm:g}" if settings.max_grad_norm else ""
    return (
        f"AdamW, lr {settings.learning_rate:g}, layer decay {settings.layer_decay:g}, decay "
        f"{settings.weight_decay:g}{betas}{clipped}"
    )


def _precision_words(hardware: DenseHardware | None) -> str:
    given = hardware is not None and hardware.precision != "float32"
    return f", {hardware.precision}" if hardware is not None and given else ""


@dataclass(frozen=True)
class DenseOptions:
    """What to do with the encoders, and where results go."""

    public: bool = False
    """The images need no protection (as COCO's). Otherwise scores and images go under
    confidential/.
    """
    work: Path | None = None
    """Folder for checkpoints, with a subfolder per encoder, from which the same command resumes
    after a stop; for private images it must be under confidential/.
    """
    sheet: Path | None = None
    """Draw some test images here (PNG), with truth and predictions."""
    out: Path | None = None
    """Also write all scores here. Scores on private images need a folder named confidential in the
    path.
    """
    dry_run: bool = False
    """Read everything, count, time a step, and train nothing."""
    ema: bool = False
    """Use the averaged weights of runs."""


@dataclass(frozen=True)
class CocoFiles:
    """Images with objects, in COCO's form."""

    train: Path | None = None
    """COCO's annotations of the training images (instances_*.json)."""
    train_images: Path | None = None
    """Folder of the training images."""
    test: Path | None = None
    """Annotations of the test images, with the same classes."""
    test_images: Path | None = None
    """Folder of the test images."""
    allow_missing: bool = False
    """Leave out images whose file is missing, and print their number."""

    def parts(self) -> tuple[tuple[Path, Path], tuple[Path, Path]]:
        """Return annotations and images of the training and of the test set.

        Raises:
            ConfigError: one of the four is missing.
        """
        given = (self.train, self.train_images, self.test, self.test_images)
        for flag, path in zip(("train", "train-images", "test", "test-images"), given, strict=True):
            if path is None:
                raise ConfigError(
                    f"evaluate: no --{flag}; expected COCO's annotations and images for training "
                    "and test. Give it as in `dpvision evaluate detection --help`."
                )
        train, train_images, test, test_images = (path for path in given if path is not None)
        return (train, train_images), (test, test_images)

    @property
    def name(self) -> str:
        """Name of the training images in the lineage of what is trained on them."""
        return self.parts()[0][0].name


@dataclass(frozen=True)
class MaskFolders:
    """Images with a class per pixel: ADE20K's folder, or folders of images and masks."""

    ade20k: Path | None = None
    """Folder ADEChallengeData2016 (images/training, annotations/validation, ...): train and test
    images, 150 classes, 0 ignored.
    """
    train: Path | None = None
    """Folder of training images; those without a mask are left out."""
    train_masks: Path | None = None
    """Folder of their masks: PNG files with the same stems, one channel, a class id per pixel."""
    test: Path | None = None
    """Folder of test images."""
    test_masks: Path | None = None
    """Folder of their masks."""
    classes: Path | None = None
    """JSON from ids to names, {"1": "person", "7": "train"}, of --train-masks and --test-masks."""
    ignore_ids: tuple[int, ...] | None = None
    """Ids of pixels that do not count; if omitted, 255, unless --classes names it."""

    def parts(self) -> tuple[Path, tuple[tuple[Path, Path], tuple[Path, Path]] | None]:
        """Return ADE20K's folder and None, or the file of classes with images and masks of both
        sets.

        Raises:
            ConfigError: both forms are given, or neither is complete.
        """
        given = {
            "train": self.train,
            "train-masks": self.train_masks,
            "test": self.test,
            "test-masks": self.test_masks,
            "classes": self.classes,
        }
        found = {name: path for name, path in given.items() if path is not None}
        if self.ade20k is not None:
            if found:
                extra = ", ".join(f"--{name}" for name in found)
                raise ConfigError(
                    f"evaluate: --ade20k with {extra}; expected one or the other. Drop one."
                )
            return self.ade20k, None
        if len(found) < len(given):
            missing = ", ".join(f"--{name}" for name in given if name not in found)
            raise ConfigError(
                f"evaluate: {missing} missing; expected --ade20k FOLDER, or images, masks and "
                "classes of both parts. Give them."
            )
        train, train_masks, test, test_masks, classes = found.values()
        return classes, ((train, train_masks), (test, test_masks))

    @property
    def name(self) -> str:
        """Name of the training images in the lineage of what is trained on them."""
        folder, parts = self.parts()
        return (folder if parts is None else parts[0][0]).name
