"""``verify``: check the released scores that a statement names against the run's file of them and
the ledger of the test store.
"""

import json
import math
from pathlib import Path
from typing import Any

from dpvision.errors import DPVisionError
from dpvision.eval.score_file import RELEASED, read_releases
from dpvision.privacy.plan import DPPlan
from dpvision.privacy.store_marks import StoreLedgers
from dpvision.statement import released_scores
from dpvision.statement.check import Check, differences, failed, not_checked, ok

_NAME = "released scores"
_CHARGE = "charge of the released table"


def check_releases(statement: dict[str, Any], root: Path) -> list[Check]:
    """Check that the statement names every release of the run's file as it is there, that the noise
    is the plan's, and that the figures follow from the tables. No check where both have none.
    """
    try:
        entries = read_releases(root)
        found = released_scores.stated(released_scores.kept(entries))
    except DPVisionError as error:
        return [failed(_NAME, str(error))]
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        return [failed(_NAME, f"{RELEASED} of the run is incomplete ({error!r})")]
    stated = statement.get("released_scores", [])
    named = [one["run_id"] for one in stated]
    wrong = [
        f"not in {RELEASED} of the run: {one['run_id']}" for one in stated if one not in found
    ] + [
        f"not in the statement: {one['run_id']}, in {RELEASED} of the run: write the statement "
        "again"
        for one in found
        if one["run_id"] not in named
    ]
    for one in entries:
        wrong += [f"{one['run_id']}: {what}" for what in _contradictions(one)]
    if wrong:
        return [failed(_NAME, "; ".join(wrong))]
    if not stated:
        return []
    return [
        ok(_NAME, f"as in {RELEASED}, figures recomputed from the tables; releases: {len(stated)}")
    ]


def check_charges(statement: dict[str, Any], store_dir: Path | None) -> list[Check]:
    """Check that the given store, if it is a release's test store, was charged with its plan."""
    checks = []
    for one in statement.get("released_scores", []):
        try:
            ledgers = None if store_dir is None else StoreLedgers.of(store_dir)
            if ledgers is None or ledgers.store_id != one["store_id"]:
                checks.append(
                    not_checked(
                        _CHARGE,
                        f"{one['run_id']}: its test store was not given: compare with `dpvision "
                        "ledger STORE` there",
                    )
                )
                continue
            ledger = ledgers.read_all().get(one["run_id"])
        except DPVisionError as error:
            checks.append(failed(_CHARGE, str(error)))
            continue
        if ledger is None or not ledger.steps or differences(one["plan"], _plain(ledger.plan)):
            checks.append(failed(_CHARGE, f"{one['run_id']}: not charged with its plan"))
        else:
            checks.append(ok(_CHARGE, f"{one['run_id']}: in the ledger of its test store"))
    return checks


def _plain(plan: DPPlan) -> Any:
    return json.loads(json.dumps(plan.to_dict()))


def _contradictions(entry: dict[str, Any]) -> list[str]:
    """Return what an entry has that does not follow from its plan and tables."""
    from dpvision.eval.noisy_counts import figures_of, tables_of  # takes time

    try:
        tables = tables_of(entry["tables"])
        std = DPPlan.from_dict(entry["plan"]).noise_std * math.sqrt(len(tables))
        again = json.loads(json.dumps(figures_of(tables, entry["class_names"])))
        wrong = differences({name: entry[name] for name in again}, again)
    except (DPVisionError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        return [f"its figures cannot be computed from its table ({type(error).__name__}: {error})"]
    noise = [one for one in tables if not math.isclose(one.noise_std, std, rel_tol=1e-9)]
    more = ", ..." if len(wrong) > 5 else ""
    return [f"noise_std of {one.attribute} is not the plan's" for one in noise] + (
        [f"not what its table gives: {', '.join(wrong[:5])}{more}"] if wrong else []
    )
