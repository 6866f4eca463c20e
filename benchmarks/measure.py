"""Time and memory of training steps, beside one another: the clock and the scales of clipping.py.

Rounds run every variant once, in shuffled order, so that what else the machine does falls on all of
them alike; ratios are of the same round. Rounds come in odd numbers: the value of a row is then a
measurement, not the larger of two.
"""

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from common import row
from torch import Tensor, nn

from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp.clip import LossFn
from dpvision.errors import ConfigError
from dpvision.train.step import autocast

Step = Callable[[Batch], object]
EPOCH_RECORDS = 233e6

# All lists of variants are in order of importance: a time budget drops from the end.
NON_PRIVATE = ("non_private_eager", "non_private_compiled")
ONE_PASS = ("one_pass_eager", "one_pass_compiled")
COMPARISONS = ("opacus_ghost", "vmap", "opacus_per_sample")
VARIANTS = (*NON_PRIVATE, *ONE_PASS, *COMPARISONS)


class UnavailableError(Exception):
    """A variant cannot run here; the message says why and what to do."""


class Bench:
    """Settings of the run, its clock, what was dropped or found, and whether a check failed."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device(args.device)
        self.on_gpu = self.device.type == "cuda"
        self.precision = args.precision or ("bfloat16" if self.on_gpu else "float32")
        self.forward_bits = 16 if self.precision == "bfloat16" else 32
        self.batch = args.batch
        self.rounds = args.rounds or (15 if self.on_gpu else 5)
        if not (self.rounds > 0 and self.rounds % 2):
            raise ConfigError(
                f"--rounds: {self.rounds}; expected an odd number, so that a median is one of "
                "the measurements. Add one."
            )
        self.variants = chosen("--variants", args.variants, VARIANTS)
        self.forms: dict[str, dict[str, str]] = {}
        """Case -> the form of the vocabulary head that each way to a gradient takes, where it was
        timed.
        """
        self.notes: list[str] = []
        self.failed = False
        self.freed_memory_kept = False
        self.longest_start_s = 0.0
        default_s = 400.0 if self.on_gpu else 1050.0 if args.quick else float("inf")
        self.end = time.monotonic() + (default_s if args.budget_s is None else args.budget_s)

    def left_s(self) -> float:
        return max(0.0, self.end - time.monotonic())

    def note(self, line: str) -> None:
        """A line of progress that also stands at the end of the output."""
        self.notes.append(line)
        progress(line)

    def cast(self, loss_fn: LossFn) -> LossFn:
        """The loss with its forward pass under autocast, for who runs the backward pass outside of
        it.
        """

        def losses(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
            with autocast(self.precision, self.device):
                return loss_fn(model, batch, key)

        return losses


def chosen(where: str, text: str | None, known: tuple[str, ...]) -> list[str]:
    """The names in ``text``, comma-separated, in the order of ``known``; all without a text; the
    baseline always.
    """
    names = known if text is None else text.split(",")
    for name in names:
        if name not in known:
            raise ConfigError(
                f"{where}: {name!r}; expected some of {', '.join(known)}. Separate them by commas."
            )
    return [name for name in known if name in names or name == NON_PRIVATE[0]]


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def free_memory(bench: Bench) -> None:
    """Give back what a finished or failed step left behind."""
    gc.collect()
    if bench.on_gpu:
        torch.cuda.empty_cache()


def seconds_of(step: Step, batch: Batch) -> float:
    """Seconds of one step; what it returns is freed after the clock stops."""
    on_gpu = batch.valid_B.is_cuda
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = step(batch)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    del result
    return seconds


def peak_mb(step: Step, batch: Batch, model: nn.Module) -> float:
    """Peak memory of one step in MB (10^6 bytes): weights, buffers and batch, and on top what the
    step allocates, gradients included.

    On a CPU every tensor from torch's allocator, to the byte, from the profiler's events (not the
    scratch memory inside a library's kernel); on a GPU torch.cuda.max_memory_allocated.
    """
    resident = sum(
        t.nbytes
        for t in (*model.parameters(), *model.buffers(), *(t for t in batch if t is not None))
    )
    gc.collect()
    if batch.valid_B.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(batch)
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before + resident) / 1e6
    return (peak_bytes(lambda: step(batch)) + resident) / 1e6


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes that torch's allocator on a CPU holds at once while ``run`` runs, on top of those
    before, from the profiler's events.
    """
    gc.collect()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()  # negative where memory is freed
        peak = max(peak, now)
    return peak


def time_rounds(
    name: str, bench: Bench, steps: dict[str, Step], batch: Batch, deadline: float
) -> dict[str, list[float]]:
    """Seconds of each variant in rounds 0, 1, ...; the lists of the comparisons are shorter, the
    length of each is odd.

    Args:
        name: of the case, for the notes.
        deadline: on time.monotonic()'s clock; past it no round after the third is started, past the
            budget's end none after the first.
    """
    seconds: dict[str, list[float]] = {variant: [] for variant in steps}
    shuffle = random.Random(0).shuffle
    compared = bench.rounds // 2 | 1
    gc.collect()
    gc.freeze()  # as training does: the collector would go through what compilers left
    for number in range(bench.rounds):
        # After the first, rounds come in pairs.
        if number % 2 and time.monotonic() > (deadline if number >= 3 else bench.end):
            bench.note(f"{name}: {number} of {bench.rounds} rounds (time budget)")
            break
        order = [v for v in steps if v not in COMPARISONS or number < compared]
        shuffle(order)
        for variant in order:
            seconds[variant].append(seconds_of(steps[variant], batch))
        progress(
            f"{name}: round {number + 1} of {bench.rounds}: "
            + ", ".join(f"{v} {seconds[v][-1]:.3g} s" for v in order)
        )
    return seconds


def rows_of(
    name: str,
    bench: Bench,
    num_records: int,
    seconds: dict[str, list[float]],
    memory: dict[str, float],
) -> list[dict[str, Any]]:
    """Rows of a case; ratios are of the same round."""
    baselines = [v for v in seconds if v in NON_PRIVATE] if bench.on_gpu else ["non_private_eager"]
    fastest = min(baselines, key=lambda v: statistics.median(seconds[v]))
    smallest = min(baselines, key=lambda v: memory[v])
    if bench.on_gpu:
        bench.note(f"{name}: time_ratio to {fastest}, memory_ratio to {smallest}")
    rows = []
    for variant, values in seconds.items():
        rates = [num_records / s for s in values]
        rows += [
            row(name, variant, "time_s", values),
            row(
                name,
                variant,
                "time_ratio",
                [s / base for s, base in zip(values, seconds[fastest], strict=False)],
            ),
            row(name, variant, "memory_mb", [memory[variant]]),
            row(name, variant, "memory_ratio", [memory[variant] / memory[smallest]]),
            row(name, variant, "records_per_s", rates),
        ]
        if bench.on_gpu:
            rows.append(
                row(
                    name,
                    variant,
                    "gpu_hours_per_epoch",
                    [EPOCH_RECORDS / rate / 3600 for rate in rates],
                )
            )
    return rows


def largest_batch(step: Step, make_batch: Callable[[int], Batch], start: int, bench: Bench) -> int:
    """Most records that one step takes before memory runs out, to a sixteenth: doubling, then
    bisection.

    Args:
        make_batch: a batch of that many records, on the device.
        start: the first number tried.

    Raises:
        UnavailableError: the time budget ends first.
    """
    low, high, doubling = 0, start, True
    while doubling or high - low > max(1, low // 16):
        if bench.left_s() == 0:
            raise UnavailableError(f"{low} records fit; the time budget is used up")
        tried = high if doubling else (low + high) // 2
        try:
            seconds_of(step, make_batch(tried))
            low, high = tried, 2 * tried if doubling else high
        except torch.OutOfMemoryError:
            high, doubling = tried, False
        free_memory(bench)
    return low


def render_table(rows: list[dict[str, Any]]) -> str:
    """Case by variant: time_ratio with its range, memory_ratio."""
    found = {(r["case"], r["variant"], r["metric"]): r for r in rows}
    lines = [f"{'case':<12} {'variant':<22} {'time_ratio':<26} memory_ratio"]
    for case, variant in dict.fromkeys(
        (r["case"], r["variant"]) for r in rows if r["metric"] == "time_ratio"
    ):
        ratio, memory = (
            found[case, variant, "time_ratio"],
            found[case, variant, "memory_ratio"]["value"],
        )
        shown = f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
        lines.append(f"{case:<12} {variant:<22} {shown:<26} {memory:.3f}")
    return "\n".join(lines)
