"""``dpvision ledger``: what a store has been charged."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from dpvision.cli.output import StorePath, emit, parse, table
from dpvision.errors import ConfigError
from dpvision.privacy.account import StoreAccount, declare_moved, restore_marks, set_cap, store_account
from dpvision.privacy.composition import parts_of, total_epsilon
from dpvision.privacy.store_marks import StoreLedgers
from dpvision.train.lineage import runs_on


def run(argv: Sequence[str]) -> None:
    """Parse and run."""
    parse(ledger, "ledger", argv)


def ledger(
    store: StorePath,
    cap: Annotated[float | None, tyro.conf.arg(name="set-cap", metavar="EPSILON")] = None,
    cap_delta: float | None = None,
    moved: bool = False,
    restore: Annotated[bool, tyro.conf.arg(name="restore-marks")] = False,
    json: bool = False,
) -> None:
    """What a store's records have been charged: by run, in total, and what is left under the owner's cap.

    Epsilon is computed from the steps in the ledgers, never from a config. All runs on one store meet in the LEDGERS folder
    beside it. Two totals stand side by side: the PLD sum holds when all runs were fixed beforehand, the RDP filter also when
    a run was chosen after seeing the results of another.

    Args:
        store: Folder made by `dpvision data import`.
        cap: Set the owner's hard cap on the total epsilon: a run that would pass it is refused.
        cap_delta: Delta at which the cap holds; required with --set-cap.
        moved: Declare that this store was moved here together with its LEDGERS folder, or is mounted under another path, and that no copy
            of it is in use elsewhere. A private store that lies elsewhere than where it was imported is refused until then, for a copy has
            ledgers of its own. Statements say how often it was declared.
        restore: Write a lost file of marks (ledger_marks.json of the store, or marks.json beside its ledgers) again, from the other one.
        json: Print JSON.
    """
    if (cap is None) != (cap_delta is None):
        raise ConfigError("ledger: --set-cap and --cap-delta; expected both or neither. E.g. --set-cap 8 --cap-delta 1e-6.")
    if moved:
        declare_moved(store)
    if restore:
        restore_marks(store)
    if cap is not None and cap_delta is not None:
        set_cap(store, cap, cap_delta)
    account, behind = store_account(store), _with_runs_before(store)
    emit(account.to_dict() | {"with_runs_before": behind}, json, _text(account, behind))


def _with_runs_before(store: Path) -> dict[str, float]:
    """By id of the runs that started from weights of others on this store: epsilon of all of them together, at the smallest delta."""
    found = {}
    for run_id, contents in StoreLedgers.of(store).read_all().items():
        before = runs_on(contents.lineage, contents.store_id) if contents.plan.guarantee == "dp" else ()
        if before:
            found[run_id] = total_epsilon(parts_of([*before, (contents.plan, contents.steps)]))[0]
    return found


def _text(account: StoreAccount, behind: dict[str, float]) -> str:
    rows = [
        (
            r.run_id,
            f"{r.spent.steps} / {r.planned_steps}",
            r.restarts,
            "none" if r.spent.epsilon is None else r.spent.epsilon,
            r.spent.delta,
            *((behind.get(r.run_id, ""),) if behind else ()),
        )
        for r in account.runs
    ]
    columns = ("run", "steps", "restarts", "epsilon", "delta", *(("with the runs its weights come from",) if behind else ()))
    lines = [table(f"store {account.store_id}", columns, rows)] if rows else ["No run yet."]
    lines += _people(account)
    if account.unprotected:
        lines.append(f"NO GUARANTEE: {', '.join(account.unprotected)} trained on this store without privacy; no total holds.")
    elif account.epsilon is not None:
        chosen = "" if account.epsilon_filter is None else f"; {account.epsilon_filter:.4g} where runs were chosen after seeing others"
        lines.append(f"total: epsilon {account.epsilon:.4g} at delta {account.delta:.3g}{chosen}")
    if account.cap is not None:
        left = "" if account.left is None else f"; left: {account.left:.4g}"
        lines.append(f"owner's cap: epsilon {account.cap.epsilon:.4g} at delta {account.cap.delta:.3g}{left}")
    if account.moves:
        lines.append(f"declared moved: {account.moves} times; a copy that is in use elsewhere has ledgers of its own")
    return "\n".join(lines)


def _people(account: StoreAccount) -> list[str]:
    """What each run has cost a person with all their images, where people are declared: the figures above are per image then."""
    known = [f"{run.run_id} {run.spent.unit_epsilon:.4g}" for run in account.runs if run.spent.unit_epsilon is not None]
    return [f"for a person with all their images, by run: epsilon {', '.join(known)} (all other figures are per image)"] if known else []
