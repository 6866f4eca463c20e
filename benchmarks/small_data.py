"""Private classifiers of small data through the command line: accuracy, AUROC and calibration error
on the test images, by data set, encoder and epsilon.

    python benchmarks/small_data.py --data DIR --work DIR [--sets A,B] [--encoders A,B] [--epsilons
    0.1,1,none] [--seeds N] [--json FILE]
    python benchmarks/small_data.py --page FILE

DIR of --data holds cifar10, eurosat, mednist and pets_sample (train.parquet and test.parquet:
image, label). Nothing but the number of records, of classes and epsilon is given to ``dpvision
adapt``; on CIFAR-10 delta too, 1e-5, as published figures have it. A run draws its noise from the
operating system, so every run is another seed; the test images are the same. Figures: accuracy in
percent, AUROC (mean of the classes), calibration error (of the predicted class, as the run gives
its probabilities), the median run with the lowest and the highest, and mean and standard deviation;
seconds of ``adapt``. A finished run is not repeated: DIR of --work keeps what it found, until you
delete it.

mednist_patients is the same images as patients made up for this table: images of a class whose file
numbers have the same hundreds show one patient. Every sixth of them is for the test; epsilon is for
a patient. The second form writes the table of docs/heads.md from a result.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
from common import ROOT, row, write_result

SETS = {
    "cifar10": (50_000, 10),
    "eurosat": (21_600, 10),
    "mednist": (9_000, 6),
    "mednist_patients": (9_029, 6),
    "pets_sample": (222, 37),
}
"""Training records and classes, which a person declares."""
ENCODERS = ("patches+scattering", "patches", "hog", "pixels")
EPSILONS = ("0.1", "0.5", "1", "2", "3", "8", "none")
PATIENTS, MOST_IMAGES = 495, 32
"""Of mednist_patients: training patients, and the most images of one."""
MEASURES = ("accuracy", "AUROC", "calibration error", "seconds")
PAGE = ROOT / "docs" / "heads.md"
BEGIN, END = "<!-- written by benchmarks/small_data.py -->", "<!-- end -->"


def write_patients(data: Path, folder: Path) -> None:
    """Write MedNIST's images, each once, as train.parquet and test.parquet of made-up patients."""
    parts: dict[str, list[dict]] = {"train": [], "test": []}
    seen = set()
    for split in parts:
        table = pyarrow.parquet.read_table(data / "mednist" / f"{split}.parquet")
        for one in table.to_pylist():
            group = int(Path(one["image"]["path"]).stem) // 100
            if one["image"]["bytes"] not in seen:
                seen.add(one["image"]["bytes"])
                patient = f"{one['label']}-{group}"
                parts["test" if group % 6 == 5 else "train"].append(one | {"patient": patient})
    folder.mkdir(parents=True)
    for split, rows in parts.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet")


def store_of(data: Path, work: Path, name: str, split: str) -> Path:
    """The store of a split, imported at its first use: training images as private ones, test images
    as public ones.
    """
    store = work / "stores" / f"{name}-{split}"
    if not (store / "store.json").exists():
        options = ["--public"] if split == "test" else []
        if name == "mednist_patients":
            if not (work / name).exists():
                write_patients(data, work / name)
            data = work
            options += ["--unit-from", "patient"]
        run(["data", "import", str(data / name / f"{split}.parquet"), str(store), *options])
    return store


def run(argv: list[str]) -> str:
    """Standard output of ``dpvision``; what it says on standard error is shown."""
    return subprocess.run(
        [sys.executable, "-m", "dpvision", *argv], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def figures(
    data: Path, work: Path, name: str, encoder: str, epsilon: str, seed: int
) -> dict[str, float]:
    """Return MEASURES of one run."""
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
    if name == "mednist_patients" and epsilon != "none":
        argv += ["--privacy.num-units", str(PATIENTS), "--privacy.sampling-unit", "person"]
        argv += ["--privacy.max-records-per-unit", str(MOST_IMAGES)]
    root = f"{name}-{encoder.replace('+', '-')}-{epsilon}-{seed}"
    if (found := work / "found" / f"{root}.json").exists():
        return json.loads(found.read_text())
    shutil.rmtree(work / "runs" / root, ignore_errors=True)  # stopped
    start = time.perf_counter()
    run([*argv, "--runs", str(work / "runs"), "--name", root, "--quiet"])
    seconds = time.perf_counter() - start
    trained = work / "runs" / root
    run(["evaluate", str(trained), "--test", str(test), "--per-class", "--json"])
    where = trained / ("confidential" if epsilon == "none" else "") / "class_scores.json"
    (scored,) = json.loads(where.read_text()).values()
    (all_images,) = (r for r in scored["rows"] if (r["name"], r["group"]) == ("all", "all"))
    values = {k: v["value"] for k, v in all_images["figures"].items() if k in MEASURES}
    right = sum(row_K[k] for k, row_K in enumerate(scored["confusion_KK"]))
    values |= {"accuracy": 100 * right / scored["images"], "seconds": seconds}
    print(root, values, file=sys.stderr, flush=True)
    found.parent.mkdir(exist_ok=True)
    found.write_text(json.dumps(values))
    return values


def table(path: Path) -> list[str]:
    """Return the page's table: mean and standard deviation of a result's runs."""
    found = json.loads(path.read_text())
    cases: dict[str, dict[str, str]] = {}
    for one in found["rows"]:
        digits = 1 if one["metric"] in ("accuracy", "seconds") else 3
        cell = f"{one['mean']:.{digits}f} ({one['sd']:.{digits}f})"
        cases.setdefault(f"{one['case']} | {one['runs']}", {})[one["metric"]] = cell
    shown = ("accuracy", "AUROC", "calibration error")
    lines = [f"| set, epsilon | runs | {' | '.join(shown)} |", "|---|---|---|---|---|"]
    lines += [
        f"| {case} | {' | '.join(cells[m] for m in shown)} |" for case, cells in cases.items()
    ]
    return [*lines, "", f"Measured at commit {found['commit']} (`{path.name}`)."]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--work", type=Path, default=Path("small_data"))
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--encoders", default=",".join(ENCODERS))
    parser.add_argument("--epsilons", default=",".join(EPSILONS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="a result, from which to write the page's table")
    args = parser.parse_args()
    if args.page is not None:
        before, rest = PAGE.read_text().split(BEGIN)
        made = "\n".join(table(args.page))
        PAGE.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.split(END)[1]}")
        return
    rows = []
    for name in args.sets.split(","):
        for encoder in args.encoders.split(","):
            for epsilon in args.epsilons.split(","):
                seeds = range(1 if epsilon == "none" else args.seeds)
                found = [
                    figures(args.data, args.work, name, encoder, epsilon, seed) for seed in seeds
                ]
                for measure in MEASURES:
                    values = [one[measure] for one in found]
                    spread = statistics.stdev(values) if len(values) > 1 else 0.0
                    mean = {"mean": statistics.mean(values), "sd": spread, "runs": len(values)}
                    case = f"{name}, epsilon {epsilon}"
                    rows.append(row(case, encoder, measure, values) | mean)
    write_result(args.json, "small_data", rows, packages=("torch", "numpy"))


if __name__ == "__main__":
    main()
