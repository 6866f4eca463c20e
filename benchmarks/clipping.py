"""The price of private gradients: time and memory of one physical batch's clipped sum against
ordinary training.

    python benchmarks/clipping.py [--quick] [--cases A,B] [--variants A,B] [--rounds N] [--batch N]
    [--threads N]
                                  [--device D] [--precision P] [--budget-s S] [--json FILE]

Cases: the ViP recipes' masked autoencoders (mae_*) and the DP-Cap recipes' captioners (cap_*) at
224 px; --quick takes Tiny and Base. "non_private_*" is forward and backward of the mean loss into
fresh .grad, the private variants are the clipped sum at the median of the records' norms; no
optimizer steps. "compiled" is torch.compile block by block. Captioners: the non-private variants
and one_pass each take the form of the vocabulary head, "plain" or "fused", with which their eager
step is faster here, as the output says; "time_s_head_*" and "memory_mb_head_*" are of both (runs
take the fused one). vmap and Opacus take the plain one.

Each round runs every variant once, in shuffled order. "time_ratio" is against the baseline of the
same round: non_private_eager on a CPU, the faster non-private variant on a GPU ("memory_ratio": the
smaller). The comparisons (vmap, Opacus) take part in the first half of the rounds; on a GPU vmap
and opacus_per_sample hold the gradients of at most 32 records at once, in the search for
"max_physical_batch" of all.

"memory_mb" is the peak of one step: weights, buffers and batch, and on top what the step allocates,
gradients included (measure.peak_mb). "gpu_hours_per_epoch" is for 233 million records at
"records_per_s". On a CPU the C library is told to keep freed memory for the next step
(dpvision.train.memory, as training does), which all variants gain by alike; the setting
"freed_memory_kept" is 1 where it could be told.

Before a case is timed, one_pass must agree with vmap on three records, with each form of the head;
else the case is left out and the script exits with 1.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "KINETO_LOG_LEVEL", "99"
)  # before torch: the profiler would report to stderr at every start

import opacus_variants
import torch
from captioners import loss_forms, make_batch, render_beside_dpcap
from common import row, write_result
from intel_kernels import take_intel_kernels
from measure import (
    COMPARISONS,
    NON_PRIVATE,
    ONE_PASS,
    VARIANTS,
    Bench,
    Step,
    UnavailableError,
    chosen,
    first_line,
    free_memory,
    largest_batch,
    peak_mb,
    progress,
    render_table,
    rows_of,
    seconds_of,
    time_rounds,
)
from opacus_variants import relative_difference, twin
from torch import Tensor, nn

from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.devices import keep_freed_memory
from dpvision.dp.clip import ClippedSum, clipped_sum
from dpvision.dp.rounding import RESERVE
from dpvision.errors import DPVisionError
from dpvision.models import make_model
from dpvision.recipes import RECIPES
from dpvision.train.objectives import mae_losses
from dpvision.train.step import autocast

try:
    from dpvision.dp.compiled import compile_blocks
except ImportError:
    compile_blocks = None

KEY = StepKey(0, 0)
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
"""Largest relative difference of one_pass's sum from vmap's at each precision."""
UNCLIPPED = 1e9
"""A clip norm above every gradient's."""
OPACUS_TOLERANCE = 1e-3
"""Opacus adds 1e-6 to norms and sums their squares in float32: another number, but of the same
thing.
"""

# Name: records of a batch on a CPU, on a GPU; in order of importance: a time budget drops from the
# end.
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


class DisagreementError(Exception):
    """one_pass differs from its oracle by more than rounding."""


