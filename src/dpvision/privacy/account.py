"""Total privacy spent by all runs on one store, and the owner's cap on it."""

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dpvision.errors import ConfigError, PrivacyError
from dpvision.files import make_folders
from dpvision.privacy import accountant
from dpvision.privacy.accountant import PrivacySpent
from dpvision.privacy.events import Composed, Event
from dpvision.privacy.marks import Cap
from dpvision.privacy.plan import DPPlan, View
from dpvision.privacy.printed import up
from dpvision.privacy.refusal import MAX_DELTA
from dpvision.privacy.renyi import ORDERS
from dpvision.privacy.store_marks import StoreLedgers

_CAP_GRID = np.geomspace(1e-3, 1e5, 8001)
_CLOSE = 1e-3
"""Relative width of the interval in which ``epsilon_left`` ends."""
_SPARE = 1e-4
"""Share of a total that is not spent, since a plan of more steps rounds its noise otherwise."""


@dataclass(frozen=True)
class RunAccount:
    """One run on a store, from its ledger."""

    run_id: str
    guarantee: str
    planned_steps: int
    steps: int
    """Steps charged."""
    restarts: int
    spent: PrivacySpent
    """Of the steps that are stated (``DPPlan.stated_steps``): the whole plan from the first step
    on.
    """
    name: str | None = None
    """Run folder, as it was given; None if the ledger folder does not have it."""


@dataclass(frozen=True)
class StoreAccount:
    """Privacy spent, by run and in total. Totals are None if a run without a guarantee used the
    store.

    A run counts with its whole plan from its first step on, while it runs and after it has ended
    (``DPPlan.stated_steps``).
    """

    store_id: str
    runs: tuple[RunAccount, ...]
    unprotected: tuple[str, ...]
    """Ids of runs without a guarantee that executed at least one step: no total holds."""
    delta: float | None
    """Delta of the totals (``total_delta``); None without a cap and a run."""
    epsilon: float | None
    """PLD of all runs: valid if their settings were fixed beforehand. For a record; for a person if
    a run drew people.
    """
    epsilon_filter: float | None
    """RDP filter (``filter_epsilon``): describes runs chosen after seeing earlier ones; None with
    truncated Poisson.
    """
    unit_epsilon: float | None
    """``epsilon`` for a unit (person) with all its records; None if no run declared units."""
    cap: Cap | None
    left: float | None
    """cap.epsilon less the total at the cap's delta, for a unit if units are declared, else for a
    record; None without a cap or a total. A further run may have a larger epsilon, because PLDs
    compose to less than the sum.
    """
    draws_people: bool = False
    """Whether a run drew people, so that ``epsilon`` is a person's."""
    moves: int = 0
    """Number of times the owner declared the store moved: a copy left behind would have separate
    ledgers.
    """
    cap_covers_choice: bool = False
    """Whether the cap is a guarantee also for runs chosen after seeing earlier ones: it was set
    before the first run, and its Renyi filter admits all of them.
    """

    def to_dict(self) -> dict[str, Any]:
        """Plain dict, ready for JSON."""
        return asdict(self)


