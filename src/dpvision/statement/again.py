"""A statement made again from its own facts: every leaf is recomputed, declared, or unknown.

The plan and the number of steps determine every figure and nearly every sentence, whatever code
wrote the statement. What they do not determine is declared: names, settings, licences, hashes, the
operator's declarations. ``verify`` lists these and compares them with the run where it is given.
"""

import math
import re
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

from dpvision.errors import DPVisionError
from dpvision.privacy.account import RunAccount, StoreAccount
from dpvision.privacy.accountant import PrivacySpent
from dpvision.privacy.marks import Cap
from dpvision.privacy.plan import DPPlan
from dpvision.statement import history_phrases, phrases
from dpvision.statement.check import Check, Tally, listed, not_checked, same, unverified
from dpvision.statement.guarantee import headline
from dpvision.statement.statement import Facts, compose, phrase_version
from dpvision.weights import lineage_digest

TOLERANCE = 0.01
"""How far a stated figure may be below the recomputed one: both are upper bounds on the same
number.
"""
COARSE = 0.10
"""How far it may be above: versions differ in the grids of their accountants."""
_DECLARED = re.compile(
    r"run_id|recipe|settings\b.*|scores\b.*|hashes\b.*|versions\b.*|phrases|guarantee\.accountant\.software"
    r"|mechanism\.steps_executed|history\.(steps_in_weights|restarts|(tuning|stop)\.declared|other_runs\.(?!text).*|audits\.runs\b.*)"
    r"|history\.lineage\[\d+\]\.(store_id|visibility|run_id|licence|declared(\.(by|name|source))?|deduplicated(\.(against|methods)\b.*)?|curation\.(steps|stability)\b.*)"
    r"|history\.lineage\[\d+\]\.guarantee\.plan\b.*|released_scores\[\d+\]\.(?!text).*"
)
"""Leaves that are facts of the statement: not computed from the plan and the steps."""
_WITH_TEXT = ("declared", "deduplicated", "curation")
"""Entries of a lineage's entry to which the statement adds a sentence."""
_FIGURE = re.compile(
    r"(guarantee|other_stores\[\d+\]|history\.lineage\[\d+\]\.guarantee|released_scores\[\d+\]\.plan)"
    r"\.(?!delta$|n_times_delta$).*"
)
"""Leaves that an accountant computed; all other numbers are exact."""
_NAME = re.compile(
    r"format|headline|other_stores\[\d+\]\.store_id|scope\.unit\.sampling_unit|.*\.composition\.methods\..*|.*\.total\.method"
)
"""Texts that are figures or names; all others are sentences."""
_NEWER = re.compile(
    r"phrases|history\.stop\b.*|guarantee\.this_run\.executed\b.*|scope\.unit\.sampling_unit"
    r"|.*attack\.auc"
)
"""Leaves that statements of older versions lack."""
_PLANNED = "epsilon_of_all_planned_steps"
"""What older versions stated beside the epsilon of the executed steps."""
_MOVES = 20
_GARBAGE = (
    DPVisionError,
    ArithmeticError,
    AttributeError,
    IndexError,
    KeyError,
    MemoryError,
    TypeError,
    ValueError,
)


def check_leaves(statement: dict[str, Any]) -> list[Check]:
    """Make the statement again from its own facts, and compare every leaf."""
    try:
        again = compose(_facts(statement))
        texts, plans = _other_runs_texts(statement), _plans(statement)
        of_releases = [
            pair
            for i, one in enumerate(statement.get("released_scores", []))
            for pair in _epsilons(one["plan"], f"released_scores[{i}].plan")
        ]
    except _GARBAGE as error:
        return [
            unverified(
                "figures",
                "they cannot be computed from the statement's plan and steps "
                f"({type(error).__name__}: {error})",
            )
        ]
    if statement["history"]["other_runs"]["text"] in texts:
        again["history"]["other_runs"] = statement["history"]["other_runs"]
    else:
        again["history"]["other_runs"] = {**statement["history"]["other_runs"], "text": texts[0]}
    if (this := (statement["guarantee"] or {}).get("this_run", {})) and _PLANNED in this:
        again["guarantee"]["this_run"][_PLANNED] = plans[-3][2]
    earlier = tuple(
        f"history.lineage[{i}].guarantee." for i in range(len(statement["history"]["lineage"]) - 1)
    )
    known = statement.get("phrases") == phrase_version()
    drawn = statement["scope"]["unit"].get("sampling_unit", "record")
    older = headline(statement["guarantee"], drawn, [])
    if not known and statement["headline"] == older:
        again["headline"] = older  # without what the weights keep from earlier runs
    figures, words, declared = Tally(), Tally(), 0
    for where, stated, found in pairs(statement, again):
        if _DECLARED.fullmatch(where) or where.startswith(
            earlier
        ):  # of an earlier run: as its ledger has it
            declared += 1
        elif isinstance(found, str) and isinstance(stated, str) and not _NAME.fullmatch(where):
            words.count(where, stated == found)
        else:
            figures.count(where, _agree(where, stated, found))
    for where, stated, found in [*plans, *of_releases]:
        figures.count(where, _agree(where, stated, found))
    if statement["guarantee"] is not None and statement["hashes"]["lineage"] not in _digests(
        statement
    ):
        figures.wrong.append("hashes.lineage")
    checks = [
        figures.check(
            "figures",
            "recomputed from the plan and the steps, the headline too",
            "not what the plan and steps give",
        )
    ]
    if known:
        checks.append(
            words.check(
                "sentences",
                "written again from the plan and the steps",
                "not what is written for this plan",
            )
        )
    else:
        checks.append(
            not_checked(
                "sentences",
                f"{words.number} sentences NOT compared: another version wrote them. Rely on the "
                "headline and figures only",
            )
        )
    return [
        *checks,
        listed(
            "other values",
            f"{_declarations(statement)}; {declared} values in all, not computed: compare them "
            "with --run",
        ),
    ]