class Subject:
    """A case's model, the forms of its loss, and the steps that work on them; all steps share the
    weights' memory.
    """

    def __init__(self, name: str, bench: Bench) -> None:
        self.name, self.bench = name, bench
        kind, size = name.split("_")
        recipe = f"vip.{size}" if kind == "mae" else f"dpcap.{size}"
        self.model = make_model(RECIPES[recipe]().model, seed=0).to(bench.device)
        self.forms = {"plain": mae_losses} if kind == "mae" else loss_forms()
        self.num_records = bench.batch or CASES[name][bench.on_gpu]
        self.form = bench.forms.get(name, {"non_private": "plain", "one_pass": "plain"})
        self.max_grad_norm = float("nan")
        self.piece = 32 if bench.on_gpu else None
        """Most records whose gradients vmap and opacus_per_sample hold at once; None: clipped_sum's
        choice, and all for Opacus.
        """

    def make_step(self, variant: str, *, dynamic: bool = False) -> Step:
        """The step of a variant; its first call may compile, with ``dynamic`` once for all batch
        sizes.

        Raises:
            UnavailableError: something that the variant needs is missing.
        """
        if variant in NON_PRIVATE:
            return self._non_private_step(
                self.form["non_private"], compiled=variant.endswith("compiled"), dynamic=dynamic
            )
        if variant.startswith("opacus"):
            return opacus_variants.make_step(
                variant,
                twin(self.model),
                self.bench.cast(self.forms["plain"]),
                self.max_grad_norm * (1 - RESERVE),
                self.piece,
            )
        model = twin(self.model)
        if variant == "one_pass_compiled":
            if compile_blocks is None:
                raise UnavailableError("dpvision.dp.compiled is not there")
            blocks = compile_blocks(model, self.num_records)
            return lambda batch: self.clipped("one_pass", batch, model=model, blocks=blocks)
        method = "vmap" if variant == "vmap" else "one_pass"
        return lambda batch: self.clipped(method, batch, model=model)

    def clipped(
        self,
        method: str,
        batch: Batch,
        *,
        model: nn.Module | None = None,
        precision: str | None = None,
        form: str | None = None,
        clip_norm: float | None = None,
        **settings: Any,
    ) -> ClippedSum:
        """dpvision's clipped sum; at the case's clip norm, 1 until there is one, unless another is
        given.
        """
        if clip_norm is None:
            clip_norm = 1.0 if self.max_grad_norm != self.max_grad_norm else self.max_grad_norm
        with autocast(precision or self.bench.precision, self.bench.device):
            return clipped_sum(
                self.forms[form or self.form.get(method, "plain")],
                model or self.model,
                batch,
                KEY,
                max_grad_norm=clip_norm,
                method=method,
                chunk_size=self.piece if method == "vmap" else None,
                # Made once for a model, here for each variant's copy: half a minute on a GPU.
                check_separability=False,
                **settings,
            )

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
            for (
                p
            ) in params:  # the gradients leave with the caller, so that the next step's are fresh
                p.grad = None
            return grads

        return step

    def choose_forms(self, ways: list[str], batch: Batch) -> list[dict[str, Any]]:
        """Time the eager steps with each form of the head and keep the faster; blocks, compiled or
        not, are the same in both.

        Args:
            ways: "non_private", "one_pass" or both.

        Returns:
            Rows with time and memory of each form; none where there is one form only.
        """
        rows: list[dict[str, Any]] = []
        for way in ways if len(self.forms) > 1 else []:
            steps = {form: self._eager_step(way, form) for form in self.forms}
            rounds = [
                {form: seconds_of(step, batch) for form, step in steps.items()} for _ in range(4)
            ][1:]
            seconds = {form: [of[form] for of in rounds] for form in steps}
            memory = {form: peak_mb(step, batch, self.model) for form, step in steps.items()}
            self.form[way] = min(seconds, key=lambda form: statistics.median(seconds[form]))
            shown = ", ".join(
                f"{form} {statistics.median(seconds[form]):.3g} s and {memory[form]:,.0f} MB"
                for form in steps
            )
            self.bench.note(f"{self.name}: {way} head: {shown}; {self.form[way]} it is")
            for form in steps:
                rows.append(row(self.name, f"{way}_eager", f"time_s_head_{form}", seconds[form]))
                rows.append(
                    row(self.name, f"{way}_eager", f"memory_mb_head_{form}", [memory[form]])
                )
        self.bench.forms[self.name] = self.form
        return rows

    def _eager_step(self, way: str, form: str) -> Step:
        if way == "non_private":
            return self._non_private_step(form, compiled=False)
        return lambda batch: self.clipped(way, batch, form=form)

    def check_one_pass(self) -> list[dict[str, Any]]:
        """Compare one_pass, with each form of the head, with vmap on three records, in float32 and
        in the run's precision.

        Sums are compared without clipping, and norms beside them: one_pass clips by an upper bound
        of the norm, so that clipped sums differ by the bound's distance from it, up to 0.2% of C.

        Raises:
            DisagreementError: a difference is more than the precision's tolerance.
        """
        batch, rows = make_batch(3, self.bench.device), []
        for precision in dict.fromkeys(["float32", self.bench.precision]):
            oracle = self.clipped("vmap", batch, precision=precision, clip_norm=UNCLIPPED)
            for form in self.forms:
                ours = self.clipped(
                    "one_pass", batch, precision=precision, form=form, clip_norm=UNCLIPPED
                )
                metric = f"difference_{precision}" + (
                    f"_head_{form}" if len(self.forms) > 1 else ""
                )
                rows.append(
                    self._agreed("one_pass_eager", ours.grads, oracle.grads, precision, metric)
                )
                norms = {"norms": ours.norms_B}, {"norms": oracle.norms_B}
                rows.append(
                    self._agreed(
                        "one_pass_eager",
                        *norms,
                        precision,
                        metric.replace("difference", "norm_difference"),
                    )
                )
        return rows

    def check_compiled(self, step: Step, batch: Batch) -> dict[str, Any]:
        """Compare a compiled one_pass step with the eager one, which agrees with vmap, on the batch
        that it was compiled for.

        Raises:
            DisagreementError: as above.
        """
        ours, oracle, precision = (
            step(batch).grads,
            self.clipped("one_pass", batch).grads,
            self.bench.precision,
        )
        return self._agreed("one_pass_compiled", ours, oracle, precision, f"difference_{precision}")

    def _agreed(
        self,
        variant: str,
        ours: dict[str, Tensor],
        oracle: dict[str, Tensor],
        precision: str,
        metric: str,
    ) -> dict[str, Any]:
        difference, allowed = relative_difference(ours, oracle), TOLERANCE[precision]
        against = "vmap" if variant == "one_pass_eager" else "eager"
        line = (
            f"{self.name}: {variant} from {against}, {metric}: relative {difference:.2g}, "
            f"allowed {allowed:.0e}"
        )
        if not difference <= allowed:
            raise DisagreementError(line)
        self.bench.note(line)
        return row(self.name, variant, metric, [difference])

    def check_opacus(self, variant: str) -> None:
        """Compare Opacus with vmap on three records in float32, the same parameters frozen.

        Raises:
            UnavailableError: Opacus is missing, or computes something else.
        """
        batch, model = make_batch(3, self.bench.device), twin(self.model)
        step = opacus_variants.make_step(
            variant, twin(self.model), self.forms["plain"], self.max_grad_norm, None
        )
        frozen = opacus_variants.freeze_bare_parameters(model)
        difference = relative_difference(
            step(batch), self.clipped("vmap", batch, model=model, precision="float32").grads
        )
        line = (
            f"{self.name}: {variant} from vmap: relative difference {difference:.2g}; frozen for "
            f"Opacus, being bare: {', '.join(frozen)}"
        )
        if not difference <= OPACUS_TOLERANCE:
            raise UnavailableError(line)
        self.bench.note(line)


