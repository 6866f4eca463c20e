"""Crashes: commands that get a signal at random places, a full disk at each write, torn last lines,
and two writers; the laws of docs/privacy.md are checked after each.

    python benchmarks/crashes.py --work FOLDER [--points N]
        [--commands train,save,import,adapt,resume] [--signals KILL,TERM,INT] [--seed S]
        [--full] [--others]
    python benchmarks/crashes.py --work FOLDER --json FILE [--page]

The first form appends a line to FOLDER/points.jsonl for each place (N a command; every write with
--full; torn lines and two writers with --others) and skips those that are there. The second, or
--json with the first, writes the result of all lines, and with --page the table of docs/audits.md.
The exit status is 1 if a law was broken at any place, or none was checked.

Half of the places are fractions of the undisturbed command's processor time, the others file
operations (writes, syncs, renames), counted in the command. Commands run in forked children
(crash_child.py): all imports are done, and the gates before a run, which write nothing, are left
out, so that every place lies in the command's own work.
"""

import argparse
import gc
import hashlib
import importlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from common import ROOT, row, write_result
from crash_child import TAKE_SPACE, Outcome, Stop, forked, run_command
from PIL import Image

PAGE = ROOT / "docs" / "audits.md"
BEGIN, END = "<!-- crashes: written by benchmarks/crashes.py -->", "<!-- end of crashes -->"
COMMANDS = ("train", "save", "import", "adapt", "resume")
SIGNALS = {"KILL": signal.SIGKILL, "TERM": signal.SIGTERM, "INT": signal.SIGINT}
NUM = 24
KEY = bytes(range(32))
_FIRST = (
    "torch.utils.tensorboard", "dp_accounting.pld.pld_privacy_accountant", "dp_accounting.rdp",
    "scipy.stats", "scipy.signal", "typeguard", "tyro._backends._tyro_backend",
    "dpvision.cli.train", "dpvision.cli.adapt", "dpvision.cli.data", "dpvision.cli.next_steps",
    "dpvision.train.loop", "dpvision.train.start", "dpvision.adapt.session",
    "dpvision.data.importer", "dpvision.data.sources", "dpvision.encoders.starting_weights",
    "dpvision.encoders.fixed", "dpvision.eval.probes.own_head", "dpvision.privacy.rare_events",
)  # fmt: skip

_TRAIN = (
    f"vip.micro_random_start --data stores/s --privacy.dataset-size {NUM} "
    "--privacy.expected-batch-size 6 --privacy.target-epsilon None --privacy.noise-multiplier 1 "
    "--model.encoder.image-size 8 --model.encoder.depth 1 --model.encoder.width 16 "
    "--model.encoder.num-heads 2 --model.decoder-width 16 --model.decoder-num-heads 2 "
    "--hardware.physical-batch-size 8 --name run --privacy.steps"
)
_HEAD = (
    f"adapt --data stores/s --encoder pixels --num-classes 2 --dataset-size {NUM} --name run "
    "--privacy.target-epsilon None --privacy.noise-multiplier 30 --hardware.checkpoint-every-s 0 "
)
_STEPS = "--head many_steps --privacy.steps"
_IMPORT = "data import images stores/s --classes classes.txt"


@dataclass(frozen=True)
class Case:
    """One command in one state of its folder."""

    name: str
    argv: str
    again: str = ""
    """The command that goes on with a run; that of ``argv`` where there is none."""
    before: tuple[str, ...] = (_IMPORT,)
    """Commands that make the state."""
    stopped: bool = False
    """Whether the last of ``before`` is stopped by SIGTERM halfway."""
    noun: str = "steps"

    @property
    def is_import(self) -> bool:
        return self.argv.startswith("data")


def cases(command: str, steps: int = 5) -> list[Case]:
    """Return the cases of a command, which take turns."""
    train = f"train {_TRAIN} {steps}"
    resume = "train vip.micro_random_start --name run --resume"
    every = " --hardware.checkpoint-every-s 0"
    if command == "train":
        return [Case("train", train, resume)]
    if command == "save":
        return [Case("save", train + every, resume)]
    if command == "resume":
        go_on = resume + every
        return [Case("resume", go_on, go_on, (_IMPORT, train + every), stopped=True)]
    if command == "import":
        tar = "data import images.tar stores/s"
        return [Case("import folder", _IMPORT, before=()), Case("import tar", tar, before=())]
    go_on = "adapt --name run --resume"
    many, one = f"{_HEAD} {_STEPS} {steps}", f"{_HEAD} --head one_step"
    warm = (_IMPORT, one.replace("--name run", "--name warm"))
    return [
        Case("adapt steps", many, go_on, noun="releases"),
        Case("adapt one", one, go_on, noun="releases"),
        Case("adapt steps, cached", many, go_on, warm, noun="releases"),
        Case("adapt one, cached", one, go_on, warm, noun="releases"),
    ]


