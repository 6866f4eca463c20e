"""The parts of a whole training step, with privacy and without, from stored JPEG files: no cost hides between benchmarks.

    python benchmarks/step.py [--small] [--models A,B] [--batch N] [--physical N] [--rounds N] [--threads N] [--json FILE]
    torchrun --nproc-per-node 2 benchmarks/step.py --threads 1 ...

"private" is what ``train.loop.fit`` does in a step, by the same functions: draw, load, clip, totals (of the physical batches in float64,
and the metrics), reduce, noise, optimizer, ledger. "non_private" trains a copy of the model on the same records: full physical batches, one
backward pass each into ``.grad``, torch's AdamW; its "clip" is that pass. In every round both sides take a step pass by pass: after each
private pass the plain loop catches up with its number of records, so that a machine that slows down slows both. One round is not
counted: while passes of new sizes map memory for the first time, a step takes up to a fifth longer. Both sides' seconds so far are printed
to standard error after each pass. Steps of Poisson size: --batch expected records out of three times as many scenes at the model's image
size, at first weights; captioners have a vocabulary of 400.

Under torchrun the ranks share the batch on both sides; the non-private loop adds up its gradients in float32. CPU time is that of all
ranks, other figures are rank 0's; where another rank's buckets hold more records, "totals" includes waiting for it.

Seconds a step by the clock; "load" is the time waited for the loader's threads. "time_ratio" and "cpu_ratio" (CPU time of all threads) are
private over non-private in the same round; the goal is 1.15 at Base with --batch 256. --small: models of 32 px, seconds in all.
"""

import argparse
import contextlib
import copy
import io
import os
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
from PIL import Image

from dpvision.config import CaptionerConfig, RunConfig
from dpvision.data.batch import Batch
from dpvision.data.importer import import_samples
from dpvision.data.keys import StepKey
from dpvision.data.loader import physical_batches
from dpvision.data.sources import Sample
from dpvision.data.tokenizer import train_tokenizer
from dpvision.dp.noise import privatize
from dpvision.optim.ema import update_average
from dpvision.optim.schedule import learning_rate
from dpvision.privacy.plan import DPPlan
from dpvision.privacy.sampling import derive_rng
from dpvision.recipes import RECIPES
from dpvision.synthetic.scenes import make_scene
from dpvision.train import start
from dpvision.train import step as train_step
from dpvision.train.distributed import Group, broadcast_int, gather_texts, join, together
from dpvision.train.heap import keep_freed_memory
from dpvision.train.loop import Session

MODELS = {"mae_base": "vip.base", "cap_base": "dpcap.base", "mae_micro": "vip.micro", "cap_micro": "dpcap.micro"}
VOCABULARY = 400
DRAW_KEY, NOISE_KEY = b"d" * 32, b"n" * 32


class Parts:
    """Seconds of each part of one step; time inside a part is not counted again in "totals"."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
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


class Clock:
    """Seconds by the clock, and CPU seconds, that were spent inside."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            self.wall, self.cpu = self.wall + time.perf_counter() - wall, self.cpu + time.process_time() - cpu


