"""Total privacy spent on one store by all runs behind one set of weights: every figure of a
statement, at one delta.

A run that starts from the weights of a private run on the same store adds to what that run
released. How two such runs compose depends on whether the second one's settings were fixed before
the first one's results were seen:

- fixed beforehand: the events are composed ("pld"; where all are Gaussian the closed form,
  "gaussian"; with a private selection "renyi").
- otherwise: a Renyi filter ("filter", ``account.filter_epsilon``), which holds for settings chosen
  after seeing earlier results.
- an event without Renyi divergences (truncated Poisson, units under Poisson sampling): basic
  composition ("basic"), the sum of the runs' epsilons at delta / runs.

Without amplification each run is a Gaussian, whatever its sampling; Gaussians compose in closed
form also when settings follow earlier results (Smith and Thakurta, arXiv 2210.17520: "gaussian").
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dpvision.errors import PrivacyError
from dpvision.privacy import accountant
from dpvision.privacy.account import filter_bound, unit_view
from dpvision.privacy.events import Composed, Event
from dpvision.privacy.plan import DPPlan, View
from dpvision.privacy.printed import up, up_delta
from dpvision.privacy.refusal import MAX_EPSILON, MAX_N_TIMES_DELTA

Part = tuple[DPPlan, int]
"""A run's plan and the steps that a figure is for."""
Method = Literal["one run", "pld", "gaussian", "renyi", "filter", "basic"]
"""How a figure was composed."""

NO_RENYI = "a run drew truncated Poisson batches, which have no Renyi accounting"
NO_UNIT = "the store does not record which images belong to one person"
TRUNCATED_UNIT = (
    "a run drew truncated Poisson batches of several records of a unit, which have no accounting"
)


@dataclass(frozen=True)
class Total:
    """Figures of all runs together. If a figure is None, ``reasons`` says why."""

    delta: float
    """The smallest delta of the runs."""
    population: int
    """The largest number of units that a run declared, or of records if it declared no units."""
    epsilon: float
    """Of a record; of a person if the runs drew people (``check_total`` refuses a mixture)."""
    epsilon_rdp: float | None
    epsilon_unamplified: float
    unit_epsilon: float | None
    methods: dict[str, Method]
    """Composition of each figure that is not None."""
    reasons: dict[str, str]

    @property
    def n_times_delta(self) -> float:
        """float: units x delta, or records x delta."""
        return self.population * self.delta


@dataclass(frozen=True)
class Curve:
    """Privacy profile of all runs together, and its bounds on membership attacks."""

    profile: list[tuple[float, float]] | None
    """Valid pairs (epsilon, delta); None if basic composition gives one pair only."""
    tpr_at_fpr: dict[float, float]
    """Best true-positive rate of a membership attack at a false-positive rate."""
    coin_accuracy: float
    auc: float
    """Largest area under the ROC curve of a membership attack."""


def parts_of(runs: Iterable[tuple[DPPlan, int]]) -> tuple[Part, ...]:
    """Return the runs that were charged a step, each with the steps that are stated
    (``DPPlan.stated_steps``), in a canonical order: composition does not depend on the order.

    Args:
        runs: plans with the number of steps charged.
    """
    return tuple(
        sorted(
            ((plan, plan.stated_steps(charged)) for plan, charged in runs if charged),
            key=lambda part: repr((part[0].form(), part[1])),
        )
    )


def total_epsilon(parts: tuple[Part, ...], *, fixed: bool = False) -> tuple[float, float, Method]:
    """Epsilon per record of all runs, the delta at which it holds, and how it was composed.

    Args:
        parts: from ``parts_of``, all with a guarantee.
        fixed: whether all settings were fixed before the first run.
    """
    delta = min((plan.delta for plan, _ in parts), default=0.0)
    epsilon, method = _composed(parts, delta, "record", fixed)
    return epsilon, delta, method


