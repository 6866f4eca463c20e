"""Checks of a statement by itself: its schema, every value that follows from its plan, and epsilon
by a second accountant.

Epsilon is recomputed by ``privacy.second_accountant``, which shares no code with the accountant
that stated it.
"""

import math
from typing import Any

from dpvision.errors import DPVisionError, PrivacyError
from dpvision.privacy import accountant, second_accountant
from dpvision.privacy.account import filter_epsilon
from dpvision.privacy.composition import Part
from dpvision.privacy.events import Composed, Event
from dpvision.privacy.plan import DPPlan, View
from dpvision.privacy.printed import up, up_delta
from dpvision.privacy.second_accountant import Release, release
from dpvision.runs.lineage import private_stores
from dpvision.statement.again import COARSE, TOLERANCE, check_leaves
from dpvision.statement.check import Check, failed, not_checked, ok, unverified
from dpvision.statement.schema import problems, statement_schema

_SLACK = 1e-6
_NOT_COMPUTED = (PrivacyError, ArithmeticError, ValueError, MemoryError)
"""What the second accountant raises for a mechanism or delta beyond its grid."""


def check_schema(statement: Any) -> Check:
    """Check that every field is there, with the right type, and no other field."""
    found = problems(statement, statement_schema())
    if found:
        return failed(
            "schema",
            "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else ""),
        )
    return ok("schema", "every field of statement.schema.json, and no other")


def check_figures(statement: dict[str, Any]) -> list[Check]:
    """Check that the plans in the lineage are plans, and every value of the statement that follows
    from them (``again.check_leaves``).
    """
    own = statement["history"]["lineage"][-1]
    try:
        parts = _parts(statement)
        _other_parts(statement)
    except DPVisionError as error:
        return [failed("figures", f"history.lineage: {error}")]
    if own["run_id"] != statement["run_id"]:
        return [
            failed(
                "figures",
                f"run_id: {statement['run_id']} stated, {own['run_id']} in the last entry of "
                "lineage",
            )
        ]
    if statement["guarantee"] is not None and not parts:
        return [
            failed("figures", "the last entry of lineage has no guarantee, the statement has one")
        ]
    return check_leaves(statement)


def check_epsilons(statement: dict[str, Any]) -> list[Check]:
    """Check epsilon of this run and of all runs behind the weights, per record, without
    amplification and per person.
    """
    guarantee = statement["guarantee"]
    try:
        parts, others = _parts(statement), _other_parts(statement)
    except DPVisionError:
        return [not_checked("epsilon", "the plans in the lineage cannot be read")]
    checks = (
        []
        if guarantee is not None
        else [not_checked("epsilon", "the statement gives no guarantee for the images of this run")]
    )
    if guarantee is not None and parts:
        this = guarantee["this_run"]
        checks.append(
            recomputed(
                "epsilon of this run",
                this["epsilon"],
                parts[-1:],
                parts[-1][0].delta,
                "record",
                "one run",
            )
        )
        checks += _of_store(guarantee, parts, "")
    for other in statement["other_stores"]:
        checks += _of_store(
            other, others.get(other["store_id"], []), f" on store {other['store_id'][:8]}"
        )
    return checks


def _of_store(figures: dict[str, Any], parts: list[Part], where: str) -> list[Check]:
    """Check every epsilon of one store, and its privacy profile."""
    delta, methods = figures["delta"], figures["composition"]["methods"]
    checks = [
        recomputed(
            f"epsilon{where}", figures["epsilon"], parts, delta, "record", methods["epsilon"]
        ),
        recomputed(
            f"without amplification{where}",
            figures["epsilon_unamplified"],
            parts,
            delta,
            "unamplified",
            methods["epsilon_unamplified"],
        ),
    ]
    if figures["unit_epsilon"] is not None:
        method = methods.get("unit_epsilon", "one run")
        checks.append(
            recomputed(
                f"epsilon of a person{where}", figures["unit_epsilon"], parts, delta, "unit", method
            )
        )
    return [
        *checks,
        _check_profile(
            f"privacy profile{where}", figures["privacy_profile"], parts, methods["epsilon"]
        ),
    ]


def _parts(statement: dict[str, Any]) -> list[Part]:
    """Return plans and stated steps of the runs on the statement's own store, this one last,
    without which there is no guarantee.

    Raises:
        ConfigError, PrivacyError: the lineage has something that is no plan, or impossible steps.
    """
    *before, own = statement["history"]["lineage"]
    if own["guarantee"] is None:
        return []
    last = own | {
        "guarantee": own["guarantee"] | {"steps": statement["mechanism"]["steps_executed"]}
    }
    return [*_parts_on(before, own["store_id"]), *_parts_on([last], own["store_id"])]


def _other_parts(statement: dict[str, Any]) -> dict[str, list[Part]]:
    """Return plans and steps of the runs on every other private store in the lineage. Raises as
    ``_parts``.
    """
    *before, own = statement["history"]["lineage"]
    stores = [
        store_id
        for store_id in private_stores(before)
        if statement["guarantee"] is None or store_id != own["store_id"]
    ]
    found = {store_id: _parts_on(before, store_id) for store_id in stores}
    return {
        store_id: parts for store_id, parts in found.items() if any(steps for _, steps in parts)
    }


def _parts_on(lineage: list[dict[str, Any]], store_id: str) -> list[Part]:
    return [
        _part(entry) for entry in lineage if entry["guarantee"] and entry["store_id"] == store_id
    ]


