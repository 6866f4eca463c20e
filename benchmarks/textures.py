"""How many procedural textures a second: eager and fused, by size; on a GPU also their share of a
training step's time.

    python benchmarks/textures.py [--quick] [--device cpu|cuda] [--sizes A,B] [--processes N]
    [--rounds N] [--json FILE]

On a GPU the variants take turns within a round. On a CPU each runs in N processes of one thread at
once, as `dpvision synth --files` does, and the figure is of all of them together. "fused" is
torch.compile; its first call, left out of the time, is "compile_s".
"""

import argparse
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from common import row, write_result

from dpvision.synthetic.textures import textures


def once(size_px: int, num: int, device: str, fused: bool, first: int) -> float:
    """Seconds for ``num`` textures, looks included, after a first call that is not counted."""
    number = torch.arange(first, first + num)
    start = time.perf_counter()
    textures(number, size_px, instance_N=number, device=device, compiled=fused)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def in_process(size_px: int, num: int, fused: bool, rounds: int) -> list[float]:
    torch.set_num_threads(1)
    once(size_px, min(num, 64), "cpu", fused, 0)
    return [once(size_px, num, "cpu", fused, 1_000_000 * (r + 1)) for r in range(rounds)]


def measured(
    device: str,
    *,
    sizes: list[int],
    rounds: int,
    processes: int,
    variants: Sequence[bool] = (False, True),
) -> Iterator[dict[str, Any]]:
    """Yield textures a second of each size, eager and fused; on a CPU of the ``variants`` (fused or
    not).
    """
    for size in sizes:
        rates: dict[bool, list[float]] = {False: [], True: []}
        if device == "cuda":
            num = max(256, (1 << 27) // size**2)
            start = time.perf_counter()
            once(size, num, "cuda", True, 0)
            yield row(f"{size}px", "fused", "compile_s", [time.perf_counter() - start])
            once(size, num, "cuda", False, 0)
            for r in range(rounds):
                for fused in (False, True):
                    rates[fused].append(num / once(size, num, "cuda", fused, 1_000_000 * (r + 1)))
        else:
            num = max(16, (1 << 20) // size**2)
            for fused in variants:
                with ProcessPoolExecutor(
                    processes, mp_context=multiprocessing.get_context("spawn")
                ) as pool:
                    jobs = [
                        pool.submit(in_process, size, num, fused, rounds) for _ in range(processes)
                    ]
                    times = [job.result() for job in jobs]
                rates[fused] = [sum(num / t[r] for t in times) for r in range(rounds)]
        for fused, values in ((fused, values) for fused, values in rates.items() if values):
            yield row(f"{size}px", "fused" if fused else "eager", "images_per_s", values)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="32 and 64 px, three rounds")
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cpu", "cuda")
    )
    parser.add_argument("--sizes", default="32,64,224")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.rounds = "32,64", 3
    rows = list(
        measured(
            args.device,
            sizes=list(map(int, args.sizes.split(","))),
            rounds=args.rounds,
            processes=args.processes,
        )
    )
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    write_result(args.json, "textures", rows, packages=("torch", "numpy"), device=device)


if __name__ == "__main__":
    main()
