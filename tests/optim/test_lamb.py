"""LAMB against the paper's update written out slowly (You et al. 2020, algorithm 2), and its state
there and back.
"""

import pytest
import torch
from made import released
from torch import Tensor, nn

from dpvision.config import OptimConfig
from dpvision.dp.noise import DPGradient
from dpvision.optim.optimizer import Optimizer


def _model() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    nn.init.zeros_(model[1].weight)
    return model


def _gradients(model: nn.Module, steps: int) -> list[DPGradient]:
    g = torch.Generator().manual_seed(5)
    return [
        released({n: 3 * torch.randn(p.shape, generator=g) for n, p in model.named_parameters()})
        for _ in range(steps)
    ]


def _published(
    weight: Tensor,
    gradients: list[Tensor],
    rates: list[float],
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
) -> Tensor:
    """w <- w - rate x ||w|| / ||u|| x u, u = m^ / (sqrt(v^) + eps) + decay x w; a norm of zero
    gives the ratio 1.
    """
    weight = weight.double().clone()
    m, v = torch.zeros_like(weight), torch.zeros_like(weight)
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        u = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps) + decay * weight
        ratio = weight.norm() / u.norm() if weight.norm() > 0 and u.norm() > 0 else 1.0
        weight = weight - rate * ratio * u
    return weight


@pytest.mark.parametrize(("decay", "decayed"), [(0.0, "all"), (0.1, "all"), (0.1, "matrices")])
def test_lamb_is_the_published_update(decay: float, decayed: str) -> None:
    """Without decay, too, where timm by itself leaves the adaptation out; and with gradients far
    longer than 1, which it would clip.
    """
    model = _model()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = OptimConfig(
        name="lamb",
        learning_rate=0.1,
        betas=(0.8, 0.9),
        eps=1e-6,
        weight_decay=decay,
        decayed=decayed,
    )  # type: ignore[arg-type]
    optimizer, gradients, rates = (
        Optimizer(config, model),
        _gradients(model, 5),
        [0.1, 0.07, 0.05, 0.03, 0.02],
    )
    for gradient, rate in zip(gradients, rates, strict=True):
        optimizer.step(gradient, rate)
    for name, p in model.named_parameters():
        own = decay if decayed == "all" or p.ndim >= 2 else 0.0
        slow = _published(
            start[name], [g.grads[name].double() for g in gradients], rates, 0.8, 0.9, 1e-6, own
        )
        torch.testing.assert_close(p.detach().double(), slow, rtol=1e-4, atol=1e-6)


def test_resumed_from_its_tensors_it_goes_on_bit_for_bit() -> None:
    """The count of its steps, which timm keeps apart from the rest of the state, is among them."""
    config = OptimConfig(name="lamb", learning_rate=0.01)
    whole, first = _model(), _model()
    gradients = _gradients(whole, 6)
    one, two = Optimizer(config, whole), Optimizer(config, first)
    assert two.tensors() == {}
    for gradient in gradients:
        one.step(gradient, 0.01)
    for gradient in gradients[:3]:
        two.step(gradient, 0.01)
    second = _model()
    second.load_state_dict(first.state_dict())
    three = Optimizer(config, second)
    saved = {name: tensor.clone() for name, tensor in two.tensors().items()}
    assert all(float(saved[f"{name}/step"]) == 3 for name, _ in whole.named_parameters())
    three.load(saved)
    for gradient in gradients[3:]:
        three.step(gradient, 0.01)
    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