def make_images(folder: Path) -> None:
    """Write images of noise in two classes, as a folder and as a tar."""
    rng = np.random.default_rng(0)
    (folder / "classes.txt").write_text("a\nb\n")
    with tarfile.open(folder / "images.tar", "w") as tar:
        for i in range(NUM):
            path = folder / "images" / "ab"[i % 2] / f"{i:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 255, (8, 8, 3), dtype=np.uint8)).save(path)
            tar.add(path, path.name)


class Bench:
    """Cases made once in a folder, restored for each place."""

    def __init__(self, work: Path) -> None:
        self.work, self._known = work, dict[Case, Outcome]()
        self._weights = dict[Case, Any]()

    def _kept(self, case: Case) -> Path:
        return self.work / "kept" / re.sub(r"\W+", "_", f"{case.name} {hash(case)}")

    def folder(self, case: Case) -> Path:
        """Return the folder of a case, in its state before the command."""
        live, kept = self.work / "live", self._kept(case)
        shutil.rmtree(live, ignore_errors=True)
        if kept.exists():
            shutil.copytree(kept, live)
            return live
        live.mkdir(parents=True)
        make_images(live)
        for argv in case.before:
            if case.stopped and argv == case.before[-1]:
                self._stop_half_way(argv.split(), live)
            else:
                done = run_command(argv.split(), live, key=KEY)
                assert done.status == 0, done.text
        shutil.copytree(live, kept)
        return live

    def _stop_half_way(self, argv: list[str], live: Path) -> None:
        """Run a command and stop it: at half of its operations, or at the nearest one where it does
        not end by itself (in its last step) and is not killed (before it listens).
        """
        before = self.work / "before"
        shutil.rmtree(before, ignore_errors=True)
        shutil.copytree(live, before)
        whole = run_command(argv, live, key=KEY)
        assert whole.status == 0, whole.text
        half = whole.operations // 2
        for number in sorted(range(1, whole.operations), key=lambda k: abs(k - half)):
            shutil.rmtree(live)
            shutil.copytree(before, live)
            stop = Stop(signal.SIGTERM, operation=number)
            done = run_command(argv, live, stop, key=KEY)
            check_status(done, stop)
            if done.status == 75:
                shutil.rmtree(before)
                return
        raise AssertionError(f"no place where SIGTERM stops {argv}")

    def whole(self, case: Case) -> Outcome:
        """Return how the command ends undisturbed, with known keys."""
        if case not in self._known:
            run_command(case.argv.split(), self.folder(case))  # the first is slower
            folder = self.folder(case)
            done = run_command(case.argv.split(), folder, key=KEY)
            assert done.status == 0, done.text
            self._known[case] = done
            self._weights[case] = forked(lambda: digests(folder))
        return self._known[case]

    def point(self, case: Case, stop: Stop, *, known: bool) -> dict[str, Any]:
        """Stop a command at a place, check, go on, check; return what was seen.

        Raises:
            AssertionError: a law does not hold.
        """
        whole = self.whole(case)
        folder = self.folder(case)
        key = KEY if known else None
        done = run_command(case.argv.split(), folder, stop, key=key)
        met = done.stopped and (stop.signal, done.status) != (signal.SIGKILL, 0)
        found: dict[str, Any] = {"status": done.status, "stopped": met, "lost": 0}
        found["operation"] = next((e["stopped"] for e in done.trace if "stopped" in e), None)
        check_status(done, stop)
        if case.is_import:
            there = forked(lambda: check_store(folder))
            again = run_command(case.argv.split(), folder)
            assert again.status == (2 if there else 0), f"again: {again.status}\n{again.text}"
            assert forked(lambda: check_store(folder)), "no store after the import"
            left = [str(p.relative_to(folder)) for p in folder.rglob(".*.partial-*")]
            assert there or not left, f"left over after a whole import: {left}"
            return found | {"leftovers": len(left)}
        state = forked(lambda: check_run(folder))
        lost = state["charged"] - state["updates"]
        in_ledger = {e["release"] for e in done.trace if "release" in e}
        assert not in_ledger or max(in_ledger) < state["charged"], f"released uncharged: {state}"
        if stop.signal in (signal.SIGTERM, signal.SIGINT):
            assert lost <= 1, f"{lost} steps lost by signal {stop.signal}"
            assert done.status != 75 or not lost, f"{lost} steps lost though saved"
        elif case.name in ("save", "resume", "adapt steps", "adapt steps, cached"):
            # A network trains on while a checkpoint is written.
            most = 1 + (stop.signal is None or not case.name.startswith("adapt"))
            assert lost <= most, f"{lost} steps lost, saved at each"
        argv = case.again if state["exists"] else case.argv
        again = run_command(argv.split(), folder, key=key)
        found |= {"lost": lost, "charged": state["charged"], "again": again.status}
        refused = "charged and lost before the head was saved" in again.text
        assert again.status == (2 if refused else 0), f"{argv}: {again.status}\n{again.text}"
        if state["exists"] and not refused:
            said = f"Resuming: {state['charged']} of {state['steps']} {case.noun} charged"
            assert said in again.text, f"expected {said!r}\n{again.text}"
            if lost:
                said = f"{lost} {case.noun} were charged and lost"
                assert said in again.text, f"expected {said!r}\n{again.text}"
        check_releases(done, again)
        after = forked(lambda: check_run(folder))
        assert after["charged"] == after["steps"], after
        assert refused or after["updates"] + lost == after["steps"], (after, lost)
        stated = re.findall(r"(?:Finished|Stopped) after .*?epsilon ([0-9.]+)", again.text)
        assert refused or float(stated[-1]) >= after["epsilon"], (stated, after)
        if known and not lost and not refused:
            same = forked(lambda: digests(folder))
            assert same == self._weights[case], "other weights than undisturbed"
        del whole
        return found


