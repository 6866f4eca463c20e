"""Numbers as text: the one place that rounds epsilons and deltas, and always up, so that no text
states less than was executed.
"""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

_DIGITS = 4
_ALL_DIGITS = Context(prec=1000)
"""Precise enough for any float to any number of digits asked for here."""


def up(epsilon: float | None, digits: int | None = None) -> str:
    """Format an epsilon, or another figure that must not look smaller than it is: the first 15
    digits of ``epsilon``, rounded up.

    >>> up(2.57347), up(2.57347, 2), up(7.99, 2), up(12345.6, 1)
    ('2.574', '2.58', '7.99', '12,345.6')

    Args:
        digits: decimals, with commas between thousands; if None, four significant digits.

    Returns:
        "infinity" for an infinite epsilon, "unknown" for None or NaN.
    """
    if epsilon is None or math.isnan(epsilon):
        return "unknown"
    if not math.isfinite(epsilon):
        return "infinity"
    return (
        f"{up_to(_DIGITS, epsilon):.{_DIGITS}g}"
        if digits is None
        else f"{_rounded(epsilon, -digits, ROUND_CEILING):,.{digits}f}"
    )


def up_to(significant: int, epsilon: float) -> float:
    """Round a finite epsilon up to some significant digits."""
    return float(_rounded(epsilon, _exact(epsilon).adjusted() - significant + 1, ROUND_CEILING))


def up_delta(delta: float | None) -> str:
    """Format a delta, or the product of one with a number of records: three significant digits,
    rounded up.

    >>> up_delta(1e-5), up_delta(1 / 120_000), up_delta(0.05)
    ('1e-5', '8.34e-6', '0.05')

    Returns:
        "unknown" for None or NaN.
    """
    if delta is None or not math.isfinite(delta):
        return up(delta)
    digits, power = f"{up_to(3, delta):.2e}".split("e")
    return f"{float(digits):g}e{int(power)}" if 0 < delta < 1e-3 else f"{up_to(3, delta):.3g}"


def one_in(delta: float) -> str:
    """Format a small probability as "1 in N", N rounded down."""
    return f"1 in {_rounded(1 / delta, 0, ROUND_FLOOR):,.0f}"


def down(x: float) -> str:
    """Format what is left of a budget with four significant digits, rounded down."""
    return (
        f"{float(_rounded(x, _exact(x).adjusted() - _DIGITS + 1, ROUND_FLOOR)):.{_DIGITS}g}"
        if math.isfinite(x)
        else str(x)
    )


def percent_up(share: float) -> str:
    """Format a share as a percentage, rounded up, at most 100%."""
    return (
        f"{min(1.0, share) * 100:.0f}%"
        if share >= 1
        else f"{up(share * 100, 0 if share >= 0.1 else 1)}%"
    )


def short(x: float) -> str:
    """Format a number with three digits; below 0.001 in scientific notation, such as 2.14e-9."""
    if x == 0 or not math.isfinite(x):
        return f"{x:.0f}"
    digits, power = f"{x:.2e}".split("e")
    return f"{float(digits):g}e{int(power)}" if x < 1e-3 else f"{x:.3g}"


def factor(epsilon: float) -> str:
    """Return e^epsilon as text, rounded up."""
    return (
        up(math.exp(epsilon), 0 if epsilon > 3 else 2)
        if epsilon < math.log(1e6)
        else f"10^{up(epsilon / math.log(10), 1)}"
    )


def count(n: int, noun: str) -> str:
    """Return ``n`` and the noun, in the plural unless ``n`` is 1."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def size(num_bytes: float) -> str:
    """Return a number of bytes as text, such as "2.8 MB"."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= 0.1 * factor:
            return f"{num_bytes / factor:,.1f} {unit}"
    return f"{num_bytes:.0f} bytes"


def duration(seconds: float) -> str:
    """Return a time as text: "66 s", "12 min" or "1.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def time_left(seconds: float) -> str:
    """Return a time left for a log that others may read, as text: rounded up to minutes, and to one
    digit of them. Steps take as long as their secret batches are large.
    """
    minutes = max(math.ceil(seconds / 60), 0)
    digit = 10 ** max(len(str(minutes)) - 1, 0)
    return f"about {duration(60 * digit * math.ceil(minutes / digit))} left"


def _exact(x: float) -> Decimal:
    """``x`` in the 15 decimal digits that a float64 holds: 7.99 is 7.99 and 0.1 + 0.2 is 0.3,
    whatever binary digits follow.
    """
    return Decimal(f"{x:.15g}")


def _rounded(x: float, exponent: int, rounding: str) -> Decimal:
    return _exact(x).quantize(Decimal(1).scaleb(exponent), rounding, _ALL_DIGITS)
