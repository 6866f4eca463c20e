"""The price of private gradients: time and memory of one physical batch's clipped sum against ordinary training.

    python benchmarks/clipping.py [--quick] [--cases A,B] [--variants A,B] [--rounds N] [--batch N] [--threads N]
                                  [--device D] [--precision P] [--budget-s S] [--json FILE]

Cases: the ViP recipes' masked autoencoders (mae_*) and captioners in the shape of DP-Cap (cap_*, captioner_shape.py) at 224 px; --quick
takes Tiny and Base. "non_private_*" is forward and backward of the mean loss into fresh .grad, the private variants are the clipped sum at
the median of the records' norms; no optimizer steps. "compiled" is torch.compile block by block. Captioners: the non-private variants take
the form of the vocabulary head that is faster here, one_pass the fused one where dpvision has it, the others the plain one.

Each round runs every variant once, in shuffled order. "time_ratio" is against the baseline of the same round: non_private_eager on a CPU,
the faster non-private variant on a GPU ("memory_ratio": the smaller). The comparisons (vmap, Opacus) take part in the first half of the
rounds; on a GPU vmap and opacus_per_sample hold the gradients of at most 32 records at once, in the search for "max_physical_batch" of all.

"memory_mb" is the peak of one step: weights, buffers and batch, and on top what the step allocates, gradients included. On a CPU that is
every tensor from torch's allocator, to the byte, from the profiler's events (not the scratch memory inside a library's kernel); on a GPU
torch.cuda.max_memory_allocated. "gpu_hours_per_epoch" is for 233 million records at "records_per_s".

Before a case is timed, one_pass must agree with vmap on three records; else the case is left out and the script exits with 1.
"""

import argparse
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch: the profiler would report to stderr at every start

import opacus_variants
import torch
from captioner_shape import loss_forms, make_batch, make_captioner, render_beside_dpcap
from common import row, write_result
from opacus_variants import UnavailableError, relative_difference, twin
from torch import Tensor, nn

from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp.clip import ClippedSum, LossFn, clipped_sum
from dpvision.errors import ConfigError, DPVisionError
from dpvision.models import make_model
from dpvision.recipes import RECIPES
from dpvision.train.objectives import mae_losses
from dpvision.train.step import autocast

try:
    from dpvision.dp.compiled import compile_blocks
except ImportError:
    compile_blocks = None