def check_status(done: Outcome, stop: Stop) -> None:
    """Exit statuses: docs/privacy.md, "Interrupting"; 2 for a full disk, with one error."""
    expected = {
        signal.SIGKILL: {0, -9}, signal.SIGTERM: {0, 75, -15}, signal.SIGINT: {0, 75, 130},
        None: {0, 2},
    }[stop.signal]  # type: ignore[index]  # fmt: skip
    assert done.status in expected, f"exit status {done.status}\n{done.text}"
    assert "Traceback" not in done.text, done.text
    if done.status == 2:
        assert "error:" in done.text, done.text


def check_releases(*starts: Outcome) -> None:
    """No step is released twice and no key is used by two starts."""
    releases = [e["release"] for s in starts for e in s.trace if "release" in e]
    keys = [e["key"] for s in starts for e in s.trace if "key" in e]
    assert len(set(releases)) == len(releases), f"released twice: {releases}"
    assert len(set(keys)) == len(keys), f"keys repeated: {keys}"


def check_files(folder: Path) -> None:
    """Read every file whole; hidden ones are leftovers. Only a run's logs and ledger may have a
    torn last line.
    """
    from safetensors.torch import load_file

    for path in sorted(folder.rglob("*")):
        if not path.is_file() or any(p.startswith(".") for p in path.relative_to(folder).parts):
            continue
        name = path.relative_to(folder)
        try:
            if path.suffix == ".json":
                json.loads(path.read_bytes())
            elif path.suffix == ".jsonl":
                *lines, torn = path.read_bytes().split(b"\n")
                for line in lines:
                    json.loads(line)
                assert not torn or path.parent.parent.name == "LEDGERS" or path.name in (
                    "progress.jsonl", "metrics.jsonl"
                )  # fmt: skip
            elif path.suffix == ".safetensors":
                load_file(path)
            elif path.suffix == ".npy":
                np.load(path)
        except Exception as error:
            raise AssertionError(f"{name}: {error!r}: {path.read_bytes()[-200:]!r}") from error


def check_store(folder: Path) -> bool:
    """Return whether there is a store; it is whole then."""
    from dpvision.data.open import open_store
    from dpvision.data.store_writer import read_key

    check_files(folder)
    if not (folder / "stores" / "s").exists():
        return False
    store = open_store(folder / "stores" / "s")
    assert store.num_records == NUM, store.num_records
    read_key(store.path)
    from dpvision.data.decode import decode

    for record in range(NUM):
        decode(store.read(record))
    return True