def store_account(store_dir: Path) -> StoreAccount:
    """Compute the account of a store from its verified ledgers.

    Raises:
        PrivacyError: a ledger was altered, shortened, deleted or replaced by an older copy.
        DataError: not a store.
    """
    ledgers = StoreLedgers.of(store_dir)
    contents = ledgers.read_all()
    runs = tuple(
        RunAccount(
            i,
            c.plan.guarantee,
            c.plan.steps,
            c.steps,
            c.restarts,
            c.plan.spent(c.plan.stated_steps(c.steps)),
            ledgers.run_name(i),
        )
        for i, c in contents.items()
    )
    unprotected = tuple(c.run_id for c in contents.values() if c.plan.guarantee != "dp" and c.steps)
    parts = [
        (c.plan, c.plan.stated_steps(c.steps))
        for c in contents.values()
        if c.plan.guarantee == "dp" and c.steps
    ]
    cap = min(ledgers.caps(), key=lambda cap: cap.epsilon, default=None)
    delta = total_delta(cap, parts)
    epsilon = epsilon_filter = of_unit = None
    if not unprotected and delta is None:
        epsilon = epsilon_filter = 0.0
    elif not unprotected and delta is not None:
        epsilon = _total(parts, delta, "record")
        epsilon_filter = filter_epsilon(
            [plan.event(steps, base_view(parts)) for plan, steps in parts], delta
        )
        of_unit = None if unit_view(parts) is None else _total(parts, delta, "unit")
    left = None
    if cap is not None and not unprotected:
        left = max(
            0.0,
            cap.epsilon
            - _total(parts, cap.delta, "record" if unit_view(parts) is None else "unit"),
        )
    moves = ledgers.declared_moves()
    people = any(plan.unit.draws_people for plan, _ in parts)
    covers = not unprotected and covers_choice(cap, parts)
    return StoreAccount(
        ledgers.store_id,
        runs,
        unprotected,
        delta,
        epsilon,
        epsilon_filter,
        of_unit,
        cap,
        left,
        people,
        moves,
        covers,
    )


@dataclass(frozen=True)
class Charge:
    """What a store has been charged, and will have been with further runs, at one delta. A total
    that does not hold is None: a run without a guarantee used the store.
    """

    runs: int
    """Runs that were charged before."""
    before: float | None
    after: float | None
    delta: float
    of_person: bool
    """Whether the totals are a person's."""


def charge_of(
    store_dir: Path,
    plan: DPPlan,
    *,
    runs: int = 1,
    chosen: bool = False,
    besides: Collection[str] = (),
    uncharged: bool = False,
) -> Charge:
    """Return the total of a store's runs before and after ``runs`` runs of ``plan``, with the steps
    that are stated.

    Args:
        chosen: whether later runs follow earlier results: the totals are those of a Renyi filter
            (``filter_epsilon``), not PLDs.
        besides: ids of these runs, which do not count among those before.
        uncharged: whether runs count that have begun, and were not charged yet.

    Raises:
        PrivacyError: as ``store_account``.
    """
    ledgers = StoreLedgers.of(store_dir)
    contents = [c for c in ledgers.read_all().values() if c.run_id not in besides]
    earlier = [
        (c.plan, c.plan.steps)
        for c in contents
        if c.steps or (uncharged and c.plan.guarantee == "dp")
    ]
    parts = [*earlier, *[(plan, plan.steps)] * runs]
    delta = total_delta(min(ledgers.caps(), key=lambda cap: cap.epsilon, default=None), parts)
    assert delta is not None
    of_person = unit_view(parts) is not None
    view: Literal["record", "unit"] = "unit" if of_person else "record"

    def total(of: list[tuple[DPPlan, int]]) -> float | None:
        if any(one.guarantee != "dp" for one, _ in of):
            return None
        if chosen:
            return filter_epsilon(
                [one.event(steps, unit_view(of) or base_view(of)) for one, steps in of], delta
            )
        return _total(of, delta, view)

    return Charge(len(earlier), total(earlier), total(parts), delta, of_person)


def epsilon_left(store_dir: Path, total: float, plan_of: Callable[[float], DPPlan]) -> float:
    """Return the epsilon of one more run with which all runs on a store have the epsilon ``total``
    (PLD), to 0.1% and never above it.

    It follows from ``total`` and the plans of the runs that have begun, so it is fixed before the
    first of them if ``total`` is. At most 0.999 ``total`` is left if there was a run before.

    Args:
        total: for a person if people are declared, else for a record.
        plan_of: the plan of the run by its epsilon.

    Raises:
        PrivacyError: less than 1% of ``total`` is left, or a run without a guarantee used the
            store; or as ``charge_of``.
    """

    def after(epsilon: float) -> float | None:
        return charge_of(store_dir, plan_of(epsilon), uncharged=True).after

    charge = charge_of(store_dir, plan_of(total), uncharged=True)
    if not charge.runs:
        return total
    if charge.after is None:
        raise PrivacyError(
            f"total_epsilon={total}: a run without a guarantee used {store_dir}, so no total "
            "holds. Import the images that it did not see into another store."
        )
    low, high = total / 100, total
    most, least = total * (1 - _SPARE), after(low)
    if least is None or not least <= most:
        raise PrivacyError(
            f"total_epsilon={total}: epsilon {up(charge.before or 0.0)} was charged to "
            f"{store_dir} before; expected at least 1% of the total to be left. Nothing was "
            "charged now. Raise --total-epsilon, or name the whole epsilon of this run."
        )
    while high - low > _CLOSE * low:
        middle = (low + high) / 2
        reached = after(middle)
        low, high = (middle, high) if reached is not None and reached <= most else (low, middle)
    return low


