"""Preempted jobs: a run under torchrun (gloo) is stopped at random moments, and goes on by the same
command with another number of processes; the laws of docs/jobs.md are checked after each.

    python benchmarks/preemption.py --work FOLDER [--points N] [--stops rank,agent,USR1,...]
    python benchmarks/preemption.py --work FOLDER --json FILE [--page]

The first form appends a line to FOLDER/points.jsonl for each stop, and skips those that are there.
The second writes the result of all lines, and with --page the table of docs/jobs.md.

A stop is SIGKILL to a rank, or to torchrun's agent, or SIGTERM, SIGINT or SIGUSR1 to the agent.
Half of the jobs have two agents (``--nnodes 2``). Keys are known, so that the weights of a run that
was stopped can be compared with those of an undisturbed one that skips the steps that were lost.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import ROOT, row, write_result

PAGE = ROOT / "docs" / "jobs.md"
BEGIN, END = "<!-- stops: written by benchmarks/preemption.py -->", "<!-- end of stops -->"
NUM, STEPS = 48, 10
STOPS = {
    "SIGKILL to a rank": signal.SIGKILL, "SIGKILL to an agent": signal.SIGKILL,
    "SIGTERM": signal.SIGTERM, "SIGINT": signal.SIGINT, "SIGUSR1": signal.SIGUSR1,
}  # fmt: skip
_HANDLED = "SIGTERM,SIGINT,SIGHUP,SIGUSR1"
_LIMIT_S = 90.0
TRAIN = (
    f"train vip.micro_random_start --data scenes --privacy.dataset-size {NUM} "
    "--privacy.expected-batch-size 24 --privacy.target-epsilon None --privacy.noise-multiplier 1 "
    "--model.encoder.image-size 16 --model.encoder.depth 1 --model.encoder.width 16 "
    "--model.encoder.num-heads 2 --model.decoder-width 16 --model.decoder-num-heads 2 "
    "--hardware.physical-batch-size 4 --hardware.workers 1 --hardware.rank-timeout-s 30 "
    f"--privacy.steps {STEPS} --name run --resume-or-start"
)


@dataclass
class Job:
    """torchrun's agents of one start, and what their ranks leave in ``folder``."""

    folder: Path
    agents: list[subprocess.Popen[bytes]]
    world_size: int
    number: int
    logs: list[Path] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        folder: Path,
        *more: str,
        nodes: int = 1,
        ranks: int = 2,
        pass_s: float = 0.03,
        skip: tuple[int, ...] = (),
        handled: str = _HANDLED,
    ) -> "Job":
        """Start ``ranks`` processes on each of ``nodes`` agents.

        Args:
            more: options of the run, after those of ``TRAIN``.
            pass_s: seconds added to each pass.
            skip: steps that are charged and not computed.
            handled: signals that the agents pass on.
        """
        number, port = len(list(folder.glob("trace-*"))), _free_port()
        for pid in folder.glob("pid-*"):
            pid.unlink()
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "JOB_FOLDER": str(folder),
            "JOB_NUMBER": str(number), "JOB_PASS_S": str(pass_s), "JOB_SKIP": json.dumps(skip),
        }  # fmt: skip
        agents, logs = [], []
        for node in range(nodes):
            command = [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes),
                "--node-rank", str(node), "--nproc-per-node", str(ranks),
                "--master-addr", "127.0.0.1", "--master-port", str(port),
                "--signals-to-handle", handled, "--shutdown-timeout", "60",
                str(ROOT / "benchmarks" / "job_child.py"), *TRAIN.split(), *more,
            ]  # fmt: skip
            logs.append(folder / f"log-{number}-{node}")
            with logs[-1].open("wb") as log:
                agents.append(
                    subprocess.Popen(
                        command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT
                    )
                )
        return cls(folder, agents, nodes * ranks, number, logs)

    def trace(self) -> list[dict[str, Any]]:
        """What rank 0 of this start has noted so far."""
        file = self.folder / f"trace-{self.number}.jsonl"
        lines = file.read_text().split("\n")[:-1] if file.exists() else []
        return [json.loads(line) for line in lines]

    def charged(self) -> int:
        """Number of steps that this start has charged."""
        return sum("charged" in entry for entry in self.trace())

    def await_charge(self, count: int = 1) -> None:
        """Wait until this start has charged ``count`` steps."""
        self._until(lambda: self.charged() >= count, f"{count} charged steps")

    def pid(self, rank: int) -> int:
        """Process id of a rank."""
        return int((self.folder / f"pid-{rank}").read_text())

    def ranks_ended(self) -> bool:
        """Whether no rank is left."""
        return not any(_alive(self.pid(rank)) for rank in range(self.world_size))

    def wait(self) -> tuple[list[int], str]:
        """Wait until all agents and ranks have ended; return the agents' statuses and the text."""
        self._until(lambda: all(a.poll() is not None for a in self.agents), "agents that end")
        self._until(self.ranks_ended, "ranks that end")
        return [a.returncode for a in self.agents], self.text()

    def text(self) -> str:
        """What all processes printed."""
        return "\n".join(log.read_text(errors="replace") for log in self.logs)

    def end(self) -> None:
        """Kill what is left."""
        pids = [int(p.read_text() or 0) for p in self.folder.glob("pid-*")]
        for pid in [*[a.pid for a in self.agents if a.poll() is None], *filter(_alive, pids)]:
            os.kill(pid, signal.SIGKILL)
        for agent in self.agents:
            agent.wait()

    def _until(self, reached: Any, what: str) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while not reached():
            ended = self.agents and all(a.poll() is not None for a in self.agents)
            if ended and what.endswith("steps"):
                raise AssertionError(f"ended before {what}\n{self.text()[-4000:]}")
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"expected {what} within {_LIMIT_S:g} s\n{self.text()[-4000:]}"
                )
            time.sleep(0.02)


