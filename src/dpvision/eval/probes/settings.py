"""Names and settings of the protocols for the command line, without slow imports, so that `--help`
and errors are fast.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from dpvision.config.checks import check_ranges
from dpvision.errors import ConfigError

if TYPE_CHECKING:
    from dpvision.encoders.encoder import Encoder

PROTOCOL_NAMES = (
    "knn",
    "linear",
    "ridge",
    "linear_lars",
    "linear_cls",
    "fine_tune",
    "few_shot_probe",
    "few_shot_dpcap",
    "own_head",
)
"""The names of the classes in ``protocols.PROTOCOLS``."""
Control = Literal["random", "pixels"]
CONTROLS: tuple[Control, ...] = get_args(Control)


@dataclass(frozen=True)
class FewShotProbeSettings:
    """Settings of the few-shot probe."""

    draws: int = 20
    """Independent draws of the K images per class."""
    classifier: Literal["linear", "ridge"] = "linear"

    def __post_init__(self) -> None:
        if not self.draws >= 1:
            raise ConfigError(f"few_shot_probe: draws={self.draws!r}; expected at least 1. Use 20.")


@dataclass(frozen=True)
class FineTuneSettings:
    """Settings of few-shot fine-tuning; the defaults are the paper's."""

    draws: int = 3
    """Independent draws of the K images per class; the interval is over draws."""
    epochs: int = 200
    """Passes over the K images per class."""
    warmup_epochs: int = 10
    """Epochs in which the rate rises to its peak."""
    batch_size: int = 64
    """Maximum batch size; the images are divided into batches of nearly equal size."""
    learning_rates: tuple[float, ...] | None = None
    """Rates to choose from; if None, 3e-3, 3e-4, 3e-5 for transformers and 1e-2, 1e-3, 1e-4 for
    convnets.
    """
    weight_decay: float = 0.05
    """For transformers only."""
    momentum: float = 0.9
    """For convnets only."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Range of a crop's area as a fraction of the image's."""
    auto_augment: bool = True
    """AutoAugment with its ImageNet policy. The flag --fine-tune.no-auto-augment turns it off."""

    def __post_init__(self) -> None:
        rates = self.learning_rates
        check_ranges(
            "fine_tune",
            self,
            ("draws", self.draws >= 1, "at least 1"),
            ("epochs", self.epochs >= 1, "at least 1"),
            (
                "warmup_epochs",
                0 <= self.warmup_epochs < self.epochs,
                f"0 to epochs - 1 ({self.epochs - 1}), lowered together with epochs",
            ),
            ("batch_size", self.batch_size >= 2, "at least 2"),
            (
                "learning_rates",
                rates is None or (len(rates) > 0 and all(0 < lr < math.inf for lr in rates)),
                "positive numbers",
            ),
            ("weight_decay", 0 <= self.weight_decay < math.inf, "0 or more"),
            ("momentum", 0 <= self.momentum < 1, "0 <= momentum < 1"),
            (
                "crop_scale",
                0 < self.crop_scale[0] <= self.crop_scale[1] <= 1,
                "0 < low <= high <= 1",
            ),
        )

    def rates(self, encoder: "Encoder") -> tuple[float, ...]:
        """Return the learning rates for this kind of network."""
        return self.learning_rates or (
            (3e-3, 3e-4, 3e-5) if encoder.family == "transformer" else (1e-2, 1e-3, 1e-4)
        )

    def words(self, encoder: "Encoder", k: int) -> str:
        """Return the settings as text for scores."""
        rates = self.rates(encoder)
        grid = "/".join(f"{lr:g}" for lr in rates)
        if len(rates) == 1:
            chosen = f"lr {grid}"
        else:
            chosen = (
                f"lr {grid} by a held-out fifth"
                if k >= 5
                else f"lr {middle_rate(rates):g} (middle of {grid})"
            )
        how = (
            f"AdamW, decay {self.weight_decay:g}"
            if encoder.family == "transformer"
            else f"SGD, momentum {self.momentum:g}"
        )
        crops = (
            f"crops {self.crop_scale[0]:g}-{self.crop_scale[1]:g} + "
            f"flip{' + AutoAugment' if self.auto_augment else ''}"
        )
        return (
            f"{how}, {chosen}, {self.epochs} epochs, batch {self.batch_size}, {crops}, "
            f"{self.draws} draws"
        )


