"""Renyi divergences of the Poisson-sampled Gaussian at a fixed set of orders, for
``accountant.rdp_curve``.

dp-accounting's series for fractional orders does not converge for large sampling rates with little
noise, and those orders are left out. At rate 0.064 and noise 0.5 it skips orders below 1.6; epsilon
is then 881 instead of 478. The divergence is one integral (Mironov, Talwar, Zhang, arXiv
1908.10530, section 3), which a trapezoid rule gives to twelve digits; at integer orders it is a
finite sum.
"""

import math
from functools import cache, lru_cache

import numpy as np
from scipy import special

_FRACTIONAL = np.unique(np.concatenate([1 + np.geomspace(1e-3, 0.1, 21), np.arange(11, 110) / 10]))
_INTEGER = np.unique(np.concatenate([np.arange(11, 65), np.round(2 ** np.arange(6, 16.01, 0.125))]))
ORDERS = np.concatenate([_FRACTIONAL, _INTEGER])
"""From 1.001, the best for epsilons in the thousands, to 65,536, the best for epsilons of a
thousandth. They include all of dp-accounting's orders, so that no figure is larger than with those,
and are fixed, as a Renyi filter requires.
"""
_LEAST_NOISE = 0.02


@lru_cache(maxsize=64)
def poisson_gaussian(sample_rate: float, noise_multiplier: float) -> np.ndarray:
    """Renyi divergence of one Poisson-sampled Gaussian step at ``ORDERS``, float64 of the same
    shape.

    Args:
        sample_rate: more than 0, at most 1.
        noise_multiplier: more than 0; below 0.02 the divergence without sampling is given, which is
            an upper bound.
    """
    plain = ORDERS / (2 * noise_multiplier**2)
    if not noise_multiplier >= _LEAST_NOISE or sample_rate == 1:
        return plain
    log_moment = np.concatenate(
        [_integrals(sample_rate, noise_multiplier), _sums(sample_rate, noise_multiplier)]
    )
    # Rounding is far below 1e-9; the divergence is never more than without sampling, and never
    # negative.
    return np.clip((log_moment * (1 + 1e-9) + 1e-14) / (ORDERS - 1), 0.0, plain)


def epsilon_at(order_A: np.ndarray, divergence_A: np.ndarray, delta: float) -> float:
    """Smallest epsilon at ``delta`` over the orders: the conversion of Balle et al. (arXiv
    1905.09982, theorem 21), or 0 where delta >= sqrt(1 - exp(-divergence)) (Bretagnolle and Huber).

    Args:
        order_A, divergence_A: one shape, order more than 1. Orders up to 1.01, where the conversion
            loses digits, are left out.
    """
    if bool(np.any(delta**2 + np.expm1(-divergence_A) > 0)):
        return 0.0
    used = order_A > 1.01
    order, divergence = order_A[used], divergence_A[used]
    return max(
        0.0,
        float(
            np.min(
                divergence + np.log1p(-1 / order) - np.log(delta * order) / (order - 1),
                initial=math.inf,
            )
        ),
    )


def at_orders(order: np.ndarray, divergence: np.ndarray) -> np.ndarray:
    """Upper bounds at ``ORDERS`` from upper bounds at a few orders: (order - 1) x divergence is
    convex in the order, below its chords, and divergence rises with the order. Infinite beyond the
    last order that is finite.

    Args:
        order, divergence: one shape, order ascending and more than 1.
    """
    finite = np.isfinite(divergence)
    if not finite.any():
        return np.full(len(ORDERS), math.inf)
    order, divergence = order[finite], divergence[finite]
    chord = np.interp(ORDERS, order, (order - 1) * divergence, right=math.inf) / (ORDERS - 1)
    return np.where(order[0] > ORDERS, divergence[0], chord)


def _integrals(q: float, noise: float) -> np.ndarray:
    """log of the integral of N(0, noise^2) times (likelihood ratio)^order, at the fractional
    orders.
    """
    step = min(
        noise / 16, noise**2 / 4
    )  # below the width of the Gaussian, and of the bend where the mixture takes over
    x = np.arange(-13 * noise, _FRACTIONAL[-1] + 13 * noise, step)
    ratio = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * noise**2))
    null = -(x**2) / (2 * noise**2) - math.log(noise * math.sqrt(2 * math.pi)) + math.log(step)
    return np.array([_log_sum(order * ratio + null) for order in _FRACTIONAL])


def _sums(q: float, noise: float) -> np.ndarray:
    """The same at the integer orders, by the binomial theorem."""
    logs = []
    for order in _INTEGER.astype(int).tolist():
        k = np.arange(order + 1)
        logs.append(
            _log_sum(
                _log_choose(order)
                + (order - k) * math.log1p(-q)
                + k * math.log(q)
                + k * (k - 1) / (2 * noise**2)
            )
        )
    return np.array(logs)


def _log_choose(order: int) -> np.ndarray:
    """Logarithms of the binomial coefficients of ``order``."""
    log = _log_factorials()[: order + 1]
    return log[order] - log - log[::-1]


@cache
def _log_factorials() -> np.ndarray:
    """Logarithms of 0!, 1!, ... up to the largest order: one table for all orders."""
    return special.gammaln(np.arange(_INTEGER[-1] + 1) + 1)


def _log_sum(log_terms: np.ndarray) -> float:
    largest = log_terms.max()
    return float(largest + np.log(np.exp(log_terms - largest).sum()))