def check_total(store_dir: Path, plan: DPPlan, total: float) -> None:
    """Refuse a new run whose whole plan, with those of all runs that have begun, exceeds ``total``
    (PLD, for a person if people are declared, else for a record).

    Raises:
        PrivacyError: it does, or a run without a guarantee used the store; or as ``charge_of``.
    """
    after = charge_of(store_dir, plan, uncharged=True).after
    if after is None or not after <= total:
        told = "no total" if after is None else f"epsilon {up(after)} together"
        raise PrivacyError(
            f"total_epsilon={total}: all runs that have begun on this store, with this one, would "
            f"have {told}; expected at most {total}. Nothing was charged for this one. Wait until "
            "the others are done, or name the whole epsilon of this run."
        )


def covers_choice(cap: Cap | None, parts: list[tuple[DPPlan, int]]) -> bool:
    """Return whether a cap is a guarantee for runs that were chosen after seeing earlier ones.

    ``parts`` are plans with the steps that are stated. The guarantee is that of the cap: the
    smaller ``filter_epsilon`` was not fixed before the first run.
    """
    if cap is None or not cap.before_first_run or not cap.epsilon >= _CAP_GRID[0]:
        return False
    view = unit_view(parts) or base_view(parts)
    events = [plan.event(steps, view) for plan, steps in parts]
    return _divergences(events) is not None and RenyiFilter.of(cap.epsilon, cap.delta).admits(
        events
    )


def total_delta(cap: Cap | None, parts: Iterable[tuple[DPPlan, int]]) -> float | None:
    """Return the delta of a store's totals: the smallest of the runs' and the cap's. A larger one
    would make them small.
    """
    return min(
        [plan.delta for plan, _ in parts] + ([] if cap is None else [cap.delta]), default=None
    )


def set_cap(store_dir: Path, epsilon: float, delta: float) -> None:
    """Set or replace the owner's cap: runs that would bring the store's PLD total above ``epsilon``
    at ``delta`` are refused.

    The total is per person if people are declared (``num_units``), else per record.

    Args:
        store_dir: folder of the store.
        epsilon: more than 0.
        delta: in [1e-14, 0.001].

    Raises:
        ConfigError: a value is out of range.
        DataError: not a store.
    """
    if not 0 < epsilon < math.inf:
        raise ConfigError(f"cap: epsilon={epsilon}; expected a positive number. Use 10.")
    if not accountant.MIN_DELTA <= delta <= MAX_DELTA:
        raise ConfigError(
            f"cap: delta={delta}; expected {accountant.MIN_DELTA} to {MAX_DELTA}. Use 1 / (2 "
            "dataset_size)."
        )
    ledgers = StoreLedgers.of(store_dir)
    ledgers.check_place()
    make_folders(ledgers.folder)
    with ledgers.locked():
        first = not any(contents.steps for contents in ledgers.read_all().values())
        ledgers.begin()
        ledgers.set_cap(Cap(epsilon, delta, before_first_run=first))


def declare_moved(store_dir: Path) -> None:
    """Record the owner's declaration that a store was moved or mounted elsewhere with its LEDGERS
    folder, and is not a copy of one in use.

    Declarations are counted in every later statement (``StoreAccount.moves``).

    Raises:
        PrivacyError: the ledgers were not moved along.
        DataError: not a store.
    """
    ledgers = StoreLedgers.of(store_dir)
    make_folders(ledgers.folder)
    with ledgers.locked():
        ledgers.declare_moved()