def total(parts: tuple[Part, ...], *, fixed: bool = False) -> Total:
    """Compute all figures of all runs together; arguments as for ``total_epsilon``, with at least
    one part.
    """
    epsilon, delta, method = total_epsilon(parts, fixed=fixed)
    methods: dict[str, Method] = {"epsilon": method}
    reasons: dict[str, str] = {}
    unamplified, methods["epsilon_unamplified"] = _composed(parts, delta, "unamplified", fixed)
    epsilon_rdp = accountant.epsilon_rdp(_all(parts, "record"), delta)
    if epsilon_rdp is None:
        reasons["epsilon_rdp"] = NO_RENYI
    unit, found = None, _unit(parts, delta, fixed)
    if isinstance(found, str):
        reasons["unit_epsilon"] = found
    else:
        unit, methods["unit_epsilon"] = found
    largest = max(plan.unit.population for plan, _ in parts)
    return Total(delta, largest, epsilon, epsilon_rdp, unamplified, unit, methods, reasons)


def unit_epsilon(parts: tuple[Part, ...], *, fixed: bool = False) -> float | None:
    """``total_epsilon`` for a unit; None if no units are declared, or if there is no accounting for
    them.
    """
    found = _unit(parts, min((plan.delta for plan, _ in parts), default=0.0), fixed)
    return None if isinstance(found, str) else found[0]


def _unit(parts: tuple[Part, ...], delta: float, fixed: bool) -> tuple[float, Method] | str:
    """Epsilon of a unit and how it was composed; or why there is none."""
    view = unit_view(parts)
    if view is None:
        return NO_UNIT
    if any(not p.sampler.accounts_for_units and p.unit.clipped > 1 for p, _ in parts):
        return TRUNCATED_UNIT
    return _composed(parts, delta, view, fixed)


def check_total(parts: tuple[Part, ...], *, allow_weak: bool = False) -> None:
    """Refuse several runs whose total breaks the rules for a single run; called before the first
    step is charged.

    Args:
        allow_weak: ``PrivacyConfig.allow_weak_guarantee`` of the new run.

    Raises:
        PrivacyError: some runs drew people and others records, dataset_size x delta is above 1.5,
            the total has no finite epsilon, or, unless ``allow_weak``, one above
            ``refusal.MAX_EPSILON`` (a unit's where units are declared).
    """
    if len(parts) < 2:
        return
    if len({plan.unit.drawn for plan, _ in parts}) > 1:
        raise PrivacyError(
            "lineage: of the runs behind these weights on this store, some drew people and "
            "others records; expected the same in all, because their epsilons are for different "
            "changes of the data. Use one --privacy.sampling-unit, or start from other weights."
        )
    epsilon, delta, _ = total_epsilon(parts)
    records = max(plan.unit.population for plan, _ in parts)
    if not records * delta <= MAX_N_TIMES_DELTA:
        raise PrivacyError(
            f"lineage: dataset_size x delta = {up_delta(records * delta)} over the {len(parts)} "
            f"runs behind these weights; expected at most {MAX_N_TIMES_DELTA}. Start from other "
            "weights, or plan a smaller delta."
        )
    if not epsilon < math.inf:
        raise PrivacyError(
            f"lineage: the {len(parts)} runs behind these weights have no finite epsilon "
            "together; expected one. Start from other weights."
        )
    stated = epsilon if unit_view(parts) is None else unit_epsilon(parts)
    if not allow_weak and (stated is None or not stated <= MAX_EPSILON):
        raise PrivacyError(
            f"lineage: epsilon={up(stated)} over the {len(parts)} runs behind these weights; "
            f"expected at most {up(MAX_EPSILON)}, above which a guarantee says next to nothing. "
            "Raise --privacy.noise-multiplier, lower --privacy.target-epsilon, or start from other "
            "weights. To train nevertheless: --privacy.allow-weak-guarantee."
        )


