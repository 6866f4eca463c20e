"""Import of tar shards: records a second and memory by rows and processes; then random reads from
all its shards.

    python benchmarks/import_rate.py [--quick] [--rows N] [--shards N] [--workers N] [--only N]
    [--work FOLDER] [--json FILE]

The records are tiny (4 x 2 pixels, 1 KiB of tar each, no texts), so that hardly more than the
import's own work is left.

    records_per_s   by the clock; "speedup" is the ratio to one process, turn about, in rounds
    cpu_us          CPU time of a record that is not divided among processes: the importing
                    process's, and each other's share of theirs; "cpu_speedup" is the ratio to one
                    process's, the speed-up on idle cores, which a busy machine can show
    peak_mb         largest resident memory of the importing process, of which "imports_mb" are its
                    libraries; "worker_mb" that of a process that it starts
    reads_per_s     random records, 64 at once, of a store whose shards are in the kernel's memory

With --work the shards are made there, if they are not yet, and kept.
"""

import argparse
import contextlib
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import row, write_result

from dpvision.data.tarindex import TarWriter

_BATCH = 64


def bmp(width: int = 4, height: int = 2) -> bytes:
    """A BMP file of zeros, whose pixels are its last bytes: it has no checksum."""
    pixels = width * height * 3
    head = b"BM" + (54 + pixels).to_bytes(4, "little") + bytes(4) + (54).to_bytes(4, "little")
    size = [40, width, height]
    about = b"".join(n.to_bytes(4, "little") for n in size) + b"\1\0\x18\0" + bytes(24)
    return head + about + bytes(pixels)


def write_shards(folder: Path, rows: int, shards: int, seed: int = 0) -> None:
    """Write tars of different images: random pixels in the copies of one tar."""
    folder.mkdir(parents=True)
    per, image = rows // shards, bmp()
    template = folder / "template"
    with template.open("wb") as file:
        tar = TarWriter(file)
        offsets = [tar.add(f"{k:07d}.bmp", image) for k in range(per)]
        tar.finish()
    data = np.fromfile(template, dtype=np.uint8)
    template.unlink()
    places = (np.array(offsets) + len(image) - 24)[:, None] + np.arange(24)
    rng = np.random.default_rng(seed)
    for k in range(shards):
        data[places] = rng.integers(0, 256, places.shape, dtype=np.uint8)
        data.tofile(folder / f"shard-{k:05d}.tar")


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def cpu_of_children() -> float:
    """Seconds of CPU time of the children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def watch_workers(found: list[float]) -> None:
    """Append the largest resident memory of each child, twice a second, for ever.

    getrusage would count what a child had of its parent before it began.
    """
    while True:
        for task in Path("/proc/self/task").glob("*/children"):
            for pid in task.read_text().split():
                with contextlib.suppress(OSError, IndexError):
                    lines = Path(f"/proc/{pid}/status").read_text().split("VmHWM:")
                    found.append(int(lines[1].split()[0]) / 1000)
        time.sleep(0.5)


def import_once(source: str, store: str, workers: int) -> None:
    """Import in this process; print figures as JSON."""
    from dpvision.data.importer import import_source

    before, start, children = peak_mb(), time.perf_counter(), [0.0]
    cpu, others = time.process_time(), cpu_of_children()
    threading.Thread(target=watch_workers, args=[children], daemon=True).start()
    made = import_source(source, store, public=True, workers=workers)
    clock = time.perf_counter() - start
    cpu = time.process_time() - cpu + (cpu_of_children() - others) / workers
    figures = {
        "records_per_s": made.num_records / clock,
        "cpu_us": 1e6 * cpu / made.num_records,
        "imports_mb": before,
        "peak_mb": peak_mb(),
        "worker_mb": max(children),
    }
    print(json.dumps(figures))


def imported(source: Path, store: Path, workers: int) -> dict[str, float]:
    """Import in a process of its own, and return its figures."""
    code = f"import import_rate as m; m.import_once({str(source)!r}, {str(store)!r}, {workers})"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def reads(store: Path, rounds: int, num: int) -> list[float]:
    """Records a second of random reads."""
    from dpvision.data.open import open_store

    opened, rng, found = open_store(store), np.random.default_rng(0), []
    for _ in range(rounds + 1):
        rows = rng.integers(opened.num_records, size=num)
        start = time.perf_counter()
        for at in range(0, num, _BATCH):
            opened.read_many(rows[at : at + _BATCH])
        found.append(num / (time.perf_counter() - start))
    return found[1:]  # the first round opens the files


def measure(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    case, source = f"{args.rows} rows, {args.shards} shards", folder / f"shards-{args.rows}"
    if not source.exists():
        write_shards(source, args.rows, args.shards)
    counts = [args.only] if args.only else [1, args.workers]
    found: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
    for number in range(args.rounds):
        for count in counts[:: 1 if number % 2 else -1]:
            with tempfile.TemporaryDirectory(dir=folder) as out:
                figures = imported(source, Path(out, "store"), count)
                print(count, figures, flush=True)
                found[count].append(figures)
                if number == args.rounds - 1 and count == counts[0]:
                    rates = reads(Path(out, "store"), args.rounds, 1 << 16)
    rows = [
        row(case, f"{count} processes", metric, [one[metric] for one in figures])
        for count, figures in found.items()
        for metric in figures[0]
    ]
    if not args.only:
        for name, metric in (("speedup", "records_per_s"), ("cpu_speedup", "cpu_us")):
            one, many = ([f[metric] for f in found[count]] for count in counts)
            ratios = [b / a for a, b in zip(one, many, strict=True)]
            ratios = [1 / ratio for ratio in ratios] if metric == "cpu_us" else ratios
            rows.append(row(case, f"{args.workers} processes", name, ratios))
    return [*rows, row(case, "store", "reads_per_s", rates)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few rows, one round")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--shards", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2, help="processes to compare with one")
    parser.add_argument("--only", type=int, help="this number of processes, compared with none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, help="where to keep the shards")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.rows, args.shards, args.rounds = 100_000, 20, 1
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(args.work or Path(folder), args)
    write_result(args.json, "import_rate", rows, packages=["dpvision", "numpy", "pillow"])


if __name__ == "__main__":
    main()
