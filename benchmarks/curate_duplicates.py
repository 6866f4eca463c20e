"""Duplicates that curation finds: precision and recall on planted copies of real images, what
clusters miss, and memory.

    python benchmarks/curate_duplicates.py table --data FOLDER [--encoders hog,lite0] [--json FILE]
    python benchmarks/curate_duplicates.py clusters --data FOLDER [--encoders hog] [--json FILE]
    python benchmarks/curate_duplicates.py memory [--json FILE]

``table``: for each set, the first images and one copy of each of every fifth, after them; one kind
of copy at a time. ``recall``: share of copies left out because of their original. ``wrong``: share
of all records left out because of an image that is neither the original nor a copy of it; the sets
hold some true duplicates, which count. ``clusters``: 20,000 images of CIFAR-10; share of the pairs
above the threshold, and of the records left out, that are found within clusters of k-means, by
probes; within them all are compared, and the same records are found one pair at a time. ``memory``:
what a process
adds to its memory, of which it may add 512 MiB, by number of records.
"""

import argparse
import io
import json
import resource
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from common import row, write_result
from papers_heads import lite0
from PIL import Image, ImageDraw

from dpvision.curate.clusters import cosines, k_means, nearest_clusters
from dpvision.curate.embedding import Embedding
from dpvision.curate.exact_duplicates import ExactDuplicates
from dpvision.curate.near_duplicates import NearDuplicates
from dpvision.curate.record import AcrossStep, Duplicates, Record
from dpvision.curate.semantic_duplicates import SemanticDuplicates
from dpvision.data.sample import Sample

SETS = {"flickr8k": 500, "pets_sample": 220, "eurosat": 500, "cifar10": 500}
EVERY = 5
THRESHOLDS = (0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99)
PACKAGES = ("torch", "numpy", "imagehash", "pillow")
MEMORY_WIDTH = 256
CASES = {"exact": (1 << 20, 8 << 20), "near_0": (1 << 20, 8 << 20), "near_6": (1 << 18, 1 << 20)}
SEMANTIC = (20_000, 1_000_000)
LIMIT = 1 << 29
"""Bytes that a process may add to what the imports take."""


def files(data: Path, name: str, num: int) -> list[bytes]:
    """The first images of a set."""
    if name == "flickr8k":
        found: list[bytes] = []
        with tarfile.open(data / name / "train-000000.tar") as tar:
            while len(found) < num and (member := tar.next()) is not None:
                if member.name.endswith(".jpg"):
                    found.append(tar.extractfile(member).read())  # type: ignore[union-attr]
        return found
    batches = pq.ParquetFile(data / name / "train.parquet").iter_batches(100, columns=["image"])
    found = []
    while len(found) < num:
        found += [image["bytes"] for image in next(batches)["image"].to_pylist()]
    return found[:num]


def copies(data: bytes) -> dict[str, bytes]:
    """Republished forms of an image, by name."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    width, height = image.size

    def saved(changed: Image.Image, quality: int = 92) -> bytes:
        file = io.BytesIO()
        changed.save(file, "JPEG", quality=quality)
        return file.getvalue()

    def cropped(share: float) -> Image.Image:
        left, top = (round(side * (1 - share) / 2) for side in (width, height))
        return image.crop((left, top, width - left, height - top))

    png = io.BytesIO()
    image.save(png, "PNG")
    text = image.copy()
    ImageDraw.Draw(text).text((width * 0.04, height * 0.88), "(c) photo", fill="white")
    half = image.resize((max(1, width // 2), max(1, height // 2)), Image.Resampling.BICUBIC)
    return {
        "other caption": data,
        "other format": png.getvalue(),
        "JPEG 30": saved(image, 30),
        "half the size": saved(half),
        "brighter": saved(image.point(lambda value: min(255, round(1.25 * value)))),
        "text": saved(text),
        "mirrored": saved(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)),
        "crop 90%": saved(cropped(0.9)),
        "crop 75%": saved(cropped(0.75)),
    }


def columns(data: list[bytes], encoders: dict[str, Embedding]) -> dict[str, np.ndarray]:
    """Facts of images, by name; embeddings by the encoder's."""
    found: dict[str, list[np.ndarray]] = {}
    steps = {
        "exact": ExactDuplicates().facts().opened(),
        "near": NearDuplicates().facts().opened(),
        **{name: step.opened() for name, step in encoders.items()},
    }
    for start in range(0, len(data), 64):
        for name, step in steps.items():
            records = [
                Record(Sample(str(i), d, {})) for i, d in enumerate(data[start : start + 64])
            ]
            step(records)
            found.setdefault(name, []).extend(next(iter(r.facts.values())) for r in records)
    return {name: np.stack(values) for name, values in found.items()}


