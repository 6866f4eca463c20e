"""The one loop, for private, non-private and simulated plans: charge, draw, clip, sum, add noise, divide, apply.

The ledger is charged before the deed and the budget is the loop's condition, so no step can run that was not paid for.
"""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpvision.checkpoint import state_tensors
from dpvision.dp.noise import privatize
from dpvision.errors import CheckpointError
from dpvision.optim.ema import update_average
from dpvision.optim.optimizer import Optimizer
from dpvision.optim.schedule import learning_rate
from dpvision.runs.run import Run, Secrets
from dpvision.runs.stop import StopRequest
from dpvision.train.distributed import Group, all_reduce_vector, broadcast_bytes, broadcast_int, together
from dpvision.train.heap import keep_freed_memory
from dpvision.train.log import RunLog
from dpvision.train.same import check_same_weights
from dpvision.train.step import Training, step_sum
from dpvision.train.words import TOKENIZER_FILE

_FINISHED, _REFUSED = -1, -2
"""What rank 0 says in the place of a step's number."""


@dataclass(kw_only=True)
class Session(Training):
    """Everything one start of a run works with; ``start.py`` makes it. Rank 0 alone has a run."""

    optimizer: Optimizer
    ema: dict[str, Tensor] | None
    lineage: list[dict[str, Any]]
    updates: int
    """Steps whose update is in the weights; the ledger may count more (lost in a crash, yet charged)."""
    saved_steps: int | None
    """Count of the ledger in the newest checkpoint; None before the first."""
    run: Run | None = None
    start: frozenset[str] | None = None
    """Digests of the weights that this start of a run without a guarantee began with; None with a guarantee."""

    def unsaved(self) -> int:
        """Steps charged since the newest checkpoint; 0 on other ranks than 0."""
        return self.run.ledger.steps - (self.saved_steps or 0) if self.run is not None else 0


def fit(session: Session, *, secrets: Secrets | None = None, quiet: bool = False, show_confidential: bool = False) -> bool:
    """Train until the plan's steps are spent, or until SIGINT (Ctrl-C), SIGTERM or SIGUSR1 asks to save and stop.

    Args:
        quiet: print no progress.
        show_confidential: print loss and throughput of a private store also where standard error is no terminal.

    Returns:
        True when the plan is complete, False when stopped by a signal (go on with --resume).

    Raises:
        CheckpointError: a checkpoint cannot be written; earlier ones are untouched and the ledger is true.
        KeyboardInterrupt: a second SIGINT; what was not saved is lost, and standard error says what.
    """
    plan, group = session.plan, session.group
    if group.device.type == "cpu":
        keep_freed_memory()
    secrets = _share(secrets or Secrets(), group)
    saved = time.monotonic()
    with StopRequest("finishing this step, then saving", session.unsaved) as stop, contextlib.ExitStack() as stack:
        log = None if session.run is None else stack.enter_context(_log(session.run, quiet=quiet, show_confidential=show_confidential))
        while (step := _charge(session)) is not None:  # before the deed
            total, metrics = step_sum(step, session, secrets.draw)
            gradient = privatize(total, plan, step, secrets.noise, owners=group)
            session.optimizer.step(gradient, learning_rate(session.config.optim, step, plan.steps))
            if session.ema is not None:
                update_average(session.ema, session.model, session.config.optim, session.updates)
            session.updates += 1
            if log is not None:
                log.step(step, metrics)
            stopping, due = _any([stop.asked, time.monotonic() - saved >= session.config.hardware.checkpoint_every_s], group)
            if stopping or due:
                with together(group):
                    save(session)
                saved = time.monotonic()
            if stopping and step + 1 < plan.steps:
                if log is not None:
                    log.say("Saved and stopped as asked; go on with --resume.")
                return False
        if session.saved_steps != plan.steps:
            with together(group):
                save(session)
        return True


def save(session: Session) -> Path | None:
    """Write a checkpoint of the session as it stands (rank 0); all ranks check that they hold the same weights."""
    check_same_weights(state_tensors(session.model), session.group)
    run, path = session.run, None
    if run is not None:
        path = run.save(
            state_tensors(session.model), updates=session.updates, ema=session.ema, optimizer=session.optimizer.tensors(),
            start=session.start or (), files={} if session.words is None else {TOKENIZER_FILE: session.words.tokenizer.to_bytes()},
        )  # fmt: skip
    session.saved_steps = broadcast_int(run.ledger.steps if run is not None else 0, session.group)
    return path


def _log(run: Run, *, quiet: bool, show_confidential: bool) -> RunLog:
    private = run.store.results_visibility == "private"
    return RunLog(
        run.folder.base, run.folder.confidential, run.plan, run.ledger.steps,
        quiet=quiet, private=private, show_confidential=show_confidential, behind=run.behind,
    )  # fmt: skip


def _share(secrets: Secrets, group: Group) -> Secrets:
    both = broadcast_bytes(secrets.draw + secrets.noise, 64, group)
    return Secrets(both[:32], both[32:])


def _charge(session: Session) -> int | None:
    """Number of the next step, which rank 0 has charged; None where the plan is used up. The one message of a step from rank 0 to all.

    Raises:
        DPVisionError: rank 0 could not charge it; then all ranks stop.
    """
    word, error = _FINISHED, None  # type: int, Exception | None
    if session.run is not None and _steps_left(session.run) > 0:
        try:
            word = session.run.ledger.append()
        except Exception as failed:
            word, error = _REFUSED, failed
    word = broadcast_int(word, session.group)
    if error is not None:
        raise error
    if word == _REFUSED:
        raise CheckpointError("ledger: rank 0 could not charge the next step; expected it. All ranks stop: see what rank 0 says.")
    return None if word == _FINISHED else word


def _steps_left(run: Run) -> int:
    return run.plan.steps - run.ledger.steps


def _any(flags: list[bool], group: Group) -> list[bool]:
    """Of each flag, whether it is set on any rank."""
    return (all_reduce_vector(torch.tensor(flags, dtype=torch.float64), group) > 0).tolist()
