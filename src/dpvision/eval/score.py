"""What every evaluator yields: one figure with its interval, what chance would give, and how it was measured."""

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dpvision.errors import DataError

Visibility = Literal["private", "public"]
CIDER = "CIDEr-D"
"""How protocols of CIDEr begin, the only measure that is no share."""
Z_95 = 1.959963984540054  # 97.5% quantile of the normal distribution


@dataclass(frozen=True)
class Score:
    """One measured figure. A share (accuracy) lies in [0, 1], CIDEr in [0, 10]."""

    name: str
    """What was measured: "encoder", "captioner", "random weights", "raw pixels", "people", ..."""
    value: float
    low: float
    """Lower end of the 95% interval over test records. It does not cover the choice of training seed."""
    high: float
    n: int
    """Test records."""
    chance: float
    """What one gets who does not look: of classes, the share of the most frequent one among the test records; where records have several,
    the share of positives (average precision) or what the best constant answers get (decisions); of a choice among captions, one in their
    number; of CIDEr, what the same captions get when each is given to another image."""
    protocol: str
    """How, in words that are complete enough to repeat it."""
    visibility: Visibility
    """"private" when any record it was computed from is: it then belongs under confidential/."""

    def to_dict(self) -> dict[str, Any]:
        """Plain dict, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Score":
        """The inverse of ``to_dict``; other entries are ignored. Raises DataError when one is missing."""
        try:
            return cls(**{name: values[name] for name in cls.__dataclass_fields__})
        except (KeyError, TypeError) as error:
            raise DataError(f"score: {values!r} lacks {error}; expected an entry of scores.json. Evaluate again.") from None


def is_share(protocol: str) -> bool:
    """Whether scores of a protocol lie in [0, 1], and can be drawn on one axis with other shares."""
    return not protocol.startswith(CIDER)


def printed(protocol: str, *values: float) -> str:
    """Values as they are told: shares as percentages, CIDEr times 100 without a unit, as papers print it; two of them as a range."""
    numbers = " to ".join(f"{100 * value:.1f}" for value in values)
    return f"{numbers}%" if is_share(protocol) else numbers


def is_of_the_run(name: str) -> bool:
    """Whether a score is of the trained network itself, and of no control beside it."""
    return name.startswith(("encoder", "own head")) or (name.startswith("captioner") and not name.endswith("other images"))


def wilson_interval(correct: float, n: int) -> tuple[float, float]:
    """95% interval of a share from ``correct`` out of ``n`` >= 1 independent trials (Wilson, 1927); good near 0 and 1 too."""
    share = correct / n
    centre = share + Z_95 * Z_95 / (2 * n)
    half = Z_95 * math.sqrt(share * (1 - share) / n + Z_95 * Z_95 / (4 * n * n))
    scale = 1 + Z_95 * Z_95 / n
    # At 0 and at 1 the ends meet the share up to rounding.
    return max(0.0, min(share, (centre - half) / scale)), min(1.0, max(share, (centre + half) / scale))