def private_step(s: Session, after_pass: Callable[[int], None] = lambda records: None) -> tuple[int, dict[str, float]]:
    """One step as ``fit`` takes it; the number of records and the seconds of its parts.

    Args:
        after_pass: called with the number of records so far after each physical batch; its time is no part of the step.
    """
    parts, batches, clip, records = Parts(), train_step._batches, train_step.clipped_sum, 0

    def clip_then_wait(*args: Any, **kwargs: Any) -> Any:
        nonlocal records
        with parts.part("clip"):
            found = clip(*args, **kwargs)
        records += found.num_records
        with parts.part("between"):
            after_pass(records)
        return found

    with parts.part("ledger"):
        step = broadcast_int(0 if s.run is None else s.run.ledger.append(), s.group)
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(DPPlan, "draw", parts.timed("draw", DPPlan.draw)))
        stack.enter_context(patch.object(train_step, "_batches", lambda *args: parts.waiting("load", batches(*args))))
        stack.enter_context(patch.object(train_step, "clipped_sum", clip_then_wait))
        stack.enter_context(patch.object(train_step, "all_reduce_sum", parts.timed("reduce", train_step.all_reduce_sum)))
        begun, before = time.perf_counter(), sum(parts.seconds.values())
        total, _ = train_step.step_sum(step, s, DRAW_KEY)
        parts.seconds["totals"] = time.perf_counter() - begun - (sum(parts.seconds.values()) - before)
    with parts.part("noise"):
        gradient = privatize(total, s.plan, step, NOISE_KEY, owners=s.group)
    with parts.part("optimizer"):
        s.optimizer.step(gradient, learning_rate(s.config.optim, step, s.plan.steps))
        if s.ema is not None:
            update_average(s.ema, s.model, s.config.optim, s.updates)
    s.updates += 1
    return total.num_records, {name: value for name, value in parts.seconds.items() if name != "between"}