def _alive(pid: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def make_folder(folder: Path) -> Path:
    """Make the folder of a job with its private store, and return it."""
    from dpvision.data.synthetic_store import write_scenes

    folder.mkdir(parents=True)
    write_scenes(folder / "scenes", NUM, 16, workers=1, public=False)
    return folder


def state(folder: Path) -> dict[str, Any]:
    """What the ledger and the newest checkpoint of the run count, and whether it is marked as
    stopped.
    """
    from dpvision.checkpoint import list_checkpoints, load_checkpoint
    from dpvision.privacy.ledger import read_ledger
    from dpvision.privacy.store_marks import StoreLedgers

    root = folder / "runs" / "run"
    if not (root / "config.json").exists():
        return {"exists": False, "charged": 0, "updates": 0, "saved": 0, "stopped": False}
    run_id = json.loads((root / "run.json").read_bytes())["run_id"]
    ledger = read_ledger(StoreLedgers.of(folder / "scenes").ledger_path(run_id))
    updates = saved = 0
    for checkpoint in list_checkpoints(root):
        manifest = load_checkpoint(checkpoint).manifest
        assert ledger.at(manifest["ledger_digest"]) is not None, "a checkpoint of no line"
        updates, saved = manifest["updates"], manifest["ledger_steps"]
    stopped = (root / "stopped.json").exists()
    return {
        "exists": True, "charged": ledger.steps, "updates": updates, "saved": saved,
        "stopped": stopped,
    }  # fmt: skip


def releases(folder: Path) -> list[int]:
    """Steps to which noise was added, of all starts; no key served two starts, no step two."""
    lines = [
        json.loads(line) for file in folder.glob("trace-*") for line in file.read_text().split("\n")
        if line
    ]  # fmt: skip
    keys = [entry["key"] for entry in lines if "key" in entry]
    found = [entry["release"] for entry in lines if "release" in entry]
    assert len(set(keys)) == len(keys), "a key served two starts"
    assert len(set(found)) == len(found), f"released twice: {sorted(found)}"
    return found


class Bench:
    """Undisturbed runs in a folder, by the steps that they skip."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.store = work / "store"
        if not self.store.exists():
            make_folder(work / "live")
            shutil.copytree(work / "live", self.store)

    def folder(self) -> Path:
        """Return the folder of a job as it was made: a store is bound to its path."""
        made = self.work / "live"
        shutil.rmtree(made, ignore_errors=True)
        shutil.copytree(self.store, made)
        return made

    def whole(self, skip: tuple[int, ...]) -> tuple[dict[str, Any], float]:
        """Return the weights of an undisturbed run of two ranks, and its seconds from the first
        charge to the last.
        """
        from safetensors.torch import load_file

        kept = self.work / f"whole-{'-'.join(map(str, skip))}"
        if not kept.exists():
            folder = self.folder()
            job = Job.start(folder, skip=skip)
            job.await_charge()
            start = time.monotonic()
            job.await_charge(STEPS - len(skip))
            (folder / "seconds").write_text(str(time.monotonic() - start))
            statuses, text = job.wait()
            assert statuses == [0], text
            kept.mkdir()
            (last,) = (folder / "runs" / "run" / "checkpoints").iterdir()
            shutil.copy(last / "model.safetensors", kept)
            shutil.copy(folder / "seconds", kept)
        return load_file(kept / "model.safetensors"), float((kept / "seconds").read_text())

    def point(self, number: int, stop: str, seed: int) -> dict[str, Any]:
        """Stop a job at a random moment, check, go on with another number of ranks, check.

        Raises:
            AssertionError: a law does not hold.
        """
        import torch

        from dpvision.checkpoint import load_checkpoint

        rng = random.Random(f"{seed} {number} {stop}")
        nodes, again = rng.choice([1, 2]), rng.choice([1, 2, 3])
        share = rng.random()
        _, whole_s = self.whole(())
        folder = self.folder()
        every = ("--hardware.checkpoint-every-s", str(rng.choice([0, 0.5])))
        job = Job.start(folder, *every, nodes=nodes, ranks=2 // nodes)
        try:
            job.await_charge()
            time.sleep(share * whole_s)
            agent, rank = job.agents[rng.randrange(nodes)], rng.randrange(2)
            target = job.pid(rank) if stop == "SIGKILL to a rank" else agent.pid
            in_time = agent.poll() is None and _alive(target)
            if in_time:
                os.kill(target, STOPS[stop])
            statuses, text = job.wait()
        finally:
            job.end()
        found = state(folder)
        lost = found["charged"] - found["updates"]
        skip = tuple(range(found["saved"], found["charged"]))
        done = releases(folder)
        assert not done or max(done) < found["charged"], f"released uncharged: {found}"
        assert "Traceback" not in _ours(text), _ours(text)
        finished = found["updates"] == STEPS
        assert finished or any(statuses), statuses
        if stop == "SIGKILL to a rank":
            assert not found["stopped"], "marked as stopped though a rank was killed"
        elif not finished:
            assert found["stopped"], f"not marked as stopped: {found}\n{text}"
            assert lost == 0, f"{lost} steps lost by {stop}"
        second = Job.start(folder, *every, ranks=again)
        try:
            (status,), text = second.wait()
        finally:
            second.end()
        assert status == 0, text
        assert f"Resuming: {found['charged']} of {STEPS} steps charged" in text, text
        assert not lost or f"{lost} steps were charged and lost" in text, text
        after = state(folder)
        releases(folder)
        assert after["charged"] == STEPS and after["updates"] == STEPS - lost, (after, lost)
        assert not after["stopped"], "marked as stopped at the end"
        weights = load_checkpoint(folder / "runs" / "run").model
        expected = self.whole(skip)[0]
        same = all(torch.equal(weights[name], value) for name, value in expected.items())
        if not same:  # sums of another number of ranks round differently
            assert again != 2, "other weights than undisturbed"
            for name, value in expected.items():
                torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4)
        return {
            "stop": stop, "nodes": nodes, "again": again, "in_time": in_time and not finished,
            "charged": found["charged"], "lost": lost, "statuses": statuses, "equal": same,
        }  # fmt: skip


def _ours(text: str) -> str:
    """The lines of ranks: torchrun prints tracebacks of its own."""
    agent = text.find("torch/distributed/run.py")
    return text[: text.rfind("Traceback", 0, agent)] if agent >= 0 else text


def table(lines: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    rows = [
        "| stop | stops | while it ran | laws broken | steps lost, at most | other number of ranks "
        "| equal bits |",
        "|---|---|---|---|---|---|---|",
    ]
    for stop in STOPS:
        of = [line for line in lines if line["stop"] == stop]
        good = [line for line in of if "error" not in line]
        if of:
            rows.append(
                f"| {stop} | {len(of)} | {sum(g['in_time'] for g in good)} "
                f"| {len(of) - len(good)} | {max((g['lost'] for g in good), default=0)} "
                f"| {sum(g['again'] != 2 for g in good)} | {sum(g['equal'] for g in good)} |"
            )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--points", type=int, default=2, help="stops of each kind")
    parser.add_argument("--stops", default=",".join(STOPS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", action="store_true")
    args = parser.parse_args()
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    file = args.work / "points.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    if args.json is not None:
        rows = []
        for stop in STOPS:
            of = [line for line in lines if line["stop"] == stop]
            good = [line for line in of if "error" not in line]
            for metric, values in {
                "stops": [len(of)], "laws_broken": [len(of) - len(good)],
                "while_it_ran": [sum(g["in_time"] for g in good)],
                "steps_lost": [g["lost"] for g in good],
                "equal_bits": [sum(g["equal"] for g in good)],
            }.items():  # fmt: skip
                if values:
                    rows.append(row("two ranks, gloo", stop, metric, values))
        write_result(args.json, "preemption", rows, packages=["torch"])
        if args.page:
            text = PAGE.read_text()
            head, tail = text.split(BEGIN)[0], text.split(END)[1]
            PAGE.write_text(f"{head}{BEGIN}\n\n{table(lines)}\n\n{END}{tail}")
        return
    bench = Bench(args.work)
    failed = 0
    for number in range(args.points):
        for stop in args.stops.split(","):
            if any(x["number"] == number and x["stop"] == stop and x["seed"] == args.seed
                   for x in lines):  # fmt: skip
                continue
            about: dict[str, Any] = {"number": number, "stop": stop, "seed": args.seed}
            try:
                found = about | bench.point(number, stop, args.seed)
            except AssertionError as error:
                found, failed = about | {"error": str(error)}, failed + 1
            with file.open("a") as out:
                out.write(json.dumps(found) + "\n")
            print(json.dumps(found)[:3000], flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
