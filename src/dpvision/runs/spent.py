"""What a run spends of a store's privacy, ready for JSON and as text for the operator.

Light to import: commands need it for errors that come before any slow import.
"""

from collections.abc import Collection
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dpvision.privacy.printed import count, up, up_delta

if TYPE_CHECKING:
    from dpvision.data.store import Store
    from dpvision.privacy.composition import Part
    from dpvision.privacy.plan import DPPlan

COMPOSED = {
    "pld": "composed, if all settings were fixed beforehand",
    "gaussian": "composed as Gaussians",
    "renyi": "composed by Renyi divergences",
    "filter": "by a Renyi filter, for settings chosen after seeing earlier results",
    "basic": "added up",
}
"""How the epsilons of several runs were combined, by ``composition.Method``."""


def guarantee_words(
    plan: "DPPlan", epsilon: float, unit_epsilon: float | None, delta: float
) -> str:
    """Return the guarantee as one line: per image, and per person if people are declared."""
    said, whom = plan.unit.stated(epsilon, unit_epsilon), ""
    if said.of_person:
        whom = f" for a person ({plan.unit.taking_part})"
        whom += "" if said.of_image is None else f", {up(said.of_image)} for a single image,"
    elif plan.unit.is_person:
        whom = " for a single image, unknown for a person,"
    return f"epsilon {up(said.epsilon)}{whom} at delta {up_delta(delta)}"


def spent(
    plan: "DPPlan", steps: int, behind: "tuple[Part, ...]" = ()
) -> tuple[dict[str, Any], str]:
    """Return the privacy cost of a run that was charged ``steps`` steps (``plan.stated_steps``: all
    planned ones), together with the runs ``behind`` the weights on the same store.

    Returns:
        A dict for JSON and a line of text. The dict has epsilon, unit_epsilon (None without
        declared units) and delta of all runs, and this_run_epsilon; all are None without a
        guarantee or before the first step.
    """
    from dpvision.privacy.composition import parts_of, total_epsilon, unit_epsilon

    if plan.guarantee != "dp" or not steps:
        return {
            "epsilon": None,
            "unit_epsilon": None,
            "delta": None,
            "this_run_epsilon": None,
        }, "no privacy guarantee" if plan.guarantee != "dp" else "nothing spent"
    alone, parts = parts_of([(plan, steps)]), parts_of([*behind, (plan, steps)])
    own = total_epsilon(alone)[0]
    epsilon, delta, method = total_epsilon(parts)
    unit = unit_epsilon(parts)
    said = guarantee_words(plan, epsilon, unit, delta)
    if steps < plan.steps:
        said += f" for all {plan.steps} planned"
    if behind:
        said += (
            f" for this run and {len(behind)} before it on this store, {COMPOSED[method]} (this "
            "run alone: "
        )
        said += f"{guarantee_words(plan, own, unit_epsilon(alone), plan.delta)})"
    return {"epsilon": epsilon, "unit_epsilon": unit, "delta": delta, "this_run_epsilon": own}, said


def charge_words(
    store: "Store",
    plan: "DPPlan",
    *,
    runs: int = 1,
    chosen: bool = False,
    besides: Collection[str] = (),
) -> tuple[dict[str, Any], str]:
    """Return what ``store`` was charged before ``runs`` runs of ``plan`` and in total with them,
    ready for JSON and as text.

    Runs without a guarantee on public images cost nothing, and have no text. Arguments are those of
    ``account.charge_of``.
    """
    from dpvision.privacy.account import charge_of

    charge = charge_of(store.path, plan, runs=runs, chosen=chosen, besides=besides)
    if plan.guarantee != "dp" and store.visibility == "public":
        return asdict(charge), ""
    whose = " for a person" if charge.of_person else ""
    how = " by a Renyi filter" if chosen else ""
    before = (
        "nothing" if not charge.runs else "no total holds, because a run was without a guarantee"
    )
    if charge.runs and charge.before is not None:
        before = f"epsilon {up(charge.before)}{whose}{how} by {count(charge.runs, 'run')}"
    after = (
        "no total holds"
        if charge.after is None
        else f"epsilon {up(charge.after)}{whose}{how} at delta {up_delta(charge.delta)}"
    )
    what = "this run" if runs == 1 else f"all {runs} runs"
    return asdict(charge), f"Charged to this store before: {before}. In total with {what}: {after}."


def lost_words(lost: int, noun: str) -> list[str]:
    """Return a line about charged steps without a result, if there are any."""
    if not lost:
        return []
    return [f"{lost} {noun} were charged and lost; they count in epsilon."]


def resume_words(
    plan: "DPPlan", charged: int, in_weights: int, saved: bool, noun: str = "steps"
) -> str:
    """Return text about the steps that a resumed run has spent, lost and left.

    Args:
        charged: steps in the ledger.
        in_weights: charged steps whose result is in the newest checkpoint.
        saved: whether there is a checkpoint.
    """
    lines = [
        f"Resuming: {charged} of {plan.steps} {noun} charged ({spent(plan, charged)[1]}), "
        f"{plan.steps - charged} left."
    ]
    lines += lost_words(charged - in_weights, noun)
    if not saved and charged:
        lines.append(
            f"There is no checkpoint: the run restarts from the initial weights, with {charged} "
            f"charged {noun} lost."
        )
    return "\n".join(lines)