def left_out(step: AcrossStep, column: np.ndarray, alive: np.ndarray) -> Duplicates:
    with tempfile.TemporaryDirectory() as work:
        found = step.duplicates(column, alive, Path(work), lambda done: None)
        return Duplicates(*(np.array(part) for part in found))


def table(
    data: Path, encoders: dict[str, Embedding], keep: Path | None
) -> Iterator[dict[str, Any]]:
    """Recall and wrong ones of every step and kind of copy."""
    for name, num in SETS.items():
        originals = files(data, name, num)
        rows, kinds = list(originals), []
        origin = list(range(num))
        for i in range(0, num, EVERY):
            for kind, copy in copies(originals[i]).items():
                rows.append(copy)
                origin.append(i)
                kinds.append(kind)
        kind_N, origin_N = np.array([""] * num + kinds), np.array(origin)
        facts = columns(rows, encoders)
        if keep is not None:
            np.savez(keep / f"{name}.npz", kind=kind_N, origin=origin_N, **facts)
        print(f"{name}: {len(rows):,} images", file=sys.stderr, flush=True)
        steps: list[tuple[str, str, AcrossStep]] = [
            ("exact", "exact", ExactDuplicates()),
            ("near 0", "near", NearDuplicates(0)),
            ("near 6", "near", NearDuplicates(6)),
            *(
                (f"{encoder} {cosine}", encoder, SemanticDuplicates(cosine, clusters=1))
                for encoder in encoders
                for cosine in THRESHOLDS
            ),
        ]
        for label, fact, step in steps:
            for kind in dict.fromkeys(kinds):
                alive = (kind_N == "") | (kind_N == kind)
                found = left_out(step, facts[fact], alive)
                right = origin_N[found.rows_M] == origin_N[found.twins_M]
                copy = kind_N[found.rows_M] != ""
                caught = float((right & copy).sum() / (kind_N == kind).sum())
                yield row(f"{name}, {kind}", label, "recall", [caught])
                if kind == "other caption":
                    lost = float((~copy).sum() / num)
                    yield row(f"{name}, {num} originals", label, "wrong", [lost])


def clusters(data: Path, encoders: dict[str, Embedding]) -> Iterator[dict[str, Any]]:
    """What clusters miss on 20,000 images."""
    images = files(data, "cifar10", 20_000)
    for name, x_ND in columns(images, encoders).items():
        if name not in encoders:
            continue
        alive = np.ones(len(x_ND), dtype=bool)
        for cosine in (0.8, 0.9, 0.95):
            later, earlier = close_pairs(x_ND, cosine)
            records = np.unique(later)
            case = f"20,000 of CIFAR-10, cosine {cosine}"
            yield row(case, name, "pairs", [len(later)])
            yield row(case, name, "left out", [len(records)])
            for num_clusters, probes in ((100, 1), (100, 2), (100, 4), (1000, 1), (1000, 4)):
                step = SemanticDuplicates(cosine, clusters=num_clusters, probes=probes)
                start = time.perf_counter()
                found = left_out(step, x_ND, alive)
                seconds = time.perf_counter() - start
                # one pair at a time: home of one among the probes of the other
                sample = x_ND if num_clusters * 64 >= len(x_ND) else drawn(x_ND, num_clusters)
                near = nearest_clusters(x_ND, k_means(sample, num_clusters), probes)
                met = (near[later] == near[earlier, :1]).any(axis=1)
                met |= (near[earlier] == near[later, :1]).any(axis=1)
                rows, first = np.unique(later[met], return_index=True)
                assert np.array_equal(found.rows_M, rows), "other records than pair by pair"
                assert np.array_equal(found.twins_M, earlier[met][first])
                variant = f"{name}, K {num_clusters}, P {probes}"
                yield row(case, variant, "share of pairs", [met.mean() if len(met) else 1.0])
                yield row(case, variant, "share left out", [len(rows) / max(1, len(records))])
                yield row(case, variant, "seconds", [seconds])


