"""Every knob of a run on one page: frozen dataclasses, validated when made, to and from JSON.

Two kinds of knobs. ``HardwareConfig`` must not change the result beyond rounding; everything else is the recipe and changes
what is learned or what is guaranteed. Ranges are written so that NaN fails them.
"""

import dataclasses
import json
import math
import types
import typing
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from dpvision.errors import ConfigError

T = TypeVar("T")

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def _require(ok: bool, where: str, name: str, got: object, rule: str, remedy: str) -> None:
    if not ok:
        raise ConfigError(f"{where}: {name}={got!r}; expected {rule}. {remedy}")


def _check_choices(config: Any) -> None:
    """Refuse a value that is none of its setting's choices: type annotations bind nobody who writes Python."""
    for name, hint in get_type_hints(type(config)).items():
        if get_origin(hint) is Literal:
            value, choices = getattr(config, name), get_args(hint)
            _require(value in choices, type(config).__name__, name, value, f"one of {', '.join(map(repr, choices))}", "Correct it.")


@dataclass(frozen=True)
class PrivacyConfig:
    """What is asked of the guarantee; ``privacy.plan.make_plan`` turns it into the one object that keeps it."""

    dataset_size: int
    """Declared, public number of records N. The sample rate is expected_batch_size / dataset_size, whatever the store holds."""
    expected_batch_size: float
    """Mean size of a logical batch; public, and the divisor of the gradient."""
    steps: int
    """Number of logical steps T (releases)."""
    max_grad_norm: float | None = 1.0
    """Clip norm C of a record's whole gradient; None only without a guarantee (no clipping)."""
    noise_multiplier: float | None = None
    """Noise standard deviation / max_grad_norm. Give this or target_epsilon, not both."""
    target_epsilon: float | None = None
    """Calibrate the noise (rounded up) so that the PLD epsilon of all steps is at most this."""
    delta: float | None = None
    """None: 1 / (2 dataset_size)."""
    guarantee: Literal["dp", "none", "simulated"] = "dp"
    """'none' and 'simulated' (TAN) run the same loop and say in every output that they guarantee nothing."""
    sampling: Literal["poisson", "truncated_poisson", "full_batch"] = "poisson"
    max_batch_size: int | None = None
    """Cap of a truncated Poisson batch; required there, forbidden elsewhere."""
    max_records_per_unit: int = 1
    """Bound on the records of one unit (person); 1 means that the unit of privacy is the record."""
    noise_generator: Literal["torch", "hardened"] = "torch"
    clipping: Literal["hard", "automatic"] = "hard"
    """'hard': scale down to the clip norm what is longer. 'automatic': scale every gradient to nearly the clip norm (Bu et al. 2023)."""

    def __post_init__(self) -> None:
        _check_choices(self)
        w = "privacy"
        n, b = self.dataset_size, self.expected_batch_size
        _require(n >= 1, w, "dataset_size", n, "at least 1", "Declare the number of records of the store.")
        _require(0 < b < math.inf, w, "expected_batch_size", b, "a positive number", "Choose a batch between 1 and dataset_size.")
        _require(b <= n, w, "expected_batch_size", b, f"at most dataset_size={n}", "Use a smaller batch, or sampling=full_batch.")
        _require(self.steps >= 1, w, "steps", self.steps, "at least 1", "Ask for one step or more.")
        if self.max_grad_norm is not None:
            _require(0 < self.max_grad_norm < math.inf, w, "max_grad_norm", self.max_grad_norm, "a positive number", "Typical: 0.1 to 1.")
        if self.noise_multiplier is not None:
            _require(0 <= self.noise_multiplier < math.inf, w, "noise_multiplier", self.noise_multiplier, "0 or more", "Typical: 0.5 to 5.")
        if self.target_epsilon is not None:
            _require(0 < self.target_epsilon < math.inf, w, "target_epsilon", self.target_epsilon, "a positive number", "Typical: 1 to 8.")
        if self.delta is not None:
            _require(0 < self.delta < 1, w, "delta", self.delta, "strictly between 0 and 1", "Leave it out for 1/(2 dataset_size).")
        _require(self.max_records_per_unit >= 1, w, "max_records_per_unit", self.max_records_per_unit, "at least 1", "Use 1 for records.")
        if self.sampling == "full_batch":
            _require(b == n, w, "expected_batch_size", b, f"dataset_size={n} for sampling=full_batch", "Set it to dataset_size.")
        if self.sampling == "truncated_poisson":
            m = self.max_batch_size
            _require(m is not None and m >= 1, w, "max_batch_size", m, "a cap for truncated_poisson", "About mean + 7 standard deviations.")
        else:
            _require(self.max_batch_size is None, w, "max_batch_size", self.max_batch_size, "nothing unless truncated", "Drop it.")
        both = self.noise_multiplier is not None and self.target_epsilon is not None
        _require(not both, w, "target_epsilon", self.target_epsilon, "noise_multiplier or target_epsilon, not both", "Drop one of them.")
        if self.guarantee == "dp":
            _require(self.max_grad_norm is not None, w, "max_grad_norm", None, "a clip norm in a private run", "Set it, e.g. 0.1.")
            _require(
                self.noise_multiplier is not None or self.target_epsilon is not None,
                w, "noise_multiplier", None, "noise_multiplier or target_epsilon in a private run", "Give target_epsilon, e.g. 8.",
            )  # fmt: skip
            _require(
                self.noise_multiplier is None or self.noise_multiplier > 0,
                w, "noise_multiplier", self.noise_multiplier, "more than 0 in a private run", "For no privacy say guarantee=none.",
            )  # fmt: skip
        if self.guarantee == "none":
            _require(
                not self.noise_multiplier and self.target_epsilon is None,
                w, "noise_multiplier", self.noise_multiplier, "no noise and no target with guarantee=none", "Drop it.",
            )  # fmt: skip


