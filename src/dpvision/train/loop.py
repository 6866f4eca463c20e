"""The one loop, for private, non-private and simulated plans: charge, draw, clip, sum, add noise,
divide, apply.

The ledger is charged before a step runs and the budget is the loop's condition, so no uncharged
step can run.
"""

import contextlib
import gc
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpvision.checkpoint import state_tensors
from dpvision.devices import keep_freed_memory
from dpvision.dp.noise import privatize
from dpvision.errors import CheckpointError, ConfigError
from dpvision.optim.ema import update_average
from dpvision.optim.optimizer import Optimizer
from dpvision.optim.schedule import learning_rate
from dpvision.privacy.stream import KEY_BYTES
from dpvision.runs.run import Run, Secrets, StopRequest
from dpvision.train.distributed import (
    Group,
    all_reduce_vector,
    broadcast_bytes,
    broadcast_int,
    together,
)
from dpvision.train.log import RunLog, StepMetrics
from dpvision.train.same import check_same_weights
from dpvision.train.step import Abandoned, Training, step_sum
from dpvision.train.stopping import Stopping
from dpvision.train.words import TOKENIZER_FILE

_FINISHED, _REFUSED = -1, -2
"""Broadcast by rank 0 instead of a step's number."""
_WRITES = "writes a checkpoint"


@dataclass(kw_only=True)
class Session(Training):
    """The state of one start of a run, made by ``start.py``. Only rank 0 has a ``run``."""

    optimizer: Optimizer
    ema: dict[str, Tensor] | None
    lineage: list[dict[str, Any]]
    updates: int
    """Number of steps whose update is in the weights; the ledger may count more (charged, then lost
    in a crash).
    """
    saved_steps: int | None
    """The ledger's step count in the newest checkpoint, kept up to date on rank 0; None before the
    first.
    """
    run: Run | None = None
    start: frozenset[str] | None = None
    """Digests of the initial weights of this start, for a run without a guarantee; None with a
    guarantee.
    """

    def unsaved(self) -> int:
        """Number of steps charged since the newest checkpoint; 0 on ranks other than 0."""
        return self.run.ledger.steps - (self.saved_steps or 0) if self.run is not None else 0


def fit(
    session: Session,
    *,
    secrets: Secrets | None = None,
    quiet: bool = False,
    show_confidential: bool = False,
    enough: Callable[[int], bool] = lambda steps: False,
) -> bool:
    """Train until the plan's steps are spent, or until SIGINT (Ctrl-C), SIGTERM or SIGUSR1 to any
    rank, or the end of torchrun's agent, asks to save and stop. The step in progress is finished if
    it ends within ``hardware.finish_step_s``, and else abandoned: charged, without an update.

    Args:
        quiet: print no progress.
        show_confidential: print loss and throughput of a private store even if standard error is
            not a terminal.
        enough: called with the number of charged steps, after each step; True saves and stops.

    Returns:
        True if the plan is complete, False if stopped (continue with --resume).

    Raises:
        CheckpointError: a checkpoint cannot be written; earlier ones are untouched and the ledger
            is correct. RankLost: another rank ended.
        ConfigError: out of memory on the GPU; the step is charged.
        KeyboardInterrupt: a second SIGINT; unsaved steps are lost, and their number is printed to
            standard error.
    """
    plan, group, hardware = session.plan, session.group, session.config.hardware
    if group.device.type == "cpu":
        keep_freed_memory()
    secrets = shared_secrets(secrets or Secrets(), group)
    saved = time.monotonic()
    doing = f"finishing this step if it ends within {hardware.finish_step_s:g} s, then saving"
    with (
        StopRequest(doing, session.unsaved) as request,
        contextlib.ExitStack() as stack,
    ):
        stopping = Stopping(request, group, hardware.finish_step_s)
        log, writer = None, _Writer()
        if session.run is not None:
            shown = _log(session.run, quiet=quiet, show_confidential=show_confidential)
            log = stack.enter_context(shown)
            stack.callback(writer.finish)
            session.run.folder.clear_stopped()
        settled = False
        while (step := _charge(session)) is not None:  # before anything is computed
            last, abandoned = step + 1 == plan.steps, False
            try:
                metrics = _take(step, session, secrets, stopping.overdue)
            except Abandoned:
                abandoned = True
                if log is not None:
                    log.abandoned(step, hardware.finish_step_s)
            else:
                if log is not None:
                    log.step(step, metrics)
            if not settled:
                # What the imports, the checks and the compiler made stays. Python's collector
                # would look through it every few passes, which takes up to half a second.
                gc.collect()
                gc.freeze()
                stack.callback(gc.unfreeze)
                settled = True
            clock = time.monotonic() - saved >= hardware.checkpoint_every_s
            flags = [stopping.asked(), enough(step + 1), clock, writer.failed]
            asked, done, due, failed = _any(flags, group)
            stop = asked or done
            if stop or due or failed:
                # Whether a step was abandoned depends on the time of its secret batch.
                timed = not last and (abandoned or not asked)
                with together(group, slow=f"written before {step}", doing=_WRITES):
                    writer.wait()
                with together(group, slow=f"saved after {step}", doing=_WRITES):
                    save(session, timed=timed, writer=None if stop or last else writer)
                    if stop and not last and session.run is not None:
                        session.run.folder.mark_stopped()
                saved = time.monotonic()
            if stop and not last:
                if log is not None:
                    log.say("Saved and stopped as asked; go on with --resume.")
                return False
        with together(group, slow="written at the end", doing=_WRITES):
            writer.wait()
        if _any([session.run is not None and session.saved_steps != plan.steps], group)[0]:
            with together(group, slow="saved at the end", doing=_WRITES):
                save(session)
        return True


