"""Training speed alone and beside a second process on the same cores, by how OpenMP's threads wait
for each other.

    python benchmarks/contention.py [--settings A,B] [--recipe NAME] [--batch N] [--rounds N]
    [--threads N] [--seconds S] [--json FILE]

Each process repeats ``clipped_sum`` of one physical batch of a small recipe, at its first weights,
with --threads threads. A setting is "unset", "passive" (OMP_WAIT_POLICY=PASSIVE) or a value of
GOMP_SPINCOUNT. A round visits all settings in shuffled order; each is measured alone, then with two
processes of that setting at once, for --seconds each.

"records_per_s" is that of one process. "ratio" is a setting over "unset" in the same round; above
1, the setting is faster.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from common import row, write_result

NAMES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def serve(args: argparse.Namespace) -> None:
    """Take steps for as many seconds as each line of the standard input asks for; answer with the
    records per second.
    """
    import torch  # before the package, which would set a default where nothing is set

    from dpvision.data.keys import StepKey
    from dpvision.dp.clip import clipped_sum
    from dpvision.models import make_model
    from dpvision.recipes import RECIPES
    from dpvision.train.memory import keep_freed_memory
    from dpvision.train.objectives import example_batch, loss_function

    torch.set_num_threads(args.threads)
    keep_freed_memory()
    config = RECIPES[args.recipe]()
    model, loss, batch = (
        make_model(config.model, seed=0),
        loss_function(config),
        example_batch(config, args.batch),
    )
    clipped_sum(loss, model, batch, StepKey(0, 0), max_grad_norm=0.1)
    print("{}", flush=True)
    for line in sys.stdin:
        start, end, steps = time.perf_counter(), time.perf_counter() + float(line), 0
        while time.perf_counter() < end:
            steps += 1
            clipped_sum(loss, model, batch, StepKey(0, steps), max_grad_norm=0.1)
        print(json.dumps(steps * args.batch / (time.perf_counter() - start)), flush=True)


class Worker:
    """A process that trains with one setting."""

    def __init__(self, setting: str, arguments: list[str]) -> None:
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in (*NAMES, "OMP_NUM_THREADS")
        }
        if setting != "unset":
            environment |= (
                {"OMP_WAIT_POLICY": "PASSIVE"}
                if setting == "passive"
                else {"GOMP_SPINCOUNT": setting}
            )
        self.process = subprocess.Popen(
            [sys.executable, __file__, *arguments, "--serve"],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.answer()

    def ask(self, seconds: float) -> None:
        assert self.process.stdin is not None
        print(seconds, file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                f"contention: a process ended with status {self.process.wait()}; its error is "
                "above."
            )
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measured(workers: list[Worker], seconds: float) -> float:
    """Records per second of one process, the mean over ``workers``, which run at the same time."""
    for worker in workers:
        worker.ask(seconds)
    return sum(worker.answer() for worker in workers) / len(workers)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--settings", default="unset,passive,0,1000,10000,100000")
    parser.add_argument(
        "--recipe", default="vip.micro_random_start", help="one whose warm start is not needed"
    )
    parser.add_argument("--batch", type=int, default=32, help="records of a physical batch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args)
        return
    settings = args.settings.split(",")
    arguments = [
        "--recipe",
        args.recipe,
        "--batch",
        str(args.batch),
        "--threads",
        str(args.threads),
    ]
    workers: dict[str, list[Worker]] = {}
    found: dict[tuple[int, str], list[float]] = {
        (side, setting): [] for side in (1, 2) for setting in settings
    }
    try:
        for setting in settings:
            workers[setting] = [Worker(setting, arguments) for _ in range(2)]
        for _ in range(args.rounds):
            for setting in random.sample(settings, len(settings)):
                for side in (1, 2):
                    found[side, setting].append(measured(workers[setting][:side], args.seconds))
    finally:
        for pair in workers.values():
            for worker in pair:
                worker.close()
    rows: list[dict[str, Any]] = []
    for (side, setting), values in found.items():
        case = "alone" if side == 1 else "two at once"
        rows.append(row(case, setting, "records_per_s", values))
        if "unset" in settings:
            rows.append(
                row(
                    case,
                    setting,
                    "ratio",
                    [a / b for a, b in zip(values, found[side, "unset"], strict=True)],
                )
            )
    write_result(args.json, "contention", rows, packages=["dpvision", "torch"])


if __name__ == "__main__":
    main()
