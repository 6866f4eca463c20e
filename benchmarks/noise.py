"""Noise: normal numbers per second on one core, and the whole of ``privatize`` for a Base model's
99 million parameters.

    python benchmarks/noise.py [--quick] [--rounds N] [--device cpu|cuda] [--json FILE]

Each round runs every variant once, in shuffled order, in this one process. "normals": float64
numbers in blocks. ``chacha20`` is what noise uses; ``chacha20_words`` and ``aes_ctr_words`` are the
ciphers alone, one word for each number; ``torch_randn`` is torch's generator, which the noise came
from before. "privatize": a float32 sum to a float32 gradient, of the shapes of ViP-Base at the size
that the bars name; ``threads_1`` and ``threads_2``; ``before`` adds, divides and casts as the code
before did, on one thread. Freed memory is kept, as training does. With --device cuda there are
"cuda" beside "chacha20", and the release of a sum on the GPU.

Bars, on the machine of docs/log: 100 M normals per second; 1.0 s with one thread and 0.6 s with
two.
"""

import argparse
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import row, write_result
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from dpvision.config import PrivacyConfig
from dpvision.devices import keep_freed_memory
from dpvision.dp.clipped import ClippedSum, seal
from dpvision.dp.noise import _GPU_PIECE, privatize
from dpvision.dp.normals import Normals, box_muller, key_words
from dpvision.models import make_model
from dpvision.privacy.plan import DPPlan, make_plan
from dpvision.privacy.stream import Keystream, new_key
from dpvision.recipes import RECIPES

PARAMETERS = 99_000_000
BLOCK = 2**15
_CHUNK = 2**20


def on_gpu(count: int) -> Callable[[], object]:
    """``count`` normals on the GPU, in pieces as a release draws them."""
    from dpvision.dp.chacha_triton import chacha_words

    device = torch.device("cuda")

    def draw() -> None:
        for at in range(0, count, _GPU_PIECE):
            box_muller(
                chacha_words(
                    key_words([new_key()])[0].to(device), at // 8, min(_GPU_PIECE, count - at) // 8
                )
            )
        torch.cuda.synchronize()

    return draw


def generators(count: int) -> dict[str, Callable[[], object]]:
    """What makes ``count`` numbers or words, by variant."""
    normals, word_W = Normals(), np.empty(BLOCK, dtype="<u8")
    zeros, out = bytes(8 * BLOCK), bytearray(8 * BLOCK + 16)

    def ours() -> None:
        for _ in normals.blocks(new_key(), 0, count):
            pass

    def words() -> None:
        stream = Keystream(new_key())
        for _ in range(count // BLOCK):
            stream.fill(word_W)

    def aes() -> None:
        cipher = Cipher(algorithms.AES(os.urandom(32)), modes.CTR(bytes(16))).encryptor()
        for _ in range(count // BLOCK):
            cipher.update_into(zeros, out)

    def mersenne() -> None:
        for _ in range(count // _CHUNK):
            torch.randn(_CHUNK, dtype=torch.float64)

    return {
        "chacha20": ours,
        "chacha20_words": words,
        "aes_ctr_words": aes,
        "torch_randn": mersenne,
    }


def base_shapes(num: int) -> list[torch.Size]:
    """Shapes of ViP-Base's parameters, its widest one repeated or left out until there are about
    ``num`` numbers.
    """
    with torch.device("meta"):
        shapes = [p.shape for p in make_model(RECIPES["vip.base"]().model, seed=0).parameters()]
    shapes.sort(key=lambda shape: shape.numel(), reverse=True)
    while sum(shape.numel() for shape in shapes) > num:
        shapes.pop(0)
    shapes += [shapes[0]] * ((num - sum(shape.numel() for shape in shapes)) // shapes[0].numel())
    return shapes


def before(total: ClippedSum, plan: DPPlan) -> dict[str, torch.Tensor]:
    """As the code before: float64 copies of whole parameters, torch's generator in chunks, rounded
    once.
    """
    grads = {}
    for name, value in total.grads.items():
        count = value.numel()
        drawn = [
            torch.randn(min(_CHUNK, count - at), dtype=torch.float64)
            for at in range(0, count, _CHUNK)
        ]
        summed = value.double().flatten() + plan.noise_std * torch.cat(drawn)
        grads[name] = (summed / plan.expected_batch_size).to(value.dtype).view_as(value)
    return grads


def releases(num: int, device: str) -> dict[str, Callable[[], object]]:
    """Whole releases of ``num`` parameters, by variant."""
    asked = PrivacyConfig(
        dataset_size=10**6,
        expected_batch_size=10**6,
        sampling="full_batch",
        steps=1,
        noise_multiplier=1.0,
    )
    plan = make_plan(asked)
    grads = {str(number): torch.randn(shape) for number, shape in enumerate(base_shapes(num))}
    total = seal(ClippedSum(grads, 1, torch.ones(1), torch.ones(1), plan.max_grad_norm))
    kept: dict[str, Any] = {}

    def release(threads: int) -> None:
        torch.set_num_threads(threads)
        kept["gradient"] = privatize(
            total, plan.another_run(), 0, new_key()
        )  # kept until the next one is there, as in the loop

    def as_before() -> None:
        torch.set_num_threads(1)
        kept["gradient"] = before(total, plan)

    if device == "cuda":
        moved = seal(replace(total, grads={name: value.cuda() for name, value in grads.items()}))

        def release_there() -> None:
            kept["gradient"] = privatize(moved, plan.another_run(), 0, new_key())
            torch.cuda.synchronize()

        return {"cuda": release_there}
    return {"threads_1": lambda: release(1), "threads_2": lambda: release(2), "before": as_before}


def measure(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every variant, after one round that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + 1):
        for name in random.sample(list(variants), len(variants)):
            start = time.perf_counter()
            variants[name]()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def measured(device: str, *, quick: bool, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of normals and of releases."""
    scale = 10 if quick else 1
    count, num = 2**25 // scale // _CHUNK * _CHUNK, PARAMETERS // scale
    for variant, seconds in measure(
        {"cuda": on_gpu(count)} if device == "cuda" else generators(count), rounds
    ).items():
        yield row("normals", variant, "million_per_s", [count / s / 1e6 for s in seconds])
    case = f"privatize_{num // 10**6}M"
    times = measure(releases(num, device), rounds)
    for variant, seconds in times.items():
        yield row(case, variant, "time_s", seconds)
        if "before" in times:
            yield row(
                case,
                variant,
                "time_ratio_to_before",
                [ours / theirs for ours, theirs in zip(seconds, times["before"], strict=True)],
            )
    yield row("machine", "setting", "load_average", [os.getloadavg()[0]])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the numbers and parameters"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    rows = list(measured(args.device, quick=args.quick, rounds=args.rounds))
    write_result(
        args.json,
        "noise",
        rows,
        packages=["torch", "numpy", "cryptography"],
        device=torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
    )


if __name__ == "__main__":
    main()
