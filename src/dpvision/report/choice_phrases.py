"""The sentences about how a run was chosen, how it ended, and what else was run on its store."""

from typing import Any

from dpvision.privacy.ledger import StoreAccount
from dpvision.privacy.plan import DPPlan
from dpvision.privacy.printed import up, up_delta
from dpvision.report.lineage_phrases import curated
from dpvision.report.numbers import count
from dpvision.report.schema import Stop, Tuning

OTHER_RUNS_UNKNOWN = (
    "Unknown: the store was not available when this statement was written. If other runs used "
    "the same images, their cost adds to this; `dpvision ledger STORE` computes the total."
)
COPIES_UNKNOWN = (
    "Not included: a second import of the same images, or a copy of the store used elsewhere, "
    "has separate ledgers, and the cost charged there adds to this."
)
TUNING: dict[Tuning, str] = {
    "none": "Declared by the operator: the settings were fixed before the first run on these "
    "images, and the checkpoint is the last one.",
    "public": (
        "Declared by the operator: settings and checkpoint were chosen by public scores alone. "
        "A choice among several runs on the same images is covered by the total of those runs, "
        "not by the epsilon of the one that was chosen."
    ),
    "charged": (
        "Declared by the operator: settings and checkpoint were chosen among runs on these "
        "images, by public scores of their weights. Each of those runs is charged to the "
        "store's ledgers. The choice costs their total (other_runs), not the epsilon of this "
        "run."
    ),
    "not_covered": (
        "Not covered: it is not recorded how the settings and the checkpoint were chosen. If "
        "they were chosen by results on these images, that choice has a privacy cost that "
        "epsilon does not include."
    ),
}
CHOICE = (
    "The choice of this run among several on the same images: it costs the total of those runs "
    "(history.other_runs: epsilon_filter, and for a person unit_epsilon_total), which is larger "
    "than the epsilon of this run. {}"
)
CHOSEN_LATER = (
    "That settings of one run behind the weights followed results of another on the same "
    "images, which was not declared otherwise: their total is a guarantee for settings fixed "
    "beforehand. {}"
)
NO_CAP = (
    "A total over runs chosen from earlier results is a guarantee only against a cap set before "
    "the first run, and there is none."
)
CAP_UNKNOWN = NO_CAP.replace("and there is none", "which is not known here")
STOP = (
    "That the run ended at this step, if confidential figures decided it: losses, gradient "
    "norms, scores of private images. Ends decided by released weights, public scores or "
    "outside events are covered by epsilon, which is that of all planned steps."
)
EARLIER_STOP = (
    "That an earlier run behind the weights ended before its plan, if confidential figures "
    "decided it: losses, gradient norms, scores of private images."
)
STOPPED = {
    "independent": (
        "{steps:,} of {planned:,} planned steps were executed. Declared by the operator: "
        "nothing computed from the images had an influence on where the run ended. Every figure "
        "is nevertheless for all planned steps; those of the executed steps stand beside it."
    ),
    "not_declared": (
        "{steps:,} of {planned:,} planned steps were executed. Every figure is for all planned "
        "steps: the released weights, or their scores, may have decided where the run ended, "
        "which the epsilon of the executed steps does not cover."
    ),
}
"""Text of ``history.stop``, by the operator's declaration."""
SELECTION = (
    "Charged: one setting of a public list was chosen by its score on these images, in a "
    "private selection. A secret random number of runs was made, each with a setting drawn from "
    "the list and with a noisy score, and the best of them is released; epsilon covers all of "
    "them and the choice. For all other settings: "
)
"""Precedes the operator's declaration about the rest."""


def stop(plan: DPPlan, steps: int, declared: Stop) -> dict[str, Any] | None:
    """Return how a run ended that was charged some of its planned steps; None for one that executed
    all of them, or none.
    """
    if not 0 < steps < plan.steps:
        return None
    return {"declared": declared, "text": STOPPED[declared].format(steps=steps, planned=plan.steps)}


