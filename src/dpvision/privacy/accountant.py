"""Account for events: epsilon by PLD and by RDP, the privacy profile, and bounds on membership
attacks.

The stated epsilon is a pessimistic privacy loss distribution (PLD, "connect the dots"; Doroshenko
et al., arXiv 2207.04380): an upper bound on the true epsilon whatever the grid. Events made of
Gaussians only use the closed form (Balle and Wang, arXiv 1805.06530). A private selection has no
PLD: its bound is Renyi. RDP uses the conversion of Balle et al., arXiv 1905.09982, as the papers
did.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from dpvision.errors import PrivacyError
from dpvision.privacy import gaussian
from dpvision.privacy.events import Composed, Event
from dpvision.privacy.renyi import ORDERS, epsilon_at

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
    noise = event.gaussian_noise()
    if noise is not None:
        return gaussian.epsilon_at(noise, delta)
    if not all(part.private for part in event.parts):
        return math.inf
    if _selects(event):
        return _epsilon_of_selection(event, delta, interval)
    return event.losses(interval or discretization_interval(event, delta)).epsilon(delta)


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
    if event.gaussian_noise() is None and not _selects(event):
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
    plain = [part for part in event.parts if not part.selects]
    if plain and delta >= 2 * MIN_DELTA:
        chosen = epsilon_rdp(
            Composed(tuple(part for part in event.parts if part.selects)), delta / 2
        )
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
    """
    divergences = event.divergences()
    return None if divergences is None else (ORDERS, divergences)


def deltas(event: Event, epsilons: np.ndarray, interval: float | None = None) -> np.ndarray:
    """Upper bounds on delta of ``event`` at each of ``epsilons`` (0 or more, ascending), same
    shape, float64.

    The grid is ten times coarser than that of ``epsilon`` unless given.
    """
    noise = event.gaussian_noise()
    if noise is not None:
        return (
            np.zeros(len(epsilons))
            if noise == math.inf
            else np.exp(gaussian.log_delta(noise, epsilons))
        )
    if _selects(event):
        curve = rdp_curve(event)
        return np.ones(len(epsilons)) if curve is None else deltas_rdp(*curve, epsilons)
    return event.losses(interval or 10 * discretization_interval(event)).deltas(epsilons)


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
    """Return ``tpr_of_profile`` of a private event; ``interval`` as for ``deltas``."""
    return tpr_of_profile(*attack_profile(event, interval), fpr)


def attack_profile(event: Event, interval: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return valid pairs (epsilon, delta) for ``tpr_of_profile`` and ``auc_of_profile``, as two
    arrays.

    Args:
        event: a private event.
        interval: as for ``deltas``.
    """
    epsilons = np.linspace(0.0, min(_largest_epsilon(event, 1e-12), 700.0), 4001)
    return epsilons, deltas(event, epsilons, interval)


def tpr_of_profile(epsilons: np.ndarray, delta: np.ndarray, fpr: float) -> float:
    """Best true-positive rate of any membership attack with false-positive rate at most ``fpr``.

    Each (epsilon, delta) of the profile bounds the miss rate from below, f(a) = max(0, 1 - delta -
    e^epsilon a, e^-epsilon (1 - delta - a)) (Dong, Roth, Su, arXiv 1905.02383); the result is 1
    minus their maximum.

    Args:
        epsilons, delta: valid pairs, two arrays of one shape.
        fpr: in [0, 1].

    Returns:
        In [fpr, 1].
    """
    hit_1 = delta + np.exp(epsilons) * fpr
    hit_2 = 1.0 - np.exp(-epsilons) * (1.0 - delta - fpr)
    return float(min(1.0, hit_1.min(), hit_2.min()))


def auc_of(tpr: Callable[[float], float]) -> float:
    """Return an upper bound of the area under a concave ROC curve ``tpr``, by the midpoint rule,
    which never gives less for such a curve.
    """
    edges = np.linspace(0.0, 1.0, 501) ** 2  # finer where the curve is steep
    middle, width = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    return min(1.0, math.fsum(w * tpr(fpr) for fpr, w in zip(middle, width, strict=True)))


def auc_of_profile(epsilons: np.ndarray, delta: np.ndarray) -> float:
    """Largest area under the ROC curve of any membership attack, from valid pairs (epsilon, delta),
    two arrays of one shape.

    Between false-positive rates an attack can be drawn at random, so that the best rates of
    ``tpr_of_profile``, the smallest of straight lines, are a concave curve above every attack's.
    """
    return auc_of(partial(tpr_of_profile, epsilons, delta))


def discretization_interval(event: Event, delta: float = 1e-5) -> float:
    """Grid of the privacy loss for the size of ``event``'s epsilon: 1e-4 from 0.1 to 100, finer
    below, coarser above.

    A fixed grid would need gigabytes at epsilon 10^6 and be too coarse at epsilon 10^-3. The size
    is estimated by RDP of similar Poisson-sampled steps; the choice affects cost and tightness,
    never validity.
    """
    rough = epsilon_rdp(event.similar(), delta)
    if rough is None or rough == 0:
        return DEFAULT_INTERVAL
    decade = math.floor(math.log10(rough))
    return 10.0 ** (-4 + max(0, decade - 1) + min(0, decade + 1))


def _selects(event: Event) -> bool:
    return any(part.selects for part in event.parts)


def _largest_epsilon(event: Event, delta: float) -> float:
    largest = epsilon(event, delta, 10 * discretization_interval(event))
    if not largest < math.inf:
        raise PrivacyError(
            "privacy_profile: event without a guarantee; expected private steps. Use a run with "
            "guarantee=dp."
        )
    return largest
