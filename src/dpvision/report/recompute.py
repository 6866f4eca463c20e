"""Checks of a statement by itself: its schema, the consistency of its figures, and epsilon by a second accountant.

Epsilon is recomputed by ``privacy.second_accountant``, which shares no code with the accountant that stated it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from dpvision.errors import DPVisionError, PrivacyError
from dpvision.privacy import second_accountant
from dpvision.privacy.account import unit_view
from dpvision.privacy.composition import Part
from dpvision.privacy.plan import DPPlan, View
from dpvision.privacy.second_accountant import Release, release
from dpvision.report.guarantee import headline
from dpvision.report.schema import problems, statement_schema
from dpvision.runs.lineage import private_stores

TOLERANCE = 0.01
"""How far a stated figure may be below the recomputed one: both are upper bounds on the same number."""
_SLACK = 1e-6
_COARSE = 0.10
"""How far it may be above: the grids for the unit's epsilon and for small epsilons are coarse."""
_NOT_COMPUTED = (PrivacyError, ArithmeticError, ValueError, MemoryError)
"""What the second accountant raises for a mechanism or delta beyond its grid."""


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


def differences(stated: Any, found: Any, where: str = "") -> list[str]:
    """Return the places where two nested values differ, such as "history.lineage[0].run_id"; floats agree within 1e-6 of their value."""
    if isinstance(stated, dict) and isinstance(found, dict):
        names = [f"{where}.{key}".lstrip(".") for key in stated.keys() ^ found.keys()]
        return names + [
            d for key in stated.keys() & found.keys() for d in differences(stated[key], found[key], f"{where}.{key}".lstrip("."))
        ]
    if isinstance(stated, list) and isinstance(found, list) and len(stated) == len(found):
        return [d for i, pair in enumerate(zip(stated, found, strict=True)) for d in differences(*pair, f"{where}[{i}]")]
    if isinstance(stated, float) and isinstance(found, float):
        return [] if math.isclose(stated, found, rel_tol=1e-6, abs_tol=1e-12) else [where]
    return [] if stated == found and isinstance(stated, bool) == isinstance(found, bool) else [where]


def check_schema(statement: Any) -> Check:
    """Check that every field is there, with the right type, and no other field."""
    found = problems(statement, statement_schema())
    if found:
        return failed("schema", "; ".join(found[:3]) + (f"; and {len(found) - 3} more" if len(found) > 3 else ""))
    return ok("schema", "every field of statement.schema.json, and no other")


def check_figures(statement: dict[str, Any]) -> Check:
    """Check that the plans in the lineage are plans, and that the figures are consistent with one another and with the headline."""
    mechanism, history, guarantee = statement["mechanism"], statement["history"], statement["guarantee"]
    own, size, unit = history["lineage"][-1], statement["scope"]["dataset_size"]["value"], statement["scope"]["unit"]
    try:
        parts, others = _parts(statement), _other_parts(statement)
    except DPVisionError as error:
        return failed("figures", f"history.lineage: {error}")
    pairs: list[tuple[str, Any, Any]] = [
        ("guaranteed", statement["guaranteed"], guarantee is not None),
        ("divisor", mechanism["divisor"], mechanism["sample_rate"] * ((unit["num_units"] or 0) if _draws_people(unit) else size)),
        ("noise_std", mechanism["noise_std"], mechanism["noise_multiplier"] * (mechanism["max_grad_norm"] or 0.0)),
        ("steps_wasted", history["steps_wasted"], mechanism["steps_executed"] - history["steps_in_weights"]),
        ("run_id of the last entry of lineage", own["run_id"], statement["run_id"]),
        ("steps_executed within steps_planned", 0 <= mechanism["steps_executed"] <= mechanism["steps_planned"], True),
        ("stores in other_stores", [other["store_id"] for other in statement["other_stores"]], list(others)),
        *(
            (f"delta on store {other['store_id'][:8]}", other["delta"], min(plan.delta for plan, _ in others[other["store_id"]]))
            for other in statement["other_stores"]
            if other["store_id"] in others
        ),
        ("headline", statement["headline"], headline(guarantee)),
    ]
    if guarantee is None:
        return compared("figures", pairs, "the figures agree with one another")
    if own["guarantee"] is None:
        return failed("figures", "the last entry of lineage has no guarantee, the statement has one")
    plan = parts[-1][0]
    people = {size for p, _ in parts for size in (p.dataset_size, p.num_units) if size is not None}
    pairs += [
        ("dataset_size of the plan", plan.dataset_size, size),
        ("num_units of the plan", plan.num_units, unit["num_units"]),
        ("sample_rate of the plan", plan.sample_rate, mechanism["sample_rate"]),
        ("noise_multiplier of the plan", plan.noise_multiplier, mechanism["noise_multiplier"]),
        ("max_grad_norm of the plan", plan.max_grad_norm, mechanism["max_grad_norm"]),
        ("steps of the plan", plan.steps, mechanism["steps_planned"]),
        ("steps of the last entry of lineage", own["guarantee"]["steps"], mechanism["steps_executed"]),
        ("delta of this run", guarantee["this_run"]["delta"], plan.delta),
        ("epsilon of this run", guarantee["this_run"]["epsilon"], own["guarantee"]["epsilon"]),
        ("delta", guarantee["delta"], min(plan.delta for plan, _ in parts)),
        ("n_times_delta", any(_same(guarantee["n_times_delta"], n * guarantee["delta"]) for n in people), True),
        ("epsilon of a person without declared people", guarantee["unit_epsilon"] is not None and unit_view(parts) is None, False),
    ]
    return compared("figures", pairs, "the figures agree with one another, and the headline with them")


