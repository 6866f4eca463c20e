"""Curation by processes of one machine and by a Ray cluster: the same store, byte for byte, also
after kills.

    python benchmarks/curate_engines.py [--quick] [--records N] [--kills N] [--no-ray] [--seed N]
    [--work FOLDER] [--json FILE]

The environment gives the steps: CURATE_STEPS (names with commas), CURATE_FACES (weights of the
detector), CURATE_SAFETY (run of a classifier).

The source is 5,000 real and synthetic images in 25 tars: flickr8k, pets, eurosat, photographs that
are hard to read, procedural noise; planted exact copies, truncated files, captions that are left
out. Names and captions of a record say nothing of where it came from.

    records, copies     images of the source; those that are copies of earlier ones
    equal               1 if all files of the store, and the lists of what was left out, are those
                        of one process
    kills_in_PASS       stops of the command while it was in a pass
    seconds             by the clock, of the uninterrupted runs

Variants: processes; ray; ray_workers_killed (SIGKILL to random workers of the cluster); and, by
engine, driver_SIGKILL, driver_SIGINT, driver_SIGTERM: the command is stopped at random moments and
started again until it ends, --kills times in all for "local" and a third of it for ray.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from common import ROOT, row, write_result

SHARED = ROOT.parent / "shared" / "data"
KEY = bytes(range(32))
STEPS = os.environ.get("CURATE_STEPS", "size,caption")
FACES, SAFETY = os.environ.get("CURATE_FACES"), os.environ.get("CURATE_SAFETY")


def pictures(num: int, rng: random.Random) -> list[bytes]:
    """Image files of all kinds."""
    from dpvision.data.decode import as_png
    from dpvision.data.tarindex import scan

    tenth, found = num // 10, list[bytes]()
    for path in sorted((SHARED / "flickr8k").glob("*.tar")):
        members = [m for m in scan(path) if m.name.endswith(".jpg")]
        with path.open("rb") as file:
            for member in members[: 6 * tenth - len(found)]:
                file.seek(member.offset)
                found.append(file.read(member.size))
    for name, most in (("pets_sample", tenth), ("eurosat", tenth)):
        table = pq.read_table(SHARED / name / "train.parquet", columns=["image"])
        found += [cell["bytes"] for cell in table["image"].to_pylist()[:most]]
    messy = [p for p in sorted((SHARED / "messy_photos").iterdir()) if p.suffix != ".json"]
    found += [path.read_bytes() for path in messy if path.stat().st_size < 1_000_000]
    made = np.random.default_rng(rng.randrange(1 << 30))
    while len(found) < num * 9 // 10:
        high, wide = made.integers(40, 200, 2)
        found.append(as_png(made.integers(0, 256, (high, wide, 3), dtype=np.uint8)))
    return found


def write_source(folder: Path, num: int, seed: int) -> tuple[int, int]:
    """Write the tars; return how many records there are, and how many are copies."""
    from dpvision.data.tarindex import TarWriter

    rng = random.Random(seed)
    images = pictures(num, rng)
    copies = [rng.choice(images) for _ in range(num - len(images))]
    images += copies
    rng.shuffle(images)
    images = [data[: len(data) // 2] if rng.random() < 0.02 else data for data in images]
    folder.mkdir(parents=True)
    tars = max(5, num // 200)
    for t in range(tars):
        with (folder / f"scraped-{t:05d}.tar").open("wb") as file:
            tar = TarWriter(file)
            for i, data in enumerate(images[t::tars]):
                name, about = f"{t:05d}{i:05d}", {"url": f"http://a.b/{rng.random()}"}
                text = rng.choice(["IMG_0012.jpg", "", "w", "a dog runs on the beach", "two men"])
                tar.add(f"{name}.jpg", data)
                tar.add(f"{name}.txt", text.encode())
                tar.add(f"{name}.json", json.dumps(about).encode())
            tar.finish()
    return len(images), len(copies)


def content(store: Path) -> dict[str, bytes]:
    """The files of a store that are the same wherever it lies and however long it took."""
    made = {
        path.relative_to(store).as_posix(): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file() and path.name != "ledger_marks.json"
    }
    for name in [name for name in made if name.endswith("counts.json")]:
        counts = json.loads(made[name])
        for step in counts.values():
            if isinstance(step, dict):
                step.pop("seconds", None)
        made[name] = json.dumps(counts).encode()
    return made


def curate_once(source: str, store: str, engine: str, workers: int) -> None:
    """Curate in this process, with a fixed key and id."""
    from unittest import mock

    from dpvision.curate.faces import Faces
    from dpvision.curate.passes import curate
    from dpvision.curate.pipeline import Pipeline, Settings
    from dpvision.curate.safety import Safety
    from dpvision.data import import_work

    with (
        mock.patch("dpvision.data.store_writer.secrets.token_bytes", lambda n: KEY),
        mock.patch("dpvision.data.importer.secrets.token_hex", lambda n: "ab" * n),
        mock.patch.object(import_work, "_WORTH_PROCESSES_BYTES", 0),
    ):
        settings = Settings(
            faces=Faces(Path(FACES)) if FACES else Faces(),
            safety=Safety(Path(SAFETY)) if SAFETY else Safety(),
        )
        pipeline = Pipeline.of(STEPS.split(","), settings)
        curate(source, store, pipeline, engine=engine, workers=workers)


def started(source: Path, store: Path, engine: str, workers: int) -> subprocess.Popen[bytes]:
    """Start ``curate_once`` in a process of its own group."""
    code = f"from curate_engines import *; curate_once({str(source)!r}, {str(store)!r}, "
    code += f"{engine!r}, {workers})"
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def finished(source: Path, store: Path, engine: str, workers: int) -> float:
    """Curate, and return the seconds it took."""
    start = time.perf_counter()
    with started(source, store, engine, workers) as process:
        assert process.wait() == 0, f"{engine} failed; run curate_once to see why"
    return time.perf_counter() - start


def ray_workers(pid: int) -> list[int]:
    """Workers of a cluster below a process."""
    found, last = list[int](), [pid]
    while last:
        lists = [path for one in last for path in Path(f"/proc/{one}/task").glob("*/children")]
        last = []
        for path in lists:
            try:
                last += [int(word) for word in path.read_text().split()]
            except OSError:
                continue
        for one in last:
            try:
                title = Path(f"/proc/{one}/cmdline").read_bytes()
            except OSError:
                continue
            if title.startswith((b"ray::do_elsewhere", b"ray::IDLE")):
                found.append(one)
    return found


def workers_killed(source: Path, store: Path, rng: random.Random, most: int) -> int:
    """Curate by Ray while random workers are killed; return how many were."""
    killed, ended = 0, threading.Event()
    with started(source, store, "ray", 2) as process:

        def kill() -> None:
            nonlocal killed
            while not ended.wait(0.2 + rng.random()):
                if killed < most and (found := ray_workers(process.pid)):
                    os.kill(rng.choice(found), signal.SIGKILL)
                    killed += 1

        thread = threading.Thread(target=kill)
        thread.start()
        code = process.wait()
        ended.set()
        thread.join()
    assert code == 0, "workers that are killed stop the curation"
    return killed


def at(store: Path) -> str:
    """What a curation is doing, by the folder it works in."""
    work = store.parent / f".{store.name}.importing" / "confidential"
    if list(store.parent.glob(f".{store.name}.partial-*")):
        return "writing"
    if list(work.glob("read-*")):
        return "import"
    if list(work.glob("compared-*")):
        return "compare"
    return "look" if list(work.glob("look-*")) else "start"


def driver_stopped(
    source: Path,
    store: Path,
    engine: str,
    number: signal.Signals,
    times: int,
    took_s: float,
    rng: random.Random,
) -> Counter[str]:
    """Curate until it ends, stopped ``times`` times; return in which passes."""
    found = Counter[str]()
    for n in range(times):
        # As far as it comes: the last stops are near its end, since what is complete stays.
        with started(source, store, engine, 2) as process:
            try:
                process.wait(rng.uniform(0.1, 1.0) * took_s * (1 - n / (times + 1)) + 1.5)
                break
            except subprocess.TimeoutExpired:
                found[at(store)] += 1
                if number is signal.SIGINT:  # as Ctrl-C does
                    os.killpg(process.pid, number)
                else:
                    process.send_signal(number)
                process.wait()
    if not store.exists():
        finished(source, store, engine, 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--records", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--no-ray", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    work = Path(tempfile.mkdtemp(dir=args.work))
    num = 500 if args.quick else args.records
    kills = 3 if args.quick else args.kills
    records, copies = write_source(work / "src", num, args.seed)
    rows: list[dict[str, Any]] = [
        row("source", "-", "records", [records]),
        row("source", "-", "copies", [copies]),
    ]
    took = {"local": finished(work / "src", work / "one", "local", 1)}
    oracle, wrong = content(work / "one"), list[str]()

    def add(variant: str, **more: float) -> None:
        same = content(work / "made") == oracle
        if not same:
            wrong.append(variant)
        for name, value in {"equal": float(same), **more}.items():
            rows.append(row(f"steps {STEPS}", variant, name, [value]))
        print(variant, same, more, flush=True)
        shutil.rmtree(work / "made")

    add_one = row(f"steps {STEPS}", "one_process", "seconds", [took["local"]])
    rows.append(add_one)
    seconds = finished(work / "src", work / "made", "local", 2)
    took["local"] = seconds
    add("processes", seconds=seconds)
    engines = [("local", kills)]
    if not args.no_ray:
        took["ray"] = finished(work / "src", work / "made", "ray", 2)
        add("ray", seconds=took["ray"])
        num = workers_killed(work / "src", work / "made", rng, 10)
        add("ray_workers_killed", kills=num)
        engines.append(("ray", kills // 3))
    for engine, times in engines if kills else ():
        for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
            left, found = -(-times // 3), Counter[str]()
            while left > 0:  # several curations, each stopped a few times
                args_of = (work / "src", work / "made", engine, number, min(left, 5))
                came = driver_stopped(*args_of, took[engine], rng)
                found += came
                left -= max(1, came.total())
                if left > 0:
                    if content(work / "made") != oracle:
                        wrong.append(f"{engine}_driver_{number.name}")
                    shutil.rmtree(work / "made")
            add(
                f"{engine}_driver_{number.name}",
                kills=found.total(),
                **{f"kills_in_{name}": n for name, n in sorted(found.items())},
            )
    packages = ["numpy", "pillow", "pyarrow", *([] if args.no_ray else ["ray"])]
    write_result(args.json, "curate_engines", rows, packages=packages)
    shutil.rmtree(work)
    if wrong:
        raise SystemExit(f"other bytes: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