def pairs(stated: Any, found: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the leaves of two nested values, as (path, stated, found); a missing one is None; of
    lists of different length, both lists.
    """
    if isinstance(stated, dict) and isinstance(found, dict):
        for key in dict.fromkeys([*stated, *found]):
            inner = f"{where}.{key}".lstrip(".")
            if key in stated or not _NEWER.fullmatch(inner):
                yield from pairs(stated.get(key), found.get(key), inner)
    elif (
        isinstance(stated, list | tuple)
        and isinstance(found, list | tuple)
        and len(stated) == len(found)
    ):
        for i, (one, other) in enumerate(zip(stated, found, strict=True)):
            yield from pairs(one, other, f"{where}[{i}]")
    else:
        yield where, stated, found


def _agree(where: str, stated: Any, found: Any) -> bool:
    if (
        isinstance(stated, bool)
        or isinstance(found, bool)
        or not isinstance(stated, int | float)
        or not isinstance(found, int | float)
    ):
        return stated == found and isinstance(stated, bool) == isinstance(found, bool)
    if isinstance(stated, int) and abs(stated) > sys.float_info.max:
        return False
    if not _FIGURE.fullmatch(where):
        return same(stated, found)
    slack = 1e-12 if "profile" in where else 1e-6
    return bool(
        math.isfinite(stated)
        and found * (1 - TOLERANCE) - slack <= stated <= found * (1 + COARSE) + slack
    )


def _facts(statement: dict[str, Any]) -> Facts:
    """Return the facts of which a statement says that it was made."""
    history, settings = statement["history"], statement["settings"]
    *before, own = history["lineage"]
    plan = (
        _bare_plan(statement)
        if own["guarantee"] is None
        else DPPlan.from_dict(own["guarantee"]["plan"])
    )
    stop = history.get("stop")
    return Facts(
        plan=plan,
        steps=statement["mechanism"]["steps_executed"],
        run_id=statement["run_id"],
        recipe=statement["recipe"],
        inherited=[_entry(entry) for entry in before],
        own=_entry(own) | {"guarantee": None},
        config=settings,
        settings=settings,
        from_store=history["other_runs"]["known"],
        updates=history["steps_in_weights"],
        restarts=history["restarts"],
        other_runs=history["other_runs"],
        scores=statement["scores"],
        audits=history["audits"]["runs"],
        hashes=statement["hashes"],
        versions=statement["versions"],
        tuning=history["tuning"]["declared"],
        stop="not_declared" if stop is None else stop["declared"],
        releases=[
            {name: value for name, value in one.items() if name != "text"}
            for one in statement.get("released_scores", [])
        ],
    )


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of the lineage as ledger and manifest have it, without the sentences."""
    made = {name: value for name, value in entry.items() if name not in ("text", *_WITH_TEXT)}
    for name in _WITH_TEXT:
        if entry.get(name) is not None:
            made[name] = {key: value for key, value in entry[name].items() if key != "text"}
    return made


def _plans(statement: dict[str, Any]) -> list[tuple[str, float | None, float | None]]:
    """Return the epsilons in the plans of the lineage, stated and recomputed: whatever ends early
    states them.
    """
    found = []
    for i, entry in enumerate(statement["history"]["lineage"]):
        if entry["guarantee"] is not None:
            where = f"history.lineage[{i}].guarantee.plan"
            found += _epsilons(entry["guarantee"]["plan"], where)
    return found


def _epsilons(values: dict[str, Any], where: str) -> list[tuple[str, float | None, float | None]]:
    """Return the epsilons in a plan, stated and recomputed."""
    plan = DPPlan.from_dict(values)
    whole = plan.spent(plan.steps)
    return [
        (f"{where}.{name}", getattr(plan, name), getattr(whole, name))
        for name in ("epsilon", "epsilon_rdp", "unit_epsilon")
    ]


def _digests(statement: dict[str, Any]) -> list[str]:
    """Return the digests that the lineage of the initial weights may have: an entry may lack a
    licence, which is stated as null.
    """
    made = [_entry(entry) for entry in statement["history"]["lineage"][:-1]]
    bare = [
        {name: value for name, value in entry.items() if name != "licence" or value is not None}
        for entry in made
    ]
    return [lineage_digest(made), lineage_digest(bare)]


def _bare_plan(statement: dict[str, Any]) -> DPPlan:
    """Return the plan of a run without a guarantee, which its statement does not have: the one that
    its sentences fit best.
    """
    mechanism, scope = statement["mechanism"], statement["scope"]
    capped = mechanism["max_batch_size"] is not None
    plans = [
        DPPlan.from_dict(
            {
                "guarantee": guarantee,
                "sampling": "truncated_poisson"
                if capped
                else "full_batch"
                if mechanism["sample_rate"] == 1
                else "poisson",
                "dataset_size": scope["dataset_size"]["value"],
                "expected_batch_size": mechanism["divisor"],
                "sample_rate": mechanism["sample_rate"],
                "max_batch_size": mechanism["max_batch_size"],
                "noise_multiplier": mechanism["noise_multiplier"],
                "max_grad_norm": mechanism["max_grad_norm"],
                "steps": mechanism["steps_planned"],
                "delta": 1e-5,
                "max_records_per_unit": scope["unit"]["max_records_per_unit"],
                "num_units": scope["unit"]["num_units"],
                "value_discretization_interval": None,
                "epsilon": None,
                "epsilon_rdp": None,
                "unit_epsilon": None,
                "clipping": clipping,
                "sampling_unit": scope["unit"].get("sampling_unit", "record"),
            }
        )
        for guarantee, clipping in product(("none", "simulated"), ("hard", "automatic"))
    ]
    texts, others = (statement["in_words"], mechanism["clipping"]), statement["other_stores"]

    def fits(plan: DPPlan) -> int:
        words = (
            history_phrases.kept_in_words(plan, others) if others else phrases.in_words(plan, None)
        )
        clipping = phrases.clipping(plan, head=phrases.is_head(statement["settings"]))
        return sum(a == b for a, b in zip(texts, (words, clipping), strict=True))

    return max(plans, key=fits)


def _other_runs_texts(statement: dict[str, Any]) -> list[str]:
    """Return the sentences that fit the stated figures of other runs; how often the store was moved
    is not among the figures.
    """
    stated = statement["history"]["other_runs"]
    if not stated["known"]:
        return [history_phrases.OTHER_RUNS_UNKNOWN]
    nothing = PrivacySpent(None, None, 0.0, 0, None, None)
    runs = tuple(
        RunAccount(run["run_id"], run["guarantee"], 0, run["steps"], 0, nothing)
        for run in stated["runs"]
    )
    unprotected = tuple(
        run["run_id"] for run in stated["runs"] if run["guarantee"] != "dp" and run["steps"]
    )
    cap = stated["cap"]
    figures = (
        stated["delta"],
        stated["epsilon_total"],
        stated["epsilon_filter"],
        stated["unit_epsilon_total"],
    )
    made = (
        StoreAccount(
            "",
            runs,
            unprotected,
            *figures,
            None if cap is None else Cap(cap["epsilon"], cap["delta"]),
            None,
            people,
            moves,
            cap is not None and bool(cap.get("covers_choice")),
        )
        for people, moves in product((False, True), range(_MOVES))
    )
    return list(
        dict.fromkeys(history_phrases.other_runs(account, statement["run_id"]) for account in made)
    )


def _declarations(statement: dict[str, Any]) -> str:
    """Return the operator's declarations as text."""
    history = statement["history"]
    stop = "" if history.get("stop") is None else f", stop {history['stop']['declared']}"
    public = sorted(
        {entry["store_id"] for entry in history["lineage"] if entry["visibility"] == "public"}
    )
    return (
        f"tuning {history['tuning']['declared']}{stop}, public data "
        f"{', '.join(public) or 'none'}, licences, settings, scores, hashes"
    )
