"""Check a model's clipping against the oracle on this machine, find the largest physical batch, and
time a step.

Legend: B records.
"""

import gc
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpvision.config import HardwareConfig
from dpvision.data.batch import Batch
from dpvision.devices import keep_freed_memory, require_precision
from dpvision.doctor.findings import KEY, Built, Findings, records, told_by_us
from dpvision.dp.clip import ClippedSum, clipped_sum
from dpvision.dp.separable import check_separable
from dpvision.dp.support import check_exact
from dpvision.errors import ConfigError, PrivacyError
from dpvision.privacy.printed import duration, size
from dpvision.train.distributed import join
from dpvision.train.step import autocast, to_device

TOLERANCE = 1e-5
"""Largest relative difference of the float32 sum, and of a norm, from the oracle's."""
MARGIN = 0.8
"""Fraction of the free memory that an estimate uses; the rest is for fragmentation and library
workspaces.
"""
_MOST_RECORDS = 2**16
_ROUNDS = 7
_FLOAT64_COPIES = 4
"""Float64 copies of the weights that the gates hold at once: the model, a sum, activations,
temporaries.
"""
_FLOAT64_PASSES = 350
"""Cost of the gates (float64 forward and backward passes of three records) in float32 forward
passes of one record: 245 to 323 for four recipes, 650 for a ResNet-18
(docs/log/2026-11-28-prove-long.md).
"""
_TIMED_SHARE = 0.6
"""Fraction of the time left for the timed rounds; the searches get the rest."""


@dataclass(frozen=True)
class Bench:
    """The model on its device, with a deadline."""

    built: Built
    device: torch.device
    hardware: HardwareConfig
    max_grad_norm: float
    end: float
    """Deadline on time.monotonic()'s clock."""

    def left_s(self) -> float:
        return max(0.0, self.end - time.monotonic())

    def batch(self, num: int) -> Batch:
        return to_device(records(self.built.batch, num), self.device)

    def step(self, batch: Batch, max_grad_norm: float | None) -> ClippedSum:
        """Return the clipped sum, or the plain sum of gradients if ``max_grad_norm`` is None, by a
        forward and a backward pass.
        """
        with autocast(self.hardware.precision, self.device):
            return clipped_sum(
                self.built.loss_fn,
                self.built.model,
                batch,
                KEY,
                max_grad_norm=max_grad_norm,
                check_separability=False,
            )

    def seconds_of(self, batch: Batch, max_grad_norm: float | None) -> float:
        """Return the seconds of one step. Its result is freed after the clock stops."""
        self._finish()
        start = time.perf_counter()
        result = self.step(batch, max_grad_norm)
        self._finish()
        seconds = time.perf_counter() - start
        del result
        return seconds

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(
    found: Findings,
    hardware: HardwareConfig | None = None,
    *,
    num_timed: int | None = None,
    max_minutes: float = 5.0,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Check three records against the oracle, find the largest physical batch, and time a private
    step against a non-private one.

    Args:
        found: the model, by ``look``.
        hardware: device, precision, and the physical batch size of a run; None: the recipe's.
        num_timed: physical batch size to time, without a search for the largest; if None, the
            run's, reduced to fit memory and time.
        max_minutes: total time limit; batches and searches shrink to meet it, the oracle check does
            not.
        say: called with each line of progress.

    Returns:
        The figures, ready for JSON.

    Raises:
        PrivacyError: the model is refused, or the clipped sum differs from the oracle's.
        ConfigError: the device does not exist or lacks the precision, or one record does not fit.
    """
    if found.refused:
        raise PrivacyError(found.refused[0].message)
    config = found.subject.config
    hardware = hardware or (HardwareConfig() if config is None else config.hardware)
    max_grad_norm = (config.privacy.max_grad_norm if config else None) or 1.0
    built = found.subject.make(False)
    device = join(hardware.device).device
    require_precision(hardware.precision, device)
    keep_freed_memory()  # as training does
    _stir(built.model)
    end = time.monotonic() + 60 * max_minutes
    with told_by_us():
        say("1/3 comparing three records with the oracle")
        gates = _gates(built, end)
        built.model.to(device)
        bench = Bench(built, device, hardware, max_grad_norm, end)
        oracle = {**compare(bench), "float64": gates}
        say("2/3 finding the largest physical batch")
        try:
            bench.seconds_of(bench.batch(1), max_grad_norm)
            largest = _largest(bench, found.state_bytes) if num_timed is None else None
            say("3/3 timing a step")
            num = num_timed or _timed_batch(bench, largest["records"] if largest else 1)
            step = _times(bench, num)
        except torch.OutOfMemoryError:
            raise ConfigError(
                f"doctor: {num_timed or 1} records do not fit into the memory of {device}; "
                "expected a smaller physical batch. Lower --physical-batch-size, or use a "
                "smaller model."
            ) from None
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "precision": hardware.precision,
        "oracle": oracle,
        "largest_physical_batch": largest,
        "step": step,
    }


def _stir(model: nn.Module) -> None:
    """Give small random values to parameters that are all zero: zeros would hide differences in the
    layers before them.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))


