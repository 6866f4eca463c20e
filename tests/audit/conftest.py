"""A small masked autoencoder, its plan, and fewer steps than an audit has."""

import pytest
import torch

from dpvision.audit import acceptance
from dpvision.config import HardwareConfig, MAEConfig, PrivacyConfig, RunConfig, ViTConfig
from dpvision.privacy.plan import DPPlan, make_plan


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """200 scores, which see noise x 0.7 with a power above 0.999 too."""
    monkeypatch.setattr(acceptance, "_STEPS", 10)


@pytest.fixture(scope="session")
def config() -> RunConfig:
    return RunConfig(
        recipe="vip.micro",
        privacy=PrivacyConfig(
            dataset_size=2000,
            expected_batch_size=600.0,
            steps=6,
            max_grad_norm=0.5,
            target_epsilon=8.0,
            delta=1e-5,
        ),
        model=MAEConfig(
            encoder=ViTConfig(image_size=8, patch_size=4, depth=1, width=16, num_heads=2),
            decoder_depth=1,
            decoder_width=16,
            decoder_num_heads=2,
        ),
        hardware=HardwareConfig(device="cpu", physical_batch_size=16, workers=1),
    )


@pytest.fixture
def plan(config: RunConfig) -> DPPlan:
    return make_plan(config.privacy)
