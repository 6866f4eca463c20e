"""Account for events: epsilon by PLD and by RDP, the privacy profile, and bounds on membership
attacks.

The stated epsilon is a pessimistic privacy loss distribution (PLD, "connect the dots"; Doroshenko
et al., arXiv 2207.04380): an upper bound on the true epsilon whatever the grid. Events made of
Gaussians only use the closed form (Balle and Wang, arXiv 1805.06530). A private selection has no
PLD: its bound is Renyi. RDP uses the conversion of Balle et al., arXiv 1905.09982, as the papers
did.
"""

import math
from dataclasses import dataclass
from functools import lru_cache, reduce

import numpy as np

from dpvision.errors import PrivacyError
from dpvision.privacy import gaussian
from dpvision.privacy.events import (
    Composed,
    Event,
    Gaussian,
    GaussianMixture,
    NonPrivate,
    NoRelease,
    PoissonGaussian,
    Repeated,
    Selected,
    TruncatedPoissonGaussian,
)
from dpvision.privacy.loss_distribution import Distribution, mixture_of_gaussians, sampled_gaussian
from dpvision.privacy.renyi import ORDERS, epsilon_at, poisson_gaussian

DEFAULT_INTERVAL = 1e-4
"""Grid of the privacy loss for epsilons between 0.1 and 100: within 0.003 of the limit at the
papers' settings, in a tenth of a second.
"""
MIN_DELTA = 1e-14
"""Smallest delta supported: the composition cuts tails of 1e-15, added to delta."""
_WIDEST = 100.0
"""Coarsest grid of the privacy loss in the search for a unit's epsilon: the exponential of 700
overflows.
"""


@dataclass(frozen=True)
class PrivacySpent:
    """Privacy spent per record by ``steps`` executed steps, at ``delta``. All epsilons are None
    without a guarantee.
    """

    epsilon: float | None
    """The stated epsilon: pessimistic PLD, or the exact Gaussian for full batches."""
    epsilon_rdp: float | None
    """RDP with the Balle conversion, for comparison with papers; None for truncated Poisson, which
    has no RDP event.
    """
    delta: float
    steps: int
    epsilon_unamplified: float | None
    """For an attacker who knows every batch: ``steps`` full-batch steps with the same noise."""
    unit_epsilon: float | None
    """For a unit (person) of up to max_records_per_unit records at the same delta; None if the unit
    is the record.
    """


def epsilon(event: Event, delta: float, interval: float | None = None) -> float:
    """Upper bound on epsilon of ``event`` at ``delta``; infinite for a non-private event.

    Args:
        event: Gaussian, Poisson-sampled, truncated or mixture-of-Gaussians steps, and compositions
            of them.
        delta: in [1e-14, 1).
        interval: grid of the privacy loss; if None, ``discretization_interval(event, delta)``.

    Raises:
        PrivacyError: delta is below what the accountant resolves.
    """
    if not delta >= MIN_DELTA:
        raise PrivacyError(
            f"accountant: delta={delta}; expected at least {MIN_DELTA}, which the accountant can "
            "resolve. Use a larger delta."
        )
    noise = gaussian_noise(event)
    if noise is not None:
        return gaussian.epsilon_at(noise, delta)
    if _non_private(event):
        return math.inf
    if _selects(event):
        return _epsilon_of_selection(event, delta, interval)
    return _pld(event, interval or discretization_interval(event, delta)).epsilon(delta)


def unit_epsilon(event: Event, delta: float, *, parts: int = 8000) -> float:
    """Upper bound on epsilon of ``event`` for a unit of several records, on a grid of about epsilon
    / ``parts``.

    For a mixture ``discretization_interval`` goes by the largest component, which is many times too
    coarse; here the grid follows from the bound. At most 0.1% above the limit at 8000 parts
    (mixtures of up to 32 records, docs/log 2026-11-23).

    Raises:
        PrivacyError: as ``epsilon``.
    """
    interval = min(100 * discretization_interval(event, delta), _WIDEST)
    bound = epsilon(event, delta, interval)
    if gaussian_noise(event) is None and not _selects(event):
        while 0 < bound < math.inf and interval > 2 * bound / parts:
            interval = bound / parts
            bound = min(bound, epsilon(event, delta, interval))
    return bound


def unit_interval(unit_epsilon: float) -> float:
    """Grid for ``deltas`` and ``attack_tpr`` of a unit's event, from its epsilon
    (``unit_epsilon``).
    """
    return max(unit_epsilon, 1e-3) / 400


