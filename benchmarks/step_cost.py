"""What one logical step's clipped sum costs, against another checkout of the package: data,
buckets, passes, blocks and totals included.

    python benchmarks/step_cost.py [--against SRC] [--recipe NAME] [--physical A,B] [--batch N]
    [--rounds N] [--threads N] [--json FILE]

``train.step.step_sum`` of a small recipe at its first weights, on scenes of its image size: Poisson
draws of --batch records out of three times as many. --against names the ``src`` folder of another
checkout, made by ``git worktree add FOLDER COMMIT``. Each side runs in a process of its own, and
the two take steps in turn, so that what else the machine does falls on both. Draws differ, so times
are per record.

"time_us" and "cpu_us" are microseconds per record of the wall clock and of all threads of the
process. "time_ratio" and "cpu_ratio" are this code over the other, of the same round: below 1, this
code is faster.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import ROOT, row, write_result


def arguments(s: Any) -> tuple[Any, ...]:
    """Of ``step_sum`` after the step: it took the session apart before it took it whole."""
    import inspect

    from dpvision.privacy import stream
    from dpvision.train.step import step_sum

    key: Any = stream.Key.for_tests(bytes(32)) if hasattr(stream, "Key") else bytes(32)
    if len(inspect.signature(step_sum).parameters) == 3:
        return s, key
    return s.config, s.plan, s.store, s.rows, None, s.model, s.loss_fn, key, s.group


def serve(args: argparse.Namespace) -> None:
    """Take a step of the size that each line of the standard input names; answer with its records,
    its seconds and its CPU seconds.
    """
    import torch

    from dpvision.data.synthetic_store import write_scenes
    from dpvision.recipes import RECIPES
    from dpvision.train import start
    from dpvision.train.memory import keep_freed_memory
    from dpvision.train.step import step_sum

    torch.set_num_threads(args.threads)
    keep_freed_memory()
    base = RECIPES[args.recipe]()
    privacy = replace(
        base.privacy,
        dataset_size=3 * args.batch,
        expected_batch_size=args.batch,
        steps=10_000,
        target_epsilon=None,
        noise_multiplier=10.0,
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        write_scenes(
            Path(folder, "scenes"), 3 * args.batch, base.model.encoder.image_size, public=False
        )
        sessions: dict[int, Any] = {}
        print("{}", flush=True)
        for number, line in enumerate(sys.stdin):
            physical = int(line)
            if physical not in sessions:
                hardware = replace(
                    base.hardware, physical_batch_size=physical, workers=args.threads, device="cpu"
                )
                data = replace(base.data, store=f"{folder}/scenes")
                config = replace(
                    base, privacy=privacy, data=data, hardware=hardware, init_from=None
                )
                sessions[physical] = stack.enter_context(
                    start.new_session(config, Path(folder, f"run{physical}"))
                )
            s = sessions[physical]
            wall, cpu = time.perf_counter(), time.process_time()
            total, _ = step_sum(number, *arguments(s))
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            print(json.dumps({"records": total.num_records, "time": wall, "cpu": cpu}), flush=True)


class Side:
    """A process that measures one checkout."""

    def __init__(self, src: Path, arguments: list[str]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(src)}
        self.process = subprocess.Popen(
            [sys.executable, __file__, *arguments, "--serve"],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._answer()

    def _answer(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                f"step_cost: a side ended with status {self.process.wait()}; its error is above."
            )
        return json.loads(line)

    def step(self, physical: int) -> dict[str, float]:
        """Microseconds per record of one step."""
        assert self.process.stdin is not None
        print(physical, file=self.process.stdin, flush=True)
        found = self._answer()
        return {name: 1e6 * found[name] / found["records"] for name in ("time", "cpu")}

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


@contextlib.contextmanager
def sides(args: argparse.Namespace, arguments: list[str]) -> Iterator[dict[str, Side]]:
    found = {"now": Side(ROOT / "src", arguments)}
    try:
        if args.against:
            found["before"] = Side(args.against.resolve(), arguments)
        yield found
    finally:
        for side in found.values():
            side.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="src folder of another checkout")
    parser.add_argument("--recipe", default="vip.micro_random_start", help="one without captions")
    parser.add_argument("--physical", default="32,64,250", help="physical batch sizes")
    parser.add_argument("--batch", type=int, default=1000, help="expected batch size")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return
    arguments = [
        "--recipe",
        args.recipe,
        "--batch",
        str(args.batch),
        "--threads",
        str(args.threads),
    ]
    rows: list[dict[str, Any]] = []
    with sides(args, arguments) as measured:
        for physical in map(int, args.physical.split(",")):
            found: dict[str, list[dict[str, float]]] = {name: [] for name in measured}
            for number in range(
                -1, args.rounds
            ):  # the first step finds the route, and is not counted
                for name in sorted(measured, reverse=number % 2 == 0):
                    cost = measured[name].step(physical)
                    if number >= 0:
                        found[name].append(cost)
            case = f"{args.recipe}-{physical}"
            for kind in ("time", "cpu"):
                values = {name: [cost[kind] for cost in costs] for name, costs in found.items()}
                rows += [row(case, name, f"{kind}_us", taken) for name, taken in values.items()]
                if args.against:
                    rows.append(
                        row(
                            case,
                            "now",
                            f"{kind}_ratio",
                            [a / b for a, b in zip(values["now"], values["before"], strict=True)],
                        )
                    )
    write_result(args.json, "step_cost", rows, packages=["dpvision", "torch"])


if __name__ == "__main__":
    main()