Step = Callable[[Batch], object]
KEY = StepKey(0, 0)
EPOCH_RECORDS = 233e6
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest relative difference of one_pass's sum from vmap's at each precision."""
OPACUS_TOLERANCE = 1e-3
"""Opacus adds 1e-6 to norms and sums their squares in float32: another number, but of the same thing."""

# Name: records of a batch on a CPU, on a GPU. All lists are in order of importance: a time budget drops from the end.
CASES = {
    "cap_base": (4, 256),
    "mae_base": (8, 256),
    "cap_large": (2, 128),
    "mae_large": (4, 128),
    "cap_tiny": (16, 256),
    "mae_tiny": (16, 256),
    "cap_small": (8, 256),
    "mae_small": (8, 256),
}
QUICK = [name for name in CASES if name.endswith(("tiny", "base"))]
NON_PRIVATE = ("non_private_eager", "non_private_compiled")
ONE_PASS = ("one_pass_eager", "one_pass_compiled")
COMPARISONS = ("opacus_ghost", "vmap", "opacus_per_sample")
VARIANTS = (*NON_PRIVATE, *ONE_PASS, *COMPARISONS)


class DisagreementError(Exception):
    """one_pass differs from its oracle by more than rounding."""


class Bench:
    """Settings of the run, its clock, what was dropped or found, and whether a check failed."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device(args.device)
        self.on_gpu = self.device.type == "cuda"
        self.precision = args.precision or ("bfloat16" if self.on_gpu else "float32")
        self.forward_bits = 16 if self.precision == "bfloat16" else 32
        self.batch = args.batch
        self.rounds = args.rounds or (15 if self.on_gpu else 5)
        self.variants = _chosen("--variants", args.variants, VARIANTS)
        self.notes: list[str] = []
        self.failed = False
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
        """The loss with its forward pass under autocast, for who runs the backward pass outside of it."""

        def losses(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
            with autocast(self.precision, self.device):
                return loss_fn(model, batch, key)

        return losses


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Subject:
    """A case's model, the forms of its loss, and the steps that work on them; all steps share the weights' memory."""

    def __init__(self, name: str, bench: Bench) -> None:
        self.name, self.bench = name, bench
        kind, size = name.split("_")
        config = RECIPES[f"vip.{size}"]().model
        model = make_model(config, seed=0) if kind == "mae" else make_captioner(config.encoder, seed=0)
        self.model = model.to(bench.device)
        self.forms = {"plain": mae_losses} if kind == "mae" else loss_forms()
        self.num_records = bench.batch or CASES[name][bench.on_gpu]
        self.non_private_form = "plain"
        self.max_grad_norm = float("nan")
        self.piece = 32 if bench.on_gpu else None
        """Most records whose gradients vmap and opacus_per_sample hold at once; None: clipped_sum's choice, and all for Opacus."""

    def make_step(self, variant: str, *, dynamic: bool = False) -> Step:
        """The step of a variant; its first call may compile, with ``dynamic`` once for all batch sizes.

        Raises:
            UnavailableError: something that the variant needs is missing.
        """
        if variant in NON_PRIVATE:
            return self._non_private_step(self.non_private_form, compiled=variant.endswith("compiled"), dynamic=dynamic)
        if variant.startswith("opacus"):
            return opacus_variants.make_step(
                variant, twin(self.model), self.bench.cast(self.forms["plain"]), self.max_grad_norm, self.piece
            )
        model = twin(self.model)
        if variant == "one_pass_compiled":
            if compile_blocks is None:
                raise UnavailableError("dpvision.dp.compiled is not there")
            compile_blocks(model)
        method = "vmap" if variant == "vmap" else "one_pass"
        return lambda batch: self.clipped(method, batch, model=model)

    def clipped(self, method: str, batch: Batch, *, model: nn.Module | None = None, precision: str | None = None) -> ClippedSum:
        """dpvision's clipped sum; the clip norm 1 until there is one."""
        form = "fused" if method == "one_pass" and "fused" in self.forms else "plain"
        clip_norm = 1.0 if self.max_grad_norm != self.max_grad_norm else self.max_grad_norm
        with autocast(precision or self.bench.precision, self.bench.device):
            return clipped_sum(
                self.forms[form], model or self.model, batch, KEY, max_grad_norm=clip_norm, method=method,
                chunk_size=self.piece if method == "vmap" else None,
            )  # fmt: skip

    def _non_private_step(self, form: str, *, compiled: bool, dynamic: bool = False) -> Step:
        model, loss_fn = twin(self.model), self.bench.cast(self.forms[form])
        params = list(model.parameters())
        if compiled:
            for blocks in (m for m in model.modules() if isinstance(m, nn.ModuleList)):
                for block in blocks:
                    block.compile(dynamic=dynamic)

        def step(batch: Batch) -> list[Tensor | None]:
            loss_fn(model, batch, KEY).mean().backward()
            grads = [p.grad for p in params]
            for p in params:  # the gradients leave with the caller, so that the next step's are fresh
                p.grad = None
            return grads

        return step

    def choose_form(self, batch: Batch) -> None:
        """Time the non-private eager step with each form of the head and keep the faster; blocks, compiled or not, are the same in both."""
        steps = {form: self._non_private_step(form, compiled=False) for form in self.forms}
        if len(steps) > 1:
            seconds = {form: statistics.median([seconds_of(step, batch) for _ in range(4)][1:]) for form, step in steps.items()}
            self.non_private_form = min(seconds, key=seconds.__getitem__)
            shown = ", ".join(f"{form} {s:.3g} s" for form, s in seconds.items())
            self.bench.note(f"{self.name}: non-private head: {shown}; {self.non_private_form} it is")

    def check_one_pass(self) -> list[dict[str, Any]]:
        """Compare one_pass with vmap on three records, in float32 and in the run's precision.

        Raises:
            DisagreementError: the difference is more than the precision's tolerance.
        """
        batch, rows = make_batch(3, self.bench.device), []
        for precision in dict.fromkeys(["float32", self.bench.precision]):
            ours, oracle = (self.clipped(method, batch, precision=precision).grads for method in ("one_pass", "vmap"))
            rows.append(self._agreed("one_pass_eager", ours, oracle, precision))
        return rows

    def check_compiled(self, step: Step, batch: Batch) -> dict[str, Any]:
        """Compare a compiled one_pass step with the eager one, which agrees with vmap, on the batch that it was compiled for.

        Raises:
            DisagreementError: as above.
        """
        return self._agreed("one_pass_compiled", step(batch).grads, self.clipped("one_pass", batch).grads, self.bench.precision)

    def _agreed(self, variant: str, ours: dict[str, Tensor], oracle: dict[str, Tensor], precision: str) -> dict[str, Any]:
        difference, allowed = relative_difference(ours, oracle), TOLERANCE[precision]
        against = "vmap" if variant == "one_pass_eager" else "eager"
        line = f"{self.name}: {variant} from {against}, {precision}: relative difference {difference:.2g}, allowed {allowed:.0e}"
        if not difference <= allowed:
            raise DisagreementError(line)
        self.bench.note(line)
        return row(self.name, variant, f"difference_{precision}", [difference])

    def check_opacus(self, variant: str) -> None:
        """Compare Opacus with vmap on three records in float32, the same parameters frozen.

        Raises:
            UnavailableError: Opacus is missing, or computes something else.
        """
        batch, model = make_batch(3, self.bench.device), twin(self.model)
        step = opacus_variants.make_step(variant, twin(self.model), self.forms["plain"], self.max_grad_norm, None)
        frozen = opacus_variants.freeze_bare_parameters(model)
        difference = relative_difference(step(batch), self.clipped("vmap", batch, model=model, precision="float32").grads)
        line = f"{self.name}: {variant} from vmap: relative difference {difference:.2g}; frozen for Opacus, being bare: {', '.join(frozen)}"
        if not difference <= OPACUS_TOLERANCE:
            raise UnavailableError(line)
        self.bench.note(line)


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
    """Peak memory of one step in MB (10^6 bytes), weights, buffers and batch included; see the top of the file."""
    resident = sum(t.nbytes for t in (*model.parameters(), *model.buffers(), *(t for t in batch if t is not None)))
    gc.collect()
    if batch.valid_B.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(batch)
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before + resident) / 1e6
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(batch)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()  # negative where memory is freed
        peak = max(peak, now)
    return (peak + resident) / 1e6