def _epsilon_of_selection(event: Event, delta: float, interval: float | None) -> float:
    """Renyi for the whole event, or, if smaller, Renyi for its selections plus PLD for its other
    parts, at half of delta each.
    """
    whole = epsilon_rdp(event, delta)
    bounds = [math.inf if whole is None else whole]
    parts = event.events if isinstance(event, Composed) else (event,)
    plain = [part for part in parts if not _selects(part)]
    if plain and delta >= 2 * MIN_DELTA:
        chosen = epsilon_rdp(Composed(tuple(part for part in parts if _selects(part))), delta / 2)
        if chosen is not None:
            bounds.append(chosen + epsilon(Composed(tuple(plain)), delta / 2, interval))
    return min(bounds)


def epsilon_rdp(event: Event, delta: float) -> float | None:
    """Epsilon by RDP with the Balle conversion; None if it gives no finite bound (truncated
    Poisson, non-private events).
    """
    curve = rdp_curve(event)
    if curve is None:
        return None
    bound = epsilon_at(*curve, delta)
    return bound if bound < math.inf else None


def rdp_curve(event: Event) -> tuple[np.ndarray, np.ndarray] | None:
    """Orders and Renyi divergences of ``event``, two float64 arrays of one shape; None for events
    without RDP accounting.

    Divergences add up under composition, so one step's curve, the slow part, is cached across step
    counts.
    """
    if isinstance(event, Repeated):
        curve = rdp_curve(event.event)
        return None if curve is None else (curve[0], curve[1] * event.count)
    if isinstance(event, Composed):
        curves = [rdp_curve(part) for part in event.events]
        known = [curve for curve in curves if curve is not None]
        if not known or len(known) < len(curves):
            return None
        return known[0][0], np.sum([divergence for _, divergence in known], axis=0)
    return _cached_rdp_curve(event)


@lru_cache(maxsize=64)
def _cached_rdp_curve(event: Event) -> tuple[np.ndarray, np.ndarray] | None:
    if isinstance(event, NoRelease):
        return ORDERS, np.zeros(len(ORDERS))
    if isinstance(event, Gaussian):
        return ORDERS, ORDERS / (2 * event.noise_multiplier**2)
    if isinstance(event, PoissonGaussian):
        return ORDERS, poisson_gaussian(event.sample_rate, event.noise_multiplier)
    if isinstance(event, Selected):
        from dpvision.privacy.rare_events import renyi_divergence

        divergence = renyi_divergence(event)
        return None if divergence is None else (ORDERS, divergence)
    return None


def deltas(event: Event, epsilons: np.ndarray, interval: float | None = None) -> np.ndarray:
    """Upper bounds on delta of ``event`` at each of ``epsilons`` (0 or more, ascending), same
    shape, float64.

    The grid is ten times coarser than that of ``epsilon`` unless given.
    """
    noise = gaussian_noise(event)
    if noise is not None:
        return (
            np.zeros(len(epsilons))
            if noise == math.inf
            else np.exp(gaussian.log_delta(noise, epsilons))
        )
    if _selects(event):
        curve = rdp_curve(event)
        return np.ones(len(epsilons)) if curve is None else deltas_rdp(*curve, epsilons)
    return _pld(event, interval or 10 * discretization_interval(event)).deltas(epsilons)


def privacy_profile(event: Event, num_points: int = 49) -> list[tuple[float, float]]:
    """Return the privacy profile: valid pairs (epsilon, delta), from epsilon 0 to the epsilon at
    which delta is 1e-10.

    Raises:
        PrivacyError: the event is not private.
    """
    epsilons = np.linspace(0.0, _largest_epsilon(event, 1e-10), num_points)
    return [(float(e), float(d)) for e, d in zip(epsilons, deltas(event, epsilons), strict=True)]


def deltas_rdp(order_A: np.ndarray, divergence_A: np.ndarray, epsilon_E: np.ndarray) -> np.ndarray:
    """Smallest delta of the conversion of Canonne, Kamath and Steinke (arXiv 2004.00010), or of
    total variation <= sqrt(1 - exp(-KL)) (Bretagnolle and Huber), over the orders.
    """
    log_EA = (
        (order_A - 1) * (divergence_A - epsilon_E[:, None])
        + order_A * np.log1p(-1 / order_A)
        - np.log(order_A - 1)
    )
    distance = math.sqrt(-math.expm1(-float(divergence_A.min())))
    return np.minimum(np.exp(np.minimum(log_EA.min(axis=1), 0.0)), distance)


