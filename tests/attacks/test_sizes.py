"""A model that mixes records at some batch sizes only: gates on three records pass it, and one
record moves the sum by several C.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dpvision.config import (
    HardwareConfig,
    MAEConfig,
    OptimConfig,
    PrivacyConfig,
    RunConfig,
    ViTConfig,
)
from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.data.synthetic_store import write_scenes
from dpvision.dp.clip import clipped_sum
from dpvision.dp.separable import check_separable
from dpvision.dp.support import check_at_sizes, check_exact
from dpvision.errors import PrivacyError
from dpvision.privacy.store_marks import StoreLedgers
from dpvision.train import start

KEY = StepKey(0, 0)
SIZE = 8


class Rolled(nn.Module):
    """Keeps three records apart, the number that the gates looked at; of more, each gets another
    one's features.
    """

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD.roll(len(x_BD) - 3, 0)


class Crowded(nn.Module):
    """Divides by the number of records, from five on: records stay apart, yet one record less
    changes the gradients of all others.
    """

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD / max(4, len(x_BD))


def net(middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 16), middle, nn.Tanh(), nn.Linear(16, 4))


def losses(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    return nn.functional.cross_entropy(
        model(batch.image_BVCHW[:, 0]), batch.label_B, reduction="none"
    )


def make_batch(size: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return Batch(
        torch.arange(size),
        torch.ones(size, dtype=torch.bool),
        3 * torch.randn(size, 1, 3, 2, 2, generator=generator),
        label_B=torch.arange(size) % 4,
    )


def moved(model: nn.Module, removed: int) -> float:
    """How far the sum of clipped gradients moves when one record is removed, in units of C."""
    batch = make_batch(SIZE)
    kept = torch.tensor([i for i in range(SIZE) if i != removed])
    sums = [
        clipped_sum(losses, model, part, KEY, max_grad_norm=0.1).grads
        for part in (batch, Batch._make(None if value is None else value[kept] for value in batch))
    ]
    return (
        float(torch.stack([(sums[0][name] - sums[1][name]).norm() for name in sums[0]]).norm())
        / 0.1
    )


@pytest.mark.parametrize("middle", [Rolled, Crowded])
def test_a_model_that_mixes_at_the_size_that_runs_is_refused(middle: type[nn.Module]) -> None:
    model = net(middle())
    small = make_batch(4)
    if middle is Rolled:
        # 2.3 C, until models that move rows went through ``vmap``, a record at a time.
        assert max(moved(model, i) for i in range(SIZE)) < 1
    check_separable(losses, model, small, KEY)
    check_exact(losses, model, small, KEY)
    with pytest.raises(PrivacyError, match=r"in a batch of \d+"):
        check_at_sizes(losses, model, make_batch(SIZE), KEY)


def test_a_model_that_mixes_at_a_smaller_size_is_refused() -> None:
    class AtFive(nn.Module):
        def forward(self, x_BD: Tensor) -> Tensor:
            return x_BD.roll(int(len(x_BD) == 2 * SIZE // 3), 0)

    with pytest.raises(PrivacyError, match=rf"in a batch of {2 * SIZE // 3}"):
        check_at_sizes(losses, net(AtFive()), make_batch(SIZE), KEY)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 33])
def test_models_that_keep_records_apart_pass_at_every_size(size: int) -> None:
    model = net(nn.LayerNorm(16))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check_at_sizes(losses, model, make_batch(size), KEY)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert max(moved(model, i) for i in range(SIZE)) <= 1


def test_a_run_is_refused_before_its_first_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "scenes"
    write_scenes(store, 60, 16, workers=1, public=False)
    config = RunConfig(
        recipe="vip.micro",
        privacy=PrivacyConfig(
            dataset_size=60,
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
        optim=OptimConfig(learning_rate=1e-2),
        hardware=HardwareConfig(device="cpu", physical_batch_size=7, workers=1),
    )
    config = replace(config, data=replace(config.data, store=str(store)))
    real = start.loss_function(config)

    def mixed(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
        losses_B = real(model, batch, key)
        return losses_B if len(losses_B) <= 4 else losses_B + 0.1 * losses_B.roll(1)

    monkeypatch.setattr(start, "loss_function", lambda config: mixed)
    with (
        pytest.raises(PrivacyError, match="in a batch of 7"),
        start.new_session(config, tmp_path / "run"),
    ):
        pass
    assert not list(StoreLedgers.of(store).folder.glob("*.jsonl")), "nothing was charged"