def check_epsilons(statement: dict[str, Any]) -> list[Check]:
    """Check epsilon of this run and of all runs behind the weights, per record, without amplification and per person."""
    guarantee = statement["guarantee"]
    try:
        parts, others = _parts(statement), _other_parts(statement)
    except DPVisionError:
        return [not_checked("epsilon", "the plans in the lineage cannot be read")]
    checks = [] if guarantee is not None else [not_checked("epsilon", "the statement gives no guarantee")]
    if guarantee is not None and parts:
        this = guarantee["this_run"]
        checks.append(recomputed("epsilon of this run", this["epsilon"], parts[-1:], parts[-1][0].delta, "record", "one run"))
        checks += _of_store(guarantee, parts, "")
    for other in statement["other_stores"]:
        checks += _of_store(other, others.get(other["store_id"], []), f" on store {other['store_id'][:8]}")
    if guarantee is not None:
        checks.append(not_checked("RDP, attacks", "epsilon_rdp and the attack terms are not recomputed"))
    return checks


def _of_store(figures: dict[str, Any], parts: list[Part], where: str) -> list[Check]:
    """Check every epsilon of one store, and its privacy profile."""
    delta, methods = figures["delta"], figures["composition"]["methods"]
    checks = [
        recomputed(f"epsilon{where}", figures["epsilon"], parts, delta, "record", methods["epsilon"]),
        recomputed(
            f"without amplification{where}", figures["epsilon_unamplified"], parts, delta, "unamplified", methods["epsilon_unamplified"]
        ),
    ]
    if figures["unit_epsilon"] is not None:
        method = methods.get("unit_epsilon", "one run")
        checks.append(recomputed(f"epsilon of a person{where}", figures["unit_epsilon"], parts, delta, "unit", method))
    return [*checks, _check_profile(f"privacy profile{where}", figures["privacy_profile"], parts, methods["epsilon"])]


def _parts(statement: dict[str, Any]) -> list[Part]:
    """Return plans and stated steps of the runs on the statement's own store, this one last, without which there is no guarantee.

    Raises:
        ConfigError, PrivacyError: the lineage has something that is no plan, or impossible steps.
    """
    *before, own = statement["history"]["lineage"]
    if own["guarantee"] is None:
        return []
    last = own | {"guarantee": own["guarantee"] | {"steps": statement["mechanism"]["steps_executed"]}}
    return [*_parts_on(before, own["store_id"]), *_parts_on([last], own["store_id"])]


def _other_parts(statement: dict[str, Any]) -> dict[str, list[Part]]:
    """Return plans and steps of the runs on every other private store in the lineage. Raises as ``_parts``."""
    *before, own = statement["history"]["lineage"]
    stores = [store_id for store_id in private_stores(before) if statement["guarantee"] is None or store_id != own["store_id"]]
    found = {store_id: _parts_on(before, store_id) for store_id in stores}
    return {store_id: parts for store_id, parts in found.items() if any(steps for _, steps in parts)}