@dataclass(frozen=True)
class LarsSettings:
    """Settings of the LARS probe; the defaults are the paper's."""

    blrs: tuple[float, ...] = (0.1, 0.05, 0.01)
    """Base learning rates to choose from. The rate is blr x batch / 256: with few images it is
    small and needs many epochs.
    """
    batch_size: int = 16_384
    """Maximum batch size; fewer training images form one batch, which lowers the rate."""
    epochs: int = 90
    """Passes over the training images."""
    warmup_epochs: int = 10
    """Epochs in which the rate rises to its peak."""
    momentum: float = 0.9
    trust: float = 1e-3
    """LARS's trust coefficient."""
    augment: bool = True
    """Random resized crops and flips, for which the encoder runs epochs x N times. The flag
    --lars.no-augment turns them off: centre crops, once.
    """
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Range of a crop's area as a fraction of the image's."""
    eval_resize: float = 256 / 224
    """Test images: resize the shorter side to this multiple of the encoder's size, then crop the
    centre.
    """
    num_blocks: int = 12
    """Number of last blocks whose mean patch tokens are concatenated; all if there are fewer."""

    def __post_init__(self) -> None:
        check_ranges(
            "lars",
            self,
            (
                "blrs",
                bool(self.blrs) and all(0 < blr < math.inf for blr in self.blrs),
                "positive numbers",
            ),
            ("batch_size", self.batch_size >= 2, "at least 2"),
            ("epochs", self.epochs >= 1, "at least 1"),
            (
                "warmup_epochs",
                0 <= self.warmup_epochs < self.epochs,
                f"0 to epochs - 1 ({self.epochs - 1}), lowered together with epochs",
            ),
            ("momentum", 0 <= self.momentum < 1, "0 <= momentum < 1"),
            ("trust", 0 < self.trust < math.inf, "a positive number"),
            (
                "crop_scale",
                0 < self.crop_scale[0] <= self.crop_scale[1] <= 1,
                "0 < low <= high <= 1",
            ),
            ("eval_resize", 1 <= self.eval_resize < 4, "1 to 4"),
            ("num_blocks", self.num_blocks >= 1, "at least 1"),
        )

    def words(self, num_records: int) -> str:
        """Return the settings as text for scores."""
        blrs = "/".join(f"{blr:g}" for blr in self.blrs)
        chosen = f"blr {blrs} by a held-out fifth" if len(self.blrs) > 1 else f"blr {blrs}"
        crop = (
            f"crops {self.crop_scale[0]:g}-{self.crop_scale[1]:g} + flip"
            if self.augment
            else "no augmentation"
        )
        return f"{self.epochs} epochs, batch {min(self.batch_size, num_records)}, {chosen}, {crop}"


@dataclass(frozen=True)
class ProtocolSettings:
    """Settings of all protocols that have some."""

    shots: tuple[int, ...] = (10,)
    """Images per class for the few-shot protocols; several are allowed."""
    lars: LarsSettings = field(default_factory=LarsSettings)
    """Settings of linear_lars and linear_cls; the defaults are the paper's."""
    fine_tune: FineTuneSettings = field(default_factory=FineTuneSettings)
    """Settings of fine_tune; the defaults are the paper's."""
    few_shot_probe: FewShotProbeSettings = field(default_factory=FewShotProbeSettings)
    """Settings of few_shot_probe; few_shot_dpcap uses its draws."""


def middle_rate(rates: tuple[float, ...]) -> float:
    return sorted(rates)[len(rates) // 2]


def checked_protocols(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of protocols without duplicates. Raises ConfigError for an unknown one, or
    none.
    """
    names = tuple(dict.fromkeys(names))
    if not names or set(names) - set(PROTOCOL_NAMES):
        raise ConfigError(
            f"evaluate: protocols={','.join(names)!r}; expected some of "
            f"{', '.join(PROTOCOL_NAMES)}. Omit it for knn,linear."
        )
    return names


def checked_controls(names: Iterable[str]) -> tuple[Control, ...]:
    """Return the baselines of these names. Raises ConfigError for an unknown one."""
    if set(names) - set(CONTROLS):
        raise ConfigError(
            f"evaluate: against={','.join(names)!r}; expected random, pixels, both or none. Omit "
            "it for both."
        )
    return tuple(c for c in CONTROLS if c in names)
