"""Start of a private head's run: seconds of CPU time (kernel included) of ``dpvision adapt
--dry-run`` on one core, beyond those of importing torch, torchvision and timm.

    python benchmarks/adapt_start.py --weights FILE [--sizes 96,224] [--trees NAME=SRC,...]
        [--json FILE]

``--weights`` is a file of EfficientNet-Lite0. Each of ``--trees`` is the src folder of a checkout,
so that two commits are compared in one run; they take turns. The first round fills caches of
bytecode and does not count.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from common import ROOT, row, write_result

from dpvision.data.synthetic_store import write_scenes

ROUNDS, NUM_IMAGES = 5, 60
IMPORTS = ["-c", "import torch, torchvision, timm"]


def cpu_seconds(command: list[str], source: str, folder: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    bytecode = {"PYTHONPYCACHEPREFIX": f"{folder}/bytecode", "PYTHONDONTWRITEBYTECODE": ""}
    environment = {**os.environ, **bytecode, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--sizes", default="96,224")
    parser.add_argument("--trees", default=f"now={ROOT / 'src'}")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    trees = dict(part.split("=", 1) for part in args.trees.split(","))
    taken: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_scenes(Path(folder) / "store", NUM_IMAGES, public=False)
        for turn in range(ROUNDS + 1):
            for tree, source in trees.items():
                imports = cpu_seconds(IMPORTS, source, folder)
                cases = {("imports", tree): imports}
                for size in args.sizes.split(","):
                    start = cpu_seconds(adapt(folder, args.weights, size), source, folder)
                    cases[f"start, {size} px", tree] = start - imports
                for case, seconds in cases.items():
                    taken.setdefault(case, []).extend([seconds] * (turn > 0))
    rows = [row(case, tree, "cpu_s", values) for (case, tree), values in sorted(taken.items())]
    write_result(args.json, "adapt_start", rows, packages=("torch", "torchvision", "timm"))


def adapt(folder: str, weights: Path, size: str) -> list[str]:
    """Arguments of python for the dry run of a head on the features of an image size."""
    encoder = [
        *("--encoder", f"timm:tf_efficientnet_lite0@{weights}", "--public-weights", "a; b; c"),
        *("--model.encoder.image-size", size),
    ]
    numbers = ["--epsilon", "3", "--dataset-size", str(NUM_IMAGES), "--num-classes", "8"]
    where = ["--data", f"{folder}/store", "--runs", f"{folder}/runs", "--name", "x", "--dry-run"]
    return ["-m", "dpvision", "adapt", *where, *numbers, *encoder]


if __name__ == "__main__":
    main()