def measure_case(name: str, bench: Bench, deadline: float) -> Iterator[dict[str, Any]]:
    """Yield time and memory of every variant of a case that can run.

    Args:
        deadline: on time.monotonic()'s clock; past it no comparison is started and no round after
            the third, past the budget's end no compiled variant and no round after the first.
    """
    started = time.monotonic()
    subject = Subject(name, bench)
    batch = make_batch(subject.num_records, bench.device)
    method = "one_pass" if set(ONE_PASS) & set(bench.variants) else "vmap"
    subject.max_grad_norm = float(subject.clipped(method, batch).norms_B.median())
    if method == "one_pass":
        yield from subject.check_one_pass()
    if bench.rounds > 1:
        yield from subject.choose_forms(
            ["non_private", *(["one_pass"] if method == "one_pass" else [])], batch
        )
    steps: dict[str, Step] = {}
    for variant in bench.variants:
        limit = (
            deadline
            if variant in COMPARISONS
            else bench.end
            if variant.endswith("compiled")
            else float("inf")
        )
        if time.monotonic() > limit:
            bench.note(f"{name}: {variant} dropped (time budget)")
            continue
        try:
            if variant.startswith("opacus"):
                subject.check_opacus(variant)
            step = subject.make_step(variant)
            progress(f"{name}: {variant}: first step {seconds_of(step, batch):.1f} s")
            if variant == "one_pass_compiled":
                yield subject.check_compiled(step, batch)
            steps[variant] = step
        except (UnavailableError, torch.OutOfMemoryError) as error:
            bench.note(f"{name}: {variant} skipped: {first_line(error)}")
        except RuntimeError as error:
            if variant == NON_PRIVATE[0]:
                raise
            bench.note(f"{name}: {variant} FAILED: {first_line(error)}")
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
        ("freed_memory_kept", int(bench.freed_memory_kept)),
    ):
        yield row(name, "setting", metric, [value])
    yield from rows_of(name, bench, subject.num_records, seconds, memory)