@dataclass(frozen=True)
class ViTConfig:
    """A plain vision transformer encoder (pre-LayerNorm, class token, fixed sin-cos positions)."""

    kind: Literal["vit"] = "vit"
    image_size: int = 224
    patch_size: int = 16
    depth: int = 12
    width: int = 768
    num_heads: int = 12
    mlp_ratio: float = 4.0

    def __post_init__(self) -> None:
        _check_choices(self)
        w = "model"
        for name in ("image_size", "patch_size", "depth", "width", "num_heads"):
            _require(getattr(self, name) >= 1, w, name, getattr(self, name), "at least 1", "See docs/models.md for the sizes.")
        ok = self.image_size % self.patch_size == 0
        _require(ok, w, "patch_size", self.patch_size, f"a divisor of image_size={self.image_size}", "E.g. 16 for 224, 4 for 32.")
        _require(self.width % self.num_heads == 0, w, "num_heads", self.num_heads, f"a divisor of width={self.width}", "Change one.")
        _require(self.width % 4 == 0, w, "width", self.width, "a multiple of 4 (two-dimensional sin-cos positions)", "Change it.")
        _require(0 < self.mlp_ratio < math.inf, w, "mlp_ratio", self.mlp_ratio, "a positive number", "The papers use 4.")


@dataclass(frozen=True)
class MAEConfig:
    """Masked autoencoder (ViP): the encoder sees the visible patches, a small decoder predicts the masked ones."""

    kind: Literal["mae"] = "mae"
    encoder: ViTConfig = field(default_factory=ViTConfig)
    decoder_depth: int = 4
    decoder_width: int = 512
    decoder_num_heads: int = 16
    mask_ratio: float = 0.75
    target: Literal["pixels", "normalised_pixels", "gradients"] = "pixels"
    """What is predicted of a hidden patch (models/targets.py): ViP's plain pixels, MAE's normalised ones, MaskFeat's oriented gradients."""

    def __post_init__(self) -> None:
        _check_choices(self)
        w = "model"
        for name in ("decoder_depth", "decoder_width", "decoder_num_heads"):
            _require(getattr(self, name) >= 1, w, name, getattr(self, name), "at least 1", "ViP: 4 blocks of width 512, 16 heads.")
        ok = self.decoder_width % self.decoder_num_heads == 0 and self.decoder_width % 4 == 0
        _require(ok, w, "decoder_width", self.decoder_width, "a multiple of 4 and of decoder_num_heads", "Change one.")
        _require(0 < self.mask_ratio < 1, w, "mask_ratio", self.mask_ratio, "strictly between 0 and 1", "ViP: 0.75.")
        even = self.target != "gradients" or self.encoder.patch_size % 2 == 0
        _require(even, w, "target", self.target, "an even patch_size with gradients (two cells along a side)", "Use patches of 4 or 16.")