def restore_marks(store_dir: Path) -> None:
    """Rewrite a lost file of marks from the remaining ones.

    Raises:
        PrivacyError: none remains, or the ledgers do not match them.
        DataError: not a store.
    """
    ledgers = StoreLedgers.of(store_dir)
    ledgers.check_place()
    make_folders(ledgers.folder)
    with ledgers.locked():
        ledgers.restore_marks()


def check_cap(ledgers: StoreLedgers, parts: list[tuple[DPPlan, int]]) -> None:
    """Refuse ``parts``, pairs of a plan and the steps that count (all planned, once one is
    charged), if they exceed the store's cap.

    Raises:
        PrivacyError: the total is above the cap, or a part has no guarantee.
    """
    caps = ledgers.caps()
    if not caps:
        return
    cap = min(caps, key=lambda cap: cap.epsilon)
    parts = [(plan, steps) for plan, steps in parts if steps]
    if any(plan.guarantee != "dp" for plan, _ in parts):
        raise PrivacyError(
            f"cap: a run without a guarantee; expected a total of at most epsilon={cap.epsilon} "
            f"at delta={cap.delta}. Use another store, or ask its owner to lift the cap."
        )
    per: Literal["record", "unit"] = "record" if unit_view(parts) is None else "unit"
    for cap in caps:
        total = _total(parts, cap.delta, per)
        if not total <= cap.epsilon:
            raise PrivacyError(
                f"cap: total epsilon={up(total)} per {'person' if per == 'unit' else 'record'} "
                f"with this run; expected at most {cap.epsilon} at delta={cap.delta}. Plan a "
                "smaller target_epsilon, or ask the store's owner to raise the cap."
            )


@dataclass(frozen=True)
class RenyiFilter:
    """A Renyi filter whose budget is fixed before the first run (``filter_epsilon`` has the
    theorem). Made by ``of``.
    """

    epsilon: float
    """What all admitted runs together guarantee at ``delta``: at most the budget asked for, on the
    grid of ``filter_epsilon``.
    """
    delta: float
    order: float

    @classmethod
    def of(cls, epsilon: float, delta: float) -> "RenyiFilter":
        """Return the filter of a budget. Its order follows from (epsilon, delta) alone.

        Args:
            epsilon: at least 0.001.
            delta: in (0, 1).

        Raises:
            ConfigError: epsilon is out of range.
        """
        if not _CAP_GRID[0] <= epsilon < math.inf:
            raise ConfigError(
                f"filter: epsilon={epsilon}; expected a number from {_CAP_GRID[0]:g} on. Use 8."
            )
        cap = int(np.searchsorted(_CAP_GRID, epsilon, side="right")) - 1
        return cls(float(_CAP_GRID[cap]), delta, float(ORDERS[_orders_of_caps(delta)[1][cap]]))

    def admits(self, events: Iterable[Event]) -> bool:
        """Return whether the sum of the events' divergences at the filter's order stays within its
        budget.

        Raises:
            PrivacyError: an event has no Renyi accounting.
        """
        total = _divergences(events)
        if total is None:
            raise PrivacyError(
                "filter: a run without Renyi accounting; expected poisson or full_batch draws. "
                "Use --privacy.sampling poisson."
            )
        at = int(np.searchsorted(ORDERS, self.order))
        return bool(total[at] + _orders_of_caps(self.delta)[0][at] <= self.epsilon)