def search_largest_batches(names: list[str], bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield the largest physical batch of every case and variant that the budget reaches, the
    compiled variants last; on a GPU only.

    With the form of the head that was the faster, as when it was timed.
    """
    tasks = [(name, variant) for name in names for variant in bench.variants]
    for name, variant in sorted(
        tasks, key=lambda task: (task[1].endswith("compiled"), task[1] in COMPARISONS)
    ):
        if bench.left_s() == 0:
            bench.note(f"{name}: {variant}: largest batch dropped (time budget)")
            continue
        torch._dynamo.reset()
        subject = Subject(name, bench)
        subject.max_grad_norm = 1.0  # clips or not: no difference to memory
        subject.piece = sys.maxsize
        try:
            step = subject.make_step(variant, dynamic=True)
            largest = largest_batch(
                step, lambda num: make_batch(num, bench.device), subject.num_records, bench
            )
        except (UnavailableError, RuntimeError) as error:
            bench.note(f"{name}: {variant}: no largest batch: {first_line(error)}")
            largest = 0
        if largest:
            progress(f"{name}: {variant}: largest batch {largest}")
            yield row(name, variant, "max_physical_batch", [largest])
        del subject
        free_memory(bench)


def run(args: argparse.Namespace) -> int:
    bench = Bench(args)
    names = chosen("--cases", args.cases, tuple(CASES)) if args.cases or not args.quick else QUICK
    # A graph for each shape, and an error where torch would otherwise go on uncompiled without a
    # word.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    device = torch.cuda.get_device_name() if bench.on_gpu else "cpu"
    if not bench.on_gpu:
        device = take_intel_kernels() if args.intel_kernels else device
        torch.set_num_threads(args.threads)
        bench.freed_memory_kept = keep_freed_memory()
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(names):
        if (
            bench.left_s() <= bench.longest_start_s
        ):  # compiling is most of a start, and cannot be interrupted
            bench.note(f"{name}: dropped (time budget)")
            continue
        torch._dynamo.reset()
        try:
            # Twice an even share of what is left: the first cases matter most, and are the larger
            # ones.
            rows.extend(
                measure_case(
                    name, bench, time.monotonic() + 2 * bench.left_s() / (len(names) - number + 1)
                )
            )
        except DisagreementError as error:
            bench.note(f"{name}: NOT TIMED: {error}")
            bench.failed = True
        except torch.OutOfMemoryError as error:
            bench.note(f"{name}: dropped: {first_line(error)}")
        free_memory(bench)
    if bench.on_gpu:
        rows += search_largest_batches(names, bench)
    packages = ["dpvision", "torch", *(["opacus"] if opacus_variants.INSTALLED else [])]
    write_result(args.json, "clipping", rows, packages=packages, device=device)
    print("\n" + "\n".join(bench.notes) + "\n\n" + render_table(rows))
    if bench.on_gpu:
        print(
            "\n" + render_beside_dpcap(rows, f"{torch.cuda.get_device_name()}, {bench.precision}")
        )
    return int(bench.failed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="Tiny and Base only; on a CPU in under 20 minutes"
    )
    parser.add_argument("--cases", help=f"some of {', '.join(CASES)}")
    parser.add_argument(
        "--variants", help=f"some of {', '.join(VARIANTS)}; {NON_PRIVATE[0]} is always there"
    )
    parser.add_argument("--rounds", type=int, help="default 5, on a GPU 15")
    parser.add_argument(
        "--batch", type=int, help="records of the batch; default: by case and device"
    )
    parser.add_argument("--threads", type=int, default=2, help="on a CPU")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument(
        "--precision",
        choices=list(TOLERANCE),
        help="autocast of the forward pass; default float32, on a GPU bfloat16",
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        help="seconds after which less is measured; default 400 on a GPU, 1050 with --quick",
    )
    parser.add_argument("--intel-kernels", action="store_true", help="see intel_kernels.py")
    parser.add_argument("--json", type=Path, help="file to write")
    try:
        code = run(parser.parse_args())
    except DPVisionError as error:
        print(error, file=sys.stderr)
        code = 2
    sys.exit(code)


if __name__ == "__main__":
    main()
