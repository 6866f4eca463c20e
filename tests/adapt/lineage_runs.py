"""Runs that were never trained, to stand in for encoders with a past."""

from pathlib import Path
from typing import Any

from dpvision.checkpoint import save_checkpoint, state_tensors
from dpvision.config import MAEConfig, PrivacyConfig, RunConfig, ViTConfig, to_dict
from dpvision.files import write_json
from dpvision.models import make_model
from dpvision.privacy.plan import make_plan

_CONFIG = RunConfig(
    recipe="vip.micro",
    privacy=PrivacyConfig(dataset_size=60, expected_batch_size=20, steps=4, noise_multiplier=2.0),
    model=MAEConfig(
        encoder=ViTConfig(image_size=8, patch_size=2, depth=1, width=16, num_heads=2),
        decoder_depth=1,
        decoder_width=16,
        decoder_num_heads=2,
    ),
)


def untrained_run(
    root: Path, visibility: str, guarantee: dict[str, Any] | None, seed: int = 5
) -> Path:
    """A run folder whose lineage is one store, "5ea1"; the plan in its guarantee is that of its
    config.
    """
    (root / "confidential").mkdir(parents=True)
    if guarantee is not None:
        guarantee = {**guarantee, "plan": make_plan(_CONFIG.privacy).to_dict()}
    entry = {
        "store_id": "5ea1",
        "visibility": visibility,
        "licence": None,
        "run_id": "r",
        "guarantee": guarantee,
    }
    manifest = {
        "run_id": "r",
        "ledger_steps": 4,
        "updates": 4,
        "config": to_dict(_CONFIG),
        "plan": {},
        "ledger_digest": "d",
        "lineage": [entry],
    }
    save_checkpoint(
        root / "checkpoints" / "step-00000004",
        manifest,
        state_tensors(make_model(_CONFIG.model, seed)),
    )
    write_json(root / "config.json", to_dict(_CONFIG))
    return root
