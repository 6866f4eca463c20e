"""Numbers as text, rounded pessimistically."""

import math

from dpvision.privacy.printed import up


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
