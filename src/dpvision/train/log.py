"""Progress of a run, on the terminal, in JSONL and in TensorBoard, public and confidential figures
apart.

Public: the step and the epsilon spent. Confidential: loss, norms, clip fraction, realised batch
size, times (docs/privacy.md). For a private store, loss and throughput are marked "operator only"
on a terminal and omitted from a job's log.
"""

import json
import math
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from torch.utils.tensorboard import SummaryWriter

from dpvision.errors import OPERATOR_ONLY
from dpvision.files import append_lines
from dpvision.privacy.composition import Part
from dpvision.privacy.plan import DPPlan
from dpvision.privacy.printed import duration, time_left
from dpvision.runs.run import EpsilonMeter

_RECENT_STEPS = 20
_LINE_EVERY_S = 15.0
_WRITER = "_AsyncWriterThread"
"""TensorBoard's class of the thread that writes."""


@dataclass(frozen=True)
class StepMetrics:
    """Confidential figures of one step. Means are over the realised batch; NaN for an empty one."""

    loss: float
    batch_size: int
    grad_norm_mean: float
    grad_norm_median: float
    clip_fraction: float
    num_non_finite: int
    step_s: float


class RunLog:
    """Writes a run's log files and draws its progress; used as a context manager by rank 0.

    Args:
        private: the store is private: loss and throughput are printed on a terminal only, marked
            "operator only".
        show_confidential: print them even if standard error is not a terminal.
        behind: as for ``EpsilonMeter``.
    """

    def __init__(
        self,
        base: Path,
        confidential: Path,
        plan: DPPlan,
        start_step: int,
        *,
        quiet: bool,
        private: bool,
        show_confidential: bool = False,
        behind: tuple[Part, ...] = (),
    ) -> None:
        self._private_store, self._show_confidential = private, show_confidential
        self._plan, self._meter = plan, EpsilonMeter(plan, behind)
        self._public = append_lines(base / "progress.jsonl")
        self._private = append_lines(confidential / "metrics.jsonl")
        self._hook, threading.excepthook = threading.excepthook, _unless_raised_again
        try:
            self._board = SummaryWriter(str(confidential / "tensorboard"))
        except BaseException:
            self._end_writers()
            raise
        self._console = Console(stderr=True, quiet=quiet)
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            console=self._console,
        )
        self._task = self._progress.add_task("starting", total=plan.steps, completed=start_step)
        self._last_line = -math.inf
        self._recent_s: deque[float] = deque(maxlen=_RECENT_STEPS)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()
        try:
            for file in (self._public, self._private, self._board):
                file.close()
        finally:
            self._end_writers()

    def _end_writers(self) -> None:
        for thread in threading.enumerate():
            if type(thread).__name__ == _WRITER and getattr(thread, "exception", None):
                thread.join()  # it ends at once, by the hook
        threading.excepthook = self._hook

    def say(self, text: str) -> None:
        """Print one line for the operator."""
        self._console.print(text, highlight=False, markup=False)

    def step(self, step: int, metrics: StepMetrics) -> None:
        """Record one finished step."""
        done = step + 1
        epsilon = self._meter.at_most(done)
        rate = metrics.batch_size / metrics.step_s
        _line(self._public, self._meter.entry(done))
        values = {key: _finite(value) for key, value in vars(metrics).items()}
        _line(
            self._private,
            {"step": done, **values, "images_per_s": _finite(rate), "time": time.time()},
        )
        for name, value in values.items():
            if value is not None:
                self._board.add_scalar(name, value, done)
        if epsilon is not None:
            self._board.add_scalar("epsilon_at_most", epsilon, done)
        self._recent_s.append(metrics.step_s)
        self._show(done, metrics.loss, rate)

    def abandoned(self, step: int, finish_s: float) -> None:
        """Record a step that was given up. Its public line is that of any charged step; it is said
        with ``quiet`` too, as all that is charged and lost.
        """
        _line(self._public, self._meter.entry(step + 1))
        print(
            f"Step {step + 1} did not end within {finish_s:g} s: it is abandoned, and counts in "
            "epsilon.",
            file=sys.stderr,
            flush=True,
        )

    def _show(self, done: int, loss: float, rate: float) -> None:
        left = sum(self._recent_s) / len(self._recent_s) * (self._plan.steps - done)
        text = f"{self._meter.text(done)}  "
        if not self._private_store or self._show_confidential or self._console.is_terminal:
            label = OPERATOR_ONLY if self._private_store else ""
            text += f"{duration(left)} left  {label}loss {loss:.4f}  {rate:,.0f} images/s"
        else:  # a job's log, which others may read
            text += time_left(left)
        if self._console.is_terminal:
            self._progress.update(self._task, completed=done, description=text)
        elif time.monotonic() - self._last_line >= _LINE_EVERY_S or done == self._plan.steps:
            self._last_line = time.monotonic()
            self.say(f"step {done}/{self._plan.steps}  {text}")


def _unless_raised_again(args: threading.ExceptHookArgs) -> None:
    """Print an exception that ended a thread, but no full disk in TensorBoard's writer, which is
    raised in the main thread too.
    """
    if not (type(args.thread).__name__ == _WRITER and args.exc_type is OSError):
        threading.__excepthook__(args)


def _line(file: object, value: dict) -> None:
    file.write(json.dumps(value, allow_nan=False) + "\n")  # type: ignore[attr-defined]
    file.flush()  # type: ignore[attr-defined]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