def _parts_on(lineage: list[dict[str, Any]], store_id: str) -> list[Part]:
    return [_part(entry) for entry in lineage if entry["guarantee"] and entry["store_id"] == store_id]


def _part(entry: dict[str, Any]) -> Part:
    try:
        plan, steps = DPPlan.from_dict(entry["guarantee"]["plan"]), entry["guarantee"]["steps"]
    except ArithmeticError as error:  # such as a division by a dataset_size of 0
        raise PrivacyError(f"plan of run {entry['run_id']}: {error}") from None
    possible = {
        "guarantee": plan.guarantee == "dp",
        "noise_multiplier": 0 < plan.noise_multiplier < math.inf,
        "delta": second_accountant.MIN_DELTA <= plan.delta < 1,
        "max_records_per_unit": plan.max_records_per_unit >= 1,
        "steps": 0 <= steps <= plan.steps,
    }
    wrong = [name for name, fits in possible.items() if not fits]
    if wrong:
        raise PrivacyError(f"plan of run {entry['run_id']}: {', '.join(wrong)} out of range")
    return plan, plan.stated_steps(steps)


def recomputed(name: str, stated: float, parts: list[Part], delta: float, view: View, method: str) -> Check:
    """Check a stated epsilon of runs against the second accountant.

    Args:
        delta: at which it is stated.
        view: as in ``DPPlan.event``.
        method: how it was composed (``composition.Method``).
    """
    if any(plan.selection is not None for plan, _ in parts):
        return not_checked(name, f"{stated:.4g} stated; a private selection has a Renyi bound only, which is not recomputed")
    releases = [_release(plan, steps, view) for plan, steps in parts]
    try:
        if method == "basic":
            found = math.fsum(second_accountant.epsilon([r], delta / len(releases)) for r in releases)
        else:
            found = second_accountant.epsilon(releases, delta)
    except _NOT_COMPUTED as error:
        return not_checked(name, f"{stated:.4g} stated; the second accountant cannot compute it ({error})")
    said = f"{stated:.4f} stated, {found:.4f} by the second accountant"
    if not stated >= found * (1 - TOLERANCE) - _SLACK:
        return failed(name, said)
    if method == "filter":
        return ok(name, f"{said} for settings fixed beforehand, which a Renyi filter must exceed")
    if view != "unamplified" and any(plan.sampling == "truncated_poisson" for plan, _ in parts):
        said += " for plain Poisson, which truncation exceeds by 1% at most"
    if not stated <= found * (1 + _COARSE) + 1e-3:
        return failed(name, f"{said}: not the figure of this mechanism")
    return ok(name, said)


def _release(plan: DPPlan, steps: int, view: View) -> Release:
    rate = 1.0 if view == "unamplified" or plan.sampling == "full_batch" else plan.sample_rate
    return release(rate, plan.noise_multiplier, steps, plan.clipped_per_unit if view == "unit" else 1)


def _draws_people(unit: dict[str, Any]) -> bool:
    """Whether a statement's unit draws people; older ones draw records and do not say so."""
    return unit.get("sampling_unit", "record") == "person"


def _check_profile(name: str, profile: list[list[float]] | None, parts: list[Part], method: str) -> Check:
    if profile is None:
        return not_checked(name, "the statement has none")
    if any(plan.selection is not None for plan, _ in parts):
        return not_checked(name, "a private selection has a Renyi bound only, which is not recomputed")
    releases = [_release(plan, steps, "record") for plan, steps in parts]
    inside = [(e, d) for e, d in profile if 1e-10 <= d < 1]
    chosen = inside[:: max(1, len(inside) // 5)]
    try:
        wrong = [f"({e:.4g}, {d:.3g})" for e, d in chosen if not e >= second_accountant.epsilon(releases, d) * (1 - TOLERANCE) - 1e-3]
    except _NOT_COMPUTED as error:
        return not_checked(name, f"the second accountant cannot compute it ({error})")
    if wrong:
        return failed(name, f"{', '.join(wrong)}: less than the second accountant finds")
    return ok(name, f"{len(chosen)} of {len(profile)} pairs hold by the second accountant" + (" (at least)" if method == "filter" else ""))


def _same(stated: Any, found: Any) -> bool:
    numbers = isinstance(stated, int | float) and isinstance(found, int | float) and not isinstance(stated, bool)
    return math.isclose(stated, found, rel_tol=1e-9, abs_tol=1e-15) if numbers else stated == found
