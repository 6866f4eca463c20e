"""Operands rounded to half precision after the factor, as on a GPU: planted on the CPU, the
contribution still never exceeds C.
"""

import pytest
import torch
import zoo
from torch import nn
from zoo import KEY, make_batch

from dpvision.dp import one_pass, outer_products
from dpvision.dp.clip import clipped_sum
from dpvision.dp.rounding import RESERVE


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    def rounding(dtype, device):
        return torch.finfo(dtype).eps / 2 if dtype in (torch.float16, torch.bfloat16) else 0.0

    monkeypatch.setattr(outer_products, "rounding", rounding)
    monkeypatch.setattr(one_pass, "rounding", rounding)


class Tokens(nn.Module):
    """One linear layer over 192 tokens of an image's pixels, wide enough that its gradient is not
    written out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(400, 400))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight)


def tilted_losses(model, batch, key):
    """<w, y> with w all of one sign and the tokens nearly alike: outer products add up or cancel as
    ``label_B`` says.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 12, 400, generator=generator) + 3 * batch.image_BVCHW.flatten(1)[:, :1, None]
    sign = torch.where(batch.label_B[:, None] > 0, 1.0, (-1.0) ** torch.arange(12))[..., None]
    y = model(x)
    return (y.float() * (torch.randn(1, 12, 400, generator=generator).abs() * sign)).sum((1, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounded_contribution_never_exceeds_c(dtype):
    model, clip, largest = Tokens(), 0.1, 0.0
    for seed in range(20):
        batch = make_batch(1, seed=seed)
        with torch.autocast("cpu", dtype):
            total = clipped_sum(tilted_losses, model, batch, KEY, max_grad_norm=clip)
        largest = max(largest, total.grads["weight"].double().norm().item())
        assert total.norms_B[0] > 10 * clip, "nothing to clip"
    assert 0.8 * clip <= largest <= clip * (1 - RESERVE)


def test_without_the_slack_rounding_exceeds_c(monkeypatch):
    """The claim above could be false: rounded products are often longer than the norm said."""
    monkeypatch.setattr(one_pass, "rounding", lambda dtype, device: 0.0)
    norms = []
    for seed in range(20):
        with torch.autocast("cpu", torch.bfloat16):
            total = clipped_sum(
                tilted_losses, Tokens(), make_batch(1, seed=seed), KEY, max_grad_norm=0.1
            )
        norms.append(total.grads["weight"].double().norm().item())
    assert max(norms) > 0.1 * (1 - RESERVE)


def test_slack_costs_little_for_incoherent_products():
    model, batch, clip = zoo.tiny_mae(), make_batch(6), 0.05
    with torch.autocast("cpu", torch.bfloat16):
        singles = [
            clipped_sum(zoo.mae_losses, model, zoo.rows(batch, [i]), KEY, max_grad_norm=clip)
            for i in range(6)
        ]
    for single in singles:
        norm = torch.cat([value.double().flatten() for value in single.grads.values()]).norm()
        assert 0.95 * clip <= norm <= clip * (1 - RESERVE)
