"""The parts of a whole training step, with privacy and without, from stored JPEG files: no cost
hides between benchmarks.

    python benchmarks/step.py [--small] [--models A,B] [--batch N] [--physical N] [--rounds N]
    [--threads N]
                              [--device cpu|cuda] [--precision P] [--compile] [--json FILE]
    torchrun --nproc-per-node 2 benchmarks/step.py --threads 1 ...

"private" is what ``train.loop.fit`` does in a step, by the same functions: draw, load, clip, totals
(of the physical batches in float64, and the metrics), reduce, noise, optimizer, ledger.
"non_private" trains a copy of the model on the same records: full physical batches, one backward
pass each into ``.grad``, torch's AdamW; its "clip" is that pass. Both sides take a step in every
round, in turn, after two passes of --physical records and a step each that are not counted: while a
pass maps memory for the first time, it takes up to a third longer. "page_faults" shows what was
still mapped. Each step is printed to standard error when it ends. Steps of Poisson size: --batch
expected records out of three times as many scenes at the model's image size, at first weights;
captioners have a vocabulary of 400.

"fill" is the share of the rows of the private passes that are records: passes are buckets by a
hash, and are padded. With --compile both sides run compiled blocks. On a GPU steps are timed
without a wait inside, and the parts are those of one more step of each side with one.

Under torchrun the ranks share the batch on both sides; the non-private loop adds up its gradients
in float32. CPU time is that of all ranks, other figures are rank 0's; where another rank's buckets
hold more records, "totals" includes waiting for it.

Seconds a step by the clock; "load" is the time waited for the loader's threads. "time_ratio" and
"cpu_ratio" (CPU time of all threads) are private over non-private in the same round; the goal is
1.15 at Base with --batch 256. --small: models of 32 px, seconds in all.
"""

import argparse
import contextlib
import copy
import io
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from common import row, write_result
from intel_kernels import take_intel_kernels
from PIL import Image

from dpvision.config import CaptionerConfig, RunConfig
from dpvision.config.resolve import resolve
from dpvision.data.batch import Batch
from dpvision.data.importer import import_samples
from dpvision.data.keys import StepKey
from dpvision.data.loader import physical_batches
from dpvision.data.sources import Sample
from dpvision.data.tokenizer import train_tokenizer
from dpvision.devices import keep_freed_memory, loader_threads
from dpvision.dp import clip
from dpvision.dp.clip import clipped_sum
from dpvision.dp.noise import privatize
from dpvision.optim.ema import update_average
from dpvision.optim.schedule import learning_rate
from dpvision.privacy.plan import DPPlan
from dpvision.privacy.sampling import derive_rng
from dpvision.privacy.stream import Key
from dpvision.recipes import RECIPES
from dpvision.synthetic.scenes import make_scene
from dpvision.train import start
from dpvision.train import step as train_step
from dpvision.train.distributed import Group, broadcast_int, gather_texts, join, together
from dpvision.train.loop import Session
from dpvision.train.step import on_device

MODELS = {
    "mae_base": "vip.base",
    "cap_base": "dpcap.base",
    "mae_micro": "vip.micro",
    "cap_micro": "dpcap.micro",
}
VOCABULARY = 400
DRAW_KEY, NOISE_KEY = b"d" * 32, b"n" * 32


class Parts:
    """Seconds of each part of one step; time inside a part is not counted again in "totals".

    Args:
        wait: wait for the GPU at the end of each part, so that its work counts there.
    """

    def __init__(self, wait: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self._wait = wait

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            if self._wait:
                torch.cuda.synchronize()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begun

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return call

    def waiting(self, name: str, items: Iterator[Any]) -> Iterator[Any]:
        """The items, with the time that each is waited for."""
        while True:
            with self.part(name):
                item = next(items, None)
            if item is None:
                return
            yield item


def private_step(s: Session, *, wait: bool = False) -> tuple[int, dict[str, float]]:
    """One step as ``fit`` takes it; the number of records and the seconds of its parts, with the
    rows of its passes as "rows".
    """
    parts, batches, one_pass, rows = Parts(wait), train_step._batches, clip.one_pass, []

    def counted(loss_fn: Any, model: Any, batch: Batch, *args: Any) -> Any:
        rows.append(len(batch.record_id_B))
        return one_pass(loss_fn, model, batch, *args)

    with parts.part("ledger"):
        step = broadcast_int(s.updates if s.run is None else s.run.ledger.append(), s.group)
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(DPPlan, "draw", parts.timed("draw", DPPlan.draw)))
        stack.enter_context(
            patch.object(
                train_step, "_batches", lambda *args: parts.waiting("load", batches(*args))
            )
        )
        stack.enter_context(patch.object(clip, "one_pass", counted))
        stack.enter_context(
            patch.object(train_step, "clipped_sum", parts.timed("clip", train_step.clipped_sum))
        )
        stack.enter_context(
            patch.object(
                train_step, "all_reduce_sum", parts.timed("reduce", train_step.all_reduce_sum)
            )
        )
        begun, before = time.perf_counter(), sum(parts.seconds.values())
        total, _ = train_step.step_sum(step, s, Key.for_tests(DRAW_KEY))
        parts.seconds["totals"] = (
            time.perf_counter() - begun - (sum(parts.seconds.values()) - before)
        )
    with parts.part("noise"):
        gradient = privatize(total, s.plan, step, Key.for_tests(NOISE_KEY), owners=s.group)
    with parts.part("optimizer"):
        s.optimizer.step(gradient, learning_rate(s.config.optim, step, s.plan.steps))
        if s.ema is not None:
            update_average(s.ema, s.model, s.config.optim, s.updates)
    s.updates += 1
    return total.num_records, parts.seconds | {"rows": float(sum(rows))}