def _gates(built: Built, end: float) -> str:
    """Run the two gates of a private run in float64 on the CPU. Return "passed", or why they were
    left out.

    Raises:
        PrivacyError: a gate refuses.
    """
    needed = _FLOAT64_COPIES * 8 * sum(p.numel() for p in built.model.parameters())
    if needed > available_bytes():
        return f"left out: {size(needed)} needed"
    one = records(built.batch, 1)
    with torch.no_grad():
        built.loss_fn(built.model, one, KEY)
        start = time.monotonic()
        built.loss_fn(built.model, one, KEY)
    needed_s = _FLOAT64_PASSES * (time.monotonic() - start)
    if needed_s > (end - time.monotonic()) / 3:
        return f"left out: about {duration(needed_s)} needed, a third of --max-minutes allowed"
    check_separable(built.loss_fn, built.model, built.batch, KEY)
    check_exact(built.loss_fn, built.model, built.batch, KEY)
    return "passed"


def compare(bench: Bench) -> dict[str, Any]:
    """Compare one-pass clipping with ``vmap`` in float32, clipping at the median norm so that only
    some records are clipped.

    Raises:
        PrivacyError: the sums or the norms have a relative difference above 1e-5.
    """
    built, batch = bench.built, to_device(bench.built.batch, bench.device)

    def run(method: str, max_grad_norm: float) -> ClippedSum:
        return clipped_sum(
            built.loss_fn,
            built.model,
            batch,
            KEY,
            max_grad_norm=max_grad_norm,
            method=method,
            chunk_size=1,
            check_separability=False,
        )

    middle = float(run("one_pass", 1.0).norms_B.median())
    if not 1e-12 <= middle <= 1e12:
        raise PrivacyError(
            f"doctor: gradient norm={middle} on random images; expected a finite, nonzero norm. "
            "Check the model and loss."
        )
    ours, oracle = run("one_pass", middle), run("vmap", middle)
    size = sum(float(value.double().square().sum()) for value in oracle.grads.values()) ** 0.5
    off = (
        sum(
            float((ours.grads[name].double() - value.double()).square().sum())
            for name, value in oracle.grads.items()
        )
        ** 0.5
    )
    norms_off = float(((ours.norms_B - oracle.norms_B).abs() / oracle.norms_B).max())
    difference = off / size if size else off
    if not max(difference, norms_off) <= TOLERANCE:
        raise PrivacyError(
            f"doctor: the one-pass sum differs from the oracle's by {difference:.1e}, a norm by "
            f"{norms_off:.1e}; expected at most {TOLERANCE:.0e}. Train with method='vmap', and "
            "report this model as a bug."
        )
    return {
        "records": len(batch.record_id_B),
        "difference": difference,
        "norm_difference": norms_off,
        "tolerance": TOLERANCE,
    }


def _largest(bench: Bench, state_bytes: int) -> dict[str, Any]:
    weights = sum(p.numel() * p.element_size() for p in bench.built.model.parameters())
    if bench.device.type == "cuda":
        return _largest_tried(bench, state_bytes - weights)
    return _largest_estimated(bench, state_bytes - weights)


def _largest_tried(bench: Bench, other_bytes: int) -> dict[str, Any]:
    """Try steps of growing batches on the GPU, with memory reserved for what training holds besides
    the weights.
    """

    def fits(num: int) -> bool:
        try:
            bench.seconds_of(bench.batch(num), bench.max_grad_norm)
            fitted = True
        except torch.OutOfMemoryError:
            fitted = False
        gc.collect()
        torch.cuda.empty_cache()
        return fitted

    room = torch.empty(other_bytes, dtype=torch.uint8, device=bench.device)
    deadline = bench.end - 0.5 * bench.left_s()
    num, final = most_that_fit(fits, most=_MOST_RECORDS, stop=lambda: time.monotonic() > deadline)
    del room
    if not num:
        raise torch.OutOfMemoryError("not even one record")
    torch.cuda.empty_cache()
    return {
        "records": num,
        "how": "measured" if final else "measured; more may fit: time or search was limited",
    }


