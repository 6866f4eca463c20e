"""Check what a statement says of the runs on its store: as the ledgers are now, or as they were
before runs and steps were added.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpvision.privacy.account import base_view, covers_choice, total_delta, unit_view
from dpvision.privacy.composition import Part
from dpvision.privacy.ledger import StoreAccount, store_account
from dpvision.privacy.marks import Cap
from dpvision.privacy.plan import View
from dpvision.privacy.store_marks import StoreLedgers
from dpvision.statement import history_phrases
from dpvision.statement.check import (
    Check,
    compared,
    differences,
    failed,
    not_checked,
    ok,
    unverified,
)
from dpvision.statement.guarantee import other_runs
from dpvision.statement.recompute import recomputed
from dpvision.statement.statement import phrase_version

_NAME = "other runs"
_AGAIN = "write the statement again, with --store"


def check_other_runs(statement: dict[str, Any], store_dir: Path) -> Check:
    """Check the statement's runs, steps and totals (``history.other_runs``), and whether the store
    has other runs.

    Raises:
        PrivacyError: a ledger of the store was altered.
    """
    stated = statement["history"]["other_runs"]
    account, ledgers = store_account(store_dir), StoreLedgers.of(store_dir).read_all()
    if not stated["known"]:
        others = sorted(
            run.run_id for run in account.runs if run.steps and run.run_id != statement["run_id"]
        )
        if others:
            return unverified(
                _NAME, f"said to be unknown, and the store was charged by {_some(others)}; {_AGAIN}"
            )
        return not_checked(
            _NAME,
            "the statement says that it does not know them; the store was charged by no other run",
        )
    now = json.loads(json.dumps(other_runs(account, statement["run_id"])))
    older = any("unit_epsilon" not in run for run in stated["runs"])
    if now.keys() != stated.keys():
        return failed(_NAME, f"the statement lacks {', '.join(sorted(now.keys() - stated.keys()))}")
    steps = {run["run_id"]: run["steps"] for run in stated["runs"]}
    if steps.get(statement["run_id"]) != statement["mechanism"]["steps_executed"]:
        return failed(
            _NAME,
            f"{steps.get(statement['run_id'])} steps of this run, "
            f"{statement['mechanism']['steps_executed']} executed",
        )
    gone = [
        run_id
        for run_id, count in steps.items()
        if run_id not in ledgers or not 0 <= count <= ledgers[run_id].steps
    ]
    if gone or len(steps) < len(stated["runs"]):
        return failed(
            _NAME,
            "the store has fewer steps than stated of: "
            f"{', '.join(gone) or 'a run that is named twice'}",
        )
    parts = [
        (ledgers[run_id].plan, ledgers[run_id].plan.stated_steps(count))
        for run_id, count in steps.items()
    ]
    grown = steps != {run_id: ledger.steps for run_id, ledger in ledgers.items()}
    another_cap = _without_choice(stated["cap"]) != _without_choice(now["cap"])
    if grown or another_cap:
        wrong = _wrong_figures(stated, parts)
    else:
        wrong = [
            where
            for where in differences(stated, now)
            if where != "text" and not (older and where.endswith("].unit_epsilon"))
        ]
    if statement.get("phrases") == phrase_version() and stated["text"] not in _texts(
        stated, statement["run_id"], parts, account
    ):
        wrong.append("text")
    if wrong:
        return failed(
            _NAME,
            "not as in the ledgers of the store: "
            f"{', '.join(wrong[:5])}{', ...' if len(wrong) > 5 else ''}",
        )
    if more := sorted(
        run_id for run_id, ledger in ledgers.items() if ledger.steps and not steps.get(run_id)
    ):
        return unverified(
            _NAME, f"not named in the statement: {_some(more)}; made since, or left out; {_AGAIN}"
        )
    if another_cap and stated["cap"] is not None:
        return unverified(
            _NAME,
            f"cap {stated['cap']} in the statement, {now['cap']} now; replaced since, or never "
            f"set; {_AGAIN}",
        )
    if another_cap:
        return not_checked(
            _NAME, f"no cap in the statement, {now['cap']} now; it was set since, or left out"
        )
    if begun := sorted(ledgers.keys() - steps.keys()):
        return not_checked(_NAME, f"not named in the statement, and not charged: {_some(begun)}")
    if older:
        return not_checked(
            _NAME, f"the epsilon of a person of each run, which is not in the statement; {_AGAIN}"
        )
    return ok(
        _NAME,
        f"every run on the store is named; runs: {len(steps)}"
        + ("; steps were charged since" if grown else ""),
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _wrong_figures(stated: dict[str, Any], parts: list[Part]) -> list[str]:
    """Return which figures are wrong for ``parts``, the stated runs at their stated steps, by the
    second accountant.
    """
    charged = [(plan, steps) for plan, steps in parts if steps]
    protected = all(plan.guarantee == "dp" for plan, _ in charged)
    said = _without_choice(stated["cap"])
    cap = None if said is None else Cap(**said)
    delta = total_delta(cap, [(plan, steps) for plan, steps in charged if plan.guarantee == "dp"])
    of_unit = unit_view(charged) if protected else None
    pairs: list[tuple[str, Any, Any]] = [
        ("delta", stated["delta"], delta),
        ("epsilon_total", stated["epsilon_total"] is not None, protected),
        ("unit_epsilon_total", stated["unit_epsilon_total"] is not None, of_unit is not None),
        (
            "covers_choice",
            bool((stated["cap"] or {}).get("covers_choice")),
            protected and covers_choice(cap, charged),
        ),
    ]
    # Without Renyi divergences, as of truncated draws, there is no filter.
    if not protected or (
        base_view(charged) == "record"
        and all(plan.sampler.max_batch_size is None for plan, _ in charged)
    ):
        pairs.append(("epsilon_filter", stated["epsilon_filter"] is not None, protected))
    asked: list[tuple[str, float | None, list[Part], float | None, View, str]] = [
        ("epsilon_total", stated["epsilon_total"], charged, delta, base_view(charged), "pld"),
        ("epsilon_filter", stated["epsilon_filter"], charged, delta, base_view(charged), "filter"),
        (
            "unit_epsilon_total",
            stated["unit_epsilon_total"],
            charged,
            delta,
            of_unit or "record",
            "pld",
        ),
    ]
    for run, (plan, steps) in zip(stated["runs"], parts, strict=True):
        dp, name = plan.guarantee == "dp", run["run_id"]
        pairs += [
            (f"guarantee of {name}", run["guarantee"], plan.guarantee),
            (f"delta of {name}", run["delta"], plan.delta if dp else None),
            (f"epsilon of {name}", run["epsilon"] is not None, dp),
        ]
        asked.append(
            (f"epsilon of {name}", run["epsilon"], [(plan, steps)], plan.delta, "record", "one run")
        )
        if "unit_epsilon" not in run:  # older versions
            continue
        person, view = f"epsilon of a person of {name}", unit_view([(plan, steps)]) or "record"
        pairs.append((person, run["unit_epsilon"] is not None, plan.unit_epsilon is not None))
        asked.append((person, run["unit_epsilon"], [(plan, steps)], plan.delta, view, "one run"))
    wrong = [
        name
        for name, said, found in pairs
        if compared(name, [(name, said, found)], "").status == "failed"
    ]
    if wrong:
        return wrong
    checks = [
        recomputed(name, said, of, at, view, how)
        for name, said, of, at, view, how in asked
        if said is not None and at is not None
    ]
    return [check.name for check in checks if check.status in ("failed", "unverified")]


def _without_choice(cap: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a statement's cap without what follows from the runs."""
    return (
        None
        if cap is None
        else {name: value for name, value in cap.items() if name != "covers_choice"}
    )


def _texts(
    stated: dict[str, Any], run_id: str, parts: list[Part], account: StoreAccount
) -> set[str]:
    """Return the sentences that fit the stated figures: one for each number of times that the store
    may have been moved by then.
    """
    named, said = {run["run_id"] for run in stated["runs"]}, _without_choice(stated["cap"])
    then = replace(
        account,
        runs=tuple(run for run in account.runs if run.run_id in named),
        unprotected=tuple(
            run["run_id"] for run in stated["runs"] if run["guarantee"] != "dp" and run["steps"]
        ),
        delta=stated["delta"],
        epsilon=stated["epsilon_total"],
        unit_epsilon=stated["unit_epsilon_total"],
        cap=None if said is None else Cap(**said),
        cap_covers_choice=bool((stated["cap"] or {}).get("covers_choice")),
        draws_people=any(
            plan.unit.draws_people for plan, steps in parts if plan.guarantee == "dp" and steps
        ),
    )
    return {
        history_phrases.other_runs(replace(then, moves=moves), run_id)
        for moves in range(account.moves + 1)
    }
