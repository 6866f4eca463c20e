"""Checks of a statement by itself: its schema, the consistency of its figures, and epsilon by a second accountant.

Epsilon is recomputed by ``privacy.second_accountant``, which shares no code with the accountant that stated it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from dpvision.privacy import second_accountant
from dpvision.privacy.second_accountant import Release, release
from dpvision.report.numbers import round_up
from dpvision.report.schema import problems, statement_schema

TOLERANCE = 0.01
"""How far a stated figure may be below the recomputed one: both are upper bounds on the same number."""
_SLACK = 1e-6
_COARSE = 0.10
"""How far it may be above: the grids for the unit's epsilon and for small epsilons are coarse."""


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    status: Literal["ok", "failed", "not checked"]
    detail: str


def ok(name: str, detail: str) -> Check:
    """Return a passed check."""
    return Check(name, "ok", detail)


def failed(name: str, detail: str) -> Check:
    """Return a failed check: the statement, or a file behind it, contradicts its claim."""
    return Check(name, "failed", detail)


def not_checked(name: str, why: str) -> Check:
    """Return a check that could not be made."""
    return Check(name, "not checked", why)


def compared(name: str, pairs: Iterable[tuple[str, Any, Any]], passed: str) -> Check:
    """Return one check of several equalities, given as (name, stated, found)."""
    wrong = [f"{what}: {stated!r} stated, {found!r} found" for what, stated, found in pairs if not _same(stated, found)]
    return failed(name, "; ".join(wrong)) if wrong else ok(name, passed)


