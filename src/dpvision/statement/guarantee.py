"""The figures of a guarantee: for one store, over all runs on it behind the released weights, at
one delta.
"""

from dataclasses import asdict
from typing import Any

from dpvision.privacy.composition import Curve, Part, curve, parts_of, total
from dpvision.privacy.ledger import StoreAccount
from dpvision.privacy.plan import DPPlan
from dpvision.runs.lineage import private_stores, runs_on
from dpvision.runs.run import code_versions
from dpvision.statement import history_phrases, phrases
from dpvision.statement.schema import Stop

_FPRS = (0.001, 0.01)


def figures_of(parts: tuple[Part, ...], *, fixed: bool) -> dict[str, Any]:
    """Return every figure of one store. A figure may be None; ``reasons`` then gives the reason.

    Args:
        parts: one or more runs on the store, from ``composition.parts_of``.
        fixed: whether all settings were fixed before the first run.
    """
    found, whole = total(parts, fixed=fixed), curve(parts, _FPRS, fixed=fixed)
    profile = None if whole.profile is None else [list(point) for point in whole.profile]
    return {
        "epsilon": found.epsilon,
        "delta": found.delta,
        "n_times_delta": found.n_times_delta,
        "epsilon_rdp": found.epsilon_rdp,
        "epsilon_unamplified": found.epsilon_unamplified,
        "unit_epsilon": found.unit_epsilon,
        "unit_attack": None
        if found.unit_epsilon is None
        else _attack(curve(parts, _FPRS, fixed=fixed, of_unit=found.unit_epsilon)),
        "privacy_profile": profile,
        "attack": _attack(whole),
        "composition": {
            "runs": len(parts),
            "methods": dict(found.methods),
            "reasons": found.reasons
            | ({} if profile is not None else {"privacy_profile": phrases.NO_PROFILE}),
            "text": phrases.composition(len(parts), found.methods["epsilon"]),
        },
    }


def _attack(of: Curve) -> dict[str, float]:
    return {f"tpr_at_fpr_{fpr:g}": tpr for fpr, tpr in of.tpr_at_fpr.items()} | {
        "coin_accuracy": of.coin_accuracy,
        "auc": of.auc,
    }


NOTHING = "This run guarantees nothing."


def headline(guarantee: dict[str, Any] | None, drawn: str, kept: list[dict[str, Any]]) -> str:
    """Return the headline of a statement.

    Args:
        guarantee: the run's own.
        drawn: by the run's plan: records or people (``Unit.drawn``).
        kept: from ``other_stores``; of a run without a guarantee only if its images, and those of
            all such runs behind it, are public.
    """
    if guarantee is None:
        return history_phrases.kept_headline(kept) if kept else NOTHING
    said = history_phrases.protection(guarantee, drawn)
    if not kept:
        return f"Differential privacy {said}."
    comma = "" if guarantee["unit_epsilon"] is None else ","
    return (
        f"Differential privacy {said}{comma} of this run's private store; and, from earlier "
        f"training behind its weights, {history_phrases.kept(kept)}."
    )


def guarantee_of(
    plan: DPPlan,
    steps: int,
    inherited: list[dict[str, Any]],
    store_id: str,
    *,
    fixed: bool,
    stop: Stop = "not_declared",
) -> dict[str, Any]:
    """Return the guarantee of a run for its own store, including the earlier runs on that store
    behind its weights.

    Args:
        steps: number of steps charged in the ledger. All figures are of ``plan.stated_steps``,
            whatever ``stop`` is.
        inherited: lineage of the weights that the run started from.
        stop: with "independent", a run that ended early also gets the figures of its executed
            steps.
    """
    behind, stated = runs_on(inherited, store_id), plan.stated_steps(steps)
    spent, executed = plan.spent(stated), None
    if stop == "independent" and steps < stated:
        prefix = plan.spent(steps)
        executed = {"steps": steps, "epsilon": prefix.epsilon, "unit_epsilon": prefix.unit_epsilon}
    figures = figures_of(parts_of([*behind, (plan, steps)]) or ((plan, stated),), fixed=fixed)
    return figures | {
        "delta_rule": phrases.delta_rule(plan, len(behind)),
        "this_run": {
            "epsilon": spent.epsilon,
            "delta": spent.delta,
            "epsilon_rdp": spent.epsilon_rdp,
            "executed": executed,
        },
        "accountant": {
            "method": phrases.accountant_method(plan),
            "software": "dpvision {dpvision} with dp-accounting {dp-accounting}".format_map(
                code_versions()
            ),
            "value_discretization_interval": plan.value_discretization_interval,
        },
    }


def other_stores(
    lineage: list[dict[str, Any]], own_store: str | None, *, fixed: bool
) -> list[dict[str, Any]]:
    """Return the figures of each private store in the lineage other than ``own_store``."""
    seen = [
        (store_id, runs_on(lineage, store_id))
        for store_id in private_stores(lineage)
        if store_id != own_store
    ]
    return [
        {"store_id": store_id, **figures_of(parts, fixed=fixed)}
        for store_id, parts in seen
        if parts
    ]


def other_runs(account: StoreAccount | None, run_id: str) -> dict[str, Any]:
    """Return all runs in the store's ledgers, including this one; without the store's account, that
    they are unknown.
    """
    if account is None:
        return {"known": False, "text": history_phrases.OTHER_RUNS_UNKNOWN}
    runs = [
        {
            "run_id": run.run_id,
            "guarantee": run.guarantee,
            "steps": run.steps,
            "epsilon": run.spent.epsilon,
            "unit_epsilon": run.spent.unit_epsilon,
            "delta": run.spent.delta if run.guarantee == "dp" else None,
        }
        for run in account.runs
    ]
    return {
        "known": True,
        "text": history_phrases.other_runs(account, run_id),
        "runs": runs,
        "epsilon_total": account.epsilon,
        "epsilon_filter": account.epsilon_filter,
        "unit_epsilon_total": account.unit_epsilon,
        "delta": account.delta,
        "cap": None
        if account.cap is None
        else asdict(account.cap) | {"covers_choice": account.cap_covers_choice},
    }