def measure_case(name: str, bench: Bench, deadline: float) -> list[dict[str, Any]]:
    """Time and memory of every variant of a case that can run.

    Args:
        deadline: on time.monotonic()'s clock; past it no comparison is started and no round after the third, past the budget's end no
            compiled variant and no round after the first.
    """
    started = time.monotonic()
    subject = Subject(name, bench)
    batch = make_batch(subject.num_records, bench.device)
    method = "one_pass" if set(ONE_PASS) & set(bench.variants) else "vmap"
    subject.max_grad_norm = float(subject.clipped(method, batch).norms_B.median())
    rows = subject.check_one_pass() if method == "one_pass" else []
    subject.choose_form(batch)
    steps: dict[str, Step] = {}
    for variant in bench.variants:
        limit = deadline if variant in COMPARISONS else bench.end if variant.endswith("compiled") else float("inf")
        if time.monotonic() > limit:
            bench.note(f"{name}: {variant} dropped (time budget)")
            continue
        try:
            if variant.startswith("opacus"):
                subject.check_opacus(variant)
            step = subject.make_step(variant)
            progress(f"{name}: {variant}: first step {seconds_of(step, batch):.1f} s")
            if variant == "one_pass_compiled":
                rows.append(subject.check_compiled(step, batch))
            steps[variant] = step
        except (UnavailableError, torch.OutOfMemoryError) as error:
            bench.note(f"{name}: {variant} skipped: {_first_line(error)}")
        except RuntimeError as error:
            if variant == NON_PRIVATE[0]:
                raise
            bench.note(f"{name}: {variant} FAILED: {_first_line(error)}")
            bench.failed = True
        free_memory(bench)
        if variant not in COMPARISONS:
            bench.longest_start_s = max(bench.longest_start_s, time.monotonic() - started)
    seconds = time_rounds(name, bench, steps, batch, deadline)
    memory = {variant: peak_mb(step, batch, subject.model) for variant, step in steps.items()}
    for metric, value in (
        ("physical_batch", subject.num_records),
        ("threads", torch.get_num_threads()),
        ("forward_bits", bench.forward_bits),
    ):
        rows.append(row(name, "setting", metric, [value]))
    return rows + rows_of(name, bench, subject.num_records, seconds, memory)


