"""DP-Cap's Figure 3a in miniature: the captioner's loss against steps for several batch sizes at
one noise per batch (TAN simulation).

    python benchmarks/batch_sizes.py --work DIR --scenes STORE --tokenizer F --warm RUN [--batches
    A,B] [--ratio R] [--steps N] [--json J]

Simulated runs of dpcap.micro: expected batch B and noise multiplier R x B, so that the noise on the
mean gradient is the same and only the number of images behind it differs. The loss of a step is the
mean over its own batch, smoothed over a tenth of the steps here; what is told is each curve's loss
at the end and its largest distance, after the first tenth, from the curve of the largest batch.
Look at the curves with `dpvision compare DIR/batch-*`.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from common import row, write_result
from runs import trained

from dpvision.data.open import open_store
from dpvision.runs.folder import run_base


def losses(batch: int, args: argparse.Namespace) -> np.ndarray:
    """Smoothed loss of every step."""
    line = ["dpcap.micro", "--data", str(args.scenes), "--init-from", str(args.warm)]
    line += [
        "--data.tokenizer",
        str(args.tokenizer),
        "--privacy.dataset-size",
        str(open_store(args.scenes).num_records),
    ]
    line += ["--privacy.guarantee", "simulated", "--privacy.target-epsilon", "None"]
    line += [
        "--privacy.expected-batch-size",
        str(batch),
        "--privacy.noise-multiplier",
        str(args.ratio * batch),
    ]
    line += [
        "--privacy.steps",
        str(args.steps),
        "--optim.warmup-steps",
        str(max(1, args.steps // 10)),
        *args.set,
    ]
    root = trained(args.work / f"batch-{batch}", line)
    base = run_base(root)
    assert base is not None
    file = next(base.rglob("metrics.jsonl"))
    loss = np.array([json.loads(line)["loss"] for line in file.read_text().splitlines()])
    width = max(1, args.steps // 10)
    return np.convolve(loss, np.ones(width) / width, mode="valid")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("work", "scenes", "tokenizer", "warm"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--batches", default="250,500,1000")
    parser.add_argument(
        "--ratio",
        type=float,
        default=1.34e-4,
        help="noise multiplier over batch; that of 4000 of 300,000 at epsilon 8",
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--set", action="extend", nargs="+", default=[], help="further settings of every run"
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.work = args.work.resolve()
    batches = sorted(map(int, args.batches.split(",")))
    curves = {batch: losses(batch, args) for batch in batches}
    skipped = args.steps // 10
    rows = []
    for batch, curve in curves.items():
        apart = float(np.abs(curve - curves[batches[-1]])[skipped:].max())
        fallen = float(curve[0] - curve[-1])
        print(
            f"batch {batch}: first {curve[0]:.3f}, last {curve[-1]:.3f}, at most {apart:.3f} "
            f"from batch {batches[-1]}",
            flush=True,
        )
        rows += [
            row(f"batch {batch}", "dpcap.micro", name, [v])
            for name, v in (("last_loss", curve[-1]), ("fallen", fallen), ("apart", apart))
        ]
    write_result(args.json, "batch_sizes", rows, packages=("torch", "numpy"))


if __name__ == "__main__":
    main()
