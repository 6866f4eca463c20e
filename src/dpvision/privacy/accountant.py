"""Account for events: epsilon by PLD and by RDP, the privacy profile, and bounds on membership attacks.

The stated epsilon is a pessimistic privacy loss distribution (PLD, "connect the dots"; Doroshenko et al., arXiv 2207.04380):
an upper bound on the true epsilon whatever the grid. Events made of Gaussians only use the closed form (Balle and Wang,
arXiv 1805.06530). A private selection has no PLD: its bound is Renyi. RDP uses the conversion of Balle et al., arXiv 1905.09982, as the
papers did.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, reduce

import numpy as np
from absl import logging
from dp_accounting import dp_event, gaussian_mechanism, rdp
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import stats

from dpvision.errors import PrivacyError
from dpvision.privacy.loss_distribution import Distribution, mixture_of_gaussians, sampled_gaussian, vectorised
from dpvision.privacy.renyi import ORDERS, at_orders, poisson_gaussian

DEFAULT_INTERVAL = 1e-4
"""Grid of the privacy loss for epsilons between 0.1 and 100: within 0.003 of the limit at the papers' settings, in a tenth of a second."""
MIN_DELTA = 1e-14
"""Smallest delta supported: the composition cuts tails of 1e-15, added to delta."""
_WIDEST = 100.0
"""Coarsest grid of the privacy loss in the search for a unit's epsilon: the exponential of 700 overflows."""


@dataclass(frozen=True)
class PrivacySpent:
    """Privacy spent per record by ``steps`` executed steps, at ``delta``. All epsilons are None without a guarantee."""

    epsilon: float | None
    """The stated epsilon: pessimistic PLD, or the exact Gaussian for full batches."""
    epsilon_rdp: float | None
    """RDP with the Balle conversion, for comparison with papers; None for truncated Poisson, which has no RDP event."""
    delta: float
    steps: int
    epsilon_unamplified: float | None
    """For an attacker who knows every batch: ``steps`` full-batch steps with the same noise."""
    unit_epsilon: float | None
    """For a unit (person) of up to max_records_per_unit records at the same delta; None if the unit is the record."""


def epsilon(event: dp_event.DpEvent, delta: float, interval: float | None = None) -> float:
    """Upper bound on epsilon of ``event`` at ``delta``; infinite for a non-private event.

    Args:
        event: Gaussian, Poisson-sampled, truncated or mixture-of-Gaussians steps, and compositions of them.
        delta: in [1e-14, 1).
        interval: grid of the privacy loss; if None, ``discretization_interval(event, delta)``.

    Raises:
        PrivacyError: delta is below what the accountant resolves.
    """
    if not delta >= MIN_DELTA:
        raise PrivacyError(
            f"accountant: delta={delta}; expected at least {MIN_DELTA}, which the accountant can resolve. Use a larger delta."
        )
    noise = gaussian_noise(event)
    if noise is not None:
        return float(gaussian_mechanism.get_epsilon_gaussian(noise, delta))
    if _non_private(event):
        return math.inf
    if _selects(event):
        return _epsilon_of_selection(event, delta, interval)
    return float(_pld(event, interval or discretization_interval(event, delta)).get_epsilon_for_delta(delta))


def unit_epsilon(event: dp_event.DpEvent, delta: float, *, parts: int = 2000) -> float:
    """Upper bound on epsilon of ``event`` for a unit of several records, on a grid of about epsilon / ``parts``.

    For a mixture ``discretization_interval`` goes by the largest component, which is many times too coarse; here the grid follows from the
    bound. Within 1% of the limit at 2000 parts.

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
    """Grid for ``deltas`` and ``attack_tpr`` of a unit's event, from its epsilon (``unit_epsilon``)."""
    return max(unit_epsilon, 1e-3) / 400


def _epsilon_of_selection(event: dp_event.DpEvent, delta: float, interval: float | None) -> float:
    """Renyi for the whole event, or, if smaller, Renyi for its selections plus PLD for its other parts, at half of delta each."""
    whole = epsilon_rdp(event, delta)
    bounds = [math.inf if whole is None else whole]
    parts = event.events if isinstance(event, dp_event.ComposedDpEvent) else [event]
    plain = [part for part in parts if not _selects(part)]
    if plain and delta >= 2 * MIN_DELTA:
        chosen = epsilon_rdp(dp_event.ComposedDpEvent([part for part in parts if _selects(part)]), delta / 2)
        if chosen is not None:
            bounds.append(chosen + epsilon(dp_event.ComposedDpEvent(plain), delta / 2, interval))
    return min(bounds)


def epsilon_rdp(event: dp_event.DpEvent, delta: float) -> float | None:
    """Epsilon by RDP with the Balle conversion; None if it gives no finite bound (truncated Poisson, non-private events)."""
    curve = rdp_curve(event)
    if curve is None:
        return None
    with _quiet():
        bound = float(rdp.compute_epsilon(*curve, delta)[0])
    return bound if bound < math.inf else None


