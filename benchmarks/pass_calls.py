"""What one private pass asks of host and device: calls, launches, host time, kernel time.

    python benchmarks/pass_calls.py [--cases mae_base,cap_base] [--json FILE]
    python benchmarks/pass_calls.py --whole --cases mae_micro,cap_micro,cls_micro [--batch 64]
    python benchmarks/pass_calls.py --device cuda [--batch 256] [--variants A,B] [--json FILE]

On a CPU the recipes' models have their depth but width 96 and images of 64 px, so that arithmetic
is a small part: "calls" are PyTorch operators that are no views, "host_ms" is CPU time of one
thread, and "host_ratio" that of a private pass over the plain one before it; --whole takes the
models as they are. On a GPU the models are whole: "time_ms" is the wall clock, "host_ms" the time
until the host has issued the pass (a private pass waits for the device once), "kernel_ms" and
"kernels" are of the device. Variants are those of clipping.py. The private pass comes without its
checks, which are made once, and the heap of the start is frozen, as in a run.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import clipping
import torch
from captioners import make_batch
from common import row, write_result
from measure import NON_PRIVATE, ONE_PASS, Bench, free_memory, peak_mb, seconds_of
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from dpvision.config import CaptionerConfig, MAEConfig
from dpvision.data.keys import StepKey
from dpvision.devices import keep_freed_memory
from dpvision.dp.clip import clipped_sum
from dpvision.models import make_model
from dpvision.recipes import RECIPES
from dpvision.train.objectives import example_batch, loss_function

RECIPE = {
    "mae_base": "vip.base",
    "cap_base": "dpcap.base",
    "mae_micro": "vip.micro",
    "cap_micro": "dpcap.micro",
    "cls_micro": "supervised.micro",
}
ROUNDS, WIDTH, SIZE, RECORDS = 15, 96, 64, 4
KEY = StepKey(0, 0)


class Calls(TorchDispatchMode):
    """Counts operators that are no views."""

    count = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = [value.alias_info for value in func._schema.returns]
        if not made or any(alias is None or alias.is_write for alias in made):
            self.count += 1
        return func(*args, **(kwargs or {}))


def narrow(model: Any) -> Any:
    """The model's settings with its depth, small otherwise."""
    encoder = replace(model.encoder, width=WIDTH, num_heads=2, image_size=SIZE)
    if isinstance(model, MAEConfig):
        return replace(model, encoder=encoder, decoder_width=WIDTH, decoder_num_heads=2)
    assert isinstance(model, CaptionerConfig)
    decoder = replace(model.decoder, width=WIDTH, num_heads=2)
    return replace(model, encoder=encoder, decoder=decoder, vocab_size=300, num_tokens=8)


def on_cpu(case: str, num_records: int, *, whole: bool) -> Iterator[dict[str, Any]]:
    """Rows of the plain and of the private pass."""
    torch.set_num_threads(1)
    keep_freed_memory()
    config = RECIPES[RECIPE[case]]()
    config = config if whole else replace(config, model=narrow(config.model))
    loss_fn, batch = loss_function(config), example_batch(config, num_records)
    model = make_model(config.model, seed=0)

    def plain() -> None:
        loss_fn(model, batch, KEY).mean().backward()
        for p in model.parameters():
            p.grad = None

    def private() -> None:
        clipped_sum(loss_fn, model, batch, KEY, max_grad_norm=1.0, check_separability=False)

    passes: dict[str, Callable[[], None]] = {NON_PRIVATE[0]: plain, ONE_PASS[0]: private}
    for once in (*passes.values(), *passes.values()):
        once()
    _settle()
    times: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(ROUNDS):
        for name, once in passes.items():
            begun = time.process_time()
            once()
            times[name].append(1e3 * (time.process_time() - begun))
    shown = f"{case}, {num_records} records" if whole else case
    for name, once in passes.items():
        with Calls() as calls:
            once()
        yield row(shown, name, "calls", [calls.count])
        yield row(shown, name, "host_ms", times[name])
    ratios = [b / a for a, b in zip(*times.values(), strict=True)]
    yield row(shown, ONE_PASS[0], "host_ratio", ratios)


def on_gpu(case: str, bench: Bench) -> Iterator[dict[str, Any]]:
    """Rows of every variant, largest model first in memory, one at a time."""
    subject = clipping.Subject(case, bench)
    batch = make_batch(subject.num_records, bench.device)
    subject.max_grad_norm = float(subject.clipped("one_pass", batch).norms_B.median())
    name = f"{case}, {subject.num_records} records"
    for variant in bench.variants:
        step = subject.make_step(variant)
        for _ in range(3):
            step(batch)
        _settle()
        seconds = [seconds_of(step, batch) for _ in range(ROUNDS)]
        yield row(name, variant, "time_ms", [1e3 * s for s in seconds])
        yield row(name, variant, "host_ms", [1e3 * _issue(step, batch) for _ in range(5)])
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            step(batch)
            torch.cuda.synchronize()
        kernels = [e for e in found.key_averages() if e.self_device_time_total > 0]
        device_us = sum(e.self_device_time_total for e in kernels)
        yield row(name, variant, "kernel_ms", [device_us / 1e3])
        yield row(name, variant, "kernels", [sum(e.count for e in kernels)])
        yield row(name, variant, "memory_mb", [peak_mb(step, batch, subject.model)])
        kernels.sort(key=lambda event: -event.self_device_time_total)
        for event in kernels[:12]:
            ms = event.self_device_time_total / 1e3
            print(f"  {event.count:>5} {ms:>8.2f} ms  {event.key[:90]}", file=sys.stderr)
        free_memory(bench)


def _issue(step: Callable[[Any], object], batch: Any) -> float:
    """Seconds until the host is done with a pass that begins on an idle device."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    made = step(batch)
    seconds = time.perf_counter() - begun
    torch.cuda.synchronize()
    del made
    return seconds


def _settle() -> None:
    """As ``train.loop`` after the first step."""
    gc.collect()
    gc.freeze()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="mae_base,cap_base")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--batch", type=int, help="records of a pass")
    parser.add_argument("--whole", action="store_true", help="the models as they are, on a CPU")
    parser.add_argument("--variants", default=",".join((*NON_PRIVATE, *ONE_PASS)))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for case in args.cases.split(","):
        if args.device == "cpu":
            num = args.batch or (64 if args.whole else RECORDS)
            rows += list(on_cpu(case, num, whole=args.whole))
        else:
            asked = argparse.Namespace(
                device="cuda",
                precision=None,
                batch=args.batch,
                rounds=1,
                variants=args.variants,
                budget_s=None,
                quick=False,
            )
            rows += list(on_gpu(case, Bench(asked)))
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    write_result(args.json, "pass_calls", rows, packages=("torch", "numpy"), device=device)


if __name__ == "__main__":
    main()
