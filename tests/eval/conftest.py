"""Runs that were never trained (a checkpoint of a small untrained model is enough to evaluate), and
labelled stores of scenes.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dpvision.checkpoint import save_checkpoint, state_tensors
from dpvision.config import MAEConfig, PrivacyConfig, RunConfig, ViTConfig, to_dict
from dpvision.data.store import Store
from dpvision.data.synthetic_store import write_scenes
from dpvision.files import write_json
from dpvision.models import make_model

MakeRun = Callable[..., Path]

torch.set_num_threads(1)  # the models are so small that threads would only wait for each other


@pytest.fixture(scope="session")
def config() -> RunConfig:
    return RunConfig(
        recipe="vip.micro",
        privacy=PrivacyConfig(
            dataset_size=60, expected_batch_size=20, steps=4, noise_multiplier=2.0
        ),
        model=MAEConfig(
            encoder=ViTConfig(image_size=8, patch_size=2, depth=1, width=16, num_heads=2),
            decoder_depth=1,
            decoder_width=16,
            decoder_num_heads=2,
        ),
    )


@pytest.fixture
def make_run(tmp_path: Path, config: RunConfig) -> MakeRun:
    """Writes a run folder: ``wholly_confidential`` as of a run without guarantee on a private
    store; ``poison`` puts NaN in the weights.
    """

    def make(*, wholly_confidential: bool = False, poison: bool = False) -> Path:
        root = tmp_path / "run"
        base = root / "confidential" if wholly_confidential else root
        (root / "confidential").mkdir(parents=True)
        model = make_model(
            config.model, seed=5
        )  # not the config's seed: these weights must differ from the run's initial ones
        if poison:
            next(model.encoder.parameters()).data[0] = torch.nan
        guarantee = None if wholly_confidential else {"epsilon": 8.0}
        manifest = {
            "run_id": "r",
            "ledger_steps": 4,
            "updates": 4,
            "config": to_dict(config),
            "plan": {},
            "ledger_digest": "d",
            "lineage": [
                {"store_id": "s", "visibility": "private", "run_id": "r", "guarantee": guarantee}
            ],
        }
        ema = {name: torch.zeros_like(value) for name, value in state_tensors(model).items()}
        save_checkpoint(
            base / "checkpoints" / "step-00000004", manifest, state_tensors(model), ema=ema
        )
        write_json(base / "config.json", to_dict(config))
        return root

    return make


@pytest.fixture(scope="session")
def train_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """240 public scenes of 16 px."""
    return write_scenes(tmp_path_factory.mktemp("stores") / "train", 240, 16)


@pytest.fixture(scope="session")
def test_store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """80 further public scenes."""
    return write_scenes(tmp_path_factory.mktemp("stores") / "test", 80, 16, first=240)
