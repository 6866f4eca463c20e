"""Memory of a training step in bytes a parameter, by number of ranks: weights, moments, average,
and what a step holds beside them at most.

    python benchmarks/step_memory.py [--recipe NAME] [--ranks 1,2,4] [--passes 2] [--json FILE]

Peaks of torch's allocator on a CPU over two steps: draw, passes, sum over ranks (gloo), noise and
update; the largest of the ranks. Few records a pass, so that parameters outweigh activations, which
are counted too.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from common import row, write_result
from measure import peak_bytes

from dpvision.data.synthetic_store import write_scenes
from dpvision.recipes import RECIPES
from dpvision.train import loop
from dpvision.train.distributed import gather_texts, join, leave
from dpvision.train.memory import held_bytes
from dpvision.train.start import new_session

RECORDS = 2
"""Records of a pass."""


def one(recipe: str, passes: int, folder: Path) -> None:
    """On each rank: measure the second step, and write the largest figures."""
    torch.set_num_threads(1)
    group = join("cpu")
    base, records = RECIPES[recipe](), RECORDS * passes * group.world_size
    privacy = replace(
        base.privacy,
        dataset_size=records,
        expected_batch_size=records,
        sampling="full_batch",
        steps=2,
        target_epsilon=None,
        noise_multiplier=10.0,
        delta=1e-5,
        max_batch_size=None,
    )
    hardware = replace(
        base.hardware,
        device="cpu",
        precision="float32",
        compile=False,
        physical_batch_size=RECORDS,
    )
    config = replace(
        base,
        privacy=privacy,
        init_from=None,
        data=replace(base.data, images="store", store=str(folder / f"scenes{group.world_size}")),
        hardware=hardware,
    )
    with (
        new_session(config, folder / f"run{group.world_size}") as session,
        patch.object(loop, "save", lambda *args, **more: None),
    ):
        held = [*session.model.state_dict().values(), *(session.ema or {}).values()]
        peak = peak_bytes(lambda: loop.fit(session, quiet=True))
        trained = sum(p.numel() for p in session.model.parameters() if p.requires_grad)
        kept = sum(t.nbytes for t in held)
        averages = sum(t.nbytes for t in (session.ema or {}).values())
        moments = held_bytes(config, session.model) - averages
        found = {"total": kept + peak, "step": peak - moments}
        text = json.dumps({name: value / trained for name, value in found.items()})
        said = [json.loads(one) for one in gather_texts(text, group)]
    if group.is_main:
        most = {name: max(one[name] for one in said) for name in found}
        (folder / f"{group.world_size}.json").write_text(json.dumps(most))
    leave()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="vip.base")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--passes", type=int, default=2, help="of a rank in a step")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one(args.recipe, args.passes, args.one)
        return
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for ranks in map(int, args.ranks.split(",")):
            size = RECIPES[args.recipe]().model.encoder.image_size
            records = RECORDS * args.passes * ranks
            write_scenes(folder / f"scenes{ranks}", records, size, workers=1, public=False)
            torchrun = f"-m torch.distributed.run --standalone --nproc-per-node {ranks}"
            again = [__file__, "--one", name, "--recipe", args.recipe, "--passes", f"{args.passes}"]
            done = subprocess.run([sys.executable, *torchrun.split(), *again])
            if done.returncode:
                sys.exit(done.returncode)
            for metric, value in json.loads((folder / f"{ranks}.json").read_text()).items():
                rows.append(
                    row(args.recipe, f"{ranks} ranks", f"{metric}_bytes_per_parameter", [value])
                )
    write_result(args.json, "step_memory", rows, packages=("dpvision", "torch"))


if __name__ == "__main__":
    main()
