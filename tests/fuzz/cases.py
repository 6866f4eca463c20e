"""Run cases of ``targets`` in a child process, which a parent watches.

A case that ends its process (a signal, a limit), takes too long or too much memory is attributed by
its number, and the next one starts in a new process.
"""

import faulthandler
import gc
import json
import logging
import os
import resource
import select
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from PIL import Image

from dpvision.cli import one_line

sys.path.insert(0, str(Path(__file__).parent))
from image_targets import REFUSALS
from mutators import mutate_file
from targets import TARGETS, mutable, seed_files

_BACKSTOP = 6 << 30
"""Address space of a child on top of what it has at its start."""
_START_S = 400
_LOOKED_FOR = ("/run.json/", "/manifest.json/")
"""Files of a run around a file of weights, looked for in all folders above it."""


def run_cases(
    jobs: Sequence[tuple[str, int]], work: Path, script: Path = Path(__file__)
) -> Iterator[dict[str, Any]]:
    """Yield a result for each case (target, number), in order, in child processes.

    A result has target, case, outcome, note, seconds and peak_mb. The outcome is "read", "counted",
    "refused" or "FAILED". Before the first case of a target its seeds are read: those that are not
    are cases of the number -1.
    """
    prepare(work)
    todo = list(jobs)
    while todo:
        child = subprocess.Popen(
            [sys.executable, str(script), str(work)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
        )
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(json.dumps(todo).encode())
        child.stdin.close()
        limit, failure = float(_START_S), "its process ended"
        while todo:
            if not select.select([child.stdout], [], [], limit)[0]:
                failure = f"more than {limit:g} s"
                break
            if not (line := child.stdout.readline()):
                break
            limit = 60 + 3 * TARGETS[todo[0][0]].seconds
            found = json.loads(line)
            if found["case"] is not None:
                if found["case"] >= 0:
                    todo.pop(0)
                yield found
        child.kill()
        status = child.wait()
        child.stdout.close()
        if todo:
            said = (work / "child.log").read_text(errors="replace")[-800:]
            yield _result(*todo.pop(0), "FAILED", f"{failure}, status {status}; {said}", limit, 0.0)


def _result(
    name: str, case: int | None, outcome: str, note: str, seconds: float, peak: float
) -> dict[str, Any]:
    return {"target": name, "case": case, "outcome": outcome, "note": note,
            "seconds": round(seconds, 4), "peak_mb": round(peak, 1)}  # fmt: skip


def _memory() -> dict[str, int]:
    """Return VmHWM, VmRSS and VmSize in kB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {
        k: int(v.split()[0]) for k, _, v in (line.partition(":") for line in lines) if "kB" in v
    }


def make_case(name: str, number: int, work: Path) -> tuple[Path, Random]:
    """Write a case's files to ``work/a/b/case``, and return the folder and the case's generator.

    A negative number -1 - N gives variant N of the seeds as it is.
    """
    rng = Random(f"{name}/{number}")
    case = work / "a" / "b" / "case"
    shutil.rmtree(case, ignore_errors=True)
    seeds = seed_files(name, work / "seeds")
    shutil.copytree(seeds[-1 - number] if number < 0 else rng.choice(seeds), case)
    files = [] if number < 0 else list(mutable(name, case))
    for path in rng.sample(files, min(len(files), rng.choice((1, 1, 1, 2, 3)))):
        mutate_file(path, rng, case / "EXECUTED")
    return case, rng


class _Watch:
    """Reports files opened outside the case, and programs started."""

    def __init__(self, work: Path) -> None:
        self._work, self._case = str(work) + "/", str(work / "a" / "b" / "case") + "/"
        self.found: list[str] | None = None
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.found is None:
            return
        if event in ("os.system", "os.exec", "os.posix_spawn", "socket.connect", "ctypes.dlopen"):
            if event != "ctypes.dlopen":
                self.found.append(f"{event} {str(args)[:100]}")
        elif event == "subprocess.Popen":
            if "unpickle_worker" not in str(args[1]):
                self.found.append(f"{event} {str(args[1])[:100]}")
        elif event == "open" and isinstance(args[0], str | bytes):
            path = os.path.abspath(os.fsdecode(args[0])) + "/"
            flags = args[2] if isinstance(args[2], int) else 0
            writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))
            seed = path.startswith(self._work + "seeds/")  # the store that a run names
            inside = path.startswith(self._case)
            if not inside and (
                (
                    path.startswith(self._work)
                    and not path.endswith(_LOOKED_FOR)
                    and not (seed and not writes)
                )
                or path == "/etc/passwd/"
                or (writes and path != "/dev/null/")
            ):
                self.found.append(f"{'write' if writes else 'read'} {path[:-1]}")


def run_case(name: str, number: int, work: Path, watch: _Watch | None = None) -> dict[str, Any]:
    """Make and read one case in this process."""
    target = TARGETS[name]
    case, rng = make_case(name, number, work)
    (case / "tmp").mkdir()
    tempfile.tempdir = str(case / "tmp")
    before = _tree(work)
    Path("/proc/self/clear_refs").write_text("5")
    held = _memory()["VmRSS"]
    if watch is not None:
        watch.found = []
    start = time.monotonic()
    try:
        outcome, note = target.read(case, rng), ""
    except REFUSALS as error:
        outcome, note = "refused", str(error)
        printed = one_line(note)  # as the command line does
        if not printed.isprintable() or len(printed) > 4000:
            outcome, note = "FAILED", f"a message of more than a line: {note!r}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        where = traceback.extract_tb(error.__traceback__)
        ours = [f"{Path(f.filename).name}:{f.lineno}" for f in where if "dpvision" in f.filename]
        outcome, note = "FAILED", f"{type(error).__name__}: {str(error)[:300]} at {ours[-3:]}"
        del error, where
    seconds = time.monotonic() - start
    opened = None if watch is None else watch.found
    if watch is not None:
        watch.found = None
    peak = max(_memory()["VmHWM"] - held, 0) / 1024
    after = _tree(work)
    for broken, text in (
        (bool(opened), f"opened {opened}"),
        ((case / "EXECUTED").exists(), "a pickle was executed"),
        (before != after, f"changed outside the case: {before ^ after}"),
        (seconds > target.seconds, f"{seconds:.0f} s, expected {target.seconds:g}"),
        (peak > target.memory_mb, f"{peak:.0f} MB, expected {target.memory_mb}"),
    ):
        if broken:
            outcome, note = "FAILED", f"{text}; {note}"
    return _result(name, number, outcome, note[:800], seconds, peak)


def _tree(work: Path) -> set[str]:
    """List what lies around the case."""
    return {str(p) for p in work.iterdir()} | {
        str(p) for p in (work / "a").rglob("*") if "/case" not in str(p)
    }


def prepare(work: Path) -> None:
    """Make the folder of cases, with an image outside them."""
    (work / "a" / "b").mkdir(parents=True, exist_ok=True)
    (work / "seeds").mkdir(exist_ok=True)
    (work / "child.log").touch()
    Image.new("RGB", (8, 8)).save(work / "secret.png")
    Image.new("RGB", (8, 8)).save(work / "a" / "secret.png")


def _child(work: Path) -> None:
    """Run the cases on standard input one after another; a line of JSON for each."""
    jobs = json.load(sys.stdin)
    lines = os.fdopen(os.dup(1), "w")
    log = os.open(work / "child.log", os.O_WRONLY | os.O_TRUNC | os.O_CREAT)
    os.dup2(log, 1), os.dup2(log, 2)
    faulthandler.enable()
    logging.disable()
    warnings.simplefilter("ignore")
    limit = _memory()["VmSize"] * 1024 + _BACKSTOP
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    watch, seen = _Watch(work), set[str]()

    def say(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=lines, flush=True)

    for name, number in jobs:
        if name not in seen:  # what is imported here counts as no case's memory or time
            seen.add(name)
            for i in range(len(seed_files(name, work / "seeds"))):
                found = run_case(name, -1 - i, work)
                gc.collect()
                gc.freeze()
                say(found | {"case": -1 if found["outcome"] in ("refused", "FAILED") else None})
        say(run_case(name, number, work, watch))


if __name__ == "__main__":
    _child(Path(sys.argv[1]))