def _part(entry: dict[str, Any]) -> Part:
    try:
        plan, steps = DPPlan.from_dict(entry["guarantee"]["plan"]), entry["guarantee"]["steps"]
    except ArithmeticError as error:  # such as a division by a dataset_size of 0
        raise PrivacyError(f"plan of run {entry['run_id']}: {error}") from None
    possible = {
        "guarantee": plan.guarantee == "dp",
        "noise_multiplier": 0 < plan.noise.multiplier < math.inf,
        "delta": second_accountant.MIN_DELTA <= plan.delta < 1,
        "max_records_per_unit": plan.unit.max_records >= 1,
        "steps": 0 <= steps <= plan.steps,
    }
    wrong = [name for name, fits in possible.items() if not fits]
    if wrong:
        raise PrivacyError(f"plan of run {entry['run_id']}: {', '.join(wrong)} out of range")
    return plan, plan.stated_steps(steps)


def recomputed(
    name: str, stated: float, parts: list[Part], delta: float, view: View, method: str
) -> Check:
    """Check a stated epsilon of runs against the second accountant, and against the first where
    that lacks the mechanism or is far below.

    Args:
        delta: at which it is stated.
        view: as in ``DPPlan.event``.
        method: how it was composed (``composition.Method``).
    """
    truncated = view != "unamplified" and any(
        plan.sampler.max_batch_size is not None for plan, _ in parts
    )
    selected = any(plan.selection is not None for plan, _ in parts)
    found, said = None, f"{up(stated, 4)} stated"
    if not truncated and not selected:
        releases = [_release(plan, steps, view) for plan, steps in parts]
        try:
            if method == "basic":
                found = math.fsum(
                    second_accountant.epsilon([r], delta / len(releases)) for r in releases
                )
            else:
                found = second_accountant.epsilon(releases, delta)
        except _NOT_COMPUTED as error:
            said += f"; the second accountant cannot compute it ({error})"
        else:
            said += (
                f", {up(found, 4)} by the second "
                f"accountant{' for settings fixed beforehand' if method == 'filter' else ''}"
            )
            if not stated >= found * (1 - TOLERANCE) - _SLACK:
                return failed(name, said)
    if (
        found is None
        or truncated
        or method == "filter"
        or not stated <= found * (1 + COARSE) + 1e-3
    ):
        try:
            first = by_first_accountant(parts, delta, view, method)
        except _NOT_COMPUTED as error:
            return unverified(name, f"{said}; nor can the first ({error})")
        what = (
            "its Renyi bound"
            if selected
            else "truncated draws"
            if truncated
            else "a filter"
            if method == "filter"
            else "its own grid"
        )
        said += f", {up(first, 4)} by the first accountant ({what})"
        if not first * (1 - TOLERANCE) - _SLACK <= stated <= first * (1 + COARSE) + _SLACK:
            return failed(name, f"{said}: not the figure of this mechanism")
    return ok(name, said)


def by_first_accountant(parts: list[Part], delta: float, view: View, method: str) -> float:
    """Return epsilon of runs by the accountant that states it, for private selections and truncated
    draws too.

    Raises:
        PrivacyError: there is none.
    """
    events = [plan.event(steps, view) for plan, steps in parts]
    grids = [
        plan.value_discretization_interval
        for plan, _ in parts
        if plan.value_discretization_interval is not None
    ]

    def epsilon_of(event: Event, at: float) -> float:
        unit = view == "unit"
        return (
            accountant.unit_epsilon(event, at)
            if unit
            else accountant.epsilon(event, at, max(grids, default=None))
        )

    if method == "filter":
        bound = filter_epsilon(events, delta)
        if bound is None:
            raise PrivacyError("a run has no Renyi divergences")
        return bound
    if method == "basic":
        return math.fsum(epsilon_of(event, delta / len(events)) for event in events)
    return epsilon_of(events[0] if len(events) == 1 else Composed(tuple(events)), delta)


def _release(plan: DPPlan, steps: int, view: View) -> Release:
    rate = 1.0 if view == "unamplified" or not plan.sampler.random else plan.sample_rate
    return release(rate, plan.noise.multiplier, steps, plan.unit.clipped if view == "unit" else 1)


def _check_profile(
    name: str, profile: list[list[float]] | None, parts: list[Part], method: str
) -> Check:
    if profile is None:
        return not_checked(name, "the statement has none")
    if any(plan.selection is not None for plan, _ in parts):
        return not_checked(
            name, "a private selection has a Renyi bound only, recomputed among the figures"
        )
    releases = [_release(plan, steps, "record") for plan, steps in parts]
    inside = [(e, d) for e, d in profile if 1e-10 <= d < 1]
    chosen = inside[:: max(1, len(inside) // 5)]
    try:
        wrong = [
            f"({up(e)}, {up_delta(d)})"
            for e, d in chosen
            if not e >= second_accountant.epsilon(releases, d) * (1 - TOLERANCE) - 1e-3
        ]
    except _NOT_COMPUTED as error:
        return not_checked(
            name,
            f"the second accountant cannot compute it ({error}); the first did, among the figures",
        )
    if wrong:
        return failed(name, f"{', '.join(wrong)}: less than the second accountant finds")
    return ok(
        name,
        f"{len(chosen)} of {len(profile)} pairs hold by the second accountant"
        + (" (at least)" if method == "filter" else ""),
    )