def time_rounds(name: str, bench: Bench, steps: dict[str, Step], batch: Batch, deadline: float) -> dict[str, list[float]]:
    """Seconds of each variant in rounds 0, 1, ...; the lists of the comparisons are shorter."""
    seconds: dict[str, list[float]] = {variant: [] for variant in steps}
    shuffle = random.Random(0).shuffle
    for number in range(bench.rounds):
        if number and time.monotonic() > (deadline if number >= 3 else bench.end):
            bench.note(f"{name}: {number} of {bench.rounds} rounds (time budget)")
            break
        order = [v for v in steps if v not in COMPARISONS or number < (bench.rounds + 1) // 2]
        shuffle(order)
        for variant in order:
            seconds[variant].append(seconds_of(steps[variant], batch))
        progress(f"{name}: round {number + 1} of {bench.rounds}: " + ", ".join(f"{v} {seconds[v][-1]:.3g} s" for v in order))
    return seconds


def rows_of(name: str, bench: Bench, num_records: int, seconds: dict[str, list[float]], memory: dict[str, float]) -> list[dict[str, Any]]:
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
            row(name, variant, "time_ratio", [s / base for s, base in zip(values, seconds[fastest], strict=False)]),
            row(name, variant, "memory_mb", [memory[variant]]),
            row(name, variant, "memory_ratio", [memory[variant] / memory[smallest]]),
            row(name, variant, "records_per_s", rates),
        ]
        if bench.on_gpu:
            rows.append(row(name, variant, "gpu_hours_per_epoch", [EPOCH_RECORDS / rate / 3600 for rate in rates]))
    return rows


def search_largest_batches(names: list[str], bench: Bench) -> list[dict[str, Any]]:
    """Largest physical batch of every case and variant that the budget reaches, the compiled variants last; on a GPU only."""
    rows = []
    tasks = [(name, variant) for name in names for variant in bench.variants]
    for name, variant in sorted(tasks, key=lambda task: (task[1].endswith("compiled"), task[1] in COMPARISONS)):
        if bench.left_s() == 0:
            bench.note(f"{name}: {variant}: largest batch dropped (time budget)")
            continue
        torch._dynamo.reset()
        subject = Subject(name, bench)
        subject.max_grad_norm = 1.0  # clips or not: no difference to memory
        subject.piece = sys.maxsize
        try:
            largest = largest_batch(subject.make_step(variant, dynamic=True), subject.num_records, bench)
        except (UnavailableError, RuntimeError) as error:
            bench.note(f"{name}: {variant}: no largest batch: {_first_line(error)}")
            largest = 0
        if largest:
            progress(f"{name}: {variant}: largest batch {largest}")
            rows.append(row(name, variant, "max_physical_batch", [largest]))
        del subject
        free_memory(bench)
    return rows


