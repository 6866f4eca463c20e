"""The result of every evaluator: a value with its interval, chance, and protocol."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dpvision.errors import ConfigError, DataError

Visibility = Literal["private", "public"]
CIDER = "CIDEr-D"
"""Prefix of CIDEr's protocols, the only metric that is not a share."""
Z_95 = 1.959963984540054  # 97.5% quantile of the normal distribution


@dataclass(frozen=True)
class Score:
    """One measured value. A share (accuracy) is in [0, 1], CIDEr in [0, 10]."""

    name: str
    """Name of what was measured: "encoder", "captioner", "random weights", "raw pixels", "people",
    ...
    """
    value: float
    low: float
    """Lower end of the 95% interval over test records or, of a protocol with several draws
    (few-shot, fine-tuning) and of a mean over seeds, of Student's interval over those, which leaves
    out the chance of the test records. Only a mean over seeds covers the choice of training seed.
    """
    high: float
    n: int
    """Number of test records."""
    chance: float
    """Score without looking at the images. Classes: the share of the most frequent one among the
    test records. Multi-label: the share of positives (average precision), or the best constant
    decisions. Choice among captions: 1 / their number. CIDEr: the same captions assigned to other
    images.
    """
    protocol: str
    """Description of the protocol, complete enough to repeat it."""
    visibility: Visibility
    """"private" if it depends on a private record; it then belongs under confidential/."""
    std: float | None = None
    """Standard deviation between seeds, of a mean over seeds (``over_seeds``); else None."""

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dict, ready for JSON; without ``std`` if that is None."""
        values = asdict(self)
        return values if self.std is not None else {k: v for k, v in values.items() if k != "std"}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Score":
        """Invert ``to_dict``; other entries are ignored. Raises DataError if one is missing."""
        try:
            named = {name: values[name] for name in cls.__dataclass_fields__ if name != "std"}
            return cls(**named, std=values.get("std"))
        except (KeyError, TypeError) as error:
            raise DataError(
                f"score: {values!r} lacks {error}; expected an entry of scores.json. Evaluate "
                "again."
            ) from None


def check_seeds(where: str, seeds: int | None) -> None:
    """Refuse fewer than two seeds: one has no standard deviation."""
    if seeds is not None and not seeds >= 2:
        raise ConfigError(f"{where}: --seeds {seeds}; expected 2 or more. Omit it to run one seed.")


def check_specificity(specificity: float) -> None:
    """Raise ConfigError unless ``specificity`` is above 0 and below 1."""
    if not 0 < specificity < 1:
        raise ConfigError(
            f"evaluate: specificity={specificity}; expected above 0 and below 1. Use 0.9."
        )


def is_share(protocol: str) -> bool:
    """Return whether scores of a protocol are shares in [0, 1], which can be plotted on one
    axis.
    """
    return not protocol.startswith(CIDER)


def printed(protocol: str, *values: float) -> str:
    """Format values: shares as percentages, CIDEr times 100 without a unit, as in papers; two
    values as a range.
    """
    numbers = " to ".join(f"{100 * value:.1f}" for value in values)
    return f"{numbers}%" if is_share(protocol) else numbers


def is_of_the_run(name: str) -> bool:
    """Return whether a score is of the trained network itself, not of a baseline."""
    return name.startswith(("encoder", "own head")) or (
        name.startswith("captioner") and not name.endswith("other images")
    )


def wilson_interval(correct: float, n: int) -> tuple[float, float]:
    """Return the 95% interval of a share from ``correct`` out of ``n`` >= 1 independent trials
    (Wilson, 1927); accurate near 0 and 1.
    """
    share = correct / n
    centre = share + Z_95 * Z_95 / (2 * n)
    half = Z_95 * math.sqrt(share * (1 - share) / n + Z_95 * Z_95 / (4 * n * n))
    scale = 1 + Z_95 * Z_95 / n
    # At 0 and 1 the ends equal the share up to rounding.
    return max(0.0, min(share, (centre - half) / scale)), min(
        1.0, max(share, (centre + half) / scale)
    )
