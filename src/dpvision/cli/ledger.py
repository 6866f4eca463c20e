"""``dpvision ledger``: the epsilon charged to a store."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from dpvision.cli.output import StorePath, emit, parse, table
from dpvision.cli.paths import check_store
from dpvision.errors import ConfigError
from dpvision.privacy.printed import down, up, up_delta

if TYPE_CHECKING:
    from dpvision.privacy.account import StoreAccount


def ledger(
    store: StorePath,
    cap: Annotated[float | None, tyro.conf.arg(name="set-cap", metavar="EPSILON")] = None,
    cap_delta: float | None = None,
    moved: bool = False,
    restore: Annotated[bool, tyro.conf.arg(name="restore-marks")] = False,
    json: bool = False,
) -> None:
    """Show the epsilon charged to a store's records: by run with its name, in total, and what is
    left under the owner's cap.

    Epsilon is computed from the ledgers, never from a config. The LEDGERS folder next to the store
    has the ledgers of all runs on it. A run counts with all its planned steps once the first is
    charged, because where it ends may follow its results. The total (PLD) holds if the settings of
    all runs were fixed beforehand. For runs chosen after seeing the results of others only a cap
    set before the first run is a guarantee; the Renyi filter's total describes them. A second
    import of the same images has separate ledgers: an image's total is the sum over its stores.

    Args:
        store: Folder made by `dpvision data import`.
        cap: Set the owner's hard cap on the total epsilon: a run that would exceed it is refused.
            The cap is on a person's total if people are declared (--privacy.num-units), otherwise
            on an image's.
        cap_delta: Delta at which the cap holds, at most 0.001; required with --set-cap.
        moved: Declare that this store was moved here together with its LEDGERS folder, or is
            mounted under another path, and that no copy of it is in use elsewhere. A private store
            at another path than its import is refused until then, because a copy would have
            separate ledgers. Statements give the number of such declarations.
        restore: Restore a lost marks file (the store's ledger_marks.json, or marks.json next to its
            ledgers) from another one that has every charge.
        json: Print JSON.
    """
    if (cap is None) != (cap_delta is None):
        raise ConfigError(
            "ledger: only one of --set-cap and --cap-delta; expected both. For example "
            "--set-cap 8 --cap-delta 1e-6."
        )
    check_store(store)
    from dpvision.privacy.account import declare_moved, restore_marks, set_cap, store_account

    if moved:
        declare_moved(store)
    if restore:
        restore_marks(store)
    if cap is not None and cap_delta is not None:
        set_cap(store, cap, cap_delta)
    account, behind = store_account(store), _with_runs_before(store)
    emit(account.to_dict() | {"with_runs_before": behind}, json, _text(account, behind))


def _with_runs_before(store: Path) -> dict[str, float]:
    """Return, for each run that started from another run's weights on this store, the total epsilon
    of its chain, at the smallest delta.
    """
    from dpvision.privacy.composition import parts_of, total_epsilon
    from dpvision.privacy.store_marks import StoreLedgers
    from dpvision.runs.lineage import runs_on

    found = {}
    for run_id, contents in StoreLedgers.of(store).read_all().items():
        before = (
            runs_on(contents.lineage, contents.store_id) if contents.plan.guarantee == "dp" else ()
        )
        if before:
            found[run_id] = total_epsilon(parts_of([*before, (contents.plan, contents.steps)]))[0]
    return found


def _text(account: "StoreAccount", behind: dict[str, float]) -> str:
    named = any(run.name for run in account.runs)
    people = any(run.spent.unit_epsilon is not None for run in account.runs)
    rows = [
        (
            r.run_id,
            *((_short(r.name),) if named else ()),
            f"{r.steps} / {r.planned_steps}",
            r.restarts,
            "none" if r.spent.epsilon is None else up(r.spent.epsilon),
            up_delta(r.spent.delta),
            *((up(r.spent.unit_epsilon) if r.spent.unit_epsilon else "",) if people else ()),
            *((up(behind[r.run_id]) if r.run_id in behind else "",) if behind else ()),
        )
        for r in account.runs
    ]
    drawn = account.draws_people
    whose = "one drawn" if drawn else "an image"
    columns = (
        "run",
        *(("name",) if named else ()),
        "steps",
        "restarts",
        f"epsilon of {whose}" if people else "epsilon",
        "delta",
        *(("epsilon of a person",) if people else ()),
        *((f"of {whose}, with the runs its weights come from",) if behind else ()),
    )
    lines = [table(f"store {account.store_id}", columns, rows)] if rows else ["No run yet."]
    if account.unprotected:
        lines.append(
            f"NO GUARANTEE: {', '.join(account.unprotected)} trained on this store without "
            "privacy; no total holds."
        )
    elif (
        account.epsilon is not None and account.delta is not None
    ):  # no delta before the first run, without a cap
        chosen = (
            ""
            if account.epsilon_filter is None
            else f"; {up(account.epsilon_filter)} by a Renyi filter"
        )
        if account.unit_epsilon is not None and not drawn:
            lines.append(
                f"total for a person with all their images: epsilon {up(account.unit_epsilon)} "
                f"at delta {up_delta(account.delta)}"
            )
        image = (
            "total"
            if account.unit_epsilon is None
            else f"total for {'a person' if drawn else 'an image'}"
        )
        lines.append(
            f"{image}: epsilon {up(account.epsilon)} at delta {up_delta(account.delta)}{chosen}"
        )
    if account.cap is not None:
        left = "" if account.left is None else f"; left: {down(account.left)}"
        whom = "" if account.unit_epsilon is None else " for a person"
        lines.append(
            f"owner's cap{whom}: epsilon {up(account.cap.epsilon)} at delta "
            f"{up_delta(account.cap.delta)}{left}"
        )
    if len(rows) > 1 and account.epsilon is not None:
        lines.append(_of_choices(account))
    if account.moves:
        lines.append(
            f"declared moved: {account.moves} times; a copy in use elsewhere would have separate "
            "ledgers"
        )
    return "\n".join(lines)


def _short(name: str | None) -> str:
    """Return a run's name in a table: its folder's, of a trial with the study's."""
    parts = Path(name or "").parts
    return "/".join(parts[-2:] if name and parts[-1].startswith("trial-") else parts[-1:])


def _of_choices(account: "StoreAccount") -> str:
    """Return a line on what holds for runs that were chosen after seeing the results of others."""
    if account.cap is not None and account.cap_covers_choice:
        return (
            "The cap was set before the first run: it is a guarantee also if runs were chosen "
            "after seeing the results of others."
        )
    return (
        "The total is a guarantee if the settings of all runs were fixed beforehand. If runs "
        "were chosen after seeing the results of others, only a cap set before the first run, "
        "which their Renyi filter keeps, is one."
    )


run = partial(parse, ledger, "ledger")