def _take(
    step: int, session: Session, secrets: Secrets, overdue: Callable[[], bool]
) -> StepMetrics:
    """Compute a charged step and apply its update.

    Raises:
        Abandoned: as ``step_sum``; the weights are those of the step before.
    """
    plan, group, config = session.plan, session.group, session.config
    try:
        total, metrics = step_sum(step, session, secrets.draw, overdue=overdue)
    except torch.OutOfMemoryError:  # it fitted at the start
        size = config.hardware.physical_batch_size
        raise ConfigError(
            f"hardware: physical_batch_size={size}; out of memory on {group.device} in "
            f"step {step}, though it fitted at the start. Stop other processes on the "
            f"GPU, or pass --resume --hardware.physical-batch-size {max(1, size // 2)}."
        ) from None
    gradient = privatize(total, plan, step, secrets.noise, owners=group)
    session.optimizer.step(gradient, learning_rate(config.optim, step, plan.steps))
    if session.ema is not None:
        update_average(session.ema, session.model, config.optim, session.updates)
    session.updates += 1
    return metrics


class _Writer:
    """Writes checkpoints in a thread, one after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[object] | None = None

    @property
    def failed(self) -> bool:
        """bool: whether the last checkpoint could not be written; ``wait`` raises the reason."""
        writing = self._writing
        return writing is not None and writing.done() and writing.exception() is not None

    def start(self, write: Callable[[], object]) -> None:
        """Begin to write; the checkpoint before must have been waited for."""
        self._writing = self._thread.submit(write)

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, and raise what it raised."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, and end the thread."""
        self._thread.shutdown()


def save(session: Session, *, timed: bool = False, writer: _Writer | None = None) -> Path | None:
    """Write a checkpoint of the session (rank 0), after all ranks checked that their weights are
    the same.

    Args:
        timed: as for ``Run.checkpoint``.
        writer: writes it, from a copy, while training goes on; if None, it is written when this
            returns.

    Returns:
        The checkpoint's folder; None on other ranks than 0, and with ``writer``.
    """
    check_same_weights(state_tensors(session.model), session.group)
    run = session.run
    if run is None:
        return None
    kept = _as_they_are if writer is None else _copied
    steps, average = run.ledger.steps, session.ema
    write = run.checkpoint(
        kept(state_tensors(session.model)),
        updates=session.updates,
        ema=None if average is None else kept(average),
        optimizer=kept(session.optimizer.tensors()),
        start=session.start or (),
        files={} if session.words is None else {TOKENIZER_FILE: session.words.tokenizer.to_bytes()},
        timed=timed,
    )

    def written() -> Path:
        path = write()
        session.saved_steps = steps
        return path

    if writer is None:
        return written()
    writer.start(written)
    return None


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}


def _as_they_are(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tensors


def _log(run: Run, *, quiet: bool, show_confidential: bool) -> RunLog:
    private = run.store.results_visibility == "private"
    return RunLog(
        run.folder.base,
        run.folder.confidential,
        run.plan,
        run.ledger.steps,
        quiet=quiet,
        private=private,
        show_confidential=show_confidential,
        behind=run.behind,
    )


def shared_secrets(secrets: Secrets, group: Group) -> Secrets:
    """Return rank 0's keys on every rank. Those given are then dead: keys are for one start."""

    def exchange(secret: bytes) -> bytes:
        return broadcast_bytes(secret, KEY_BYTES, group)

    return Secrets(secrets.draw.hand_over(exchange), secrets.noise.hand_over(exchange))


def _charge(session: Session) -> int | None:
    """Charge the next step on rank 0 and return its number on all ranks, None if the plan is used
    up: a step's only broadcast.

    Raises:
        DPVisionError: rank 0 could not charge the step; all ranks stop.
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
        raise CheckpointError(
            "ledger: rank 0 could not charge the next step; expected it. All ranks stop: see "
            "the error of rank 0."
        )
    return None if word == _FINISHED else word


def _steps_left(run: Run) -> int:
    return run.plan.steps - run.ledger.steps


def _any(flags: list[bool], group: Group) -> list[bool]:
    """For each flag, whether it is set on any rank."""
    return (all_reduce_vector(torch.tensor(flags, dtype=torch.float64), group) > 0).tolist()