def attack_tpr(event: Event, fpr: float, interval: float | None = None) -> float:
    """Best true-positive rate of any membership attack with false-positive rate at most ``fpr``.

    Each (epsilon, delta) of the profile bounds the miss rate from below, f(a) = max(0, 1 - delta -
    e^epsilon a, e^-epsilon (1 - delta - a)) (Dong, Roth, Su, arXiv 1905.02383); the result is 1
    minus their maximum.

    Args:
        event: a private event.
        fpr: in [0, 1].
        interval: as for ``deltas``.

    Returns:
        In [fpr, 1].
    """
    epsilons = np.linspace(0.0, min(_largest_epsilon(event, 1e-12), 700.0), 4001)
    return tpr_of_profile(epsilons, deltas(event, epsilons, interval), fpr)


def tpr_of_profile(epsilons: np.ndarray, delta: np.ndarray, fpr: float) -> float:
    """``attack_tpr`` from valid pairs (epsilon, delta), two arrays of one shape."""
    hit_1 = delta + np.exp(epsilons) * fpr
    hit_2 = 1.0 - np.exp(-epsilons) * (1.0 - delta - fpr)
    return float(min(1.0, hit_1.min(), hit_2.min()))


def gaussian_noise(event: Event) -> float | None:
    """Noise multiplier of the single Gaussian equivalent to ``event``, infinite for the empty
    event; None if a part is not Gaussian.
    """
    if isinstance(event, NoRelease):
        return math.inf
    if isinstance(event, Gaussian):
        return event.noise_multiplier
    if isinstance(event, Repeated):
        inner = gaussian_noise(event.event)
        return None if inner is None else inner / math.sqrt(event.count)
    if isinstance(event, Composed):
        parts = [gaussian_noise(e) for e in event.events]
        known = [p for p in parts if p is not None]
        if len(known) < len(parts):
            return None
        precision = sum(p**-2 for p in known)
        return precision**-0.5 if precision > 0 else math.inf
    return None


def discretization_interval(event: Event, delta: float = 1e-5) -> float:
    """Grid of the privacy loss for the size of ``event``'s epsilon: 1e-4 from 0.1 to 100, finer
    below, coarser above.

    A fixed grid would need gigabytes at epsilon 10^6 and be too coarse at epsilon 10^-3. The size
    is estimated by RDP of similar Poisson-sampled steps; the choice affects cost and tightness,
    never validity.
    """
    rough = epsilon_rdp(_stand_in(event), delta)
    if rough is None or rough == 0:
        return DEFAULT_INTERVAL
    decade = math.floor(math.log10(rough))
    return 10.0 ** (-4 + max(0, decade - 1) + min(0, decade + 1))


def _stand_in(event: Event) -> Event:
    if isinstance(event, Repeated):
        return Repeated(_stand_in(event.event), event.count)
    if isinstance(event, Composed):
        return Composed(tuple(_stand_in(e) for e in event.events))
    if isinstance(event, TruncatedPoissonGaussian):
        return PoissonGaussian(event.sample_rate, event.noise_multiplier)
    if isinstance(event, GaussianMixture):
        any_drawn = max(1.0 - event.probabilities[0], 1e-300)
        return PoissonGaussian(any_drawn, event.noise_multiplier / max(event.shifts))
    return event


def _selects(event: Event) -> bool:
    parts = event.events if isinstance(event, Composed) else (event,)
    return any(isinstance(part, Selected) for part in parts)


def _non_private(event: Event) -> bool:
    parts = event.events if isinstance(event, Composed) else (event,)
    return any(isinstance(part, NonPrivate) for part in parts)


def _largest_epsilon(event: Event, delta: float) -> float:
    largest = epsilon(event, delta, 10 * discretization_interval(event))
    if not largest < math.inf:
        raise PrivacyError(
            "privacy_profile: event without a guarantee; expected private steps. Use a run with "
            "guarantee=dp."
        )
    return largest


def _pld(event: Event, interval: float) -> Distribution:
    if isinstance(event, Composed):
        return reduce(Distribution.compose, (_pld(e, interval) for e in event.events))
    return _cached_pld(event, interval)


@lru_cache(maxsize=8)
def _cached_pld(event: Event, interval: float) -> Distribution:
    # One step's distribution is cached across step counts.
    if isinstance(event, Repeated):
        return _pld(event.event, interval).repeat(event.count)
    if isinstance(event, PoissonGaussian):
        return sampled_gaussian(event.sample_rate, event.noise_multiplier, interval)
    if isinstance(event, GaussianMixture):
        return mixture_of_gaussians(
            event.shifts, event.probabilities, event.noise_multiplier, interval
        )
    from dpvision.privacy.rare_events import distribution

    return distribution(event, interval)
