"""The append-only record of executed steps: each is charged before it runs, so that a crash never
under-counts.
"""

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dpvision.errors import CheckpointError, DataError, PrivacyError, remedy_for
from dpvision.files import append, make_folders, write_file
from dpvision.privacy.account import (
    RunAccount,
    StoreAccount,
    check_cap,
    check_total,
    set_cap,
    store_account,
)
from dpvision.privacy.ledger_format import (
    LedgerContents,
    digest,
    encode,
    header_line,
    read_ledger,
    recovery_line,
    start_line,
    step_line,
)
from dpvision.privacy.marks import Cap, Mark
from dpvision.privacy.plan import DPPlan
from dpvision.privacy.store_marks import StoreLedgers

__all__ = [
    "Cap",
    "Ledger",
    "LedgerContents",
    "RunAccount",
    "StoreAccount",
    "read_ledger",
    "set_cap",
    "store_account",
]


@contextlib.contextmanager
def _access() -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise DataError(
            f"ledger: {error.filename} ({error.strerror}); expected write access, because the "
            "ledger is kept beside the store. Ask for access; a copy of the store elsewhere "
            "would miss what this one was charged."
        ) from None


class Ledger:
    """Open ledger of one run: holds an exclusive lock on its file until closed. Use as a context
    manager; rank 0 only.

    The contract of the training loop: ``step = ledger.append()`` returns only when the charge is on
    the disk, and only then may anything of that step be computed. ``steps`` is the only counter of
    the run.
    """

    path: Path
    run_id: str
    plan: DPPlan

    def __init__(self, ledgers: StoreLedgers, contents: LedgerContents, fd: int) -> None:
        self.path = contents.path
        self.run_id = contents.run_id
        self.plan = contents.plan
        self._ledgers = ledgers
        self._fd = fd
        self._steps = contents.steps
        self._restarts = contents.restarts
        self._digest = contents.digest
        self._header = contents.header
        self._process, self._appending = os.getpid(), threading.Lock()

    @classmethod
    @_access()
    def open(
        cls,
        store_dir: Path,
        run_id: str,
        plan: DPPlan,
        *,
        resume: bool,
        lineage: Sequence[dict[str, Any]] = (),
        total: float | None = None,
    ) -> Self:
        """Start or resume a run's ledger, LEDGERS/<store_id>/<run_id>.jsonl beside the store.

        A torn last line is charged and sealed. Every ledger of the store is verified first, and
        with a cap the total of all runs must stay within it: the whole plans of this run, of runs
        that are open now, and of runs that were charged a step.

        Args:
            store_dir: folder of the store.
            run_id: name of the run, a plain file name.
            plan: the plan to execute; on resume the run's original plan.
            resume: whether the run was started before.
            lineage: lineage of the weights that the run starts from (``runs.lineage``), bound into
                the first line; on resume the same.
            total: of a new run, the largest epsilon that all runs on the store may have with it
                (``account.check_total``).

        Raises:
            CheckpointError: the run is open elsewhere, exists although ``resume`` is False, does
                not exist although it is True, or the disk is full.
            PrivacyError: a ledger was altered, shortened, deleted or replaced by an older copy;
                another plan or lineage; above the cap or the total.
            DataError: not a store, or its ledgers may not be written.
        """
        ledgers = StoreLedgers.of(store_dir)
        path = ledgers.ledger_path(run_id)
        ledgers.check_place()
        make_folders(ledgers.folder)
        with contextlib.ExitStack() as undo:
            with ledgers.locked():
                if resume and not path.exists() and run_id not in ledgers.marks():
                    raise CheckpointError(
                        f"ledger: {path}: missing; expected a ledger with resume. Start the run "
                        "without resume."
                    )
                if not resume and path.exists():
                    raise CheckpointError(
                        f"ledger: run_id={run_id}: has a ledger; expected a new run. Resume it, or "
                        "choose another name."
                    )
                fd = _lock(path, undo) if resume else -1
                contents = ledgers.read_all()
                if resume and not plan.same_mechanism(contents[run_id].plan):
                    raise PrivacyError(
                        f"ledger: {path}: another plan; expected the one the run began with. "
                        "Restore its settings, or start a new run."
                    )
                if resume and list(lineage) != contents[run_id].lineage:
                    raise PrivacyError(
                        f"ledger: {path}: another lineage; expected the one the run began with. "
                        "Restore the weights that it started from and its checkpoints, or start "
                        "a new run."
                    )
                others = [
                    (c.plan, c.plan.steps if _in_use(c.path) else c.plan.stated_steps(c.steps))
                    for c in contents.values()
                    if c.run_id != run_id
                ]
                check_cap(ledgers, [*others, (plan, plan.steps)])
                if total is not None and not resume:
                    check_total(store_dir, plan, total)
                ledgers.begin()
                if not resume:
                    header = encode(header_line(run_id, ledgers.store_id, plan, list(lineage)))
                    write_file(
                        path,
                        header + b"\n" + encode(start_line(digest(header), resume=False)) + b"\n",
                    )
                    fd = _lock(path, undo)
                elif contents[run_id].torn:
                    _seal(contents[run_id])
                    # the file was replaced: lock the new one; the folder's lock keeps others out
                    # meanwhile
                    undo.pop_all().close()
                    fd = _lock(path, undo)
                ledger = cls(ledgers, read_ledger(path), fd)
                undo.pop_all()
                undo.callback(ledger.close)  # once, also where a failed write has closed it
                if resume and ledger.steps < plan.steps:  # else nothing can follow
                    ledger._write(encode(start_line(ledger._digest, resume=True)))
                    ledger._restarts += 1
                ledgers.set_marks(
                    {other: c.mark for other, c in contents.items()} | {run_id: ledger._mark()},
                    of_all=True,
                )
            undo.pop_all()
        return ledger

    @property
    def steps(self) -> int:
        """int: steps charged so far, torn lines included."""
        return self._steps

    @property
    def restarts(self) -> int:
        """int: starts of the run after the first, with a step left to charge."""
        return self._restarts

    @property
    def digest(self) -> str:
        """str: hex SHA-256 of the last line, which commits to the whole ledger."""
        return self._digest

    def append(self) -> int:
        """Charge the next step and return its number, from 0; the charge is durable and marked in
        the store when this returns.

        Threads take turns.

        Raises:
            PrivacyError: the plan has no further step, or this process was forked after the ledger
                was opened.
            CheckpointError: the ledger is closed, or the disk is full; the step may then count as
                charged.
        """
        if os.getpid() != self._process:
            raise PrivacyError(
                "ledger: a process forked after the ledger was opened; expected the one that "
                "opened it. Charge steps there."
            )
        with self._appending:
            if self._steps >= self.plan.steps:
                raise PrivacyError(
                    f"ledger: steps={self._steps}; expected fewer than the plan's "
                    f"{self.plan.steps}. The plan is used up: stop."
                )
            step = self._steps
            self._write(encode(step_line(self._digest, step)))
            self._steps = step + 1
            with self._ledgers.locked():
                self._ledgers.set_marks({self.run_id: self._mark()})
            return step

    def close(self) -> None:
        """Release the lock."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _mark(self) -> Mark:
        return Mark(self._steps, self._digest, self._header)

    def _write(self, line: bytes) -> None:
        if self._fd < 0:
            raise CheckpointError(
                f"ledger: {self.path}: closed; expected an open ledger. Open it again with resume."
            )
        try:
            append(self._fd, line + b"\n")
        except OSError as error:
            # What is on the disk is unknown now: nothing more may be appended by this process.
            self.close()
            raise CheckpointError(
                f"ledger: {self.path}: {error.strerror}; expected room to write. Free space, "
                "then resume."
            ) from None
        self._digest = digest(line)


def _seal(contents: LedgerContents) -> None:
    """Seal a torn line with the digest of its bytes, by rename: a crash while appending could leave
    the line ended but unsealed.
    """
    seal = encode(recovery_line(digest(contents.torn), contents.steps))
    write_file(contents.path, contents.path.read_bytes() + b"\n" + seal + b"\n")


def _lock(path: Path, undo: contextlib.ExitStack) -> int:
    """Descriptor of the ledger for appending, exclusively locked; closed by ``undo``.

    Raises:
        CheckpointError: another process has the lock.
        PrivacyError: the ledger is missing.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_APPEND)
    except OSError as error:
        remedy = remedy_for(error, "Restore the ledger.")
        raise PrivacyError(
            f"ledger: {path}: {error.strerror}; the store saw its run. {remedy}"
        ) from None
    undo.callback(os.close, fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise CheckpointError(
            f"ledger: {path}: in use by another process; expected one run at a time. Stop the "
            "other one first."
        ) from None
    return fd


def _in_use(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
