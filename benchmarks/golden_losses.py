"""Losses and weights of every recipe's first steps, at a tiny size, to the bit: the same before and
after a change of structure.

    python benchmarks/golden_losses.py --json FILE [--compare FILE] [--only PART_OF_A_NAME]

Each recipe keeps its kind of network, guarantee, clipping, loss, optimizer and augmentation; sizes,
data and number of steps are small, pretrained weights are left out, and the keys are fixed. Recipes
that are then equal run once. Three steps on one thread of a CPU; for a private head, all of its
releases. With --compare the exit status is 1 where anything differs from an earlier file. The bits
depend on the processor and on the versions of libraries: compare files made on one machine.
"""

import argparse
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

from safetensors.torch import save as tensor_bytes

from dpvision.adapt.session import adapt, new_head_session
from dpvision.checkpoint import load_checkpoint
from dpvision.config import (
    CaptionerConfig,
    ClassifierConfig,
    CrossMAEConfig,
    FrozenEncoderConfig,
    HeadConfig,
    MAEConfig,
    ResNetConfig,
    RunConfig,
    TimmConfig,
    to_dict,
)
from dpvision.config.resolve import resolve
from dpvision.data.synthetic_store import write_scenes
from dpvision.data.tokenizer import train_tokenizer
from dpvision.privacy.stream import Key
from dpvision.recipes import RECIPES
from dpvision.runs.run import Secrets
from dpvision.synthetic.scenes import make_scene
from dpvision.train.loop import fit
from dpvision.train.start import new_session

NUM_RECORDS = 60
NUM_CLASSES = 8
VOCABULARY = 300


def secrets() -> Secrets:
    """The keys of every run, whose bits are compared; keys are for one start."""
    return Secrets(Key.for_tests(b"d" * 32), Key.for_tests(b"n" * 32))


def small(config: RunConfig, store: Path, tokenizer: Path) -> RunConfig:
    """The recipe with everything small that has a size."""
    privacy, model = config.privacy, config.model
    full = privacy.sampling == "full_batch"
    changes: dict[str, Any] = {
        "dataset_size": NUM_RECORDS,
        "expected_batch_size": NUM_RECORDS if full else 20,
        "delta": None,
    }
    changes |= {"max_batch_size": None if privacy.max_batch_size is None else 50}
    if isinstance(model, HeadConfig):
        changes |= {"allow_weak_guarantee": True}
    else:
        changes |= {
            "steps": 3,
            "target_epsilon": None,
            "noise_multiplier": None if privacy.guarantee == "none" else 2.0,
        }
    if isinstance(model, HeadConfig):
        model = replace(
            model,
            num_classes=NUM_CLASSES,
            encoder=FrozenEncoderConfig(spec="pixels", image_size=16),
        )
    elif isinstance(model, ClassifierConfig):
        model = replace(
            model, num_classes=NUM_CLASSES, lora_rank=2, encoder=small_encoder(model.encoder)
        )
    else:
        model = replace(model, encoder=small_encoder(model.encoder))
    if isinstance(model, MAEConfig):
        model = replace(model, decoder_depth=1, decoder_width=16, decoder_num_heads=2)
    elif isinstance(model, CrossMAEConfig | CaptionerConfig):
        model = replace(model, decoder=replace(model.decoder, depth=1, width=16, num_heads=2))
    if isinstance(model, CaptionerConfig):
        model = replace(model, vocab_size=VOCABULARY, num_tokens=24)
    data = replace(
        config.data,
        store=str(store),
        images="store",
        tokenizer=str(tokenizer),
        resize=config.data.resize and 20,
    )
    hardware = replace(
        config.hardware,
        device="cpu",
        physical_batch_size=7,
        workers=1,
        precision="float32",
        compile=False,
    )
    optim = replace(config.optim, warmup_steps=min(config.optim.warmup_steps, 2))
    made = replace(
        config,
        privacy=replace(privacy, **changes),
        model=model,
        data=data,
        optim=optim,
        hardware=hardware,
        init_from=None,
        public_weights=None,
    )
    return resolve(made, {})  # without what this kind of run does not read


def small_encoder(encoder: Any) -> Any:
    """The encoder at 16 px, or timm's own for tests in the place of a timm transformer."""
    if isinstance(encoder, ResNetConfig):
        return replace(encoder, image_size=16, depths=(1, 1), widths=(16, 32), groups=4)
    if isinstance(encoder, TimmConfig):
        return replace(encoder, name="test_vit", image_size=32, options=())
    return replace(encoder, image_size=16, patch_size=4, depth=2, width=16, num_heads=2)


def digest(tensors: dict[str, Any] | None) -> str | None:
    """SHA-256 over names, shapes and bits."""
    return (
        None
        if not tensors
        else hashlib.sha256(
            tensor_bytes({k: v.contiguous() for k, v in sorted(tensors.items())})
        ).hexdigest()
    )


def first_steps(config: RunConfig, root: Path) -> dict[str, Any]:
    """Losses as hexadecimal floats, and digests of the saved weights, averages and optimizer."""
    losses: list[str] = []
    if isinstance(config.model, HeadConfig):
        with new_head_session(config, root) as session:
            adapt(session, secrets=secrets())
    else:
        with new_session(config, root) as training:
            assert training.run is not None
            log = training.run.folder.confidential / "metrics.jsonl"
            fit(training, secrets=secrets(), quiet=True)
        found = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
        losses = ["nan" if loss is None else float(loss).hex() for loss in found]
    saved = load_checkpoint(root)
    return {
        "losses": losses,
        "weights": digest(saved.model),
        "average": digest(saved.ema),
        "optimizer": digest(saved.optimizer),
    }


def golden(only: str, say: Callable[[str], None]) -> dict[str, Any]:
    """What ``first_steps`` gives for every distinct small recipe, under the name of the first
    recipe that has it.
    """
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        store, tokenizer = base / "scenes", base / "tokenizer.json"
        with patch(
            "secrets.token_bytes", lambda count: b"k" * count
        ):  # the ids of records, which key their augmentation
            write_scenes(store, NUM_RECORDS, 24, public=False)
        train_tokenizer([make_scene(i, 16).caption for i in range(500)], VOCABULARY).save(tokenizer)
        done: set[str] = set()
        for name, make in RECIPES.items():
            config = small(make(), store, tokenizer)
            about = json.dumps(to_dict(replace(config, recipe="")), sort_keys=True)
            if about in done or only not in name:
                continue
            done.add(about)
            results[name] = first_steps(config, base / "runs" / name)
            say(
                f"{name}: "
                f"{', '.join(f'{float.fromhex(loss):.4f}' for loss in results[name]['losses'])}"
            )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument(
        "--compare",
        type=Path,
        help="an earlier file of this machine; exit status 1 where anything differs",
    )
    parser.add_argument("--only", default="", help="recipes whose name contains this")
    args = parser.parse_args()
    results = golden(args.only, print)
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n")
    if args.compare is None:
        return 0
    before = {
        name: value
        for name, value in json.loads(args.compare.read_text()).items()
        if args.only in name
    }
    differing = sorted(
        name for name in before.keys() | results.keys() if before.get(name) != results.get(name)
    )
    print(f"{len(results)} compared, differing: {', '.join(differing) or 'none'}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