def rdp_curve(event: dp_event.DpEvent) -> tuple[np.ndarray, np.ndarray] | None:
    """Orders and Renyi divergences of ``event``, two float64 arrays of one shape; None for events without RDP accounting.

    Divergences add up under composition, so one step's curve, the slow part, is cached across step counts.
    """
    if isinstance(event, dp_event.SelfComposedDpEvent):
        curve = rdp_curve(event.event)
        return None if curve is None else (curve[0], curve[1] * event.count)
    if isinstance(event, dp_event.ComposedDpEvent):
        curves = [rdp_curve(part) for part in event.events]
        known = [curve for curve in curves if curve is not None]
        if not known or len(known) < len(curves):
            return None
        return known[0][0], np.sum([divergence for _, divergence in known], axis=0)
    return _cached_rdp_curve(event)


@lru_cache(maxsize=64)
def _cached_rdp_curve(event: dp_event.DpEvent) -> tuple[np.ndarray, np.ndarray] | None:
    if isinstance(event, dp_event.NoOpDpEvent):
        return ORDERS, np.zeros(len(ORDERS))
    if isinstance(event, dp_event.GaussianDpEvent):
        return ORDERS, ORDERS / (2 * event.noise_multiplier**2)
    if isinstance(event, dp_event.PoissonSampledDpEvent) and isinstance(event.event, dp_event.GaussianDpEvent):
        return ORDERS, poisson_gaussian(event.sampling_probability, event.event.noise_multiplier)
    accountant = rdp.RdpAccountant()
    if not accountant.supports(event):
        return None
    with _quiet():
        accountant.compose(event)
    return ORDERS, at_orders(np.asarray(accountant.orders, dtype=np.float64), np.asarray(accountant.rdp, dtype=np.float64))


def deltas(event: dp_event.DpEvent, epsilons: np.ndarray, interval: float | None = None) -> np.ndarray:
    """Upper bounds on delta of ``event`` at each of ``epsilons`` (0 or more, ascending), same shape, float64.

    The grid is ten times coarser than that of ``epsilon`` unless given.
    """
    noise = gaussian_noise(event)
    if noise is not None:
        high = stats.norm.logcdf(0.5 / noise - epsilons * noise)
        low = epsilons + stats.norm.logcdf(-0.5 / noise - epsilons * noise)
        return np.exp(high) * -np.expm1(np.minimum(low - high, 0.0))
    if _selects(event):
        curve = rdp_curve(event)
        return np.ones(len(epsilons)) if curve is None else deltas_rdp(*curve, epsilons)
    return np.asarray(_pld(event, interval or 10 * discretization_interval(event)).get_delta_for_epsilon(epsilons), dtype=np.float64)


def privacy_profile(event: dp_event.DpEvent, num_points: int = 49) -> list[tuple[float, float]]:
    """Return the privacy profile: valid pairs (epsilon, delta), from epsilon 0 to the epsilon at which delta is 1e-10.

    Raises:
        PrivacyError: the event is not private.
    """
    epsilons = np.linspace(0.0, _largest_epsilon(event, 1e-10), num_points)
    return [(float(e), float(d)) for e, d in zip(epsilons, deltas(event, epsilons), strict=True)]


def deltas_rdp(order_A: np.ndarray, divergence_A: np.ndarray, epsilon_E: np.ndarray) -> np.ndarray:
    """Smallest delta of the conversion of Canonne, Kamath and Steinke (arXiv 2004.00010), or of total variation <= sqrt(1 - exp(-KL))
    (Bretagnolle and Huber), over the orders."""
    log_EA = (order_A - 1) * (divergence_A - epsilon_E[:, None]) + order_A * np.log1p(-1 / order_A) - np.log(order_A - 1)
    distance = math.sqrt(-math.expm1(-float(divergence_A.min())))
    return np.minimum(np.exp(np.minimum(log_EA.min(axis=1), 0.0)), distance)


