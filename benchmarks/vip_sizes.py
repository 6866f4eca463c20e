"""ViP's Figure 5 in miniature: do larger networks gain from private training on scenes, from a warm
start and from random weights?

    python benchmarks/vip_sizes.py --work DIR --scenes STORE [--sizes A,B] [--starts A,B] [--seeds
    0] [--gradients N] [--warm N] [--steps T]
                                   [--set ARGUMENT ...] [--quick] [--json FILE]
                                   [--figure FILE.svg]

Runs the product itself in DIR, for each size of encoder (depth x width; decoder of one block) and
each seed:

    random, no training     the network as its seed initialises it
    random                  vip.micro_random_start, epsilon 8: T steps, N sample-gradients
    warm, no training       synthetic.vip_micro: --warm sample-gradients on textures
    warm                    vip.micro, epsilon 8: T steps, N sample-gradients, from that warm start

STORE holds private scenes (`dpvision data scenes STORE`); measured are the masked loss on 2000
public scenes of other numbers (the paper's figures show losses), ridge probes of the scenes'
attributes (4000 others to fit, the 2000 to test), and the parameters trained. Value, low and high
in the JSON are median, least and greatest over seeds. --figure draws the masked loss against the
parameters, as the paper does.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from common import row, write_result
from matplotlib.figure import Figure
from runs import trained
from scene_probes import FIRST_FIT, FIRST_TEST, attribute_probes, pixels, scenes

from dpvision.checkpoint import load_checkpoint
from dpvision.data.open import open_store
from dpvision.encoders.pooled import pooled_network
from dpvision.encoders.trained import load_model
from dpvision.models import make_model
from dpvision.models.mae import MAE, losses
from dpvision.synthetic.scenes import Scene

SIZES = {
    "1x32": (1, 32, 1),
    "2x64": (2, 64, 2),
    "4x128": (4, 128, 4),
    "6x192": (6, 192, 6),
    "8x256": (8, 256, 8),
}
STARTS = ("random", "warm")
WARM_BATCH = 64
MASKED_LOSS = "masked loss"
UNITS = {"parameters": "count", MASKED_LOSS: "mean_square"}


def network(size: str) -> list[str]:
    depth, width, heads = SIZES[size]
    line = [
        "--model.encoder.depth",
        str(depth),
        "--model.encoder.width",
        str(width),
        "--model.encoder.num-heads",
        str(heads),
    ]
    return [*line, "--hardware.workers", "1", "--hardware.physical-batch-size", "125"]


def steps(gradients: int, count: int) -> list[str]:
    sizes = [
        "--privacy.expected-batch-size",
        str(round(gradients / count)),
        "--privacy.steps",
        str(count),
    ]
    return [*sizes, "--optim.warmup-steps", str(max(1, count // 10))]


def warm_start(size: str, seed: int, args: argparse.Namespace) -> Path:
    line = [
        "synthetic.vip_micro",
        *network(size),
        *steps(args.warm, args.warm // WARM_BATCH),
        "--seed",
        str(seed),
        *args.set,
    ]
    return trained(args.work / f"start-{size}-{seed}", line)


def private(start: str, size: str, seed: int, args: argparse.Namespace) -> Path:
    recipe = "vip.micro" if start == "warm" else "vip.micro_random_start"
    store = [
        "--data",
        str(args.scenes),
        "--privacy.dataset-size",
        str(open_store(args.scenes).num_records),
    ]
    parent = ["--init-from", str(warm_start(size, seed, args)) if start == "warm" else "None"]
    line = [
        recipe,
        *store,
        *parent,
        *network(size),
        *steps(args.gradients, args.steps),
        "--seed",
        str(seed),
        *args.set,
    ]
    return trained(args.work / f"{start}-{size}-{seed}", line)


def masked_loss(model: MAE, made: list[Scene]) -> float:
    """Mean reconstruction loss of public scenes, under the same masks for every network."""
    order_NL = torch.randint(
        2**62, (len(made), model.num_patches), generator=torch.Generator().manual_seed(0)
    )
    with torch.inference_mode():
        parts = [
            losses(model, x, order)
            for x, order in zip(pixels(made).split(250), order_NL.split(250), strict=True)
        ]
    return float(torch.cat(parts).mean())


def measure(arm: str, size: str, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """Probes of one network in percent, and its parameters; kept in DIR."""
    kept = args.work / f"{arm}-{size}-{seed}.scores.json"
    if not kept.exists():
        start, untrained = arm.split(", ")[0], arm.endswith("no training")
        run = (
            warm_start(size, seed, args)
            if untrained and start == "warm"
            else private(start, size, seed, args)
        )
        model, config = load_model(load_checkpoint(run))
        if untrained and start == "random":
            model = make_model(config.model, seed)
        px = config.model.encoder.image_size
        fit, test = scenes(FIRST_FIT, args.num_fit, px), scenes(FIRST_TEST, args.num_test, px)
        found = {
            MASKED_LOSS: masked_loss(model, test),
            **attribute_probes(pooled_network(model.encoder).eval(), fit, test),
        }
        kept.write_text(
            json.dumps(
                found
                | {"parameters": sum(p.numel() for p in model.parameters() if p.requires_grad)}
            )
        )
    return json.loads(kept.read_text())


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the masked loss against the number of trained parameters: a line per arm, with the least
    and the greatest loss of the seeds.
    """
    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", xlabel="parameters", ylabel=MASKED_LOSS)
    size_of = {r["case"]: r["value"] for r in rows if r["variant"] == "parameters"}
    arms: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for r in rows:
        if r["variant"] == MASKED_LOSS:
            arms.setdefault(r["case"].partition(", ")[2], []).append((size_of[r["case"]], r))
    for arm, points in arms.items():
        sizes, found = zip(*sorted(points, key=lambda point: point[0]), strict=True)
        (line,) = axes.plot(sizes, [r["value"] for r in found], marker="o", label=arm)
        lows, highs = ([r[name] for r in found] for name in ("low", "high"))
        axes.vlines(sizes, lows, highs, color=line.get_color())
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("work", "scenes"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--sizes", default="2x64,4x128,6x192")
    parser.add_argument("--starts", default=",".join(STARTS))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--gradients", type=int, default=200_000)
    parser.add_argument("--warm", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--set", action="extend", nargs="+", default=[], help="further settings of every run"
    )
    parser.add_argument("--quick", action="store_true", help="few scenes to measure on")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    args.num_fit, args.num_test = (1000, 500) if args.quick else (4000, 2000)
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    found: dict[tuple[str, str, str], list[float]] = {}
    for size in args.sizes.split(","):
        for start in args.starts.split(","):
            for arm in (f"{start}, no training", start):
                for seed in map(int, args.seeds.split(",")):
                    made = measure(arm, size, seed, args)
                    shown = ", ".join(
                        f"{name} {value:.4g}"
                        for name, value in made.items()
                        if name.startswith(("mean of", "masked"))
                    )
                    print(f"{size}, {arm}, seed {seed}: {shown}", flush=True)
                    for name, value in made.items():
                        found.setdefault((size, arm, name), []).append(value)
    rows = [
        row(f"{size}, {arm}", name, UNITS.get(name, "percent"), values)
        for (size, arm, name), values in found.items()
    ]
    write_result(args.json, "vip_sizes", rows, packages=("torch", "numpy", "dp-accounting"))
    if args.figure is not None:
        draw(rows, args.figure)


if __name__ == "__main__":
    main()
