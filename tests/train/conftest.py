"""A store of scenes, and a config so small that a run takes seconds."""

from dataclasses import replace
from pathlib import Path

import pytest

from dpvision.config import (
    HardwareConfig,
    MAEConfig,
    OptimConfig,
    PrivacyConfig,
    RunConfig,
    ViTConfig,
)
from dpvision.data.synthetic_store import write_scenes

NUM_RECORDS = 60


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private store of 60 scenes; runs leave their ledgers beside it, each under its own run
    id.
    """
    folder = tmp_path_factory.mktemp("data") / "scenes"
    write_scenes(folder, NUM_RECORDS, 16, workers=1, public=False)
    return folder


@pytest.fixture(scope="session")
def config(scenes: Path) -> RunConfig:
    base = RunConfig(
        recipe="vip.micro",
        privacy=PrivacyConfig(
            dataset_size=NUM_RECORDS,
            expected_batch_size=20,
            steps=4,
            max_grad_norm=0.5,
            noise_multiplier=2.0,
        ),
        model=MAEConfig(
            encoder=ViTConfig(image_size=16, patch_size=4, depth=1, width=16, num_heads=2),
            decoder_depth=1,
            decoder_width=16,
            decoder_num_heads=2,
        ),
        optim=OptimConfig(learning_rate=1e-2, ema_decay=0.9),
        hardware=HardwareConfig(device="cpu", physical_batch_size=7, workers=1),
    )
    return replace(base, data=replace(base.data, store=str(scenes)))