def most_that_fit(
    fits: Callable[[int], bool], *, most: int, stop: Callable[[], bool]
) -> tuple[int, bool]:
    """Find the largest number for which ``fits`` is true, to within 1/16, by doubling and
    bisection.

    Args:
        fits: true up to some number, false beyond it.
        most: largest number to try.
        stop: when true, return the best result so far.

    Returns:
        The largest number found to fit (0 if not even 1 does), and whether the search is complete.
    """
    low, high = 0, most + 1
    while high - low > max(1, low // 16) and not stop():
        tried = max(1, 2 * low) if high > most else (low + high) // 2
        tried = min(tried, most)
        if fits(tried):
            low = tried
        else:
            high = tried
        if low == most:
            break
    return low, high <= most and high - low <= max(1, low // 16)


def _largest_estimated(bench: Bench, other_bytes: int) -> dict[str, Any]:
    """Estimate the largest batch from the peak memory of two small batches and the machine's free
    memory.
    """
    free = available_bytes()
    seconds = bench.seconds_of(bench.batch(2), bench.max_grad_norm) / 2
    # Larger batches give a better slope, since computations in chunks stop growing. At most ten
    # seconds of steps.
    num = max(
        2,
        min(bench.hardware.physical_batch_size, 64, int(min(10.0, bench.left_s() / 20) / seconds)),
    )
    many = peak_bytes(lambda: bench.step(bench.batch(num), bench.max_grad_norm))
    few = peak_bytes(lambda: bench.step(bench.batch(num // 2), bench.max_grad_norm))
    record_bytes = max(1.0, (many - few) / (num - num // 2))
    fixed = max(0.0, many - num * record_bytes)
    fitting = int((MARGIN * free - other_bytes - fixed) / record_bytes)
    if fitting < 1:
        raise torch.OutOfMemoryError("not even one record")
    return {
        "records": fitting,
        "how": "estimated",
        "record_bytes": round(record_bytes),
        "fixed_bytes": round(fixed),
        "available_bytes": free,
        "margin": MARGIN,
    }


def peak_bytes(step: Callable[[], object]) -> int:
    """Return the peak bytes that torch's CPU allocator holds for ``step``, beyond what it held
    before.
    """
    gc.collect()
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "99"
    )  # else the profiler logs every start, and a missing GPU
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = [
        event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()  # negative where memory is freed
        peak = max(peak, now)
    return peak


def available_bytes() -> int:
    """Return the memory that this process can still allocate, within a container's limit."""
    found = _meminfo("MemAvailable")
    if found is None:
        found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            found = min(found, max(0, int(Path(limit).read_text()) - int(Path(used).read_text())))
        except (OSError, ValueError):  # no such limit, or "max"
            continue
    return found


def _meminfo(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next(
        (1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), None
    )


def _timed_batch(bench: Bench, fitting: int) -> int:
    """Return the run's physical batch size, reduced to fit memory and to leave time for a warm-up
    and three rounds.
    """
    num = min(4, fitting)
    seconds = min(bench.seconds_of(bench.batch(num), bench.max_grad_norm) for _ in range(2)) / num
    in_time = int(_TIMED_SHARE * bench.left_s() / (2 * 4 * seconds))
    return max(1, min(bench.hardware.physical_batch_size, fitting, in_time))


def _times(bench: Bench, num: int) -> dict[str, Any]:
    """Time private and plain steps in alternation; each ratio is taken within a round."""
    batch = bench.batch(num)
    private: list[float] = []
    plain: list[float] = []
    for number in range(-1, _ROUNDS):
        start = time.monotonic()
        ways: list[tuple[list[float], float | None]] = [
            (private, bench.max_grad_norm),
            (plain, None),
        ]
        # The order alternates, so that cache effects hit both equally.
        for seconds, max_grad_norm in ways if number % 2 else reversed(ways):
            taken = bench.seconds_of(batch, max_grad_norm)
            if number >= 0:  # round -1 is a warm-up
                seconds.append(taken)
        if number >= 2 and time.monotonic() - start > bench.left_s():
            break
    return {
        "physical_batch_size": num,
        "rounds": len(private),
        "private_s": _spread(private),
        "non_private_s": _spread(plain),
        "price": _spread([a / b for a, b in zip(private, plain, strict=True)]),
        "records_per_s": num / statistics.median(private),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}