def drawn(x_ND: np.ndarray, num_clusters: int) -> np.ndarray:
    from dpvision.curate.semantic_duplicates import _sample

    return _sample(x_ND, np.ones(len(x_ND), dtype=bool), len(x_ND), num_clusters)


def close_pairs(x_ND: np.ndarray, cosine: float) -> tuple[np.ndarray, np.ndarray]:
    """All pairs above a cosine, the later row first, in order: float64, exact."""
    later, earlier = [], []
    for start in range(0, len(x_ND), 500):
        block = x_ND[start : start + 500].astype(np.float32)
        one, two = np.nonzero(block @ x_ND[: start + 500].astype(np.float32).T > cosine - 0.01)
        keep = two < one + start
        one, two = one[keep] + start, two[keep]
        above = cosines(x_ND[one], x_ND[two]) > cosine
        later.append(one[above])
        earlier.append(two[above])
    return np.concatenate(later), np.concatenate(earlier)


def one_memory(case: str, num: int, folder: Path) -> dict[str, float]:
    """Run a step on ``num`` records in this process; return its peaks."""
    rng = np.random.default_rng(0)
    path = folder / "column"
    shape = {"exact": (2,), "near_0": (2, 2), "near_6": (2, 2)}.get(case, (MEMORY_WIDTH,))
    dtype = np.float16 if case == "semantic" else np.uint64
    with path.open("wb") as file:
        for start in range(0, num, 1 << 14):
            size = (min(1 << 14, num - start), *shape)
            if case == "semantic":
                x = rng.normal(size=size).astype(np.float32)
                x[1::10] = x[::10][: len(x[1::10])] + 0.1 * x[1::10]
                x /= np.linalg.norm(x, axis=1, keepdims=True)
                file.write(x.astype(np.float16).tobytes())
            else:
                x = rng.integers(1, 1 << 63, size, dtype=np.uint64)
                x[1::10] = x[::10][: len(x[1::10])]
                file.write(x.tobytes())
    column = np.memmap(path, dtype=dtype, mode="r").reshape(num, *shape)
    alive = np.ones(num, dtype=bool)
    step: AcrossStep = {
        "exact": ExactDuplicates(),
        "near_0": NearDuplicates(0),
        "near_6": NearDuplicates(6),
        "semantic": SemanticDuplicates(0.95),
    }[case]
    limit = of_status("VmData") + LIMIT
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    before = of_status("RssAnon")
    peak, start_s = [before], time.perf_counter()
    work = folder / "work"
    work.mkdir()
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.005):
            peak[0] = max(peak[0], of_status("RssAnon"))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    found = step.duplicates(column, alive, work, lambda done: None)
    stop.set()
    watcher.join()
    return {
        "left_out": len(found.rows_M),
        "seconds": time.perf_counter() - start_s,
        "added_bytes": peak[0] - before,
    }


def of_status(name: str) -> int:
    """Bytes of this process: RssAnon, in memory and no pages of files; VmData, what it may use."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition(f"{name}:")[2].split()[0])


def memory() -> Iterator[dict[str, Any]]:
    """Peaks of processes of their own."""
    for case, sizes in {**CASES, "semantic": SEMANTIC}.items():
        for num in sizes:
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, "one", f"--case={case}", f"--num={num}"]
                done = subprocess.run(
                    [*command, f"--folder={folder}"], capture_output=True, text=True, check=True
                )
            print(case, num, done.stdout, file=sys.stderr, flush=True)
            for metric, value in json.loads(done.stdout).items():
                yield row(f"{case}, {num:,} records", "+ 512 MiB", metric, [value])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("table", "clusters", "memory", "one"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--encoders", default="hog")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="table: folder for the facts of each set")
    parser.add_argument("--case")
    parser.add_argument("--num", type=int)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    if args.part == "one":
        print(json.dumps(one_memory(args.case, args.num, args.folder)))
        return
    names = args.encoders.split(",")
    encoders = {name: Embedding(lite0() if name == "lite0" else name) for name in names}
    if args.part == "memory":
        rows = list(memory())
    elif args.part == "table":
        rows = list(table(args.data, encoders, args.keep))
    else:
        rows = list(clusters(args.data, encoders))
    write_result(args.json, f"curate_duplicates {args.part}", rows, packages=PACKAGES)


if __name__ == "__main__":
    main()
