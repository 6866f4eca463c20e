"""Does private fine-tuning of a public encoder beat a private head on its frozen features? Test
accuracy by the command line, at equal epsilon.

    python benchmarks/fine_tuning.py --data DATA --set eurosat --encoder timm:NAME@FILE
    --public-weights 'NAME; LICENCE; SOURCE' --work DIR [--draws 5] [--records N]
    [--test-records N] [--batch B] [--steps T] [--epsilons 1,8]
    [--ways head,film,film_refit,film@3] [--image-size PX] [--json FILE]

A draw is N random images of DATA/SET/train.parquet, imported as a private store, with its own noise
and batches; all are scored on the same random images of test.parquet.

``head`` is ``dpvision adapt --head auto``: full batches, no augmentation; ``stages`` is that head
on the averages of all stages. The other ways are the recipes transfer.micro_WAY with their own
rates and crops, T Poisson batches of B expected records. WAY_refit is that recipe and then the head
on the encoder that it gave: two runs of one smaller epsilon, found before the first one starts,
whose composition has the epsilon of the other ways.
WAY@C has the clipping norm C in place of the recipe's.

Values are percent right (median and range of the draws; ``mean``; ``over_head``, the difference
from the first way of the same draw) and CPU seconds of the training commands. A finished run in
--work is not repeated, so draws may be made by several processes: --only 2,3 makes these two.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from common import row, write_result

from dpvision.adapt.release import full_batch_plan
from dpvision.config import PrivacyConfig
from dpvision.privacy.composition import parts_of, total_epsilon
from dpvision.privacy.plan import make_plan

WAYS = {
    "micro_head": [],
    "last_block": [],
    "biases": [],
    "film": [],
    "lora": ["--model.lora-on", "both"],
}
CLOSE = 1e-3
"""Relative distance of a composed epsilon from the one asked for, at most; it is never above."""


def dpvision(*argv: str) -> Any:
    """Run a command and return its JSON."""
    command = [sys.executable, "-m", "dpvision", *argv, "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def composed(args: argparse.Namespace, epsilon: float) -> float:
    """Epsilon of a fine-tuning and of a head, each at ``epsilon``, fixed before the first one."""
    tuning = make_plan(
        PrivacyConfig(
            dataset_size=args.records,
            expected_batch_size=args.batch,
            steps=args.steps,
            max_grad_norm=1.0,
            target_epsilon=epsilon,
        )
    )
    head = full_batch_plan(args.records, epsilon)
    return total_epsilon(parts_of([(p, p.steps) for p in (tuning, head)]), fixed=True)[0]


def part_of(args: argparse.Namespace, target: float) -> float:
    """The epsilon of each of the two runs that are ``target`` together."""
    low, high = target / 2, target
    while high - low > CLOSE * low:
        middle = (low + high) / 2
        low, high = (middle, high) if composed(args, middle) <= target else (low, middle)
    return low


def store_of(args: argparse.Namespace, part: str, draw: int, records: int) -> Path:
    """Import random images of a split, as a private store or, of the test split, a public one."""
    store: Path = args.work / f"{args.set}-{part}-{draw}"
    folder, drawn = args.data / args.set, store.with_suffix(".parquet")
    if store.exists():
        return store
    table = pq.read_table(folder / f"{part}.parquet")
    chosen = np.random.default_rng(draw).choice(table.num_rows, records, replace=False)
    pq.write_table(table.take(np.sort(chosen)), drawn)
    public = ["--public"] if part == "test" else []
    classes = ["--classes", str(folder / "classes.txt")]
    dpvision("data", "import", str(drawn), str(store), *classes, *public)
    return store


def train(
    args: argparse.Namespace, draw: int, way: str, epsilon: str, name: str, encoder: str
) -> Any:
    """Train one run and return its result."""
    way, _, norm = way.partition("@")
    argv = [
        "--data",
        str(args.work / f"{args.set}-train-{draw}"),
        "--encoder",
        encoder,
        "--epsilon",
        epsilon,
        "--quiet",
    ]
    argv += ["--num-classes", str(args.classes), "--dataset-size", str(args.records)]
    argv += ["--runs", str(args.work), "--name", name]
    argv += ["--privacy.max-grad-norm", norm] if norm else []
    if encoder == args.encoder:
        argv += ["--public-weights", args.public_weights]
        argv += ["--model.encoder.image-size", str(args.image_size)]
    if way in ("head", "stages"):
        pooling = ["--model.encoder.pooling", "stages"] if way == "stages" else []
        return dpvision("adapt", *argv, "--head", "auto", *pooling)
    recipe = "transfer.micro_" + way.removeprefix("micro_")
    argv = [recipe, *argv, *WAYS[way], "--hardware.physical-batch-size", "16"]
    argv += ["--privacy.expected-batch-size", str(args.batch)]
    return dpvision("adapt", *argv, "--privacy.steps", str(args.steps))


def run_of(args: argparse.Namespace, draw: int, way: str, epsilon: str) -> dict[str, Any]:
    """Accuracy and cost of one way."""
    name = f"{args.set}-{draw}-{way}-{epsilon}-{args.image_size}"
    if (found := args.work / f"{name}.json").exists():
        return json.loads(found.read_text())
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    first = way.removesuffix("_refit")
    if first == way:
        total = train(args, draw, way, epsilon, name, args.encoder)["epsilon"]
    else:
        part = part_of(args, float(epsilon))
        train(args, draw, first, f"{part:.6f}", f"{name}-first", args.encoder)
        train(args, draw, "head", f"{part:.6f}", name, str(args.work / f"{name}-first"))
        total = composed(args, part)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    score = dpvision(
        "evaluate", str(args.work / name), "--test", str(args.work / f"{args.set}-test-0")
    )["scores"][0]
    made = {"score": score, "epsilon": total, "cpu_s": spent}
    found.write_text(json.dumps(made))
    print(f"{name}: {100 * score['value']:.1f}", file=sys.stderr, flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option in ("--data", "--work"):
        parser.add_argument(option, type=Path, required=True)
    for option in ("--set", "--encoder", "--public-weights"):
        parser.add_argument(option, required=True)
    counts = {"draws": 5, "records": 1500, "test-records": 1800, "batch": 300, "steps": 20}
    for option, default in counts.items():
        parser.add_argument(f"--{option}", type=int, default=default)
    parser.add_argument("--only", help="draws that this process makes")
    parser.add_argument("--epsilons", default="1,8")
    parser.add_argument("--ways", default=",".join(["head", *WAYS]))
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    args.classes = len((args.data / args.set / "classes.txt").read_text().splitlines())
    store_of(args, "test", 0, args.test_records)
    draws = [int(n) for n in args.only.split(",")] if args.only else range(1, args.draws + 1)
    for draw in draws:
        store_of(args, "train", draw, args.records)
    rows = []
    for epsilon in args.epsilons.split(","):
        head = None
        for way in args.ways.split(","):
            made, case = (
                [run_of(args, n, way, epsilon) for n in draws],
                f"{args.set}, epsilon {epsilon}",
            )
            right = [100 * one["score"]["value"] for one in made]
            head = head or right
            rows.append(row(case, way, "accuracy", right))
            rows.append(row(case, way, "mean", [statistics.mean(right)]))
            rows.append(
                row(case, way, "over_head", [a - b for a, b in zip(right, head, strict=True)])
            )
            for name in ("cpu_s", "epsilon"):
                rows.append(row(case, way, name, [one[name] for one in made]))
    write_result(args.json, "fine_tuning", rows, packages=("torch", "timm"))


if __name__ == "__main__":
    main()