def plain_step(
    s: Session,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    *,
    wait: bool = False,
) -> tuple[int, dict[str, float]]:
    """The same records by an ordinary training loop."""
    parts, key = Parts(wait), StepKey(s.config.seed, step)
    with parts.part("draw"):
        drawn = s.rows[
            s.plan.another_run().draw(step, len(s.rows), derive_rng(Key.for_tests(DRAW_KEY), step))
        ]
        rows = drawn[s.group.rank :: s.group.world_size]
    optimizer.zero_grad()
    for batch in parts.waiting("load", full_batches(s, rows, key)):
        with parts.part("clip"):
            plain_pass(s, model, batch, key)
    if s.group.world_size > 1:
        with parts.part("reduce"):
            for work in [
                dist.all_reduce(p.grad, async_op=True)
                for p in model.parameters()
                if p.grad is not None
            ]:
                work.wait()
    with parts.part("optimizer"):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.div_(s.plan.expected_batch_size)
        optimizer.step()
    return len(drawn), parts.seconds


def plain_pass(s: Session, model: torch.nn.Module, batch: Batch, key: StepKey) -> None:
    with train_step.autocast(s.config.hardware.precision, s.group.device):
        losses_B = s.loss_fn(model, batch, key)
    losses_B.sum().backward()


def full_batches(s: Session, rows: np.ndarray, key: StepKey) -> Iterator[Batch]:
    """Full physical batches of these rows of the store, on the device."""
    hardware, device = s.config.hardware, s.group.device
    batches = physical_batches(
        s.store,
        rows,
        key,
        s.config.data,
        s.config.model.encoder.image_size,
        physical_batch_size=hardware.physical_batch_size,
        workers=loader_threads(hardware.workers, device),
        captions=s.words,
        normalised=device.type == "cpu",
    )
    for batch, _ in on_device(batches, device, s.config.data):
        num, least = len(batch.record_id_B), hardware.physical_batch_size
        if (
            hardware.compile and num < least
        ):  # a program for every number of rows would be compiled in the middle
            row_B = torch.arange(least, device=device) % num
            batch = Batch._make(None if value is None else value[row_B] for value in batch)
        yield batch


def map_memory(s: Session, model: torch.nn.Module) -> None:
    """Two passes of a full physical batch of each side, in turn, so that most of the memory of
    later ones is mapped.
    """
    key = StepKey(s.config.seed, 0)
    batch = next(full_batches(s, s.rows[: s.config.hardware.physical_batch_size], key))
    for _ in range(2):
        with train_step.autocast(s.config.hardware.precision, s.group.device):
            clipped_sum(
                s.loss_fn,
                s.model,
                batch,
                key,
                max_grad_norm=s.plan.max_grad_norm,
                blocks=s.blocks,
                check_separability=False,
            )
        plain_pass(s, model, batch, key)
        model.zero_grad()


def make_config(name: str, args: argparse.Namespace, folder: Path, group: Group) -> RunConfig:
    """The recipe at its first weights, on JPEG files of scenes; rank 0 writes them."""
    base, num = RECIPES[MODELS[name]](), 3 * args.batch
    tokenizer, model = folder / "tokenizer.json", base.model
    made = train_tokenizer([make_scene(i, 16).caption for i in range(1000)], VOCABULARY)
    if isinstance(model, CaptionerConfig):
        model = replace(model, vocab_size=made.vocab_size)
    with together(group):
        if group.is_main:
            made.save(tokenizer)
            import_samples(
                (_sample(i, base.model.encoder.image_size) for i in range(num)), folder / "scenes"
            )
    privacy = replace(
        base.privacy,
        dataset_size=num,
        expected_batch_size=args.batch,
        steps=10_000,
        target_epsilon=None,
        noise_multiplier=10.0,
        delta=None,
        max_batch_size=None,
    )
    hardware = replace(
        base.hardware,
        physical_batch_size=args.physical,
        workers=args.threads,
        device=args.device,
        precision=args.precision,
        compile=args.compile,
    )
    data = replace(
        base.data, images="store", store=str(folder / "scenes"), tokenizer=str(tokenizer)
    )
    return resolve(
        replace(base, model=model, privacy=privacy, data=data, hardware=hardware, init_from=None),
        {},
    )