@dataclass(frozen=True)
class ResNetConfig:
    """A pre-activation residual network without statistics of a batch: GroupNorm or no norm, standardised weights (models/resnet.py)."""

    kind: Literal["resnet"] = "resnet"
    image_size: int = 32
    block: Literal["basic", "bottleneck"] = "basic"
    """Two 3 x 3 convolutions, or 1 x 1, 3 x 3, 1 x 1 with a quarter of the width between."""
    depths: tuple[int, ...] = (2, 2, 2)
    """Blocks of each stage; every stage but the first halves the side."""
    widths: tuple[int, ...] = (64, 128, 256)
    """Channels that each stage gives (WRN-16-4: 64, 128, 256)."""
    stem: Literal["3x3", "7x7"] = "3x3"
    """'3x3' keeps the side (32 px); '7x7' with stride 2 and a max pool divides it by four (224 px)."""
    stem_width: int = 16
    norm: Literal["group", "none"] = "group"
    """'none': norm-free (Brock et al. 2021), scaled standardised convolutions with gains hold the variance instead."""
    groups: int = 16
    """Groups of a GroupNorm; unused with norm=none."""
    weight_standardisation: bool = True

    def __post_init__(self) -> None:
        _check_choices(self)
        w = "model"
        for name in ("image_size", "stem_width", "groups"):
            _require(getattr(self, name) >= 1, w, name, getattr(self, name), "at least 1", "See docs/supervised.md for the sizes.")
        same = 0 < len(self.depths) == len(self.widths)
        _require(same, w, "widths", self.widths, f"one for each of depths={self.depths}", "WRN-16-4: (2, 2, 2) and (64, 128, 256).")
        _require(all(d >= 1 for d in self.depths), w, "depths", self.depths, "numbers from 1", "WRN-16-4: (2, 2, 2).")
        _require(all(v >= 4 and v % 4 == 0 for v in self.widths), w, "widths", self.widths, "multiples of 4", "WRN-16-4: (64, 128, 256).")
        if self.norm == "group":
            channels = [self.stem_width, *self.widths, *([v // 4 for v in self.widths] if self.block == "bottleneck" else [])]
            fits = all(c % self.groups == 0 for c in channels)
            _require(fits, w, "groups", self.groups, f"a divisor of all numbers of channels {sorted(set(channels))}", "16 or 32 are usual.")
        ok = self.norm == "group" or self.weight_standardisation
        _require(ok, w, "weight_standardisation", False, "True with norm=none: nothing else holds the variance", "Leave it on.")

    @property
    def width(self) -> int:
        """Numbers of a pooled feature."""
        return self.widths[-1]


@dataclass(frozen=True)
class ClassifierConfig:
    """An encoder with a linear head, trained with labels."""

    kind: Literal["classifier"] = "classifier"
    encoder: ViTConfig | ResNetConfig = field(default_factory=ViTConfig)
    num_classes: int = 1000
    """Labels are 0 ... num_classes - 1; a public number."""
    head_init: Literal["zero", "xavier"] = "zero"
    """Weights of the head at the start ('xavier': uniform, as of MAE's linear maps); its bias starts at zero."""
    pooling: Literal["mean", "cls"] = "mean"
    """What the head sees: the mean of all places, or a transformer's class token."""

    def __post_init__(self) -> None:
        _check_choices(self)
        w = "model"
        _require(self.num_classes >= 2, w, "num_classes", self.num_classes, "at least 2", "Count the classes of the store.")
        ok = self.pooling == "mean" or isinstance(self.encoder, ViTConfig)
        _require(ok, w, "pooling", self.pooling, "'mean' with a convolutional encoder, which has no class token", "Use mean.")


ModelConfig = MAEConfig | ClassifierConfig
"""In JSON told apart by ``kind``, as are encoders."""


@dataclass(frozen=True)
class DataConfig:
    """Which records, and how a picture becomes a tensor. Augmentation is keyed by (seed, step, record id)."""

    store: str | None = None
    """Folder made by ``dpvision data import``."""
    pictures: Literal["store", "textures"] = "store"
    """'textures': where no store is named, ``dpvision train`` makes one of privacy.dataset_size procedural textures."""
    crop_scale: tuple[float, float] = (0.2, 1.0)
    """Area range of the random resized crop (ViP: 0.2 to 1)."""
    horizontal_flip: bool = True
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    views: int = 1
    """Augmented views of a record whose losses are averaged before the clip."""

    def __post_init__(self) -> None:
        _check_choices(self)
        lo, hi = self.crop_scale
        _require(0 < lo <= hi <= 1, "data", "crop_scale", self.crop_scale, "0 < low <= high <= 1", "ViP: (0.2, 1.0).")
        _require(self.views >= 1, "data", "views", self.views, "at least 1", "Use 1.")
        scale = "Pixels run from 0 to 1 here: divide constants for 0 to 255 by 255, or leave the ImageNet ones."
        _require(all(0 <= m <= 1 for m in self.mean), "data", "mean", self.mean, "three numbers from 0 to 1", scale)
        _require(all(0 < s <= 1 for s in self.std), "data", "std", self.std, "three numbers above 0, at most 1", scale)


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer, schedule and averaging: they see only privatized gradients (post-processing, free)."""

    name: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = 3.84e-4
    """Peak rate, used as it stands: recipes that scale a base rate by batch / 256 do the arithmetic themselves."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    momentum: float = 0.9
    """For sgd only."""
    weight_decay: float = 0.005
    """Decoupled."""
    decayed: Literal["all", "matrices"] = "all"
    """Which trained parameters decay: all of them (ViP), or those of two dimensions and more (MAE)."""
    schedule: Literal["vip", "cosine", "constant"] = "vip"
    """'vip': lr x min((t + 1) / warmup_steps, (1 + cos(pi t / T)) / 2). 'cosine' (MAE): the same warm-up, then a cosine from its end on.
    'constant': the same warm-up, then level."""
    warmup_steps: int = 0
    ema_decay: float | None = None
    """Exponential moving average of the weights, kept beside them, with a warm-up (optim/ema.py); None for none (ViP)."""

    def __post_init__(self) -> None:
        _check_choices(self)
        w = "optim"
        _require(0 < self.learning_rate < math.inf, w, "learning_rate", self.learning_rate, "a positive number", "ViP: 3.84e-4.")
        _require(all(0 <= b < 1 for b in self.betas), w, "betas", self.betas, "two numbers in [0, 1)", "ViP: (0.9, 0.95).")
        _require(0 < self.eps < math.inf, w, "eps", self.eps, "a positive number", "ViP: 1e-8.")
        _require(0 <= self.momentum < 1, w, "momentum", self.momentum, "in [0, 1)", "Use 0.9.")
        _require(0 <= self.weight_decay < math.inf, w, "weight_decay", self.weight_decay, "0 or more", "ViP: 0.005.")
        _require(self.warmup_steps >= 0, w, "warmup_steps", self.warmup_steps, "0 or more", "ViP: 1000.")
        if self.ema_decay is not None:
            _require(0 < self.ema_decay < 1, w, "ema_decay", self.ema_decay, "strictly between 0 and 1", "Leave it out for none.")


@dataclass(frozen=True)
class HardwareConfig:
    """Where and how fast; must not change the result beyond rounding (a test changes each and compares)."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    physical_batch_size: int = 64
    """Records in one forward pass, per process."""
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    """Autocast of the forward pass; norms, sums and noise stay in float32. float16 takes its loss scale from a public batch."""
    compile: bool = False
    """Compile transformer blocks (torch.compile); pays on a GPU and in long runs, and takes a minute or more at the start."""
    workers: int = 2
    """Threads that read and decode pictures."""
    checkpoint_every_s: float = 300.0
    """Seconds between checkpoints; a checkpoint is also written at the end and on SIGTERM or SIGUSR1."""
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        _check_choices(self)
        w = "hardware"
        _require(self.physical_batch_size >= 1, w, "physical_batch_size", self.physical_batch_size, "at least 1", "Try 64.")
        _require(self.workers >= 1, w, "workers", self.workers, "at least 1", "Use the number of cores.")
        _require(0 <= self.checkpoint_every_s < math.inf, w, "checkpoint_every_s", self.checkpoint_every_s, "0 or more", "Use 300.")
        _require(self.keep_checkpoints >= 1, w, "keep_checkpoints", self.keep_checkpoints, "at least 1", "Use 2.")


@dataclass(frozen=True)
class RunConfig:
    """One run: recipe and hardware. Variants are made with ``dataclasses.replace``."""

    recipe: str
    """Name in ``dpvision.recipes.RECIPES`` that this started from."""
    privacy: PrivacyConfig
    model: ModelConfig = field(default_factory=MAEConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    seed: int = 0
    """Initialisation, masks and augmentation only: never the draw of the batch or the noise."""
    init_from: str | None = None
    """Run folder or checkpoint whose weights this run starts from; its lineage is taken over."""

    def __post_init__(self) -> None:
        _require(0 <= self.seed < 2**31, "run", "seed", self.seed, "between 0 and 2^31 - 1", "Use a small integer.")


def to_dict(config: Any) -> dict[str, Any]:
    """Plain dict of a config dataclass, ready for JSON; the inverse of ``from_dict``."""
    return json.loads(json.dumps(dataclasses.asdict(config), allow_nan=False))


def from_dict(cls: type[T], values: Any, where: str = "config") -> T:
    """Config dataclass from the plain dict of ``to_dict``.

    Raises:
        ConfigError: a name is unknown or missing, a type does not fit, or a value is out of its range.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: {values!r}; expected an object of settings. Restore the file that the run wrote.")
    hints = get_type_hints(cls)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise ConfigError(f"{where}: {unknown[0]}; expected one of {sorted(hints)}. Remove it, or use the version that wrote it.")
    made = {name: _value(hints[name], value, f"{where}.{name}") for name, value in values.items()}
    try:
        return cls(**made)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}; expected every setting without a default. Restore the file that the run wrote.") from None


def _value(hint: Any, value: Any, where: str) -> Any:
    origin = get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        options = [option for option in get_args(hint) if option is not type(None)]
        if value is None and len(options) < len(get_args(hint)):
            return None
        return _value(options[0] if len(options) == 1 else _by_kind(options, value, where), value, where)
    if origin is Literal:
        if value in get_args(hint):
            return value
    elif origin is tuple:
        inner = get_args(hint)
        if len(inner) == 2 and inner[1] is Ellipsis and isinstance(value, list | tuple):
            inner = (inner[0],) * len(value)
        if isinstance(value, list | tuple) and len(value) == len(inner):
            return tuple(_value(h, v, where) for h, v in zip(inner, value, strict=True))
    elif dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, where)
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif hint in (int, str, bool) and type(value) is hint:
        return value
    raise ConfigError(f"{where}: {value!r}; expected {hint}. Correct it.")


def _by_kind(options: list[Any], value: Any, where: str) -> Any:
    """The class among several whose ``kind`` stands in ``value``; without a kind the first, which older files mean."""
    kinds = {get_args(get_type_hints(option)["kind"])[0]: option for option in options}
    kind = value.get("kind", next(iter(kinds))) if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in kinds:
        got = f"{where}.kind: {kind!r}" if isinstance(value, dict) else f"{where}: {value!r}"
        choices = ", ".join(map(repr, kinds))
        raise ConfigError(f"{got}; expected kind {choices}. Correct it, or use the version that wrote it.")
    return kinds[kind]
