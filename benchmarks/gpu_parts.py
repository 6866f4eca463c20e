"""The parts of ``gpu_acceptance.py`` as functions of the device that yield rows; as a script, the
process that runs them on request.

python benchmarks/gpu_parts.py cuda|cpu        one request a line, {"part": NAME, "budget_s": S};
                                               one answer a line
"""

import argparse
import datetime
import gc
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import clipping
import gpu_checks
import noise
import opacus_variants
import patch_speed
import step
import textures
import torch
from common import commit, cpu_name
from measure import NON_PRIVATE, ONE_PASS, Bench

from dpvision.devices import keep_freed_memory

Row = dict[str, Any]
Rows = Iterator[Row]
Run = Callable[[torch.device, float], Rows]
"""(device, budget in seconds) to rows; on a CPU at tiny sizes."""


def _bench(device: torch.device, budget_s: float, variants: tuple[str, ...]) -> Bench:
    small = device.type == "cpu"
    # A graph for each shape, and an error where torch would otherwise go on uncompiled without a
    # word.
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    asked = argparse.Namespace(
        device=device.type,
        precision=None,
        batch=2 if small else None,
        rounds=1 if small else 15,
        variants=",".join(variants),
        budget_s=budget_s,
        quick=False,
    )
    return Bench(asked)


def clip(case: str) -> Run:
    """Time and memory of a case's variants; on a CPU of Tiny, uncompiled, two records."""

    def run(device: torch.device, budget_s: float) -> Rows:
        compiled = device.type == "cuda"
        ghost = ("opacus_ghost",) if opacus_variants.INSTALLED and compiled else ()
        bench = _bench(
            device,
            budget_s,
            (*NON_PRIVATE, *ONE_PASS, *ghost) if compiled else (NON_PRIVATE[0], ONE_PASS[0]),
        )
        torch._dynamo.reset()
        subject = case if compiled else case.partition("_")[0] + "_tiny"
        yield from clipping.measure_case(subject, bench, time.monotonic() + 0.8 * budget_s)
        if bench.failed:
            raise RuntimeError("; ".join(bench.notes[-3:]))

    return run


def batches(device: torch.device, budget_s: float) -> Rows:
    """The largest physical batch of the uncompiled steps; there is no limit to find on a CPU."""
    if device.type == "cuda":
        bench = _bench(device, budget_s, (NON_PRIVATE[0], ONE_PASS[0]))
        yield from clipping.search_largest_batches(["mae_base", "cap_base"], bench)


def noise_speed(device: torch.device, budget_s: float) -> Rows:
    yield from noise.measured(
        device.type, quick=device.type == "cpu", rounds=1 if device.type == "cpu" else 7
    )


def whole_step(device: torch.device, budget_s: float) -> Rows:
    on_gpu = device.type == "cuda"
    cores = len(os.sched_getaffinity(0))
    settings = argparse.Namespace(
        batch=2048 if on_gpu else 16,
        physical=256 if on_gpu else 8,
        rounds=3 if on_gpu else 1,
        threads=min(cores, 16) if on_gpu else 1,
        device=device.type,
        precision="bfloat16" if on_gpu else "float32",
        compile=on_gpu,
    )
    yield from step.measure("mae_base" if on_gpu else "mae_micro", settings)


def texture_rates(device: torch.device, budget_s: float) -> Rows:
    on_gpu = device.type == "cuda"
    if on_gpu:
        yield from textures.measured("cuda", sizes=[32, 224], rounds=5, processes=1)
    else:  # compiled for a CPU they would take a minute, and show nothing
        yield from textures.measured("cpu", sizes=[32], rounds=1, processes=1, variants=(False,))


def feature_times(device: torch.device, budget_s: float) -> Rows:
    on_gpu = device.type == "cuda"
    yield from patch_speed.measured(
        device.type,
        sizes=[32, 96, 224] if on_gpu else [32],
        num=128 if on_gpu else 4,
        rounds=5 if on_gpu else 1,
    )


PARTS: dict[str, Run] = {
    **{name: gpu_checks.as_part(check, name) for name, check in gpu_checks.CHECKS.items()},
    **{f"clip_{case}": clip(case) for case in ("mae_base", "cap_base", "mae_large", "cap_large")},
    "noise_speed": noise_speed,
    "step_mae_base": whole_step,
    "textures": texture_rates,
    "batches": batches,
    "features": feature_times,
}


def environment(device: torch.device) -> dict[str, Any]:
    """Device, versions, commit and date of the results."""
    packages = (
        "dpvision",
        "torch",
        "triton",
        "numpy",
        "timm",
        *(["opacus"] if opacus_variants.INSTALLED else []),
    )
    return {
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else cpu_name(),
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in packages},
        },
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def serve(device: torch.device, requests: Any, answer: Callable[[dict[str, Any]], None]) -> None:
    """Run the parts that are asked for, and answer with each row as it comes, then "complete" or
    the reason of a failure.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        answer({"failed": "torch finds no GPU; expected one"})
        return
    answer({"environment": environment(device)})
    for line in requests:
        asked = json.loads(line)
        try:
            for row in PARTS[asked["part"]](device, asked["budget_s"]):
                answer({"row": row})
            answer({"complete": True})
        except Exception as error:
            traceback.print_exc()
            answer({"failed": f"{type(error).__name__}: {error}".partition("\n")[0][:300]})
            if "CUDA error" in str(error):  # nothing works in this process from here on
                return
        finally:
            sys.stderr.flush()
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed, by processes of a part too, goes to the log

    def answer(event: dict[str, Any]) -> None:
        answers.write(json.dumps(event) + "\n")
        answers.flush()

    device = torch.device(sys.argv[1])
    if device.type == "cpu":
        torch.set_num_threads(1)
        keep_freed_memory()
    torch.backends.cudnn.allow_tf32 = False  # as a run has it
    print(f"{Path(__file__).name}: {device}", flush=True)
    serve(device, sys.stdin, answer)


if __name__ == "__main__":
    main()