def check_schema(statement: Any) -> Check:
    """Check that every field is there, with the right type, and no other field."""
    found = problems(statement, statement_schema())
    if found:
        return failed("schema", "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else ""))
    return ok("schema", "every field of statement.schema.json, and no other")


def check_figures(statement: dict[str, Any]) -> Check:
    """Check that the figures are consistent with one another and with the headline."""
    mechanism, history, guarantee = statement["mechanism"], statement["history"], statement["guarantee"]
    own = history["lineage"][-1]
    size, unit = statement["scope"]["dataset_size"]["value"], statement["scope"]["unit"]
    pairs: list[tuple[str, Any, Any]] = [
        ("guaranteed", statement["guaranteed"], guarantee is not None),
        ("divisor", mechanism["divisor"], mechanism["sample_rate"] * (unit["num_units"] if _draws_people(unit) else size)),
        ("noise_std", mechanism["noise_std"], mechanism["noise_multiplier"] * (mechanism["max_grad_norm"] or 0.0)),
        ("steps_wasted", history["steps_wasted"], mechanism["steps_executed"] - history["steps_in_weights"]),
        ("run_id of the last entry of lineage", own["run_id"], statement["run_id"]),
        ("steps_executed within steps_planned", mechanism["steps_executed"] <= mechanism["steps_planned"], True),
    ]
    if guarantee is None:
        return compared("figures", pairs, "the figures agree with one another")
    if own["guarantee"] is None:
        return failed("figures", "the last entry of lineage has no guarantee, the statement has one")
    plan = own["guarantee"]["plan"]
    people = {size for p, _ in _parts(statement) for size in (p["dataset_size"], p.get("num_units")) if size is not None}
    stated = [figure for figure in (guarantee["epsilon"], guarantee["unit_epsilon"]) if figure is not None]
    pairs += [
        ("dataset_size of the plan", plan["dataset_size"], size),
        ("sample_rate of the plan", plan["sample_rate"], mechanism["sample_rate"]),
        ("noise_multiplier of the plan", plan["noise_multiplier"], mechanism["noise_multiplier"]),
        ("max_grad_norm of the plan", plan["max_grad_norm"], mechanism["max_grad_norm"]),
        ("steps of the plan", plan["steps"], mechanism["steps_planned"]),
        ("steps of the last entry of lineage", own["guarantee"]["steps"], mechanism["steps_executed"]),
        ("delta of this run", guarantee["this_run"]["delta"], plan["delta"]),
        ("epsilon of this run", guarantee["this_run"]["epsilon"], own["guarantee"]["epsilon"]),
        ("delta", guarantee["delta"], min(plan["delta"] for plan, _ in _parts(statement))),
        ("n_times_delta", any(_same(guarantee["n_times_delta"], n * guarantee["delta"]) for n in people), True),
        ("epsilon in the headline", any(f"epsilon {round_up(figure, 2)} " in statement["headline"] for figure in stated), True),
    ]
    return compared("figures", pairs, "the figures agree with one another, and the headline with them")


def check_epsilons(statement: dict[str, Any]) -> list[Check]:
    """Check epsilon of this run and of all runs behind the weights, per record, without amplification and per person."""
    guarantee = statement["guarantee"]
    if guarantee is None:
        return [not_checked("epsilon", "the statement gives no guarantee")]
    own = statement["history"]["lineage"][-1]["guarantee"]["plan"]
    steps, delta = statement["mechanism"]["steps_executed"], guarantee["delta"]
    parts, methods = _parts(statement), guarantee["composition"]["methods"]
    checks = [_recomputed("epsilon of this run", guarantee["this_run"]["epsilon"], [(own, steps)], own["delta"], "record", "one run")]
    checks.append(_recomputed("epsilon", guarantee["epsilon"], parts, delta, "record", methods["epsilon"]))
    checks.append(
        _recomputed("without amplification", guarantee["epsilon_unamplified"], parts, delta, "unamplified", methods["epsilon_unamplified"])
    )
    if guarantee["unit_epsilon"] is not None:
        method = methods.get("unit_epsilon", "one run")
        checks.append(_recomputed("epsilon of a person", guarantee["unit_epsilon"], parts, delta, "unit", method))
    checks.append(_check_profile(guarantee["privacy_profile"], parts, methods["epsilon"]))
    for other in statement["other_stores"]:
        behind, how = _parts_on(statement["history"]["lineage"], other["store_id"]), other["composition"]["methods"]["epsilon"]
        checks.append(_recomputed(f"epsilon on store {other['store_id'][:8]}", other["epsilon"], behind, other["delta"], "record", how))
    checks.append(not_checked("RDP, attacks", "epsilon_rdp and the attack terms are not recomputed"))
    return checks


def _parts(statement: dict[str, Any]) -> list[tuple[dict[str, Any], int]]:
    """Return plans and steps of the runs on the statement's own store, this one last."""
    *before, own = statement["history"]["lineage"]
    return [*_parts_on(before, own["store_id"]), (own["guarantee"]["plan"], statement["mechanism"]["steps_executed"])]


def _parts_on(lineage: list[dict[str, Any]], store_id: str) -> list[tuple[dict[str, Any], int]]:
    return [(e["guarantee"]["plan"], e["guarantee"]["steps"]) for e in lineage if e["guarantee"] and e["store_id"] == store_id]


def _recomputed(name: str, stated: float, parts: list[tuple[dict[str, Any], int]], delta: float, view: str, method: str) -> Check:
    if any(plan.get("selection") is not None for plan, _ in parts):
        return not_checked(name, f"{stated:.4g} stated; a private selection has a Renyi bound only, which is not recomputed")
    releases = [_release(plan, steps, view) for plan, steps in parts]
    if method == "basic":
        found = math.fsum(second_accountant.epsilon([r], delta / len(releases)) for r in releases)
    else:
        found = second_accountant.epsilon(releases, delta)
    said = f"{stated:.4f} stated, {found:.4f} by the second accountant"
    if not stated >= found * (1 - TOLERANCE) - _SLACK:
        return failed(name, said)
    if method == "filter":
        return ok(name, f"{said} for settings fixed beforehand, which a Renyi filter must exceed")
    if view != "unamplified" and any(plan["sampling"] == "truncated_poisson" for plan, _ in parts):
        said += " for plain Poisson, which truncation exceeds by 1% at most"
    if not stated <= found * (1 + _COARSE) + 1e-3:
        return failed(name, f"{said}: not the figure of this mechanism")
    return ok(name, said)


def _release(plan: dict[str, Any], steps: int, view: str) -> Release:
    rate = 1.0 if view == "unamplified" or plan["sampling"] == "full_batch" else plan["sample_rate"]
    records = plan["max_records_per_unit"] if view == "unit" and not _draws_people(plan) else 1
    return release(rate, plan["noise_multiplier"], steps, records)


def _draws_people(plan: dict[str, Any]) -> bool:
    """Whether a plan, or a statement's unit, draws people; older ones draw records and do not say so."""
    return plan.get("sampling_unit", "record") == "person"


def _check_profile(profile: list[list[float]] | None, parts: list[tuple[dict[str, Any], int]], method: str) -> Check:
    name = "privacy profile"
    if profile is None:
        return not_checked(name, "the statement has none")
    if any(plan.get("selection") is not None for plan, _ in parts):
        return not_checked(name, "a private selection has a Renyi bound only, which is not recomputed")
    releases = [_release(plan, steps, "record") for plan, steps in parts]
    inside = [(e, d) for e, d in profile if 1e-10 <= d < 1]
    chosen = inside[:: max(1, len(inside) // 5)]
    wrong = [f"({e:.4g}, {d:.3g})" for e, d in chosen if not e >= second_accountant.epsilon(releases, d) * (1 - TOLERANCE) - 1e-3]
    if wrong:
        return failed(name, f"{', '.join(wrong)}: less than the second accountant finds")
    return ok(name, f"{len(chosen)} of {len(profile)} pairs hold by the second accountant" + (" (at least)" if method == "filter" else ""))


def _same(stated: Any, found: Any) -> bool:
    numbers = isinstance(stated, int | float) and isinstance(found, int | float) and not isinstance(stated, bool)
    return math.isclose(stated, found, rel_tol=1e-9, abs_tol=1e-15) if numbers else stated == found