def attack_tpr(event: dp_event.DpEvent, fpr: float, interval: float | None = None) -> float:
    """Best true-positive rate of any membership attack with false-positive rate at most ``fpr``.

    Each (epsilon, delta) of the profile bounds the miss rate from below, f(a) = max(0, 1 - delta - e^epsilon a,
    e^-epsilon (1 - delta - a)) (Dong, Roth, Su, arXiv 1905.02383); the result is 1 minus their maximum.

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


def gaussian_noise(event: dp_event.DpEvent) -> float | None:
    """Noise multiplier of the single Gaussian equivalent to ``event``, infinite for the empty event; None if a part is not Gaussian."""
    if isinstance(event, dp_event.NoOpDpEvent):
        return math.inf
    if isinstance(event, dp_event.GaussianDpEvent):
        return event.noise_multiplier
    if isinstance(event, dp_event.SelfComposedDpEvent):
        inner = gaussian_noise(event.event)
        return None if inner is None else inner / math.sqrt(event.count)
    if isinstance(event, dp_event.ComposedDpEvent):
        parts = [gaussian_noise(e) for e in event.events]
        known = [p for p in parts if p is not None]
        if len(known) < len(parts):
            return None
        precision = sum(p**-2 for p in known)
        return precision**-0.5 if precision > 0 else math.inf
    return None


def discretization_interval(event: dp_event.DpEvent, delta: float = 1e-5) -> float:
    """Grid of the privacy loss for the size of ``event``'s epsilon: 1e-4 from 0.1 to 100, finer below, coarser above.

    A fixed grid would need gigabytes at epsilon 10^6 and be too coarse at epsilon 10^-3. The size is estimated by RDP of similar
    Poisson-sampled steps; the choice affects cost and tightness, never validity.
    """
    rough = epsilon_rdp(_stand_in(event), delta)
    if rough is None or rough == 0:
        return DEFAULT_INTERVAL
    decade = math.floor(math.log10(rough))
    return 10.0 ** (-4 + max(0, decade - 1) + min(0, decade + 1))


def _stand_in(event: dp_event.DpEvent) -> dp_event.DpEvent:
    if isinstance(event, dp_event.SelfComposedDpEvent):
        return dp_event.SelfComposedDpEvent(_stand_in(event.event), event.count)
    if isinstance(event, dp_event.ComposedDpEvent):
        return dp_event.ComposedDpEvent([_stand_in(e) for e in event.events])
    if isinstance(event, dp_event.TruncatedSubsampledGaussianDpEvent):
        return dp_event.PoissonSampledDpEvent(event.sampling_probability, dp_event.GaussianDpEvent(event.noise_multiplier))
    if isinstance(event, dp_event.MixtureOfGaussiansDpEvent):
        any_drawn = max(1.0 - event.sampling_probs[0], 1e-300)
        return dp_event.PoissonSampledDpEvent(any_drawn, dp_event.GaussianDpEvent(event.standard_deviation / max(event.sensitivities)))
    return event


def _selects(event: dp_event.DpEvent) -> bool:
    parts = event.events if isinstance(event, dp_event.ComposedDpEvent) else [event]
    return any(isinstance(part, dp_event.RepeatAndSelectDpEvent) for part in parts)


def _non_private(event: dp_event.DpEvent) -> bool:
    parts = event.events if isinstance(event, dp_event.ComposedDpEvent) else [event]
    return any(isinstance(part, dp_event.NonPrivateDpEvent) for part in parts)


def _largest_epsilon(event: dp_event.DpEvent, delta: float) -> float:
    largest = epsilon(event, delta, 10 * discretization_interval(event))
    if not largest < math.inf:
        raise PrivacyError("privacy_profile: event without a guarantee; expected private steps. Use a run with guarantee=dp.")
    return largest


def _pld(event: dp_event.DpEvent, interval: float) -> Distribution:
    if isinstance(event, dp_event.ComposedDpEvent):
        return reduce(Distribution.compose, (_pld(e, interval) for e in event.events))
    return _cached_pld(event, interval)


@lru_cache(maxsize=8)
def _cached_pld(event: dp_event.DpEvent, interval: float) -> Distribution:
    # As dp-accounting's PLDAccountant does (a test compares), but one step's distribution is cached across step counts.
    if isinstance(event, dp_event.SelfComposedDpEvent):
        return _pld(event.event, interval).self_compose(event.count)
    if isinstance(event, dp_event.PoissonSampledDpEvent) and isinstance(event.event, dp_event.GaussianDpEvent):
        return sampled_gaussian(event.sampling_probability, event.event.noise_multiplier, interval)
    if isinstance(event, dp_event.MixtureOfGaussiansDpEvent):
        return mixture_of_gaussians(event.sensitivities, event.sampling_probs, event.standard_deviation, interval)
    return vectorised(_pld_of_library(event, interval))


def _pld_of_library(event: dp_event.DpEvent, interval: float) -> Distribution:
    if isinstance(event, dp_event.NoOpDpEvent):
        return pld.identity(interval)
    if isinstance(event, dp_event.GaussianDpEvent):
        return pld.from_gaussian_mechanism(event.noise_multiplier, value_discretization_interval=interval)
    if isinstance(event, dp_event.TruncatedSubsampledGaussianDpEvent):
        return pld.from_truncated_subsampled_gaussian_mechanism(
            event.dataset_size,
            event.sampling_probability,
            event.truncated_batch_size,
            event.noise_multiplier,
            value_discretization_interval=interval,
        )
    raise TypeError(f"accountant: {event}; expected an event of dpvision.privacy.mechanism.")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence dp-accounting's log of Renyi orders that it skips: the remaining orders give a valid bound."""
    before = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)
    try:
        yield
    finally:
        logging.set_verbosity(before)
