"""ViP in miniature: what the warm start gives, what private training adds to it, and controls of
equal counts, by probes on photographs.

    python benchmarks/vip_table.py --work DIR --train STORE --probe STORE --test STORE [--arms A,B]
    [--seeds 0,1,2] [--gradients N]
                                   [--warm N] [--textures STORE] [--set ARGUMENT ...] [--json FILE]

Runs the product itself: `dpvision train` recipes in DIR, each arm of a seed from that seed's warm
start, with N sample-gradients:

    random            the network of vip.micro as its seed initialises it
    warm              synthetic.vip_micro: the warm start alone (--warm sample-gradients)
    textures          the control that matters: as many sample-gradients again on textures, without
                      noise
    images          on the private images without privacy (as textures: small batches)
    private_eps8      vip.micro, epsilon 8
    private_eps2      vip.micro, epsilon 2
    random_eps8       vip.micro_random_start, epsilon 8
    private_eps8@3e-3 an arm of another learning rate than its recipe's

STOREs are imported from CIFAR-10 or the like: --train is trained on, --probe and --test have
labels. A run that is complete in DIR is not run again, so several processes may share the work by
--arms or --seeds. Scores: ridge probes, and few-shot probes of 5, 10 and 30 per class (20 draws),
on features. Value, low and high in the JSON are median, least and greatest over seeds.
"""

import argparse
import json
from pathlib import Path

from common import row, write_result
from runs import trained

from dpvision.data.open import open_store
from dpvision.eval.probes.few_shot_probe import FewShotProbe
from dpvision.eval.probes.ridge import Ridge
from dpvision.eval.probes.suite import evaluate

ARMS = ("random", "warm", "textures", "pictures", "private_eps8", "private_eps2", "random_eps8")
SHOTS = (5, 10, 30)
WARM_BATCH, PRIVATE_BATCH = 64, 2500


def command(arm: str, seed: int, args: argparse.Namespace) -> list[str]:
    """The `dpvision train` line of an arm."""
    common = [
        "--seed",
        str(seed),
        "--hardware.workers",
        "1",
        "--hardware.physical-batch-size",
        "125",
        *args.set,
    ]
    warm = str(args.work / f"warm-{seed}")

    def steps(gradients: int, batch: int) -> list[str]:
        return [
            "--privacy.expected-batch-size",
            str(batch),
            "--privacy.steps",
            str(max(1, round(gradients / batch))),
        ]

    def warmup(gradients: int, batch: int) -> list[str]:
        return ["--optim.warmup-steps", str(max(1, round(0.1 * gradients / batch)))]

    if arm in ("warm", "textures"):
        count = args.warm if arm == "warm" else args.gradients
        start = [] if arm == "warm" else ["--init-from", warm]
        if args.textures is not None:
            start += [
                "--data",
                str(args.textures),
                "--privacy.dataset-size",
                str(open_store(args.textures).num_records),
            ]
        return [
            "synthetic.vip_micro",
            *start,
            *steps(count, WARM_BATCH),
            *warmup(count, WARM_BATCH),
            *common,
        ]
    data = [
        "--data",
        str(args.train),
        "--privacy.dataset-size",
        str(open_store(args.train).num_records),
    ]
    start = ["--init-from", "None" if arm.startswith("random_eps") else warm]
    private = "vip.micro_random_start" if arm.startswith("random_eps") else "vip.micro"
    if arm == "pictures":
        recipe = Path(warm, "config.json")  # the warm start's optimizer: the best this arm can do
        optim = json.loads(recipe.read_text())["optim"]
        same = [
            "--optim.weight-decay",
            str(optim["weight_decay"]),
            "--optim.decayed",
            optim["decayed"],
            "--optim.schedule",
            optim["schedule"],
        ]
        sizes = [*steps(args.gradients, WARM_BATCH), *warmup(args.gradients, WARM_BATCH)]
        return ["vip.micro_non_private", *data, *start, *sizes, *same, *common]
    epsilon, _, rate = arm.split("_eps")[1].partition("@")
    sizes = [*steps(args.gradients, PRIVATE_BATCH), *warmup(args.gradients, PRIVATE_BATCH)]
    rates = ["--optim.learning-rate", rate] if rate else []
    return [private, *data, *start, "--privacy.target-epsilon", epsilon, *sizes, *rates, *common]


def train(arm: str, seed: int, args: argparse.Namespace) -> Path:
    """Run an arm unless it is there; returns its run folder."""
    return trained(args.work / f"{arm}-{seed}", command(arm, seed, args))


def scores(arm: str, seed: int, args: argparse.Namespace) -> dict[str, float]:
    """Accuracy in percent by protocol, kept in DIR."""
    kept = args.work / f"{arm}-{seed}.scores.json"
    if not kept.exists():
        spec = (
            f"random:{train('warm', seed, args)}"
            if arm == "random"
            else str(train(arm, seed, args))
        )
        found = evaluate(
            spec,
            open_store(args.probe),
            open_store(args.test),
            protocols=(Ridge(), FewShotProbe(SHOTS)),
            against=(),
            workers=1,
        )
        kept.write_text(json.dumps({s.protocol: 100 * s.value for s in found}))
    return json.loads(kept.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("work", "train", "probe", "test"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument(
        "--textures",
        type=Path,
        help="store of textures, e.g. of files; left out: new looks at 200,000 in each step",
    )
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--gradients", type=int, default=100_000)
    parser.add_argument("--warm", type=int, default=150_000)
    parser.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        help="further settings of every run, as `dpvision train` takes them",
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.work = args.work.resolve()
    found: dict[tuple[str, str], list[float]] = {}
    for seed in map(int, args.seeds.split(",")):
        for arm in args.arms.split(","):
            made = scores(arm, seed, args)
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
    write_result(
        args.json, "vip_table", rows, packages=("torch", "numpy", "scikit-learn", "dp-accounting")
    )


if __name__ == "__main__":
    main()
