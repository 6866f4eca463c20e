"""Seconds that a checkpoint stops training: written in a thread from a copy, and before training
goes on; in turn, in one run.

    python benchmarks/checkpoint_stall.py [--recipe vip.base] [--steps 13] [--json FILE]

"stopped" is the time from the end of a step to the charge of the next one. "step" is the next step,
which shares the cores with the writing thread; "total" is both. "none" are steps without a
checkpoint before them. Full batches of two records: the size of the parameters decides.
"""

import argparse
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import row, write_result

from dpvision.data.synthetic_store import write_scenes
from dpvision.models import count_parameters
from dpvision.recipes import RECIPES
from dpvision.runs.run import Secrets
from dpvision.train import loop, start

RECORDS = 2
TURNS = ("thread", "none", "waits", "none")


def measure(
    recipe: str, steps: int, device: str, folder: Path
) -> dict[str, list[dict[str, float]]]:
    """Return for each variant the seconds of each checkpoint and of the step after it."""
    base = RECIPES[recipe]()
    privacy = replace(
        base.privacy, dataset_size=RECORDS, expected_batch_size=RECORDS, sampling="full_batch",
        steps=steps, target_epsilon=None, noise_multiplier=10.0, delta=1e-3, max_batch_size=None,
    )  # fmt: skip
    hardware = replace(
        base.hardware, device=device, precision="float32", compile=False,
        physical_batch_size=RECORDS, checkpoint_every_s=0.0,
    )  # fmt: skip
    write_scenes(folder / "scenes", RECORDS, base.model.encoder.image_size, workers=1, public=True)
    config = replace(
        base, privacy=privacy, hardware=hardware, init_from=None,
        data=replace(base.data, store=str(folder / "scenes")),
    )  # fmt: skip
    save, take = loop.save, loop._take
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    ended, variant, count = 0.0, "", 0

    def in_turn(session: Any, *, timed: bool = False, writer: Any = None) -> Any:
        nonlocal variant, count
        variant = TURNS[count % len(TURNS)]
        count += 1
        if variant != "none":
            return save(session, timed=timed, writer=writer if variant == "thread" else None)
        return None

    def watched(*args: Any) -> Any:
        nonlocal ended
        begin = time.monotonic()
        made = take(*args)
        now = time.monotonic()
        if variant:
            one = {"stopped": begin - ended, "step": now - begin, "total": now - ended}
            found[variant].append(one)
            print(f"{variant:8}", one, flush=True)
        ended = now
        return made

    with (
        patch.object(loop, "save", in_turn),
        patch.object(loop, "_take", watched),
        patch.object(start, "check_gates", lambda *_: None),
        start.new_session(config, folder / "run") as session,
    ):
        print(f"{count_parameters(config.model) / 1e6:.1f} million parameters", flush=True)
        loop.fit(session, secrets=Secrets(), quiet=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--recipe", default="vip.base")
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as work:
        found = measure(args.recipe, args.steps, args.device, Path(work))
    rows = [
        row(args.recipe, variant, f"{name}_s", [one[name] for one in lines])
        for variant, lines in found.items()
        for name in ("stopped", "step", "total")
    ]
    name = "cpu" if args.device == "cpu" else torch.cuda.get_device_name()
    write_result(args.json, "checkpoint_stall", rows, packages=["torch"], device=name)


if __name__ == "__main__":
    main()
