"""Curation: records a second of each step and pass, memory by the number of shards, and the bill
for 233,804,767 pairs.

    python benchmarks/curate_rate.py [--quick] [--shards N] [--steps STEPS] [--also STEP=RATE ...]
    [--work FOLDER] [--json FILE] [--page FILE]

Part 1, "flickr8k": the steps over flickr8k's tars by one process, three rounds: images_per_s of
each step (counts.json: seconds include the decoding that the first step causes), and of the whole
command by pass.

Part 2, "shards": N / 10 and N tars of 10 tiny records each (4 x 2 pixels): seconds of the command,
peak_mb of the process, ms_a_shard of each pass; fsync_ms is what one fsync of a small file takes.

--page writes the bill: core hours of each step for the papers' 233,804,767 pairs, and minutes on 10
to 100 machines of 64 cores, whose cores are as fast as this one, with nothing lost to waiting. With
--also, it has steps whose images a second and core were measured elsewhere. --shards 0 leaves the
second part out; on a --work in memory, that part shows memory without the time of fsync.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, row, write_result
from import_rate import bmp

SHARED = ROOT.parent / "shared" / "data"
PAIRS, SHARD_RECORDS = 233_804_767, 10_000
CORES = 64
"""Of one machine in the bill."""
EACH = 10
"""Records of a tiny shard."""
IMAGE_BYTES = 20_000
"""Of a pair of LAION at 224 pixels, with its texts, in a tar."""


def write_tiny(folder: Path, shards: int) -> None:
    """Write tars of different tiny images with captions."""
    from dpvision.data.tarindex import TarWriter

    folder.mkdir(parents=True)
    for shard in range(shards):
        with (folder / f"{shard:05d}.tar").open("wb") as file:
            tar = TarWriter(file)
            for i in range(EACH):
                number = (shard * EACH + i).to_bytes(8, "little")
                tar.add(f"{shard:05d}{i:02d}.bmp", bmp()[:-24] + number * 3)
                tar.add(f"{shard:05d}{i:02d}.txt", b"two small words")
            tar.finish()


def curate_once(source: str, store: str, steps: str, small: bool) -> None:
    """Curate by one process; print its figures as JSON."""
    from dpvision.curate import passes
    from dpvision.curate.pipeline import Pipeline, Settings
    from dpvision.curate.size import Size

    last, spent = ["start", time.perf_counter()], dict[str, float]()

    def said(what: str, num: int) -> None:
        now = time.perf_counter()
        spent[what] = spent.get(what, 0.0) + now - last[1]
        last[:] = [what, now]

    settings = Settings(size=Size(min_side_px=1)) if small else Settings()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
    start = time.perf_counter()
    made = passes.curate(
        source,
        store,
        Pipeline.of(steps.split(","), settings),
        public=True,
        workers=1,
        progress=said,
    )
    said("writing", 0)
    counts = json.loads((made.path / "confidential/curation/counts.json").read_text())
    figures = {
        "seconds": time.perf_counter() - start,
        "imports_mb": before,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
        "records": made.num_records,
        "spent": spent,
        "counts": counts,
    }
    print(json.dumps(figures))


def curated(source: str, work: Path, steps: str, small: bool) -> dict[str, Any]:
    """Curate in a process of its own, and return its figures."""
    code = f"from curate_rate import *; curate_once({source!r}, {str(work / 's')!r}, {steps!r}, "
    done = subprocess.run(
        [sys.executable, "-c", code + f"{small})"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    shutil.rmtree(work / "s")
    return json.loads(done.stdout.splitlines()[-1])


def fsync_ms(folder: Path, times: int = 200) -> list[float]:
    """Milliseconds of an fsync of a file of 100 bytes just written."""
    found = list[float]()
    for n in range(times):
        path = folder / f"synced-{n}"
        with path.open("wb") as file:
            file.write(bytes(100))
            file.flush()
            start = time.perf_counter()
            os.fsync(file.fileno())
            found.append(1000 * (time.perf_counter() - start))
        path.unlink()
    return found


def bill(per_s: dict[str, float]) -> str:
    """The page: core hours of each part, and hours by machines."""
    machines = (10, 30, 100)
    head = " | ".join(f"{n} machines, minutes" for n in machines)
    lines = [
        f"| part | images/s a core | core hours | share | {head} |",
        f"|---|---|---|---|{'---|' * len(machines)}",
    ]
    hours = {name: PAIRS / rate / 3600 for name, rate in per_s.items()}
    total = sum(hours.values())
    for name, needed in hours.items():
        by = " | ".join(f"{60 * needed / n / CORES:.1f}" for n in machines)
        lines.append(
            f"| {name} | {per_s[name]:,.0f} | {needed:,.0f} | {needed / total:.0%} | {by} |"
        )
    by = " | ".join(f"**{60 * total / n / CORES:.1f}**" for n in machines)
    lines.append(f"| **sum** | {PAIRS / total / 3600:,.0f} | **{total:,.0f}** | | {by} |")
    read_tb = 2 * PAIRS * IMAGE_BYTES / 1e12
    lines += [
        "",
        f"Both passes read the source once: {read_tb:.1f} TB at {IMAGE_BYTES // 1000} kB a pair. A "
        f"disk of 5 GB/s that all machines share needs {read_tb / 5 * 1000 / 3600:.1f} hours for "
        "that, however many machines there are.",
    ]
    return "\n".join(lines) + "\n"


def _split(text: str) -> tuple[str, str, str]:
    return text.partition("=")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--steps", default="size,caption")
    parser.add_argument("--also", nargs="*", default=())
    parser.add_argument("--source", default=str(SHARED / "flickr8k" / "train-*.tar"))
    parser.add_argument("--work", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    shards = 200 if args.quick else args.shards
    work = Path(tempfile.mkdtemp(dir=args.work))
    rows: list[dict[str, Any]] = []
    rates: dict[str, list[float]] = {}
    for _ in range(1 if args.quick else 3):
        found = curated(args.source, work, args.steps, False)
        seen, steps = found["counts"]["seen"], 0.0
        for name, step in found["counts"].items():
            if isinstance(step, dict) and step.get("seconds"):
                rates.setdefault(f"step {name}", []).append(step["came"] / step["seconds"])
                steps += step["seconds"]
        spent = found["spent"]
        looking = max(spent.get("looking", 0.0) - steps, 1e-9)
        rates.setdefault("look: read, write", []).append(seen / looking)
        rates.setdefault("import", []).append(found["records"] / spent["importing"])
        rates.setdefault("whole command", []).append(seen / found["seconds"])
    for name, values in rates.items():
        rows.append(row("flickr8k", name, "images_per_s", values))
    rows.append(row("disk", "100 bytes", "fsync_ms", fsync_ms(work)))
    write_tiny(work / "src", shards)
    peaks = list[float]()
    for num in (shards // 10, shards) if shards else ():
        names = sorted((work / "src").iterdir())
        few = work / f"some-{num}"
        few.mkdir()
        for path in names[:num]:
            os.link(path, few / path.name)
        found = curated(str(few), work, args.steps, True)
        assert found["records"] == num * EACH, found["records"]
        variant = f"{num:,} shards"
        peaks.append(found["peak_mb"])
        rows.append(row("shards", variant, "peak_mb", [found["peak_mb"]]))
        rows.append(row("shards", variant, "imports_mb", [found["imports_mb"]]))
        rows.append(row("shards", variant, "seconds", [found["seconds"]]))
        for name, seconds in found["spent"].items():
            rows.append(row("shards", f"{variant}: {name}", "ms_a_shard", [1000 * seconds / num]))
    if peaks:
        rows.append(row("shards", "all / a tenth", "peak_ratio", [peaks[1] / peaks[0]]))
    write_result(args.json, "curate_rate", rows, packages=["numpy", "pillow"])
    if args.page:
        parts = {name: sorted(v)[len(v) // 2] for name, v in rates.items()}
        del parts["whole command"]
        parts |= {f"step {step}": float(rate) for step, _, rate in map(_split, args.also)}
        args.page.write_text(bill(parts))
    shutil.rmtree(work)


if __name__ == "__main__":
    main()
