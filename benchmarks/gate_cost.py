"""CPU time and memory of the gates before a private run (docs/clipping.md), each in a process of
its own.

    taskset -c 1 python benchmarks/gate_cost.py [--recipes A,B] [--gates A,B] [--json FILE]

One thread. Memory is what the process holds at most (resident) while a gate runs, and that beyond
what it held before, with the float32 model made. ``gates`` is all of ``train.gates.check_gates``,
which rank 0 runs; ``route`` and ``bits`` are what every rank runs after it, on its device, here a
CPU, the latter in passes of 16 records and not of the recipe's physical batch size.
"""

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from common import row, write_result

RECIPES = "vip.micro,vip.base,dpcap.base,vip.large"
GATES = "separable,exact,at_sizes,gates,route,bits"
_BITS_ROWS = 16


def measure(recipe: str, gate: str) -> dict[str, float]:
    """Run one gate in this process; return CPU seconds and gigabytes."""
    import torch

    from dpvision.data.keys import StepKey
    from dpvision.dp.clip import check_bits
    from dpvision.dp.route import route_of
    from dpvision.dp.separable import check_separable, perturb_zeros
    from dpvision.dp.support import check_at_sizes, check_exact
    from dpvision.models import make_model
    from dpvision.recipes import get_recipe
    from dpvision.train.gates import check_gates, small_model
    from dpvision.train.objectives import example_batch, loss_function

    torch.set_num_threads(1)
    config = get_recipe(recipe)
    model, loss_fn, key = make_model(config.model, 0), loss_function(config), StepKey(0, 0)

    def own(check: Callable[..., None]) -> Callable[[], None]:
        return lambda: check(loss_fn, perturb_zeros(model).double(), example_batch(config), key)

    def at_sizes() -> None:
        small = replace(config, model=small_model(config.model))
        network = perturb_zeros(make_model(small.model, 0)).double()
        rows = config.hardware.physical_batch_size
        check_at_sizes(loss_fn, network, example_batch(small, rows), key)

    run = {
        "separable": own(check_separable),
        "exact": own(check_exact),
        "at_sizes": at_sizes,
        "gates": lambda: check_gates(config, model, loss_fn),
        "route": lambda: route_of(loss_fn, model, example_batch(config), key),
        "bits": lambda: check_bits(
            loss_fn, model, example_batch(config, _BITS_ROWS), key, max_grad_norm=1.0
        ),
    }[gate]
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    held, start = _held_gb("VmRSS"), _cpu_s()
    run()
    peak = _held_gb("VmHWM")
    return {"cpu_s": _cpu_s() - start, "peak_gb": peak, "above_model_gb": peak - held}


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _held_gb(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipes", default=RECIPES)
    parser.add_argument("--gates", default=GATES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.recipes, args.gates)))
        return
    rows = []
    for recipe in args.recipes.split(","):
        for gate in args.gates.split(","):
            again = [sys.executable, __file__, "--one", "--recipes", recipe, "--gates", gate]
            done = subprocess.run(again, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                print(f"{recipe} {gate}: ended with {done.returncode}", file=sys.stderr)
                continue
            for metric, value in json.loads(done.stdout).items():
                rows.append(row(recipe, gate, metric, [value]))
                print(rows[-1], file=sys.stderr, flush=True)
    write_result(args.json, "gate_cost", rows, packages=("dpvision", "torch"))


if __name__ == "__main__":
    main()
