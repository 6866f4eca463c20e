"""Continual pre-training at micro size: do 5,000 public photographs and then 45,000 private ones
gain over either alone?

    python benchmarks/continual.py --cifar DIR --work DIR [--seeds 0,1,2] [--arms A,B] [--warm N]
    [--public N] [--private N] [--batch N]
                                   [--textures N] [--tested N] [--quick] [--json FILE]

DIR of --cifar holds train.parquet and test.parquet. Rows of train.parquet whose number is a
multiple of 10 are public, the rest private, a rule that looks at no image. Runs the product,
`dpvision train` in DIR of --work, unless a complete run is there; N are sample-gradients:

    random        the network of vip.micro as its seed initialises it
    start         synthetic.vip_micro on --textures files, --warm N: what all others begin with
    warm          (a) start + as many textures as "public" has photographs: the warm start alone
    public        (b) start + vip.continual_public_micro on the public images, --public N, 64 a step
    private       (c) warm + vip.micro on the private images, epsilon 8, --private N, --batch of
                  them a step
    continual     (d) public + vip.continual_micro on the private images: the same settings as (c)
    non_private   (e) public + the private images (imported as public) without clipping or noise, as
                  many, 64 a step: the upper bound
    continual@3e-3  an arm at another learning rate than its recipe's

(a) to (e) have equal counts of public steps, (c) to (e) of images after them. Scores: ridge probes
fitted on the 5,000 public photographs and tested on the first --tested test ones. Value, low and
high in the JSON are median, least and greatest over seeds; rows "A - B" are differences seed by
seed.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from common import row, write_result
from runs import trained

from dpvision.data.open import open_store
from dpvision.eval.probes.ridge import Ridge
from dpvision.eval.probes.suite import evaluate

ARMS = ("random", "warm", "public", "private", "continual", "non_private")
DIFFERENCES = (
    ("public", "warm"),
    ("private", "warm"),
    ("continual", "public"),
    ("continual", "private"),
    ("continual", "warm"),
    ("continual@3e-3", "public"),
    ("continual@3e-3", "private"),
    ("non_private", "public"),
    ("non_private", "continual"),
)
SMALL_BATCH = 64
PUBLIC_EVERY = 10


def make_stores(cifar: Path, work: Path, tested: int, textures: int) -> dict[str, Path]:
    """Stores of the public share, of the private one (also as a public store), of test images and
    of textures; made where missing.
    """
    train, test = (pq.read_table(cifar / f"{split}.parquet") for split in ("train", "test"))
    public = np.arange(len(train)) % PUBLIC_EVERY == 0
    rows = {
        "public": train.filter(public),
        "private": train.filter(~public),
        "test": test.slice(0, tested),
    }
    rows["private_as_public"] = rows["private"]
    stores = {name: work / "stores" / name for name in rows}
    (work / "stores").mkdir(parents=True, exist_ok=True)
    for name, table in rows.items():
        if not stores[name].exists():
            pq.write_table(table, source := work / f"{name}.parquet")
            dpvision(
                [
                    "data",
                    "import",
                    str(source),
                    str(stores[name]),
                    *([] if name == "private" else ["--public"]),
                ]
            )
    stores["textures"] = work / "stores" / "textures"
    if not stores["textures"].exists():
        dpvision(
            [
                "synth",
                str(stores["textures"]),
                "--num",
                str(textures),
                "--size-px",
                "40",
                "--files",
                "--workers",
                "1",
            ]
        )
    return stores


def dpvision(argv: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "dpvision", *argv], check=True, stdout=subprocess.DEVNULL)


def command(arm: str, seed: int, stores: dict[str, Path], args: argparse.Namespace) -> list[str]:
    """The `dpvision train` line of an arm, its parent included."""

    def sizes(gradients: int, batch: int) -> list[str]:
        steps = max(1, round(gradients / batch))
        return [
            "--privacy.expected-batch-size",
            str(batch),
            "--privacy.steps",
            str(steps),
            "--optim.warmup-steps",
            str(max(1, steps // 10)),
            "--seed",
            str(seed),
            "--hardware.workers",
            "1",
            "--hardware.physical-batch-size",
            "125",
        ]

    def after(parent: str) -> list[str]:
        return ["--init-from", str(train(parent, seed, stores, args))]

    arm, _, rate = arm.partition("@")
    if arm in ("start", "warm"):
        textures = ["--data", str(stores["textures"]), "--privacy.dataset-size", str(args.textures)]
        parent, count = ([], args.warm) if arm == "start" else (after("start"), args.public)
        return ["synthetic.vip_micro", *textures, *parent, *sizes(count, SMALL_BATCH)]
    if arm == "public":
        return [
            "vip.continual_public_micro",
            "--data",
            str(stores["public"]),
            *after("start"),
            *sizes(args.public, SMALL_BATCH),
        ]
    if arm == "non_private":
        data = ["--data", str(stores["private_as_public"]), "--privacy.dataset-size", "45000"]
        return [
            "vip.continual_public_micro",
            *data,
            *after("public"),
            *sizes(args.private, SMALL_BATCH),
        ]
    line = [
        "vip.continual_micro",
        "--data",
        str(stores["private"]),
        *after({"private": "warm", "continual": "public"}[arm]),
    ]
    return [
        *line,
        *sizes(args.private, args.batch),
        *(["--optim.learning-rate", rate] if rate else []),
    ]


def train(arm: str, seed: int, stores: dict[str, Path], args: argparse.Namespace) -> Path:
    """Run an arm, and first its parent, unless they are there."""
    return trained(args.work / "runs" / f"{arm}-{seed}", command(arm, seed, stores, args))


def scores(
    arm: str, seed: int, stores: dict[str, Path], args: argparse.Namespace
) -> dict[str, float]:
    """Accuracy in percent by protocol, kept in DIR."""
    kept = args.work / f"{arm}-{seed}.scores.json"
    if not kept.exists():
        spec = (
            f"random:{train('start', seed, stores, args)}"
            if arm == "random"
            else str(train(arm, seed, stores, args))
        )
        found = evaluate(
            spec,
            open_store(stores["public"]),
            open_store(stores["test"]),
            protocols=(Ridge(),),
            against=(),
            workers=1,
        )
        kept.write_text(json.dumps({s.protocol: 100 * s.value for s in found}))
    return json.loads(kept.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cifar", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--warm", type=int, default=12_800)
    parser.add_argument("--public", type=int, default=16_000)
    parser.add_argument("--private", type=int, default=25_000)
    parser.add_argument(
        "--batch", type=int, default=2500, help="expected batch of the private arms"
    )
    parser.add_argument("--textures", type=int, default=6000)
    parser.add_argument("--tested", type=int, default=5000)
    parser.add_argument("--quick", action="store_true", help="one seed, one or two steps an arm")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.work = args.work.resolve()
    if args.quick:
        args.seeds, args.textures, args.warm, args.public, args.private, args.batch = (
            "0",
            200,
            128,
            128,
            500,
            250,
        )
    stores = make_stores(args.cifar, args.work, args.tested, args.textures)
    found: dict[tuple[str, str], list[float]] = {}
    for seed in map(int, args.seeds.split(",")):
        for arm in args.arms.split(","):
            made = scores(arm, seed, stores, args)
            print(
                f"{arm}-{seed}: "
                + ", ".join(f"{protocol} {value:.1f}" for protocol, value in made.items()),
                flush=True,
            )
            for protocol, value in made.items():
                found.setdefault((arm, protocol), []).append(value)
    rows = [
        row(arm, protocol, "accuracy_percent", values) for (arm, protocol), values in found.items()
    ]
    for (one, protocol), values in found.items():
        for other in (b for a, b in DIFFERENCES if a == one and (b, protocol) in found):
            pairs = zip(values, found[other, protocol], strict=True)
            rows.append(
                row(f"{one} - {other}", protocol, "difference_points", [a - b for a, b in pairs])
            )
    write_result(
        args.json, "continual", rows, packages=("torch", "numpy", "scikit-learn", "dp-accounting")
    )


if __name__ == "__main__":
    main()
