"""Random reads from a store against bare os.pread of the same bytes; the goal is a time_ratio of at
most 1.1.

    python benchmarks/store_reads.py [--quick] [--source SOURCE] [--json FILE]

SOURCE is anything that `dpvision data import` takes; by default the photographs of CIFAR-10, 640
bytes each, where what the store adds to a system call weighs most, or with --quick 2,000 procedural
scenes, which nobody has to download. Both variants read the same
random records in the same round, turn about; "bare" gets its file, size and offset ready-made.
"cached" finds the bytes in memory; before each reading of "disk" the kernel is asked to drop them
(compare the rates to see that it did).
"""

import argparse
import os
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
from common import ROOT, row, write_result

from dpvision.data.importer import import_source
from dpvision.data.store import Store
from dpvision.data.synthetic_store import write_scenes

SOURCE = ROOT.parent / "shared" / "data" / "cifar10" / "train.parquet"


def drop_cache(fds: list[int]) -> None:
    for fd in fds:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def read_bare(where: list[tuple[int, int, int]]) -> list[bytes]:
    return [os.pread(fd, size, offset) for fd, size, offset in where]


def measure(store: Store, case: str, num_reads: int, rounds: int) -> list[dict]:
    rng = np.random.default_rng(0)
    fds = [os.open(path, os.O_RDONLY) for path in store.shard_paths]
    seconds: dict[str, list[float]] = {"bare": [], "store": []}
    for number in range(rounds):
        rows = rng.choice(store.num_records, min(num_reads, store.num_records), replace=False)
        chosen = store.index[rows]
        where = list(
            zip(
                [fds[s] for s in chosen["shard"]],
                chosen["size"].tolist(),
                chosen["offset"].tolist(),
                strict=True,
            )
        )
        variants = {"bare": partial(read_bare, where), "store": partial(store.read_many, rows)}
        if case == "cached":
            variants[
                "bare"
            ]()  # or else the first of the two would warm the processor's caches for the second
        for name in sorted(variants, reverse=bool(number % 2)):
            if case == "disk":
                drop_cache(fds)
            start = time.perf_counter()
            variants[name]()
            seconds[name].append(time.perf_counter() - start)
    for fd in fds:
        os.close(fd)
    ratios = [ours / bare for ours, bare in zip(seconds["store"], seconds["bare"], strict=True)]
    rates = [
        row(case, name, "reads_per_s", [len(rows) / s for s in values])
        for name, values in seconds.items()
    ]
    return [*rates, row(case, "store", "time_ratio", ratios)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few rounds, of procedural scenes")
    parser.add_argument("--source", help="images to import and read")
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        if args.quick and args.source is None:
            store = write_scenes(Path(folder, "store"), 2000, 32)
        else:
            start = time.perf_counter()
            store = import_source(args.source or str(SOURCE), Path(folder, "store"), public=True)
            rate = store.num_records / (time.perf_counter() - start)
            rows.append(row("import", "store", "records_per_s", [rate]))
        rows += measure(store, "cached", 5000, 5 if args.quick else 201)
        rows += measure(store, "disk", 1000, 3 if args.quick else 21)
    write_result(args.json, "store_reads", rows, packages=["numpy"])


if __name__ == "__main__":
    main()
