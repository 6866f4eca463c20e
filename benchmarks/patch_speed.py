"""Features of patches and scattering: milliseconds an image, by image size and encoder.

    python benchmarks/patch_speed.py [--threads N] [--images N] [--rounds N] [--sizes A,B] [--device
    cpu|cuda] [--json FILE]

Random pixels, no decoding. "minutes" are those of 50,000 images at 32 px and of 10,000 at the
larger sizes.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import row, write_result

from dpvision.encoders.patch_constants import SIZES, load_constants
from dpvision.encoders.patch_features import PatchFeatures

NUM = {32: 50_000}


def measured(device: str, *, sizes: list[int], num: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the time of each encoder at each size."""
    where = "GPU" if device == "cuda" else f"{torch.get_num_threads()} threads"
    for side in sizes:
        x_BCHW = torch.rand(num, 3, side, side, generator=torch.Generator().manual_seed(0)).to(
            device
        )
        for name, scattering in (("patches", False), ("patches+scattering", True)):
            features = PatchFeatures({side: load_constants(side)}, scattering=scattering).to(device)
            seconds = []
            with torch.inference_mode():
                features(x_BCHW[:16])
                for _ in range(rounds):
                    start = time.perf_counter()
                    made = features(x_BCHW)
                    float(made[0, 0])  # waits for a GPU
                    seconds.append((time.perf_counter() - start) / num)
            case = f"{side} px, {where}"
            yield row(case, name, "ms_per_image", [1000 * s for s in seconds])
            yield row(case, name, "minutes", [s * NUM.get(side, 10_000) / 60 for s in seconds])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = list(
        measured(
            args.device,
            sizes=list(map(int, args.sizes.split(","))),
            num=args.images,
            rounds=args.rounds,
        )
    )
    write_result(
        args.json,
        "patch_speed",
        rows,
        packages=("torch",),
        device=torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
    )


if __name__ == "__main__":
    main()
