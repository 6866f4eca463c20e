"""One Gaussian release of sensitivity 1 in closed form (Balle and Wang, arXiv 1805.06530, theorem
8).

The figures are dp-accounting's, by bisection to the last digit; what is returned is always on the
private side of the root.
"""

import math
from collections.abc import Callable

import numpy as np
from scipy import special

LARGEST_NORMAL = math.sqrt(258 * math.log(2))
"""13.37 standard deviations: what is drawn is never beyond (``dp.normals``)."""
DENSE_NORMAL = math.sqrt(212 * math.log(2))
"""12.12: up to it radii are closer than 1/20 of the grid that sums are rounded to; beyond, some
outputs are never drawn.
"""
_BRACKET = 4.0
_ROUNDED_UP = 1 + 1e-9


def log_delta(noise_multiplier: float, epsilon_E: np.ndarray | float) -> np.ndarray:
    """log of the smallest delta at each epsilon, of the shape of ``epsilon_E``; minus infinity
    where it is below what float64 resolves.

    Args:
        noise_multiplier: standard deviation of the noise; more than 0, and finite.
        epsilon_E: 0 or more.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        high = special.log_ndtr(0.5 / noise_multiplier - epsilon_E * noise_multiplier)
        low = epsilon_E + special.log_ndtr(-0.5 / noise_multiplier - epsilon_E * noise_multiplier)
        return np.asarray(high + np.log(-np.expm1(np.minimum(low - high, 0.0))))


def epsilon_at(noise_multiplier: float, delta: float) -> float:
    """Smallest epsilon of one release at ``delta``.

    Args:
        noise_multiplier: 0 to infinity.
        delta: in (0, 1).
    """
    if not noise_multiplier > 0:
        return math.inf
    if noise_multiplier == math.inf or log_delta(noise_multiplier, 0.0) <= math.log(delta):
        return 0.0
    return _smallest(lambda epsilon: bool(log_delta(noise_multiplier, epsilon) <= math.log(delta)))


def noise_for(epsilon: float, delta: float) -> float:
    """Smallest noise multiplier with which one release is (epsilon, delta)-private.

    Args:
        epsilon: more than 0, and finite.
        delta: in (0, 1).
    """
    return _smallest(lambda noise: bool(log_delta(noise, epsilon) <= math.log(delta)))


def full_batch_noise(epsilon: float, delta: float, steps: int) -> float:
    """Noise multiplier of ``steps`` full-batch releases, which compose to one Gaussian: sqrt(steps)
    times that of one, within 2e-9 of the smallest; arguments as in ``noise_for``.
    """
    return math.sqrt(steps) * noise_for(epsilon, delta) * _ROUNDED_UP


def beyond_largest(shift: float) -> float:
    """Probability that a pair of normals, moved by ``shift``, is longer than ``DENSE_NORMAL``:
    without the move few such pairs are drawn, so it may show that there was one (docs/proofs.md).

    The tail of the Rice distribution, by the trapezoid rule.
    """
    if shift >= 2 * DENSE_NORMAL:
        return 1.0
    r = DENSE_NORMAL + np.linspace(0.0, 40.0, 20_001)
    density = r * np.exp(-((r - shift) ** 2) / 2) * special.i0e(r * shift)
    return min(1.0, float(np.trapezoid(density, r)))


def _smallest(enough: Callable[[float], bool]) -> float:
    """Smallest positive number that is enough; all larger ones are. Infinite if none is, also where
    NaN was asked for.
    """
    low = high = 1.0
    while not enough(high):
        if high == math.inf:
            return high
        low, high = high, _BRACKET * high
    while low > 0 and enough(low):
        low, high = low / _BRACKET, low
    while low < (middle := low + (high - low) / 2) < high:
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
