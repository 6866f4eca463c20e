"""What bfloat16 features cost a private head, and what its test images in float32 change, as
predictions and exports have them.

    python benchmarks/feature_precision.py --data DATA --work FEATURES
        --encoder timm:tf_efficientnet_lite0@FILE [--pooling POOLING] [--image-size PX]
        [--sets SET,SET] [--records N,N] [--json FILE]

Features, records and heads are as in head_regret.py, with the centre in the same precision. Each
cell has the accuracy of many_steps in percent, mean over seeds [lowest, highest], of three
variants: all in float32; all in bfloat16; trained on bfloat16 and tested on float32. ``change`` is
the length of the difference of a test image's row from float32, relative to the row's: the mean
over the images [smallest, largest].
"""

import argparse
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from common import write_result
from head_regret import Seen, Split, cell, encoder_of, features, line

from dpvision.devices import has_bfloat16

EPSILONS = (1.0, 3.0, 8.0)
PRECISIONS: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")


def change(low: Split, full: Split) -> np.ndarray:
    """Return the relative difference of each row, float32 (N,)."""
    full_ND, low_ND = (np.asarray(split.x_ND, dtype=np.float32) for split in (full, low))
    return np.linalg.norm(low_ND - full_ND, axis=1) / np.linalg.norm(full_ND, axis=1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--encoder", required=True)
    parser.add_argument("--pooling", default="mean")
    parser.add_argument("--image-size", type=int, default=96)
    parser.add_argument("--sets", default="pets_sample,eurosat,cifar10,mednist")
    parser.add_argument("--records", default="1500")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"bfloat16 instructions: {has_bfloat16(torch.device('cpu'))}")
    counts = [int(count) for count in args.records.split(",")]
    rows, most = [], (max(counts), 2000)
    seen = {p: Seen(args.encoder, args.pooling, args.image_size, most, None, p) for p in PRECISIONS}
    for name in args.sets.split(","):
        full, low = (
            {part: features(args.work / p, args.data, s, name, part) for part in ("train", "test")}
            for p, s in seen.items()
        )
        where = f"{name}, {args.pooling}, {args.image_size} px"
        changed_N = change(low["test"], full["test"])
        rows.append(line(where, "bfloat16", list(changed_N), "change"))
        print(f"{where}: a row changes by {changed_N.mean():.4f}, at most {changed_N.max():.4f}")
        num_classes = int(full["train"].label_N.max()) + 1
        order = np.random.default_rng(0).permutation(len(full["train"].label_N))
        for count in sorted({min(count, len(order)) for count in counts}):
            row_N = np.sort(order[:count])
            variants = {
                "float32": ("float32", full["train"], full["test"]),
                "bfloat16": ("bfloat16", low["train"], low["test"]),
                "bfloat16, tested in float32": ("bfloat16", low["train"], full["test"]),
            }
            for epsilon in EPSILONS:
                case = f"{where}, {count} records, epsilon {epsilon:g}"
                for variant, (p, train, test) in variants.items():
                    opened, heads = encoder_of(seen[p], name), ["many_steps"]
                    got = cell(
                        train.taken(row_N), test, num_classes, epsilon, args.seeds, opened, heads
                    )
                    rows.append(line(case, variant, got["many_steps"]))
                    print(f"{case}, {variant}: {rows[-1]['value']:.2f}", flush=True)
    write_result(args.json, "feature_precision", rows, packages=("torch", "timm"))


if __name__ == "__main__":
    main()
