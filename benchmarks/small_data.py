"""Private classifiers of small data through the command line: accuracy on the test images, by data
set, encoder and epsilon.

    python benchmarks/small_data.py --data DIR --work DIR [--sets A,B] [--encoders A,B] [--epsilons
    0.1,1,none] [--seeds N] [--json FILE]

DIR of --data holds cifar10, eurosat, mednist and pets_sample (train.parquet and test.parquet:
image, label). Nothing but the number of records, of classes and epsilon is given to ``dpvision
adapt``; on CIFAR-10 delta too, 1e-5, as published figures have it. A run draws its noise from the
operating system, so every run is another seed. Figures: accuracy in percent, the median run with
the lowest and the highest; seconds of the whole command. A finished run is not repeated: DIR of
--work keeps what it found, until you delete it.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from common import row, write_result

SETS = {
    "cifar10": (50_000, 10),
    "eurosat": (21_600, 10),
    "mednist": (9_000, 6),
    "pets_sample": (222, 37),
}
"""Training records and classes, which a person declares."""
ENCODERS = ("patches+scattering", "patches", "hog", "pixels")
EPSILONS = ("0.1", "0.5", "1", "2", "3", "8", "none")


def store_of(data: Path, work: Path, name: str, split: str) -> Path:
    """The store of a split, imported at its first use: training images as private ones, test images
    as public ones.
    """
    store = work / "stores" / f"{name}-{split}"
    if not (store / "store.json").exists():
        source = [str(data / name / f"{split}.parquet"), str(store)]
        run(["data", "import", *source, *(["--public"] if split == "test" else [])])
    return store


def run(argv: list[str]) -> str:
    """Standard output of ``dpvision``; what it says on standard error is shown."""
    return subprocess.run(
        [sys.executable, "-m", "dpvision", *argv], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def accuracy(
    data: Path, work: Path, name: str, encoder: str, epsilon: str, seed: int
) -> tuple[float, float]:
    """Percent right and seconds of one run."""
    records, classes = SETS[name]
    train, test = (store_of(data, work, name, split) for split in ("train", "test"))
    argv = [
        "adapt",
        "--data",
        str(train),
        "--encoder",
        encoder,
        "--num-classes",
        str(classes),
        "--dataset-size",
        str(records),
        "--json",
    ]
    argv += ["--privacy.guarantee", "none"] if epsilon == "none" else ["--epsilon", epsilon]
    argv += ["--privacy.delta", "1e-5"] if name == "cifar10" and epsilon != "none" else []
    root = f"{name}-{encoder.replace('+', '-')}-{epsilon}-{seed}"
    if (found := work / "found" / f"{root}.json").exists():
        return tuple(json.loads(found.read_text()))
    shutil.rmtree(work / "runs" / root, ignore_errors=True)  # stopped
    start = time.perf_counter()
    result = json.loads(
        run([*argv, "--runs", str(work / "runs"), "--name", root, "--test", str(test), "--quiet"])
    )
    print(
        f"{root}: {100 * result['scores'][0]['value']:.2f} by {result['head']}",
        file=sys.stderr,
        flush=True,
    )
    figures = 100 * result["scores"][0]["value"], time.perf_counter() - start
    found.parent.mkdir(exist_ok=True)
    found.write_text(json.dumps(figures))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--encoders", default=",".join(ENCODERS))
    parser.add_argument("--epsilons", default=",".join(EPSILONS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for name in args.sets.split(","):
        for encoder in args.encoders.split(","):
            for epsilon in args.epsilons.split(","):
                seeds = range(1 if epsilon == "none" else args.seeds)
                found = [
                    accuracy(args.data, args.work, name, encoder, epsilon, seed) for seed in seeds
                ]
                case = f"{name}, epsilon {epsilon}"
                rows += [
                    row(case, encoder, "accuracy", [value for value, _ in found]),
                    row(case, encoder, "seconds", [s for _, s in found]),
                ]
    write_result(args.json, "small_data", rows, packages=("torch", "numpy"))


if __name__ == "__main__":
    main()