def curve(
    parts: tuple[Part, ...],
    fprs: tuple[float, ...],
    *,
    fixed: bool = False,
    num_points: int = 49,
    of_unit: float | None = None,
) -> Curve:
    """Compute the privacy profile and the attack bounds of all runs together.

    Args:
        fprs: false-positive rates.
        of_unit: a unit's epsilon (``unit_epsilon``), for attacks on a unit; there is then no
            profile.
    """
    view = ("record" if of_unit is None else unit_view(parts)) or "record"
    if len(parts) > 1 and not fixed:
        delta = min(plan.delta for plan, _ in parts)
        bound = filter_bound([plan.event(steps, view) for plan, steps in parts], delta)
        if bound is None or not bound[0] < math.inf:
            return _curve_of_pair(_composed(parts, delta, view, fixed)[0], delta, fprs)
        _, order, divergence = bound
        return _curve_of_renyi(order, divergence, fprs, num_points)
    event = _all(parts, view)
    interval = accountant.unit_interval(of_unit) if of_unit is not None and view == "unit" else None
    coin = (1 + float(accountant.deltas(event, np.zeros(1), interval)[0])) / 2
    pairs = accountant.attack_profile(event, interval)
    tpr = {fpr: accountant.tpr_of_profile(*pairs, fpr) for fpr in fprs}
    profile = None if of_unit is not None else accountant.privacy_profile(event, num_points)
    return Curve(profile, tpr, coin, accountant.auc_of_profile(*pairs))


def _composed(
    parts: tuple[Part, ...], delta: float, view: View, fixed: bool
) -> tuple[float, Method]:
    if not parts:
        return 0.0, "one run"
    whole = _all(parts, view)
    interval = None
    if view == "record":
        intervals = [
            plan.value_discretization_interval
            for plan, _ in parts
            if plan.value_discretization_interval is not None
        ]
        interval = max(intervals, default=None)

    def epsilon_of(event: Event, at: float) -> float:
        return (
            accountant.unit_epsilon(event, at)
            if view == "unit"
            else accountant.epsilon(event, at, interval)
        )

    if len(parts) == 1:
        return epsilon_of(whole, delta), "one run"
    gaussian = whole.gaussian_noise() is not None
    if gaussian and (fixed or view == "unamplified"):
        return accountant.epsilon(whole, delta), "gaussian"
    if fixed:
        selects = any(plan.selection is not None for plan, _ in parts)
        return epsilon_of(whole, delta), "renyi" if selects else "pld"
    events = [plan.event(steps, view) for plan, steps in parts]
    bound = filter_bound(events, delta)
    if bound is not None and bound[0] < math.inf:
        return bound[0], "filter"
    return math.fsum(epsilon_of(event, delta / len(events)) for event in events), "basic"


def _all(parts: tuple[Part, ...], view: View) -> Event:
    events = tuple(plan.event(steps, view) for plan, steps in parts)
    return events[0] if len(events) == 1 else Composed(events)


def _curve_of_renyi(
    order: float, divergence: float, fprs: tuple[float, ...], num_points: int
) -> Curve:
    """Curve of an (order, divergence)-RDP mechanism."""

    def deltas(epsilon_E: np.ndarray) -> np.ndarray:
        return accountant.deltas_rdp(np.array([order]), np.array([divergence]), epsilon_E)

    def largest(delta: float) -> float:
        return max(0.0, divergence + math.log1p(-1 / order) - math.log(order * delta) / (order - 1))

    profile_E = np.linspace(0.0, largest(1e-10), num_points)
    attack_E = np.linspace(0.0, min(largest(1e-12), 700.0), 4001)
    attack = attack_E, deltas(attack_E)
    tpr = {fpr: accountant.tpr_of_profile(*attack, fpr) for fpr in fprs}
    pairs = [(float(e), float(d)) for e, d in zip(profile_E, deltas(profile_E), strict=True)]
    coin = (1 + float(deltas(np.zeros(1))[0])) / 2
    return Curve(pairs, tpr, coin, accountant.auc_of_profile(*attack))


def _curve_of_pair(epsilon: float, delta: float, fprs: tuple[float, ...]) -> Curve:
    """Curve from one pair (epsilon, delta): the trade-off function of ``accountant.tpr_of_profile``
    (Dong, Roth, Su, arXiv 1905.02383).
    """
    grown = math.exp(min(epsilon, 700.0))

    def tpr(fpr: float) -> float:
        return min(1.0, delta + grown * fpr, 1 - math.exp(-epsilon) * (1 - delta - fpr))

    # At the crossing of the two lines of the trade-off curve.
    coin = 1 - (1 - delta) / (1 + grown)
    return Curve(None, {fpr: tpr(fpr) for fpr in fprs}, coin, accountant.auc_of(tpr))
