"""Attacks by the precision of weights: half-precision or mixed parameters, whose sums round by more
than a contribution.
"""

import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "oracles"))

from zoo import KEY

from dpvision.data.batch import Batch, take
from dpvision.dp.clip import clipped_sum
from dpvision.dp.rounding import proven_bound
from dpvision.errors import PrivacyError

HALF = (torch.bfloat16, torch.float16)


def rows_batch(x: Tensor) -> Batch:
    """Records that are vectors (B, D)."""
    return Batch(
        torch.arange(len(x)), torch.ones(len(x), dtype=torch.bool), x.view(-1, 1, 1, 1, x.shape[1])
    )


def row(batch: Batch) -> Tensor:
    return batch.image_BVCHW[:, 0, 0, 0, :]


class Weight(nn.Module):
    """A weight multiplied with the record in ``used``'s precision, and a scalar of another
    parameter.
    """

    def __init__(
        self,
        width: int,
        dtype: torch.dtype,
        used: torch.dtype | None = None,
        first: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(1, dtype=first or dtype))
        self.weight = nn.Parameter(torch.zeros(width, dtype=dtype))
        self.used = used or dtype


def weight_losses(model: nn.Module, batch: Batch, _key: object) -> Tensor:
    assert isinstance(model, Weight)
    return (row(batch).to(model.used) * model.weight.to(model.used)).sum(
        1
    ).float() + 0 * model.first.float()


class Adapted(nn.Module):
    """A frozen half-precision layer with a trained float32 adapter (LoRA)."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.base = nn.Linear(64, 64, dtype=dtype).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(0.1 * torch.randn(p.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x.to(self.base.weight.dtype)).float() + self.up(self.down(x))


def adapted_losses(model: nn.Module, batch: Batch, _key: object) -> Tensor:
    return model(row(batch)).square().mean(1)


def near_the_rounding_boundary(seed: int, width: int, num: int) -> Tensor:
    """Records of one direction, of which three have less: a sum in bfloat16 that ends just beside
    the middle of two numbers.
    """
    x = torch.full((num, width), 8.0)
    x[1:4] = 0.3 * torch.rand(3, 1, generator=torch.Generator().manual_seed(seed))
    return x


def moved(model: nn.Module, loss_fn: object, x: Tensor, method: str) -> float:
    """Distance of the sums with and without the first record, in units of C."""
    whole = rows_batch(x)
    sums = [
        clipped_sum(loss_fn, model, batch, KEY, max_grad_norm=1.0, method=method).grads  # type: ignore[arg-type]
        for batch in (whole, take(whole, slice(1, None)))
    ]
    return (
        sum(
            float((a.double() - b.double()).square().sum())
            for a, b in zip(*(s.values() for s in sums), strict=True)
        )
        ** 0.5
    )


@pytest.mark.parametrize("method", ["one_pass", "vmap"])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        *((d, d) for d in HALF),
        *itertools.permutations((torch.float32, *HALF), 2),
        (torch.float64, torch.float32),
    ],
)
def test_half_precision_and_mixed_weights_are_refused(
    first: torch.dtype, second: torch.dtype, method: str
) -> None:
    """Sums of 256 such records moved by up to 1.41 C, with weights of both precisions by 1.94 C."""
    with pytest.raises(
        PrivacyError,
        match=r"trained parameters are .*; expected all float32 or all float64.*torch\.autocast",
    ):
        moved(
            Weight(15, second, first=first),
            weight_losses,
            near_the_rounding_boundary(0, 15, 256),
            method,
        )


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("num", [256, 2000])
def test_weights_cast_to_half_precision_in_the_forward_pass_move_the_sum_by_at_most_c(
    dtype: torch.dtype, num: int
) -> None:
    """The sum's gradient was rounded on its way back through the cast."""
    worst = max(
        moved(
            Weight(15, torch.float32, used=dtype),
            weight_losses,
            near_the_rounding_boundary(t, 15, num),
            "one_pass",
        )
        for t in range(40)
    )
    assert worst <= proven_bound()


def test_small_gradients_of_cast_weights_keep_their_direction() -> None:
    """A sum below float16's smallest number became zero."""
    model, x = Weight(15, torch.float32, used=torch.float16), near_the_rounding_boundary(0, 15, 9)
    total = clipped_sum(weight_losses, model, rows_batch(x), KEY, max_grad_norm=1e-9).grads[
        "weight"
    ]
    assert total.norm() == pytest.approx(9 * 0.995e-9, rel=1e-3)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("method", ["one_pass", "vmap"])
def test_adapters_on_frozen_half_precision_weights_keep_the_bound(
    dtype: torch.dtype, method: str
) -> None:
    for seed in range(5):
        x = 0.2 + 0.01 * torch.randn(250, 64, generator=torch.Generator().manual_seed(seed))
        assert moved(Adapted(dtype), adapted_losses, x, method) <= proven_bound()
