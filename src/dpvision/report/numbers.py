"""Numbers as text, rounded against us."""

import math


def round_up(x: float, digits: int) -> str:
    """Decimal text that is never less than ``x``."""
    if not math.isfinite(x):
        return "infinity"
    # The small term forgives binary rounding: 7.99 must not become 8.00.
    return f"{math.ceil(x * 10**digits - 1e-9) / 10**digits:,.{digits}f}"


def percent_up(share: float) -> str:
    """A share as a percentage, rounded up, 100% at most."""
    return f"{min(1.0, share) * 100:.0f}%" if share >= 1 else f"{round_up(share * 100, 0 if share >= 0.1 else 1)}%"


def short(x: float) -> str:
    """A small number in three digits, such as 1e-05 as 0.00001 or 2.14e-9."""
    if x == 0:
        return "0"
    digits, power = f"{x:.2e}".split("e")
    return f"{float(digits):g}e{int(power)}" if x < 1e-3 else f"{x:.3g}"


def factor(epsilon: float) -> str:
    """e^epsilon, rounded up."""
    return round_up(math.exp(epsilon), 0 if epsilon > 3 else 2) if epsilon < math.log(1e6) else f"10^{epsilon / math.log(10):.1f}"


def one_in(delta: float) -> str:
    """A small probability as "1 in N"."""
    return f"1 in {1 / delta:,.0f}"


def count(n: int, noun: str) -> str:
    """``n`` things, in the plural where it is due."""
    return f"{n} {noun}{'' if n == 1 else 's'}"
