"""Optimizers against torch used by hand; schedules against the papers' formula; state there and
back.
"""

import math

import pytest
import torch
from made import made_sum, released
from torch import nn

from dpvision.config import OptimConfig
from dpvision.dp.noise import DPGradient
from dpvision.errors import CheckpointError, PrivacyError
from dpvision.optim.ema import make_ema, update_ema
from dpvision.optim.optimizer import Optimizer
from dpvision.optim.schedule import learning_rate


def _model() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    model[1].bias.requires_grad_(False)
    return model


def _gradients(model: nn.Module, steps: int) -> list[DPGradient]:
    g = torch.Generator().manual_seed(5)
    return [
        released(
            {
                n: torch.randn(p.shape, generator=g)
                for n, p in model.named_parameters()
                if p.requires_grad
            }
        )
        for _ in range(steps)
    ]


def test_adamw_is_the_published_update() -> None:
    model = _model()
    config = OptimConfig(learning_rate=0.1, weight_decay=0.05, betas=(0.8, 0.9), eps=1e-6)
    optimizer = Optimizer(config, model)
    weight = model[0].weight.detach().double().clone()
    m, v = torch.zeros_like(weight), torch.zeros_like(weight)
    for t, gradient in enumerate(_gradients(model, 5), start=1):
        optimizer.step(gradient, 0.1 / t)
        g = gradient.grads["0.weight"].double()
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        weight = weight * (1 - 0.1 / t * 0.05) - 0.1 / t * (m / (1 - 0.8**t)) / (
            (v / (1 - 0.9**t)).sqrt() + 1e-6
        )
    torch.testing.assert_close(model[0].weight.detach().double(), weight, rtol=1e-5, atol=1e-6)


def test_sgd_momentum_with_decoupled_decay() -> None:
    model = _model()
    optimizer = Optimizer(
        OptimConfig(name="sgd", learning_rate=0.1, momentum=0.5, weight_decay=0.2), model
    )
    weight, velocity = model[0].weight.detach().clone(), 0.0
    for gradient in _gradients(model, 3):
        optimizer.step(gradient, 0.1)
        velocity = 0.5 * velocity + gradient.grads["0.weight"]
        weight = weight * (1 - 0.1 * 0.2) - 0.1 * velocity
    torch.testing.assert_close(model[0].weight.detach(), weight)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_resumed_from_its_tensors_it_goes_on_bit_for_bit(name: str) -> None:
    config = OptimConfig(name=name, learning_rate=0.01)  # type: ignore[arg-type]
    whole, first = _model(), _model()
    gradients = _gradients(whole, 6)
    one, two = Optimizer(config, whole), Optimizer(config, first)
    for gradient in gradients:
        one.step(gradient, 0.01)
    for gradient in gradients[:3]:
        two.step(gradient, 0.01)
    second = _model()
    second.load_state_dict(first.state_dict())
    three = Optimizer(config, second)
    three.load(two.tensors())
    for gradient in gradients[3:]:
        three.step(gradient, 0.01)
    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_frozen_parameter_never_moves_and_foreign_state_is_refused() -> None:
    model = _model()
    optimizer = Optimizer(OptimConfig(learning_rate=1.0), model)
    before = model[1].bias.detach().clone()
    optimizer.step(_gradients(model, 1)[0], 1.0)
    assert torch.equal(model[1].bias, before)
    with pytest.raises(CheckpointError, match="expected state"):
        optimizer.load({"elsewhere/exp_avg": torch.zeros(1)})


def test_a_clipped_sum_does_not_pass_the_wall() -> None:
    model = _model()
    total = made_sum(_gradients(model, 1)[0].grads)
    with pytest.raises(PrivacyError, match="DPGradient"):
        Optimizer(OptimConfig(), model).step(total, 0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [0, 3, 9, 10, 55, 99])
def test_the_vip_schedule_is_the_papers_formula(step: int) -> None:
    config = OptimConfig(learning_rate=2.0, warmup_steps=10)
    expected = 2.0 * min((step + 1) / 10, (1 + math.cos(math.pi * step / 100)) / 2)
    assert learning_rate(config, step, 100) == pytest.approx(expected)
    level = OptimConfig(learning_rate=2.0, warmup_steps=10, schedule="constant")
    assert learning_rate(level, step, 100) == pytest.approx(2.0 * min((step + 1) / 10, 1))


def test_ema_is_the_weighted_sum_of_the_weights_seen() -> None:
    model = nn.Linear(2, 2)
    start = model.weight.detach().clone()
    ema = make_ema(model)
    for value in (1.0, 2.0):
        with torch.no_grad():
            model.weight.fill_(value)
        update_ema(ema, model, 0.9, 1000)
    torch.testing.assert_close(ema["weight"], 0.81 * start + 0.09 * 1.0 + 0.1 * 2.0)


def test_ema_forgets_the_start_in_a_short_run() -> None:
    """150 updates at decay 0.999: the weights that the run began with count for nothing, those of
    its second half for most.
    """
    model = nn.Linear(1, 1)
    ema = {"weight": torch.full((1, 1), 1000.0), "bias": torch.zeros(1)}
    for t in range(150):
        with torch.no_grad():
            model.weight.fill_(1.0 if t >= 75 else 0.0)
        update_ema(ema, model, 0.999, t)
    assert 0.99 < ema["weight"].item() < 1.0