def check_run(folder: Path) -> dict[str, Any]:
    """Return what a run's ledger and newest checkpoint count; every file of the folder is whole."""
    from dpvision.checkpoint import list_checkpoints, load_checkpoint
    from dpvision.privacy.ledger import read_ledger
    from dpvision.privacy.store_marks import StoreLedgers

    check_files(folder)
    root, ledgers = folder / "runs" / "run", StoreLedgers.of(folder / "stores" / "s")
    found = ledgers.read_all()
    if not (root / "config.json").exists():
        named = {ledgers.run_name(run_id) for run_id, c in found.items() if c.steps}
        assert "runs/run" not in named, "charged steps of a run that is not there"
        return {"exists": False, "charged": 0, "updates": 0, "steps": 0}
    run_id = json.loads((root / "run.json").read_bytes())["run_id"]
    ledger, updates = read_ledger(ledgers.ledger_path(run_id)), 0
    for checkpoint in list_checkpoints(root):
        manifest = load_checkpoint(checkpoint).manifest
        assert ledger.at(manifest["ledger_digest"]) is not None, "a checkpoint of no line"
        assert manifest["updates"] <= manifest["ledger_steps"] <= ledger.steps
        updates = manifest["updates"]
    if (root / "ledger.jsonl").exists():
        assert ledger.continues(read_ledger(root / "ledger.jsonl"))
    return {
        "exists": True,
        "charged": ledger.steps,
        "updates": updates,
        "steps": ledger.plan.steps,
        "epsilon": ledger.plan.epsilon,
    }


def digests(folder: Path) -> Any:
    """Return digests of the newest checkpoint's tensors; of an import the number of images."""
    from dpvision.checkpoint import load_checkpoint

    if not (folder / "runs" / "run").exists():
        return NUM
    found = load_checkpoint(folder / "runs" / "run")
    return {
        kind + name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
        for kind, group in (("", found.model), ("ema.", found.ema), ("optim.", found.optimizer))
        for name, tensor in (group or {}).items()
    }


def random_points(
    bench: Bench, command: str, points: int, signals: list[str], seed: int
) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield (name, check) of random places: processor time and file operations in turn."""
    rng = random.Random(f"{seed} {command}")
    turns = cases(command)
    for i in range(points):
        case, name, share = turns[i // 2 % len(turns)], signals[i // 2 % len(signals)], rng.random()

        def check(
            case: Case = case, name: str = name, share: float = share, timed: bool = not i % 2
        ) -> dict[str, Any]:
            whole = bench.whole(case)
            stop = Stop(SIGNALS[name])
            if timed:
                stop = replace(stop, cpu_s=share * whole.cpu_s)
            else:
                stop = replace(stop, operation=1 + int(share * whole.operations))
            return bench.point(case, stop, known=name != "KILL")

        yield f"{command} {seed} {i}: {case.name}, {name}, {'time' if not i % 2 else 'file'}", check


def full_disks(bench: Bench, command: str) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield (name, check) of a disk that is full from the k-th operation on, for each k that takes
    space.
    """
    case = cases(command, steps=2 if command == "resume" else 1)[0]  # none left of one step
    names = next(e["names"] for e in bench.whole(case).trace if "names" in e)
    for k, name in enumerate(names, start=1):
        if name in TAKE_SPACE:
            yield (
                f"{command} full {k}: {case.name}, FULL, {name}",
                lambda k=k: bench.point(case, Stop(operation=k), known=False),
            )