def largest_batch(step: Step, start: int, bench: Bench) -> int:
    """Most records that one step takes before memory runs out, to a sixteenth: doubling, then bisection.

    Raises:
        UnavailableError: the time budget ends first.
    """

    low, high, doubling = 0, start, True
    while doubling or high - low > max(1, low // 16):
        if bench.left_s() == 0:
            raise UnavailableError(f"{low} records fit; the time budget is used up")
        tried = high if doubling else (low + high) // 2
        try:
            seconds_of(step, make_batch(tried, bench.device))
            low, high = tried, 2 * tried if doubling else high
        except torch.OutOfMemoryError:
            high, doubling = tried, False
        free_memory(bench)
    return low


def free_memory(bench: Bench) -> None:
    """Give back what a finished or failed step left behind."""
    gc.collect()
    if bench.on_gpu:
        torch.cuda.empty_cache()


def render_table(rows: list[dict[str, Any]]) -> str:
    """Case by variant: time_ratio with its range, memory_ratio."""
    found = {(r["case"], r["variant"], r["metric"]): r for r in rows}
    lines = [f"{'case':<12} {'variant':<22} {'time_ratio':<26} memory_ratio"]
    for case, variant in dict.fromkeys((r["case"], r["variant"]) for r in rows if r["metric"] == "time_ratio"):
        ratio, memory = found[case, variant, "time_ratio"], found[case, variant, "memory_ratio"]["value"]
        shown = f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
        lines.append(f"{case:<12} {variant:<22} {shown:<26} {memory:.3f}")
    return "\n".join(lines)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _chosen(where: str, text: str | None, known: tuple[str, ...]) -> list[str]:
    """The names in ``text``, comma-separated, in the order of ``known``; all without a text; the baseline always."""
    names = known if text is None else text.split(",")
    for name in names:
        if name not in known:
            raise ConfigError(f"{where}: {name!r}; expected some of {', '.join(known)}. Separate them by commas.")
    return [name for name in known if name in names or name == NON_PRIVATE[0]]


def run(args: argparse.Namespace) -> int:
    bench = Bench(args)
    names = _chosen("--cases", args.cases, tuple(CASES)) if args.cases or not args.quick else QUICK
    # A graph for each shape, and an error where torch would otherwise go on uncompiled without a word.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    if not bench.on_gpu:
        torch.set_num_threads(args.threads)
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        if bench.left_s() <= bench.longest_start_s:  # compiling is most of a start, and cannot be interrupted
            bench.note(f"{name}: dropped (time budget)")
            continue
        torch._dynamo.reset()
        try:
            # Twice an even share of what is left: the first cases matter most, and are the larger ones.
            rows += measure_case(name, bench, time.monotonic() + 2 * bench.left_s() / (len(names) - number + 1))
        except DisagreementError as error:
            bench.note(f"{name}: NOT TIMED: {error}")
            bench.failed = True
        except torch.OutOfMemoryError as error:
            bench.note(f"{name}: dropped: {_first_line(error)}")
        free_memory(bench)
    if bench.on_gpu:
        rows += search_largest_batches(names, bench)
    packages = ["dpvision", "torch", *(["opacus"] if opacus_variants.INSTALLED else [])]
    write_result(args.json, "clipping", rows, packages=packages, device=torch.cuda.get_device_name() if bench.on_gpu else "cpu")
    print("\n" + "\n".join(bench.notes) + "\n\n" + render_table(rows))
    if bench.on_gpu:
        print("\n" + render_beside_dpcap(rows, f"{torch.cuda.get_device_name()}, {bench.precision}"))
    return int(bench.failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="Tiny and Base only; on a CPU in under 20 minutes")
    parser.add_argument("--cases", help=f"some of {', '.join(CASES)}")
    parser.add_argument("--variants", help=f"some of {', '.join(VARIANTS)}; {NON_PRIVATE[0]} is always there")
    parser.add_argument("--rounds", type=int, help="default 5, on a GPU 15")
    parser.add_argument("--batch", type=int, help="records of the batch; default: by case and device")
    parser.add_argument("--threads", type=int, default=2, help="on a CPU")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", choices=list(TOLERANCE), help="autocast of the forward pass; default float32, on a GPU bfloat16")
    parser.add_argument("--budget-s", type=float, help="seconds after which less is measured; default 400 on a GPU, 1050 with --quick")
    parser.add_argument("--json", type=Path, help="file to write")
    try:
        code = run(parser.parse_args())
    except DPVisionError as error:
        print(error, file=sys.stderr)
        code = 2
    sys.exit(code)


if __name__ == "__main__":
    main()