def filter_epsilon(events: Iterable[Event], delta: float) -> float | None:
    """Smallest cap whose Renyi filter would have admitted ``events`` in this order; for events
    chosen after seeing earlier results.

    Summing the PLDs of runs is proven for settings fixed in advance. For a run whose settings, or
    very existence, depend on earlier results (fully adaptive composition) a Renyi filter is: fix an
    order a and a budget B before the first run, and admit runs while the sum of their divergences
    at that order is at most B; the whole is then (a, B)-RDP (Feldman and Zrnic, arXiv 2008.11193;
    Lecuyer, arXiv 2103.01379), and with c(a, delta) = log(1 - 1/a) - log(a delta) / (a - 1) (the
    Balle conversion) it is (B + c, delta)-DP.

    The order must not depend on what was seen. Here it is a function of the cap (epsilon, delta)
    alone: the order whose budget admits the most Gaussian steps, a(epsilon, delta) = argmax of
    (epsilon - c(a, delta)) / a over the fixed orders of ``renyi``, and B = epsilon - c. A cap fixed
    before the first run is therefore kept, under full adaptivity, if and only if this filter admits
    the runs. The figure returned is the smallest of 8001 caps (0.23% apart, 1e-3 to 1e5) that
    admits them: a guarantee if the owner set that cap beforehand, a description otherwise. If a
    larger cap was set beforehand, the guarantee is that cap (``covers_choice``).

    Returns:
        The cap; infinite if none admits the events; 0 for none; None if one of them has no RDP.
    """
    bound = filter_bound(events, delta)
    return None if bound is None else bound[0]


def filter_bound(events: Iterable[Event], delta: float) -> tuple[float, float, float] | None:
    """Return ``filter_epsilon`` with the filter's bound, (cap, order a, divergence B): the events
    are (a, B)-RDP.
    """
    events = list(events)
    total = _divergences(events)
    if total is None:
        return None
    if not events:
        return 0.0, math.inf, 0.0
    conversion, chosen = _orders_of_caps(delta)
    admitted = total[chosen] + conversion[chosen] <= _CAP_GRID
    if not admitted.any():
        return math.inf, math.inf, math.inf
    first = int(np.argmax(admitted))
    return float(_CAP_GRID[first]), float(ORDERS[chosen[first]]), float(total[chosen[first]])


def _orders_of_caps(delta: float) -> tuple[np.ndarray, np.ndarray]:
    """c(a, delta) at ``ORDERS``, and the index of the order of each cap of the grid."""
    conversion = np.log1p(-1 / ORDERS) - np.log(ORDERS * delta) / (ORDERS - 1)
    return conversion, np.argmax((_CAP_GRID[:, None] - conversion) / ORDERS, axis=1)


def _divergences(events: Iterable[Event]) -> np.ndarray | None:
    """Sum of the events' divergences at ``ORDERS``; None if one of them has none."""
    total = np.zeros(len(ORDERS))
    for event in events:
        curve = accountant.rdp_curve(event)
        if curve is None:
            return None
        total = total + curve[1]
    return total


def unit_view(parts: Iterable[tuple[DPPlan, int]]) -> View | None:
    """Return the view of the runs' events (``DPPlan.event``) that gives a unit's epsilon; None if
    no run declared units.

    If no unit adds several gradients to a step, that is the record's view.
    """
    units = [plan.unit for plan, _ in parts]
    if not any(unit.is_person for unit in units):
        return None
    return "record" if all(unit.clipped == 1 for unit in units) else "unit"


def base_view(parts: Iterable[tuple[DPPlan, int]]) -> View:
    """Return the view of the runs' events that gives the figure called epsilon: a record's, or a
    person's if a run drew people.

    Such a run bounds the removal of a person, not that of one of a person's images, which replaces
    the person's gradient by another.
    """
    parts = list(parts)
    people = any(plan.unit.draws_people for plan, _ in parts)
    return (unit_view(parts) if people else None) or "record"


def _total(parts: list[tuple[DPPlan, int]], delta: float, per: Literal["record", "unit"]) -> float:
    """PLD epsilon of all parts together, for a record on the coarsest of their grids; 0 for
    none.
    """
    if not parts:
        return 0.0
    view = unit_view(parts) or "record" if per == "unit" else base_view(parts)
    whole = Composed(tuple(plan.event(steps, view) for plan, steps in parts))
    if view == "unit":
        return accountant.unit_epsilon(whole, delta)
    return accountant.epsilon(
        whole, delta, max(plan.value_discretization_interval or 0.0 for plan, _ in parts)
    )
