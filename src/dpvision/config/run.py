"""Settings of data and hardware, and of the whole run."""

import math
from dataclasses import dataclass, field
from typing import Literal

from dpvision.config.checks import check_choices, require
from dpvision.config.models import MAEConfig, ModelConfig
from dpvision.config.optim import OptimConfig
from dpvision.config.privacy import PrivacyConfig

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class DataConfig:
    """The store, and the conversion of images to tensors. Augmentation is keyed by (seed, step,
    record id).
    """

    store: str | None = None
    """Folder made by ``dpvision data import``."""
    images: Literal["store", "textures", "public"] = "store"
    """'textures': if no store is named, ``dpvision train`` makes one of privacy.dataset_size
    procedural textures. 'public': a private store is refused.
    """
    crop_scale: tuple[float, float] = (0.2, 1.0)
    """Area range of the random resized crop (ViP: 0.2 to 1)."""
    horizontal_flip: bool = True
    resize: int | None = None
    """Side in pixels of the square to which an image is resized, ignoring its aspect ratio, before
    it is cropped (transfer: 448, 384). If None, crops are taken from the original image.
    """
    crop: Literal["random", "centre"] = "random"
    """Crop of training views: random and resized, or the centre of side ``image_size`` in the
    resized square. Evaluation uses the centre of the whole image, or with "centre" the crop of
    training.
    """
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    own_sizes: tuple[int, ...] = ()
    """Resolutions at which an image may be encoded, px, in ascending order
    (``transform.own_size``). Frozen encoders set it for their features; in a run's config it is
    empty, and all images are resized to one size.
    """
    views: int = 1
    """Augmented views of a record, whose losses are averaged before the clip; each has its own
    caption if the record has several.
    """
    tokenizer: str | None = None
    """File made by ``dpvision data tokenizer``, or BERT's vocab.txt; needed by a captioner, unused
    by others.
    """

    def __post_init__(self) -> None:
        check_choices(self)
        lo, hi = self.crop_scale
        require(
            0 < lo <= hi <= 1,
            "data",
            "crop_scale",
            self.crop_scale,
            "0 < low <= high <= 1",
            "ViP: (0.2, 1.0).",
        )
        require(self.views >= 1, "data", "views", self.views, "at least 1", "Use 1.")
        ascending = list(self.own_sizes) == sorted({s for s in self.own_sizes if s >= 1})
        require(
            ascending,
            "data",
            "own_sizes",
            self.own_sizes,
            "sizes in ascending order",
            "Leave it out: the encoder sets it.",
        )
        if self.resize is not None:
            require(
                self.resize >= 1,
                "data",
                "resize",
                self.resize,
                "at least 1",
                "Transfer: 448 for random crops of 384.",
            )
        scale = (
            "Pixels run from 0 to 1 here: divide constants for 0 to 255 by 255, or leave the "
            "ImageNet ones."
        )
        require(
            all(0 <= m <= 1 for m in self.mean),
            "data",
            "mean",
            self.mean,
            "three numbers from 0 to 1",
            scale,
        )
        require(
            all(0 < s <= 1 for s in self.std),
            "data",
            "std",
            self.std,
            "three numbers above 0, at most 1",
            scale,
        )


@dataclass(frozen=True)
class HardwareConfig:
    """Device and speed; must not change the result beyond rounding (a test changes each and
    compares).
    """

    device: Literal["auto", "cpu", "cuda"] = "auto"
    physical_batch_size: int = 64
    """Records (with privacy.sampling_unit="person", people) in one forward pass, per process."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Autocast of the forward pass; norms, sums and noise stay in float32. float16 takes its loss
    scale from a public batch. bfloat16 is slower than float32 on CPUs that only emulate it.
    """
    compile: bool = False
    """Compile transformer blocks (torch.compile): faster on a GPU and in long runs, after a minute
    or more at the start.
    """
    workers: int | None = None
    """Threads that read and decode images; if None, from 2 to 16: on a GPU the cores of this
    process, on a CPU a quarter of them.
    """
    checkpoint_every_s: float = 300.0
    """Seconds between checkpoints under ``confidential/``, which are written while training goes
    on; one that may leave is written at the end and on SIGINT (Ctrl-C), SIGTERM or SIGUSR1.
    """
    keep_checkpoints: int = 2
    finish_step_s: float = 30.0
    """Seconds in which the step in progress may still end after such a signal; otherwise it is
    abandoned, and counts in epsilon.
    """
    rank_timeout_s: float = 600.0
    """Seconds that a process waits for the others of the run before it ends."""

    def __post_init__(self) -> None:
        check_choices(self)
        w = "hardware"
        require(
            self.physical_batch_size >= 1,
            w,
            "physical_batch_size",
            self.physical_batch_size,
            "at least 1",
            "Try 64.",
        )
        require(
            self.workers is None or self.workers >= 1,
            w,
            "workers",
            self.workers,
            "at least 1",
            "Leave it out.",
        )
        require(
            0 <= self.checkpoint_every_s < math.inf,
            w,
            "checkpoint_every_s",
            self.checkpoint_every_s,
            "0 or more",
            "Use 300.",
        )
        require(
            self.keep_checkpoints >= 1,
            w,
            "keep_checkpoints",
            self.keep_checkpoints,
            "at least 1",
            "Use 2.",
        )
        require(
            0 <= self.finish_step_s < math.inf,
            w,
            "finish_step_s",
            self.finish_step_s,
            "0 or more",
            "Use 30.",
        )
        require(
            0 < self.rank_timeout_s <= 86_400,
            w,
            "rank_timeout_s",
            self.rank_timeout_s,
            "above 0, at most a day",
            "Use 600.",
        )


@dataclass(frozen=True)
class RunConfig:
    """One run: recipe and hardware. Variants are made with ``dataclasses.replace``."""

    recipe: str
    """Name of the original recipe in ``dpvision.recipes.RECIPES``."""
    privacy: PrivacyConfig
    model: ModelConfig = field(default_factory=MAEConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    seed: int = 0
    """Initialisation, masks and augmentation only: never the draw of the batch or the noise."""
    init_from: str | None = None
    """Weights that this run starts from, with their lineage: a run folder or checkpoint; timm:NAME;
    or a file, timm:NAME@FILE, vip:FILE, mae:FILE or dpcap:FILE, declared by --public-weights.
    """
    public_weights: str | None = None
    """For weights without a lineage, from init_from or of a head's encoder: the declaration that
    they are public, as 'NAME; LICENCE; SOURCE'. The statement repeats it as declared.
    """

    @property
    def views(self) -> int:
        """int: images in a step for one clipped gradient of a network: data.views, times
        max_records_per_unit where people are drawn.
        """
        return self.data.views * (self.privacy.unit.images_per_draw)

    def __post_init__(self) -> None:
        if self.model.kind == "head" and self.privacy.unit.draws_people:
            chosen = self.model.choice.candidates
            require(
                not chosen,
                "model",
                "candidates",
                chosen,
                "none with privacy.sampling_unit='person'",
                "Name one head: --head NAME.",
            )
        require(
            not self.data.own_sizes,
            "run",
            "data.own_sizes",
            self.data.own_sizes,
            "none: a frozen encoder sets it",
            "Leave it out.",
        )
        require(
            0 <= self.seed < 2**31,
            "run",
            "seed",
            self.seed,
            "between 0 and 2^31 - 1",
            "Use a small integer.",
        )
