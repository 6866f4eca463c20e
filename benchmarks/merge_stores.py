"""Merge of two stores: records a second and memory by rows, with two processes.

    python benchmarks/merge_stores.py [--quick] [--rows N ...] [--json FILE]

The stores have half of the rows each, tiny images in tars (import_rate.py), half of the second
one's being the first one's.

    records_per_s   rows of both stores by the clock
    peak_mb         largest resident memory of the merging process, of which "imports_mb" are its
                    libraries; "worker_mb" that of a process that it starts
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from common import row, write_result
from import_rate import watch_workers, write_shards

_SHARDS = 40


def peak_mb() -> float:
    """Largest resident memory of this process; getrusage would count its parent's."""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1000


def merge_once(folder: str) -> None:
    """Merge in this process; print figures as JSON."""
    from dpvision.data.merge import merge_stores

    children, before, start = [0.0], peak_mb(), time.perf_counter()
    threading.Thread(target=watch_workers, args=[children], daemon=True).start()
    made = merge_stores([Path(folder, "a"), Path(folder, "b")], Path(folder, "m"), workers=2)
    repeats = made.import_summary()["duplicates_merged"]
    figures = {
        "records_per_s": (made.num_records + repeats) / (time.perf_counter() - start),
        "imports_mb": before,
        "peak_mb": peak_mb(),
        "worker_mb": max(children),
        "repeats": repeats,
    }
    print(json.dumps(figures))


def measured(rows: int) -> dict[str, float]:
    """Make two stores, and return the figures of their merge."""
    from dpvision.data.importer import import_source

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for seed, store in enumerate("ab"):
            source = folder / f"of {store}"
            write_shards(source, rows // 2, _SHARDS, seed)
            if store == "b":  # half of its tars are others' copies
                for k in range(0, _SHARDS, 2):
                    shard = f"shard-{k:05d}.tar"
                    (source / shard).write_bytes((folder / "of a" / shard).read_bytes())
            import_source(source, folder / store, public=True, workers=2)
        code = f"import merge_stores as m; m.merge_once({name!r})"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise SystemExit(done.stderr)
    print(rows, done.stdout, flush=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few rows")
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 8_000_000])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [
        row(f"{num} rows", "2 processes", metric, [value])
        for num in ([40_000] if args.quick else args.rows)
        for metric, value in measured(num).items()
    ]
    write_result(args.json, "merge_stores", rows, packages=["dpvision", "numpy"])


if __name__ == "__main__":
    main()
