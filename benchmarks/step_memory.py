"""Memory of a training step beside its activations, and of the check before the first charge, in
bytes a parameter.

    python benchmarks/step_memory.py [--recipe NAME] [--records N] [--json FILE]

Peaks of torch's allocator on a CPU over the last of three steps of ``fit``, on top of model,
optimizer and average. "kept" holds the total and the gradient of the step before, as ``fit`` did
until November 2026; "freed" is ``fit`` as it is; "check" is ``train.memory.require_fit``, less what
it holds for optimizer and average. Few records, so that parameters outweigh activations.
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from common import row, write_result
from measure import peak_bytes

from dpvision.config import RunConfig
from dpvision.data.synthetic_store import write_scenes
from dpvision.recipes import RECIPES
from dpvision.train import loop
from dpvision.train.memory import held_bytes, require_fit
from dpvision.train.start import new_session

STEPS = 3


def last_step(config: RunConfig, root: Path, keep: bool) -> tuple[int, int, Any]:
    """Peak of the last step's sum and release, the model's parameters, and the session."""
    kept: list[Any] = []
    peaks: list[int] = []
    step_sum, privatize = loop.step_sum, loop.privatize

    def summed(*args: Any) -> Any:
        found: list[Any] = []
        if len(peaks) < STEPS - 1:
            found.append(step_sum(*args))
            peaks.append(0)
        else:
            before = sum(value.nbytes for held in kept for value in held.grads.values())
            peaks.append(peak_bytes(lambda: found.append(step_sum(*args))) + before)
        if keep:
            kept[:] = [found[0][0]]
        return found[0]

    def released(*args: Any, **kwargs: Any) -> Any:
        gradient = privatize(*args, **kwargs)
        if keep:
            kept.append(gradient)
        return gradient

    with new_session(config, root) as session:
        with patch.object(loop, "step_sum", summed), patch.object(loop, "privatize", released):
            loop.fit(session, quiet=True)
        parameters = sum(p.numel() for p in session.model.parameters() if p.requires_grad)
        held = held_bytes(config, session.model)
        check = (
            peak_bytes(
                lambda: require_fit(config, session.model, session.loss_fn, session.group.device)
            )
            - held
        )
    return peaks[-1], parameters, check


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="vip.base")
    parser.add_argument("--records", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        write_scenes(Path(folder, "scenes"), args.records, 224, workers=1, public=False)
        base = RECIPES[args.recipe]()
        privacy = replace(
            base.privacy,
            dataset_size=args.records,
            expected_batch_size=args.records,
            sampling="full_batch",
            steps=STEPS,
            target_epsilon=None,
            noise_multiplier=10.0,
            delta=1e-5,
            max_batch_size=None,
        )
        config = replace(
            base,
            privacy=privacy,
            init_from=None,
            data=replace(base.data, images="store", store=str(Path(folder, "scenes"))),
            hardware=replace(
                base.hardware,
                device="cpu",
                precision="float32",
                compile=False,
                physical_batch_size=args.records,
            ),
        )
        for variant, keep in (("kept", True), ("freed", False)):
            peak, parameters, check = last_step(config, Path(folder, variant), keep)
            rows.append(row(args.recipe, variant, "peak_bytes_per_parameter", [peak / parameters]))
            rows.append(row(args.recipe, variant, "peak_mb", [peak / 1e6]))
        rows.append(row(args.recipe, "check", "peak_bytes_per_parameter", [check / parameters]))
    write_result(args.json, "step_memory", rows, packages=("dpvision", "torch"))


if __name__ == "__main__":
    main()
