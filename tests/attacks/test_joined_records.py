"""Attacks by calls that join records only in some numbers: at a limit, beside a large eps, with
another factor, where one number is zero, or from some call on.

On 2026-11-29 each moved the sum of 64 records by 38 to 63 C, and a layer that counts its calls by
995 C; docs/attacks.md.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpvision.data.batch import Batch, take
from dpvision.data.keys import StepKey
from dpvision.dp.buckets import hashes
from dpvision.dp.clip import clipped_sum
from dpvision.errors import PrivacyError

KEY, NUM = StepKey(seed=7, step=3), 64
IDS = torch.arange(1, NUM + 1)
ORDER = hashes(KEY, IDS).argsort()
Make = Callable[[], tuple[nn.Module, Any, Batch, int, float]]
"""Model, loss, records, the one that leaves, clip norm."""


def batch_of(x_BN: Tensor, **fields: Tensor) -> Batch:
    return Batch(IDS, torch.ones(NUM, dtype=torch.bool), x_BN[:, None, None, None], **fields)


def flat(grads: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.double().flatten() for value in grads.values()])


def moved(make: Make) -> float:
    """By how much the sum moves when the record leaves, in units of C."""
    model, loss, batch, record, clip = make()

    def total(rows: list[int]) -> Tensor:
        own = take(batch, torch.tensor(rows))
        return flat(clipped_sum(loss, model, own, KEY, max_grad_norm=clip, rows=NUM).grads)

    everyone = [*range(NUM)]
    return float((total(everyone) - total([i for i in everyone if i != record])).norm() / clip)


def ones(inputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, 1, bias=False)
    nn.init.ones_(layer.weight)
    return layer


def product() -> tuple[nn.Module, Any, Batch, int, float]:
    """PyTorch divides the product by each number, unless one of the whole batch is zero: a product
    that underflows then has gradients after all.
    """

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x_BN: Tensor) -> Tensor:
            return ((x_BN - 0.5) / 0.25 * self.scale).prod(1)

    def loss(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
        return 1e9 * model(batch.image_BVCHW.flatten(1))

    x_BN = torch.tensor([0.5 + 2.0**-24] * 7 + [2.0**124]).repeat(NUM, 1)
    x_BN[0], x_BN[0, 4] = 0.3, 0.5
    return Model(), loss, batch_of(x_BN), 0, 1.0


def limited() -> tuple[nn.Module, Any, Batch, int, float]:
    """``renorm`` keeps the dimension that it is given and joins all others; below its limit it does
    nothing.
    """
    limit = (81.0 * NUM + 9) ** 0.5

    def loss(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
        return model(batch.image_BVCHW.flatten(1)).clamp(-10, 10).renorm(2, 1, limit).sum(1)

    x_BN = torch.full((NUM, 8), 9.0 / 8)
    x_BN[ORDER[-1]] = 9.9 / 8
    return ones(8), loss, batch_of(x_BN), int(ORDER[-1]), 0.5


def beside_eps() -> tuple[nn.Module, Any, Batch, int, float]:
    """What an eps of 1e9 hides among numbers near 1 decides among those above 30,000."""

    def loss(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
        value_B1 = model(batch.image_BVCHW.flatten(1))
        shown_B1 = torch.where(value_B1 > 300, value_B1.clamp(max=1e7), 0.0)
        return F.rms_norm(shown_B1.T, (len(value_B1),), eps=1e9)[0]

    x_BN = torch.full((NUM, 8), 1e3)
    x_BN[ORDER[-1]] = 1e6
    return ones(8), loss, batch_of(x_BN), int(ORDER[-1]), 0.05


def by_a_float(number: type = float) -> tuple[nn.Module, Any, Batch, int, float]:
    """The records are added up times a number of Python, which is 0 when the calls are checked."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.share = ones(1), nn.Parameter(torch.tensor(-1.0))

        def forward(self, x_BN: Tensor) -> Tensor:
            z_B1 = self.layer(x_BN)
            all_BB = torch.ones(len(z_B1), len(z_B1), dtype=z_B1.dtype)
            joined_B1 = torch.addmm(
                z_B1, all_BB, z_B1, alpha=number(max(float(self.share), 0.0) / len(z_B1))
            )
            return (joined_B1**2).sum(1) + 0 * self.share

    def loss(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
        return model(batch.image_BVCHW.flatten(1))

    x_BN = torch.linspace(-1, 1, NUM)[:, None] ** 3
    x_BN[0] = 4.0 * NUM
    model, batch = Model(), batch_of(x_BN)
    clipped_sum(loss, model, batch, KEY, max_grad_norm=0.01, rows=NUM)
    with torch.no_grad():
        model.share += 1.5  # as training does
    return model, loss, batch, 0, 0.01


def by_lengths() -> tuple[nn.Module, Any, Batch, int, float]:
    """A record whose segment is shorter shifts those of all later records."""

    def loss(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
        assert batch.label_B is not None
        row_RN = batch.image_BVCHW.flatten(1).unflatten(1, (8, 3)).flatten(0, 1)
        length_B = 8 - (batch.label_B >= 10).long()
        return model(torch.segment_reduce(row_RN, "sum", lengths=length_B, unsafe=True))[:, 0]

    x_BN, even_B = torch.zeros(NUM, 8, 3), torch.arange(NUM) % 2 == 0
    x_BN[ORDER, 0, 0] = torch.where(even_B, 3.0, -1.0)
    x_BN[ORDER, -1, 0] = torch.where(even_B, -2.0, 4.0)
    label_B = torch.zeros(NUM, dtype=torch.long)
    label_B[ORDER[0]] = 10
    return ones(3), loss, batch_of(x_BN.flatten(1), label_B=label_B), int(ORDER[0]), 0.01


def of_the_first() -> tuple[nn.Module, Any, Batch, int, float]:
    """All records read the first one's number, and no other's."""

    def loss(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
        value_B = model(batch.image_BVCHW.flatten(1))[:, 0]
        shown_B, num = torch.where(value_B > 300, value_B, 0.0), len(value_B)
        first_B = F.pad(shown_B[None, None], (num - 1, 1 - num), mode="replicate")[0, 0]
        return value_B * torch.where(first_B > 300, -1.0, 1.0)

    x_BN = torch.full((NUM, 8), 0.1)
    x_BN[ORDER[0]] = 100.0
    return ones(8), loss, batch_of(x_BN), int(ORDER[0]), 0.1


def by_statistics() -> tuple[nn.Module, Any, Batch, int, float]:
    """``batch_norm`` leaves the mean of all records in a tensor, and PyTorch counts no write."""

    def loss(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
        value_B1 = model(batch.image_BVCHW.flatten(1))
        shown_B1 = torch.where((value_B1 > 3e3) & (value_B1 < 1e5), value_B1, 0.0)
        mean, var = shown_B1.new_zeros(1), shown_B1.new_ones(1)
        F.batch_norm(shown_B1.expand(-1, 2)[:, None], mean, var, training=True, momentum=1.0)
        return value_B1[:, 0] * torch.where(mean > 1, -1.0, 1.0)

    x_BN = torch.full((NUM, 8), 0.1)
    x_BN[ORDER[0]] = 1000.0
    return ones(8), loss, batch_of(x_BN), int(ORDER[0]), 0.1


JOINING = [product, limited, beside_eps, by_a_float, by_lengths, of_the_first, by_statistics]


@pytest.mark.parametrize("make", [*JOINING, partial(by_a_float, np.float64)])
def test_a_call_that_joins_records_in_some_numbers_only_moves_a_sum_by_c(make: Make) -> None:
    assert moved(make) <= 0.9951


@pytest.mark.parametrize("activation", [F.relu6, F.hardshrink, F.softshrink])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_record_with_a_number_that_is_not_finite_contributes_nothing(
    activation: Callable[[Tensor], Tensor], value: float
) -> None:
    """PyTorch computes the last numbers of a tensor by other code, whose gradient at NaN is 1 in
    place of 0: a record that comes last, when another leaves, would contribute otherwise.
    """
    layer, num = nn.Linear(7, 1, bias=False), 17
    nn.init.constant_(layer.weight, 0.1)

    def loss(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
        x_BN = batch.image_BVCHW.flatten(1)
        return 10 * activation(model(x_BN[:, 1:]) + x_BN[:, :1]).sum(1)

    ids = torch.arange(1, num + 1)
    last = int(hashes(KEY, ids).argmax())
    x_BN = torch.full((num, 8), 0.1)
    x_BN[last] = 1.0
    x_BN[last, 0] = value
    batch = batch_of(x_BN.repeat(4, 1)[:NUM])
    batch = take(batch, torch.arange(num))

    def total(rows: list[int]) -> Tensor:
        own = take(batch, torch.tensor(rows))
        return flat(clipped_sum(loss, layer, own, KEY, max_grad_norm=1.0, rows=num).grads)

    everyone = [*range(num)]
    rest = [i for i in everyone if i != last]
    assert torch.equal(total(everyone), total(rest))
    first = rest[0]
    assert (total(everyone) - total([i for i in everyone if i != first])).norm() <= 0.9951


@pytest.mark.parametrize("method", ["one_pass", "vmap"])
def test_cutting_the_memory_of_all_records_is_refused(method: str) -> None:
    """``vmap`` takes each record's first numbers from the memory of all: 126 C."""

    def loss(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
        value_B1 = model(batch.image_BVCHW.flatten(1))
        cut_B1 = value_B1.detach().expand(-1, 4).clone().resize_(len(value_B1), 1)
        return (value_B1 * cut_B1)[:, 0]

    with pytest.raises(PrivacyError, match="resize_, which cuts the memory of all records"):
        clipped_sum(
            loss, ones(8), batch_of(torch.ones(NUM, 8)), KEY, max_grad_norm=1.0, method=method
        )


class Measured(NamedTuple):
    """A user's own records: numbers and a target, of which one may be missing."""

    record_id_B: Tensor
    valid_B: Tensor
    x_BN: Tensor
    target_B: Tensor


@pytest.mark.parametrize("method", ["one_pass", "vmap"])
def test_a_target_that_is_missing_leaves_its_record_out(method: str) -> None:
    def loss(model: nn.Module, batch: Measured, key: StepKey) -> Tensor:
        error_B = model(batch.x_BN)[:, 0] - batch.target_B
        return torch.where(error_B.isnan(), model(batch.x_BN)[:, 0], error_B.square())

    generator = torch.Generator().manual_seed(0)
    batch = Measured(
        IDS,
        torch.ones(NUM, dtype=torch.bool),
        torch.randn(NUM, 4, generator=generator),
        torch.randn(NUM, generator=generator),
    )
    batch.target_B[3] = float("nan")
    settings: dict[str, Any] = {"max_grad_norm": 1.0, "rows": NUM, "method": method}
    with_it = clipped_sum(loss, ones(4), batch, KEY, **settings)
    valid_B = batch.valid_B.clone()
    valid_B[3] = False
    without = clipped_sum(loss, ones(4), batch._replace(valid_B=valid_B), KEY, **settings)
    assert torch.equal(flat(with_it.grads), flat(without.grads)) and flat(with_it.grads).any()


class CallCounting(nn.Module):
    """Its output is a thousand times as large from some call on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls, self.starts = nn.Parameter(torch.ones(4, 4)), 0, 10**9

    def forward(self, x_BN: Tensor) -> Tensor:
        self.calls += 1
        scale = 1.0 if self.calls < self.starts else 1000.0
        return scale * torch.einsum("bi,ij->bj", x_BN, self.weight).sum(1)


def plain_loss(model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    return model(batch.image_BVCHW.flatten(1))


@pytest.mark.parametrize("back", [1, 4, 15, 16])
def test_gradients_that_are_longer_in_the_sum_than_in_the_norm_are_refused(back: int) -> None:
    """Those of a weight without a rule are computed twice, in 16 chunks of four records."""
    model, batch = CallCounting(), batch_of(torch.full((NUM, 4), 0.5))
    settings: dict[str, Any] = {"max_grad_norm": 1.0, "rows": NUM, "chunk_size": 4}
    clipped_sum(plain_loss, model, batch, KEY, **settings)
    before = model.calls
    clipped_sum(plain_loss, model, batch, KEY, **settings)
    model.starts = model.calls + (model.calls - before) - back + 1
    with pytest.raises(PrivacyError, match="differ from one computation to the next"):
        clipped_sum(plain_loss, model, batch, KEY, **settings)