def torn_lines(bench: Bench) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield (name, check) of last lines cut at every byte: of the ledger, as a crash before the
    mark leaves it, and of both logs.
    """
    (case,) = cases("resume")

    def ledger() -> dict[str, Any]:
        folder = bench.folder(case)
        return forked(lambda: tear_ledger(folder))

    def log(name: str) -> dict[str, Any]:
        folder = bench.folder(case)
        return forked(lambda: tear_log(folder / "runs" / "run" / name))

    yield "torn ledger: every byte", ledger
    yield "torn progress.jsonl: every byte", lambda: log("progress.jsonl")
    yield "torn metrics.jsonl: every byte", lambda: log("confidential/metrics.jsonl")


def tear_ledger(folder: Path) -> dict[str, Any]:
    """A torn line that no mark knows counts as a step; one that a mark knows is refused."""
    from dpvision.errors import PrivacyError
    from dpvision.privacy.ledger import Ledger, read_ledger
    from dpvision.privacy.ledger_format import encode, step_line
    from dpvision.privacy.store_marks import StoreLedgers

    store, cuts = folder / "stores" / "s", 0
    run_id = json.loads((folder / "runs" / "run" / "run.json").read_bytes())["run_id"]
    path = StoreLedgers.of(store).ledger_path(run_id)
    before, kept = path.read_bytes(), folder / "kept"
    contents = read_ledger(path)
    line = encode(step_line(contents.digest, contents.steps)) + b"\n"
    shutil.copytree(folder / "stores", kept)
    for end in range(len(line) + 1):
        shutil.copytree(kept, folder / "stores", dirs_exist_ok=True)
        path.write_bytes(before + line[:end])
        expected = contents.steps + (end > 0)
        assert read_ledger(path).steps == expected, end
        for restarts in (1, 2):
            with Ledger.open(store, run_id, contents.plan, resume=True) as ledger:
                assert (ledger.steps, ledger.restarts) == (expected, contents.restarts + restarts)
        assert not read_ledger(path).torn
        cuts += 1
    last = before[:-1].rindex(b"\n") + 1
    for end in range(last, len(before)):
        shutil.copytree(kept, folder / "stores", dirs_exist_ok=True)
        path.write_bytes(before[:end])
        try:
            with Ledger.open(store, run_id, contents.plan, resume=True):
                raise AssertionError(f"a ledger shorter than its mark was opened: {end}")
        except PrivacyError:
            cuts += 1
    return {"cuts": cuts}


def tear_log(path: Path) -> dict[str, Any]:
    """After a torn line, the lines of the next start are whole and on lines of their own."""
    from dpvision.privacy.plan import DPPlan
    from dpvision.train.log import RunLog
    from dpvision.train.step import StepMetrics

    root = next(p for p in path.parents if (p / "plan.json").exists())
    plan = DPPlan.from_dict(json.loads((root / "plan.json").read_bytes()))
    whole = path.read_bytes()
    assert whole.count(b"\n") >= 2, "lines to cut"
    start = whole[:-1].rindex(b"\n") + 1
    fields = StepMetrics.__dataclass_fields__
    for end in range(start, len(whole) + 1):
        path.write_bytes(whole[:end])
        with RunLog(root, root / "confidential", plan, 2, quiet=True, private=True) as log:
            log.step(2, StepMetrics(**dict.fromkeys(fields, 1.0)))
        lines = path.read_bytes().splitlines()
        values = []
        for line in lines:
            try:
                values.append(json.loads(line))
            except ValueError as error:
                raise AssertionError(f"cut at {end - start}: {line!r}") from error
        assert values[-1]["step"] == 3, f"cut at {end - start}: {lines[-1]!r}"
        assert len(values) == whole.count(b"\n") + (end == len(whole)), f"cut at {end - start}"
    return {"cuts": len(whole) + 1 - start}


def two_writers(bench: Bench) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield (name, check) of two processes at once: on one run, one store, one name, one cache."""
    run, head = cases("save")[0], cases("adapt")[0]
    resume, imports = cases("resume")[0], cases("import")[0]
    other = head.argv.replace("--name run", "--name other")

    def both(case: Case, first: str, second: str, statuses: set[tuple[int, int]]) -> dict[str, Any]:
        bench.whole(case)
        folder = bench.folder(case)
        outcomes = run_both(first, second, folder)
        found = tuple(sorted(o.status for o in outcomes))
        text = "\n".join(o.text for o in outcomes)
        assert found in statuses and "Traceback" not in text, f"{found}\n{text}"
        if case.is_import:
            assert forked(lambda: check_store(folder))
        else:
            state = forked(lambda: check_run(folder))
            assert state["charged"] == state["updates"] == state["steps"], state
            if "--name other" not in second:
                check_releases(*outcomes)
        return {"statuses": list(found)}

    yield (
        "writers: one run, both --resume",
        lambda: both(resume, resume.argv, resume.argv, {(0, 2), (0, 0)}),
    )
    yield "writers: one name, two new runs", lambda: both(run, run.argv, run.argv, {(0, 2)})
    yield (
        "writers: one store, two runs",
        lambda: both(run, run.argv, run.argv.replace("--name run", "--name other"), {(0, 0)}),
    )
    yield "writers: one feature cache, two heads", lambda: both(head, head.argv, other, {(0, 0)})
    yield (
        "writers: one store's name, two imports",
        lambda: both(imports, imports.argv, imports.argv, {(0, 2)}),
    )