def _sample(i: int, size: int) -> Sample:
    scene, file = make_scene(i, size), io.BytesIO()
    Image.fromarray(scene.image).save(file, "JPEG", quality=90)
    return Sample(str(i), file.getvalue(), {"captions": [scene.caption]})


def measure(name: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of a model; ``args`` as on the command line."""
    group = join(args.device)  # the session leaves it
    on_gpu = group.device.type == "cuda"
    found: dict[str, list[dict[str, float]]] = {"private": [], "non_private": []}
    parts: dict[str, list[dict[str, float]]] = (
        {"private": [], "non_private": []} if on_gpu else found
    )
    with tempfile.TemporaryDirectory() as own, contextlib.ExitStack() as stack:
        folder = Path(gather_texts(own, group)[0])
        s = stack.enter_context(
            start.new_session(make_config(name, args, folder, group), folder / "run")
        )
        model = copy.deepcopy(s.model)
        plain = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=on_gpu or None
        )
        if args.compile:
            for blocks in (m for m in model.modules() if isinstance(m, torch.nn.ModuleList)):
                for block in blocks:
                    block.compile(dynamic=False)
        map_memory(s, model)
        private_step(s)
        plain_step(s, model, plain, 0)
        for number in range(1, args.rounds + 1 + on_gpu):
            split = number > args.rounds
            for variant in sorted(found, reverse=number % 2 == 1):
                gather_texts("", group)  # the ranks begin together
                if on_gpu:
                    torch.cuda.synchronize()
                wall, cpu, faults = time.perf_counter(), time.process_time(), _page_faults()
                step = (
                    private_step(s, wait=split)
                    if variant == "private"
                    else plain_step(s, model, plain, number, wait=split)
                )
                if on_gpu:
                    torch.cuda.synchronize()
                seconds, cpu = time.perf_counter() - wall, time.process_time() - cpu
                counts = {"records": step[0], "page_faults": _page_faults() - faults}
                costs = {
                    **step[1],
                    "step": seconds,
                    "cpu": sum(map(float, gather_texts(str(cpu), group))),
                    **counts,
                }
                (parts if split else found)[variant].append(costs)
                if group.is_main:
                    print(
                        f"{name} {variant}: {costs['step']:.3g} s, CPU {costs['cpu']:.3g} s, "
                        f"{step[0]} records",
                        file=sys.stderr,
                    )
    for ours, theirs in zip(found["private"], found["non_private"], strict=True):
        assert ours["records"] == theirs["records"], "both sides take the same draw"
    for variant, steps in found.items():
        for part in steps[0]:
            whole = part in ("step", "cpu", "records", "page_faults")
            values = [costs[part] for costs in (steps if whole else parts[variant])]
            yield row(
                name,
                variant,
                part if part in ("records", "page_faults", "rows") else f"{part}_s",
                values,
            )
    for ratio, part in (("time_ratio", "step"), ("cpu_ratio", "cpu")):
        yield row(
            name,
            "private",
            ratio,
            [
                a[part] / b[part]
                for a, b in zip(found["private"], found["non_private"], strict=True)
            ],
        )
    if group.world_size == 1:
        yield row(
            name,
            "private",
            "fill",
            [costs["records"] / costs["rows"] for costs in found["private"]],
        )


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--small",
        action="store_true",
        help="models of 32 px, batches of 64 in passes of 32, unless others are given",
    )
    parser.add_argument("--models", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--batch", type=int, help="expected batch size; 256 if not given")
    parser.add_argument("--physical", type=int, help="records of a pass; 32 if not given")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of torch and of the loader")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--precision", choices=["float32", "bfloat16", "float16"], default="float32"
    )
    parser.add_argument("--compile", action="store_true", help="compiled blocks, on both sides")
    parser.add_argument("--intel-kernels", action="store_true", help="see intel_kernels.py")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = take_intel_kernels() if args.intel_kernels else "cpu"
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    models = args.models or ("mae_micro,cap_micro" if args.small else "mae_base,cap_base")
    args.batch, args.physical = args.batch or (64 if args.small else 256), args.physical or 32
    rows = [line for name in models.split(",") for line in measure(name, args)]
    if os.environ.get("RANK", "0") == "0":
        packages = ["dpvision", "torch", "numpy"]
        write_result(args.json, "step", rows, packages=packages, device=device)


if __name__ == "__main__":
    main()
