"""Run folders as training leaves them, made by hand around a real ledger: seconds instead of a
training run.
"""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from dpvision.checkpoint import save_checkpoint
from dpvision.config import (
    DataConfig,
    MAEConfig,
    ModelConfig,
    OptimConfig,
    PrivacyConfig,
    RunConfig,
    ViTConfig,
    to_dict,
)
from dpvision.files import write_json
from dpvision.models import make_model
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.plan import make_plan
from dpvision.runs.folder import FORMAT
from dpvision.runs.run import code_versions

STEPS = 60
POISSON = PrivacyConfig(
    dataset_size=50_000,
    expected_batch_size=5000,
    steps=STEPS,
    max_grad_norm=0.1,
    noise_multiplier=0.9,
)
PRIVACY = replace(POISSON, sampling="full_batch", expected_batch_size=50_000, noise_multiplier=12.0)
"""Full batches, which are accounted in closed form, at once."""
MODEL = MAEConfig(
    encoder=ViTConfig(image_size=32, patch_size=4, depth=1, width=32, num_heads=2),
    decoder_depth=1,
    decoder_width=32,
    decoder_num_heads=2,
)


def make_store(folder: Path, visibility: str = "private") -> str:
    """The part of a store that ledgers need; returns its id."""
    store_id = hashlib.sha256(str(folder).encode()).hexdigest()[:16]
    folder.mkdir(parents=True)
    (folder / "store.json").write_text(json.dumps({"store_id": store_id, "visibility": visibility}))
    return store_id


def make_run(
    root: Path,
    store: Path,
    *,
    privacy: PrivacyConfig = PRIVACY,
    run_id: str = "5eedc0ffee123456",
    charged: int = STEPS,
    saved: int | None = None,
    parents: tuple[dict[str, Any], ...] = (),
    model: ModelConfig = MODEL,
    data: DataConfig | None = None,
    tensors: dict[str, Tensor] | None = None,
    files: dict[str, bytes] | None = None,
    more: dict[str, Any] | None = None,
) -> Path:
    """A run folder of ``charged`` steps whose newest checkpoint was saved after ``saved`` of
    them.

    Args:
        tensors: weights of ``model``; if None, its initial ones.
        files: further files of the checkpoint.
        more: further fields of its manifest.
    """
    meta = json.loads((store / "store.json").read_text())
    plan = make_plan(privacy)
    config = RunConfig(
        recipe="vip.micro",
        privacy=privacy,
        model=model,
        data=replace(data or DataConfig(), store=str(store)),
        optim=OptimConfig(learning_rate=1e-3, warmup_steps=5),
    )
    confidential = root / "confidential"
    confidential.mkdir(parents=True)
    base = confidential if plan.guarantee != "dp" and meta["visibility"] == "private" else root
    seen_by = {"store_visibility": meta["visibility"], "results_visibility": meta["visibility"]}
    about = {"store_id": meta["store_id"], **seen_by, "guarantee": plan.guarantee}
    write_json(base / "run.json", {"format": FORMAT, "run_id": run_id, **about})
    write_json(base / "config.json", to_dict(config))
    write_json(base / "plan.json", plan.to_dict())
    saved = charged if saved is None else saved
    own = {
        "store_id": meta["store_id"],
        "visibility": meta["visibility"],
        "run_id": run_id,
        "guarantee": None,
    }
    if plan.guarantee == "dp":
        # Wrong on purpose: a report must take epsilon from the ledger.
        own["guarantee"] = {
            "epsilon": 0.125,
            "epsilon_rdp": 0.125,
            "delta": plan.delta,
            "steps": saved,
            "plan": plan.to_dict(),
        }
    with Ledger.open(store, run_id, plan, resume=False, lineage=parents) as ledger:
        for step in range(charged):
            ledger.append()
            if step + 1 == saved:
                manifest = {
                    "run_id": run_id,
                    "ledger_steps": saved,
                    "updates": saved,
                    "config": to_dict(config),
                    "plan": plan.to_dict(),
                    "ledger_digest": ledger.digest,
                    "lineage": [*parents, own],
                    "versions": code_versions(),
                    **(more or {}),
                }
                save_checkpoint(
                    base / "checkpoints" / f"step-{saved:08d}",
                    manifest,
                    tensors or make_model(model, 0).state_dict(),
                    files=files,
                )
                shutil.copyfile(ledger.path, base / "ledger.jsonl")
    (confidential / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in make_metrics(charged))
    )
    return root


def make_metrics(steps: int, seed: int = 0) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl as a run writes them, with one empty batch."""
    rng = np.random.default_rng(seed)
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        size, seconds = int(rng.binomial(50_000, 0.1)), 2.4 + 0.2 * rng.random()
        norm = 1.2 * np.exp(-step / (steps / 2)) + 0.35 + 0.02 * rng.random()
        loss = 0.55 + 0.9 * np.exp(-step / (steps / 4)) + 0.004 * rng.random()
        lines.append(
            {
                "step": step,
                "loss": loss,
                "batch_size": size,
                "grad_norm_mean": 1.1 * norm,
                "grad_norm_median": norm,
                "clip_fraction": 1 - 0.002 * rng.random(),
                "num_non_finite": 0,
                "step_s": seconds,
                "images_per_s": size / seconds,
                "time": 1_790_000_000.0 + 2.5 * step,
            }
        )
    empty = {name: None for name in ("loss", "grad_norm_mean", "grad_norm_median", "clip_fraction")}
    lines[0] |= {**empty, "batch_size": 0, "images_per_s": 0.0}
    return lines


def score_entry(
    name: str,
    value: float,
    protocol: str,
    visibility: str = "public",
    test_data: str = "cifar10-test",
) -> dict[str, Any]:
    """One entry of scores.json."""
    return {
        "name": name,
        "value": value,
        "low": value - 0.01,
        "high": value + 0.01,
        "n": 10_000,
        "chance": 0.1,
        "protocol": protocol,
        "visibility": visibility,
        "train_data": "cifar10-train",
        "test_data": test_data,
    }


PUBLIC_SCORES = [
    score_entry(name, value + (0.05 if how.startswith("linear") else 0.0), f"{how}, {pooling}")
    for how in ("k-NN, k=20, cosine", "linear probe")
    for name, pooling, value in (
        ("random weights", "mean", 0.27),
        ("encoder", "mean", 0.41),
        ("raw pixels", "pixels", 0.34),
        ("random weights", "2x2", 0.32),
        ("encoder", "2x2", 0.46),
    )
]