class PlainStep:
    """A step of an ordinary training loop on the records of private step ``step``, taken pass by pass."""

    def __init__(self, s: Session, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        self.parts, self.clock, self.records = Parts(), Clock(), 0
        self._session, self._model, self._optimizer, self._drawn = s, model, optimizer, 0
        self._passes = self._take_passes(StepKey(s.config.seed, step), step)

    def catch_up(self, records: int) -> None:
        """Take passes until ``records`` have been seen, or all of this rank."""
        with self.clock.running():
            while self.records < records and next(self._passes, None) is not None:
                pass

    def finish(self) -> tuple[int, dict[str, float]]:
        """Take the rest of the step; return the number of records that all ranks drew, and the seconds of its parts."""
        with self.clock.running():
            for _ in self._passes:
                pass
            trained = [p for p in self._model.parameters() if p.grad is not None]
            if self._session.group.world_size > 1:
                with self.parts.part("reduce"):
                    for work in [dist.all_reduce(p.grad, async_op=True) for p in trained]:
                        work.wait()
            with self.parts.part("optimizer"):
                for p in trained:
                    assert p.grad is not None
                    p.grad.div_(self._session.plan.expected_batch_size)
                self._optimizer.step()
        return self._drawn, self.parts.seconds

    def _take_passes(self, key: StepKey, step: int) -> Iterator[int]:
        s, parts = self._session, self.parts
        with parts.part("draw"):
            drawn = s.rows[s.plan.draw(step, len(s.rows), derive_rng(DRAW_KEY, step))]
            rows = drawn[s.group.rank :: s.group.world_size]
        self._drawn = len(drawn)
        self._optimizer.zero_grad()
        for batch in parts.waiting("load", full_batches(s, rows, key)):
            with parts.part("clip"):
                s.loss_fn(self._model, batch, key).sum().backward()
            self.records += int(batch.valid_B.sum())
            yield self.records


def both_steps(s: Session, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, name: str) -> dict[str, dict[str, float]]:
    """The costs of a private and a plain step on the same records, by variant."""
    plain, whole = PlainStep(s, model, optimizer, step), Clock()
    begun = time.perf_counter()

    def after_pass(records: int) -> None:
        ours = time.perf_counter() - begun - plain.clock.wall
        plain.catch_up(records)
        if s.group.is_main:
            line = f"{name}: private {ours:.1f} s for {records} records, non-private {plain.clock.wall:.1f} s for {plain.records}"
            print(line, file=sys.stderr, flush=True)

    gather_texts("", s.group)  # the ranks begin together
    begun = time.perf_counter()
    with whole.running():
        private = private_step(s, after_pass)
    ours = whole.wall - plain.clock.wall, whole.cpu - plain.clock.cpu
    gather_texts("", s.group)
    found = {"private": (*private, *ours), "non_private": (*plain.finish(), plain.clock.wall, plain.clock.cpu)}
    return {
        variant: {**seconds, "step": wall, "cpu": sum(map(float, gather_texts(str(cpu), s.group))), "records": records}
        for variant, (records, seconds, wall, cpu) in found.items()
    }


def full_batches(s: Session, rows: np.ndarray, key: StepKey) -> Iterator[Batch]:
    """Full physical batches of these rows of the store."""
    hardware = s.config.hardware
    return physical_batches(
        s.store, rows, key, s.config.data, s.config.model.encoder.image_size,
        physical_batch_size=hardware.physical_batch_size, workers=hardware.workers, captions=s.words,
    )  # fmt: skip


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
            import_samples((_sample(i, base.model.encoder.image_size) for i in range(num)), folder / "scenes")
    privacy = replace(
        base.privacy, dataset_size=num, expected_batch_size=args.batch, steps=10_000, target_epsilon=None,
        noise_multiplier=10.0, delta=None, max_batch_size=None,
    )  # fmt: skip
    hardware = replace(
        base.hardware, physical_batch_size=args.physical, workers=args.threads, device="cpu", precision="float32", compile=False
    )
    data = replace(base.data, images="store", store=str(folder / "scenes"), tokenizer=str(tokenizer))
    return replace(base, model=model, privacy=privacy, data=data, hardware=hardware, init_from=None)


def _sample(i: int, size: int) -> Sample:
    scene, file = make_scene(i, size), io.BytesIO()
    Image.fromarray(scene.image).save(file, "JPEG", quality=90)
    return Sample(str(i), file.getvalue(), {"captions": [scene.caption]})


def measure(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    group = join("cpu")  # the session leaves it
    found: dict[str, list[dict[str, float]]] = {"private": [], "non_private": []}
    with tempfile.TemporaryDirectory() as own, contextlib.ExitStack() as stack:
        folder = Path(gather_texts(own, group)[0])
        s = stack.enter_context(start.new_session(make_config(name, args, folder, group), folder / "run"))
        model = copy.deepcopy(s.model)
        plain = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
        both_steps(s, model, plain, 0, f"{name}, not counted")
        for number in range(1, args.rounds + 1):
            costs = both_steps(s, model, plain, number, f"{name}, round {number}")
            for variant, steps in found.items():
                steps.append(costs[variant])
                if group.is_main:
                    last = steps[-1]
                    line = f"{name} {variant}: {last['step']:.1f} s, CPU {last['cpu']:.1f} s, {last['records']} records"
                    print(line, file=sys.stderr, flush=True)
    for ours, theirs in zip(found["private"], found["non_private"], strict=True):
        assert ours["records"] == theirs["records"], "both sides take the same draw"
    rows = [
        row(name, variant, f"{part}_s" if part != "records" else part, [costs[part] for costs in steps])
        for variant, steps in found.items()
        for part in steps[0]
    ]
    for ratio, part in (("time_ratio", "step"), ("cpu_ratio", "cpu")):
        rows.append(row(name, "private", ratio, [a[part] / b[part] for a, b in zip(found["private"], found["non_private"], strict=True)]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="models of 32 px, batches of 64 in passes of 32, unless others are given")
    parser.add_argument("--models", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--batch", type=int, help="expected batch size; 256 if not given")
    parser.add_argument("--physical", type=int, help="records of a pass; 32 if not given")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of torch and of the loader")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    models = args.models or ("mae_micro,cap_micro" if args.small else "mae_base,cap_base")
    args.batch, args.physical = args.batch or (64 if args.small else 256), args.physical or 32
    rows = [line for name in models.split(",") for line in measure(name, args)]
    if os.environ.get("RANK", "0") == "0":
        write_result(args.json, "step", rows, packages=["dpvision", "torch", "numpy"])


if __name__ == "__main__":
    main()