def run_both(first: str, second: str, folder: Path) -> list[Outcome]:
    """Run two commands at once."""
    pipes = []
    for name, argv in (("1", first), ("2", second)):
        read, write = os.pipe()
        if os.fork() == 0:
            done = run_command(argv.split(), folder, name=name)
            values = [done.status, done.text, done.cpu_s, done.wall_s, done.trace]
            os.write(write, json.dumps(values).encode())
            os.close(write)
            os._exit(0)
        os.close(write)
        pipes.append(read)
    outcomes = []
    for read in pipes:
        with open(read, "rb") as file:
            outcomes.append(Outcome(*json.loads(file.read())))
        os.wait()
    return outcomes


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    found: dict[str, dict[str, float]] = {}
    for r in rows:
        found.setdefault(f"{r['case']} | {r['variant']}", {})[r["metric"]] = r["value"]
    lines = [
        "| command | stopped by | places | in its work | laws broken | steps lost, at most |",
        "|---|---|---|---|---|---|",
    ]
    for name, f in found.items():
        lost = f"{f['lost']:.0f}" if "lost" in f else "n/a"
        lines.append(
            f"| {name} | {f['places']:.0f} | {f['met']:.0f} | {f['broken']:.0f} | {lost} |"
        )
    return "\n".join(lines)


def rows_of(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Count places by command and signal."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["case"], line["variant"]), []).append(line)
    found = []
    for (case, variant), members in sorted(groups.items()):
        seen = [m["found"] for m in members if "found" in m]
        figures = {
            "places": sum(f.get("cuts", 1) for f in seen) + len(members) - len(seen),
            "met": sum(f.get("cuts", int(f.get("stopped", True))) for f in seen),
            "broken": sum("error" in m for m in members),
            **({"lost": max(f["lost"] for f in seen)} if any("charged" in f for f in seen) else {}),
        }
        found += [row(case, variant, metric, [value]) for metric, value in figures.items()]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--points", type=int, default=0)
    parser.add_argument("--commands", default=",".join(COMMANDS))
    parser.add_argument("--signals", default=",".join(SIGNALS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--others", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    log = args.work / "points.jsonl"
    args.work.mkdir(parents=True, exist_ok=True)
    lines = read_lines(log)
    if args.points or args.full or args.others:
        for failed in run_points(args, {line["name"] for line in lines}, log):
            print(failed, flush=True)
        lines = read_lines(log)
    if args.json is not None:
        write_result(args.json, "crashes", rows_of(lines), packages=("torch", "numpy"))
        if args.page:
            before, rest = PAGE.read_text().split(BEGIN)
            made = table(json.loads(args.json.read_text())["rows"])
            PAGE.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.split(END)[1]}")
    sys.exit(not lines or any("error" in line for line in lines))


def read_lines(log: Path) -> list[dict[str, Any]]:
    """Return the places that were checked, but for a last line that was cut by a kill."""
    whole = log.read_text().split("\n")[:-1] if log.exists() else []
    return [json.loads(line) for line in whole]


def run_points(args: argparse.Namespace, known: set[str], log: Path) -> Iterator[str]:
    """Check all places asked for that are not ``known``, append each to the log, and yield what
    failed.
    """
    for module in _FIRST:
        importlib.import_module(module)
    from dpvision.train import start

    start.check_gates = start.check_reference_bits = lambda *_, **__: None
    gc.collect()
    gc.freeze()  # children neither collect nor copy what was imported
    bench = Bench(args.work.resolve() / f"pid{os.getpid()}")
    todo: list[tuple[str, str, str, Callable[[], dict[str, Any]]]] = []
    for command in args.commands.split(","):
        signals = args.signals.split(",")
        for name, check in random_points(bench, command, args.points, signals, args.seed):
            todo.append((command, f"SIG{name.split(', ')[-2]}", name, check))
        if args.full:
            todo += [(command, "full disk", n, check) for n, check in full_disks(bench, command)]
    if args.others:
        todo += [("cut at every byte", n.split(":")[0], n, check) for n, check in torn_lines(bench)]
        todo += [("two writers", n.split(": ")[1], n, check) for n, check in two_writers(bench)]
    for case, variant, name, check in todo:
        if name in known:
            continue
        line: dict[str, Any] = {"name": name, "case": case, "variant": variant}
        try:
            line["found"] = check()
        except AssertionError as error:
            line["error"] = str(error)
            yield f"{name}: {error}"
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")
    shutil.rmtree(bench.work, ignore_errors=True)


if __name__ == "__main__":
    main()