def not_covered_of(
    lineage: list[dict[str, Any]],
    tuning: Tuning,
    guarantee: dict[str, Any],
    ended_early: dict[str, Any] | None,
    other_runs: dict[str, Any],
) -> list[str]:
    """Return what the guarantee does not cover because of a statement's lineage, and of how the run
    was chosen and ended.

    Args:
        ended_early: from ``stop``.
        other_runs: ``history.other_runs`` of the statement.
    """
    cap = other_runs.get("cap")
    capped = NO_CAP
    if cap is not None and cap["covers_choice"]:
        capped = (
            f"The owner's cap, set before the first run, covers it: epsilon {up(cap['epsilon'])} "
            f"at delta {up_delta(cap['delta'])}."
        )
    elif not other_runs["known"]:
        capped = CAP_UNKNOWN
    adaptive = guarantee["composition"]["methods"]["epsilon"] in ("filter", "basic")
    return [
        *([STOP] if ended_early is not None and ended_early["declared"] != "independent" else []),
        *of_earlier_runs(lineage, adaptive=adaptive, capped=capped),
        *([CHOICE.format(capped)] if tuning == "charged" else []),
    ]


def of_earlier_runs(
    lineage: list[dict[str, Any]], *, adaptive: bool, capped: str = CAP_UNKNOWN
) -> list[str]:
    """Return what a guarantee does not cover because of the statement's lineage, this run last.

    Args:
        adaptive: whether the settings of one run may have followed another's results.
        capped: sentence about the owner's cap.
    """
    named = [entry["declared"]["name"] for entry in lineage if entry["declared"]]
    ended = any(
        0 < g["steps"] < g["plan"]["steps"]
        for entry in lineage[:-1]
        if (g := entry["guarantee"]) is not None
    )
    return [
        *(
            [
                f"Weights that were declared to be public ({', '.join(named)}): their training "
                "data was not verified."
            ]
            if named
            else []
        ),
        *([EARLIER_STOP] if ended else []),
        *([CHOSEN_LATER.format(capped)] if adaptive else []),
        *curated(lineage),
    ]


def tuning(plan: DPPlan, declared: Tuning) -> str:
    """Return how settings and checkpoint were chosen."""
    return (SELECTION if plan.selection is not None else "") + TUNING[declared]


def other_runs(account: StoreAccount, run_id: str) -> str:
    """Return the total cost of all runs on the store."""
    others = sum(run.run_id != run_id for run in account.runs)
    if account.unprotected:
        return (
            f"{count(len(account.unprotected), 'run')} without a guarantee used the same images. "
            "Their results are confidential; if they were released, or used to choose settings, "
            "no total would hold."
        )
    unknown = COPIES_UNKNOWN if not account.moves else f"{COPIES_UNKNOWN} {_moved(account.moves)}"
    if not others:
        return f"None is known: this is the only run in the store's ledgers. {unknown}"
    of_unit = account.unit_epsilon
    person = (
        "" if of_unit is None else f"epsilon {up(of_unit, 2)} for a person with all their images"
    )
    image = f"epsilon {up(account.epsilon or 0.0, 2)}"
    chosen = (
        "epsilon_filter describes settings chosen after seeing earlier runs; it is no "
        "guarantee, for lack of a cap set before the first."
    )
    if account.cap is not None and account.cap_covers_choice:
        chosen = (
            "The owner's cap, set before the first run, is a guarantee also for settings chosen "
            "after seeing earlier runs."
        )
    total = (
        f"{person},"
        if account.draws_people
        else image
        if of_unit is None
        else f"{person}, and {image} for an image,"
    )
    return (
        f"{count(others, 'other run')} used the same images. Together they cost {total} at delta "
        f"{up_delta(account.delta or 0.0)} if their settings were fixed beforehand; every run "
        f"counts with all its planned steps. {chosen} {unknown}"
    )


def _moved(moves: int) -> str:
    return (
        f"The operator declared {count(moves, 'time')} that the store was moved and that no copy "
        "of it is in use."
    )
