"""Does TAN simulation foretell the loss curve of the full private run? An autoencoder, a captioner
and a classifier, small, on scenes.

    python benchmarks/simulate.py --work DIR [--models mae,captioner,classifier] [--factors 4,16]
    [--batch N] [--steps N] [--json FILE]

Makes the store and the tokenizer it needs under DIR. Per model, from random weights: the full run
(batch N, noise for --epsilon), its simulations (`dpvision train --simulate K`), and a control, the
smallest simulation without its noise: what a plain small run would foretell. Losses are means over
a step's own batch, smoothed over a tenth of the steps. "fallen" is how far the full run's loss
fell; "apart" is the mean distance of a curve from the full run's after the first tenth of the
steps, "end" the signed difference at the end, both as shares of "fallen". One seed: draws, masks
and noise of any two runs differ, so a distance of 0 is not to be had.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from common import row, write_result
from run_folders import trained

from dpvision.runs.folder import run_base

RECIPES = {
    "mae": "vip.micro_random_start",
    "captioner": "dpcap.micro",
    "classifier": "supervised.micro",
}
RECORDS = 20_000


def prepared(work: Path) -> tuple[Path, Path]:
    """The store of scenes, labelled by colour, and the tokenizer."""
    work.mkdir(parents=True, exist_ok=True)
    store, words = work / "scenes", work / "words.json"
    for made, line in (
        (
            store,
            [
                "scenes",
                str(store),
                "--num",
                str(RECORDS),
                "--size-px",
                "32",
                "--label",
                "colour",
                "--public",
            ],
        ),
        (words, ["tokenizer", str(words), "--scenes", "20000", "--vocab-size", "440"]),
    ):
        if not made.exists():
            subprocess.run(
                [sys.executable, "-m", "dpvision", "data", *line],
                check=True,
                stdout=subprocess.DEVNULL,
            )
    return store, words


def losses(root: Path, model: str, args: argparse.Namespace, extra: list[str]) -> np.ndarray:
    """Smoothed loss by step of a run, trained unless it is there."""
    store, words = prepared(args.work)
    line = [
        RECIPES[model],
        "--data",
        str(store),
        "--init-from",
        "None",
        "--hardware.workers",
        "1",
        "--hardware.device",
        "cpu",
    ]
    line += [
        "--privacy.dataset-size",
        str(RECORDS),
        "--privacy.steps",
        str(args.steps),
        "--optim.warmup-steps",
        str(args.steps // 10),
    ]
    if model == "captioner":
        line += ["--data.tokenizer", str(words)]
    if model == "classifier":
        line += ["--model.num-classes", str(args.classes), "--data.views", "1"]
    base = run_base(trained(root, [*line, *extra]))
    assert base is not None
    metrics = next(base.rglob("metrics.jsonl")).read_text().splitlines()
    loss = np.array([json.loads(entry)["loss"] for entry in metrics], dtype=np.float64)
    loss = loss[np.isfinite(loss)]
    width = max(1, args.steps // 10)
    return np.convolve(loss, np.ones(width) / width, mode="valid")


def compared(model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    private = [
        "--privacy.target-epsilon",
        str(args.epsilon),
        "--privacy.expected-batch-size",
        str(args.batch),
    ]
    full = losses(args.work / f"{model}-full", model, args, private)
    curves = {
        f"simulate {k}": losses(
            args.work / f"{model}-{k}", model, args, [*private, "--simulate", str(k)]
        )
        for k in args.factors
    }
    plain = [
        "--privacy.guarantee",
        "simulated",
        "--privacy.target-epsilon",
        "None",
        "--privacy.noise-multiplier",
        "0",
    ]
    plain += ["--privacy.expected-batch-size", str(args.batch / args.factors[0])]
    curves["no noise (control)"] = losses(args.work / f"{model}-plain", model, args, plain)
    fallen, skipped = float(full[0] - full[-1]), len(full) // 10
    rows = [
        row(model, "full", name, [value])
        for name, value in (("first_loss", full[0]), ("last_loss", full[-1]), ("fallen", fallen))
    ]
    for name, curve in curves.items():
        shared = min(len(curve), len(full))
        apart = float(np.abs(curve[:shared] - full[:shared])[skipped:].mean()) / abs(fallen)
        end = float(curve[shared - 1] - full[shared - 1]) / abs(fallen)
        rows += [
            row(model, name, metric, [v])
            for metric, v in (("last_loss", curve[-1]), ("apart", apart), ("end", end))
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--models", default="mae,captioner,classifier")
    parser.add_argument("--factors", default="4,16")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--classes", type=int, default=10, help="colours of scenes, or more")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.work, args.factors = args.work.resolve(), [int(k) for k in args.factors.split(",")]
    rows = [found for model in args.models.split(",") for found in compared(model, args)]
    write_result(args.json, "simulate", rows, packages=("dpvision", "torch", "numpy"))


if __name__ == "__main__":
    main()
