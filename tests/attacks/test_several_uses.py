"""Attacks on the sum of a weight's uses: each is longer than C, their sum is not, and float32
rounds the uses.

On 2026-11-29 they reached 1.78 C (one weight of 4 x 4 used 256 times), 1.06 C (two records) and, by
blocks that others cut, 1.005 C; docs/attacks.md.
"""

import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from timm.layers import StdConv2d
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "oracles"))

from zoo import GradientIsImage, image_losses, make_batch

from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp import one_pass
from dpvision.dp.buckets import block_error, blocks, hashes
from dpvision.dp.clip import clipped_sum
from dpvision.dp.outer_products import Dense, OuterProducts
from dpvision.dp.rounding import BUDGET, proven_bound
from dpvision.dp.weight_grads import Slot, norm_is_own
from dpvision.errors import ConfigError
from dpvision.models import make_model
from dpvision.recipes import RECIPES
from dpvision.train.objectives import example_batch, loss_function

KEY, WIDTH = StepKey(seed=7, step=3), 4
HALF_ULP = 0.49 * 2.0**-23
"""What a sum that begins with 1 does not see."""


class Uses(nn.Module):
    """One weight, used as often as the batch says: a recurrent layer at one place a step."""

    def __init__(self, *, transposed: bool) -> None:
        super().__init__()
        self.map = nn.Linear(WIDTH, WIDTH, bias=False)
        self.transposed = transposed

    def forward(self, x_BUP: torch.Tensor, g_BUQ: torch.Tensor) -> torch.Tensor:
        made = []
        for use in range(x_BUP.shape[1]):
            x_BP = x_BUP[:, use]
            other = self.transposed and use % 2
            y_BQ = x_BP @ self.map.weight.t() if other else self.map(x_BP)
            made.append((y_BQ * g_BUQ[:, use]).sum(1))
        return torch.stack(made).sum(0)


def losses(model: Uses, batch: Batch, key: StepKey) -> torch.Tensor:
    x_BUW = batch.image_BVCHW[:, 0, 0]
    return model(x_BUW[..., :WIDTH], x_BUW[..., WIDTH:])


def uses_batch(value_BU: np.ndarray, ids: list[int]) -> Batch:
    """Records of which use u has the gradient of 4 x 4 numbers value_BU[:, u]."""
    image = torch.ones(*value_BU.shape, 2 * WIDTH)
    image[..., WIDTH:] = torch.from_numpy(value_BU).float()[..., None]
    assert (image[..., -1].double() == torch.from_numpy(value_BU)).all()
    valid = torch.ones(len(ids), dtype=torch.bool)
    return Batch(torch.tensor(ids), valid, image[:, None, None])


def moved(model: Uses, value_BU: np.ndarray, ids: list[int], rows: int) -> float:
    """How far the sum moves when the first record leaves, in units of C = 1."""
    sums = [
        clipped_sum(
            losses, model, uses_batch(value_BU[n:], ids[n:]), KEY, max_grad_norm=1.0, rows=rows
        ).grads["map.weight"]
        for n in (0, 1)
    ]
    return (sums[0].double() - sums[1].double()).norm().item()


def cancelling_uses(num_uses: int) -> tuple[np.ndarray, list[int]]:
    """Records whose uses cancel, in blocks of their own: if the first leaves, each use's total over
    the blocks passes a power of two, beyond which small blocks are lost.
    """
    most = 0.97 * BUDGET / (2.04 * 2.0**-24) / (2 * num_uses**0.5) / 4
    top = 2.0 ** math.floor(math.log2(13 * most))
    ulp, num_small = top * 2.0**-23, 14
    num_long = max(math.ceil((top + 2 * ulp) / most), 11)
    own = math.floor(0.24875 / num_uses / (ulp / 2)) * ulp / 2
    long = 2.0 ** math.floor(math.log2(0.3 * most))
    lost = -math.floor(0.49 * ulp / (long * 2.0**-23)) * long * 2.0**-23
    sign_U = np.where(np.arange(num_uses) % 2, -1.0, 1.0)

    def spread(total: float) -> list[float]:
        each = math.floor(total / num_long / 2**-9) * 2**-9
        return [each] * (num_long - 1) + [total - (num_long - 1) * each]

    candidates = torch.arange(1, 8000, dtype=torch.int64) * 1_000_003
    hash_N = hashes(KEY, candidates).numpy()
    slot_N = hash_N >> 58
    first = [sorted(np.flatnonzero(slot_N == q), key=lambda i: hash_N[i]) for q in range(32)]
    records = [(np.full(num_uses, own), first[0][0])]
    ups = zip(spread(top + 2 * ulp - own), spread(top + 2 * ulp), strict=True)
    records += [(np.where(sign_U > 0, v, -w), first[1 + q][0]) for q, (v, w) in enumerate(ups)]
    for q in range(1 + num_long, 1 + num_long + num_small):
        records += [(sign_U * long, first[q][0]), (sign_U * (lost - long), first[q][1])]
    return np.stack([value for value, _ in records]), [int(candidates[i]) for _, i in records]


@pytest.mark.parametrize("num_uses", [4, 16, 64])
@pytest.mark.parametrize("transposed", [False, True])
def test_uses_that_cancel_do_not_move_the_sum_by_more_than_c(
    num_uses: int, transposed: bool
) -> None:
    value_BU, ids = cancelling_uses(num_uses)
    assert 0.9 < moved(Uses(transposed=transposed), value_BU, ids, 64) <= proven_bound()


@pytest.mark.parametrize("num_uses", [64, 256])
def test_what_one_record_hides_in_a_sum_of_uses_is_within_c(num_uses: int) -> None:
    """Two records in one block: the large uses of one uncover the small ones of the other."""
    model, top = Uses(transposed=False), 320.0
    small_U = np.full(num_uses, float(np.float32(HALF_ULP * 256)))

    def record(sign: float, rest: float) -> np.ndarray:
        value_U = small_U.copy()
        value_U[0], value_U[-1] = sign * top, -sign * top + rest
        return value_U.astype(np.float32).astype(np.float64)

    found = [
        moved(model, np.stack([record(1, rest), record(-1, 0.0)]), [5, 6], 16)
        for rest in np.arange(0.2400, 0.2490, 2.0**-11)
    ]
    assert 0.9 < max(found) <= proven_bound()


@pytest.mark.parametrize("num_uses", [2, 3, 64, 1000])
@pytest.mark.parametrize("written", [False, True])
def test_norms_over_several_uses_are_within_their_bounds(num_uses: int, written: bool) -> None:
    """The norm, and the cost by which blocks are cut: (T + 1) x the sum of the uses' lengths."""
    value_U = np.full(num_uses, HALF_ULP)
    value_U[0], value_U[-1] = 1.0, -1.0
    value_U = value_U.astype(np.float32).astype(np.float64)
    weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    slot = Slot(weight, frozenset(["w"]), open=True)
    for value in value_U[written:]:
        left, right = torch.full((1, 1, WIDTH), value).float(), torch.ones(1, 1, WIDTH)
        slot.add_outer_products(OuterProducts(Dense(left), Dense(right), weight.shape))
    if written:
        slot.add_written(torch.full((1, WIDTH, WIDTH), value_U[0]).float())
    found = slot.square_norms(1)
    true = (WIDTH * value_U.sum()) ** 2
    assert abs(found.value_B.item() - true) <= found.error_B.item()
    length = WIDTH * abs(value_U).sum()
    assert found.work_B.sqrt() >= 2 * length * (1 - 1e-6)


class Copies(nn.Module):
    """A table of 16 numbers, each of which is added at a thousand places."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.table, self.how = nn.Parameter(torch.zeros(16)), how
        self.register_buffer("index", torch.arange(16).repeat(1000, 1))

    def forward(self, g_BM: torch.Tensor) -> torch.Tensor:
        copies_MK = {
            "index": lambda: self.table[self.index],
            "expand": lambda: self.table.expand(1000, 16),
            "stack": lambda: torch.stack([self.table] * 1000),
        }[self.how]()
        return ((torch.zeros(len(g_BM), 1000, 16) + copies_MK) * g_BM[..., None]).sum((1, 2))


@pytest.mark.parametrize("how", ["index", "expand", "stack"])
def test_copies_of_a_parameter_that_cancel_are_summed_within_c(how: str) -> None:
    """Pulled back after the sum over records, copies were rounded relative to each other."""
    top, unit, model = 1024.0, 2.0**-24, Copies(how)
    value_BM = np.zeros((16, 1000))
    value_BM[0, 0], value_BM[0, -1] = top / 2, -top / 2 + 0.248
    value_BM[1:] = -0.98 * unit * top / 15
    value_BM[1:, 0] = (top - 64 * unit * top) / 15
    value_BM[1:, -1] = -value_BM[1:, 0]
    sums = []
    for n in (0, 1):
        image = torch.from_numpy(value_BM[n:]).float()[:, None, None, None]
        ids, valid = torch.arange(n, 16), torch.ones(16 - n, dtype=torch.bool)
        found = clipped_sum(
            lambda model, batch, key: model(batch.image_BVCHW[:, 0, 0, 0]),
            model,
            Batch(ids, valid, image),
            KEY,
            max_grad_norm=1.0,
            rows=16,
        )
        sums.append(found.grads["table"].double())
    assert 0.9 < (sums[0] - sums[1]).norm() <= proven_bound()


def test_standardised_kernels_sum_what_their_mean_removes_within_c() -> None:
    """A record's gradient of the standardised kernel is 2,500 C long, that of the parameter 0.9."""
    torch.manual_seed(0)
    model, (num, width) = StdConv2d(64, 4, 3, bias=False, padding=0, eps=1e-6), (256, 64)
    nn.init.kaiming_normal_(model.weight, nonlinearity="relu")
    spread, entry = model.weight[0].std().item(), (width * 9 * 4) ** -0.5
    noise = torch.randn(num, width, 3, 3)
    noise *= 0.45 * spread / noise.flatten(1).norm(dim=1)[:, None, None, None]
    ids, valid = torch.arange(num) + 11, torch.ones(num, dtype=torch.bool)
    sums = [
        clipped_sum(
            lambda model, batch, key: model(batch.image_BVCHW[:, 0]).flatten(1).sum(1),
            model,
            Batch(ids[n:], valid[n:], (2500 * entry + noise)[n:, None]),
            KEY,
            max_grad_norm=1.0,
            rows=num,
        ).grads["weight"]
        for n in range(3)
    ]
    for a, b in itertools.pairwise(sums):
        assert 0.8 < (a.double() - b.double()).norm() <= proven_bound()


@pytest.mark.parametrize("kind", ["double", "float"])
def test_uses_of_a_parameter_in_another_precision_are_summed_within_c(kind: str) -> None:
    """``w.double()`` of a float32 parameter was rounded use by use, after the sum over records."""
    num_uses, top = 256, 2048.0

    def cast(model: nn.Module, batch: Batch, key: StepKey) -> torch.Tensor:
        g_BU = batch.image_BVCHW[:, 0, 0, 0]
        made = [
            (getattr(model.weight, kind)() * g_BU[:, use, None, None]).sum((1, 2))
            for use in range(num_uses)
        ]
        return torch.stack(made).sum(0).to(g_BU.dtype)

    model = nn.Linear(WIDTH, WIDTH, bias=False)
    model = model.double() if kind == "float" else model
    small = 0.49 * 2.0**-23 * top / 2
    value_BU = np.full((2, num_uses), small)
    value_BU[:, 0], value_BU[:, -1] = (top, -top), (-top + 0.24, top)
    sums = []
    for n in (0, 1):
        image = torch.from_numpy(value_BU[n:])[:, None, None, None]
        image = image if kind == "float" else image.float()
        found = clipped_sum(
            cast,
            model,
            Batch(torch.arange(n, 2), torch.ones(2 - n, dtype=torch.bool), image),
            KEY,
            max_grad_norm=1.0,
            rows=8,
        )
        sums.append(found.grads["weight"].double())
    assert 0.5 < (sums[0] - sums[1]).norm() <= 1


def test_blocks_of_other_records_are_cut_the_same_when_one_leaves() -> None:
    """The costs of each later block are at the limit to the last bit, after any others."""
    terms, num = 5, 4
    limit, rng = BUDGET / block_error(num, terms), np.random.default_rng(0)
    bits_B = np.concatenate([[0], np.arange(1, 8), 2**62 + np.arange(num)]).astype(np.int64)
    for _ in range(500):
        cost_B = rng.uniform(0.1, 1.0, len(bits_B)) * limit
        last_B = rng.uniform(0.2, 0.3, num)
        cost_B[-num:] = limit * last_B / last_B.sum()
        cost_B[-1] += rng.integers(-2, 3) * np.spacing(limit)
        whole, less = (
            {(a.start + n, a.stop + n) for a in blocks(bits_B[n:], cost_B[n:], terms, 1.0)}
            for n in (0, 1)
        )
        last = len(bits_B) - num
        assert {cut for cut in whole if cut[0] >= last} == {cut for cut in less if cut[0] >= last}


@pytest.mark.parametrize("exponent", [-13, -80, 25, 140])
def test_loss_scales_that_lose_squares_are_refused(exponent: int) -> None:
    model, batch = GradientIsImage(3, 8, 8), make_batch(2)
    with pytest.raises(ConfigError, match=r"from 2\^-12 to 2\^24"):
        clipped_sum(image_losses, model, batch, KEY, max_grad_norm=1.0, loss_scale=2.0**exponent)


def test_float64_sums_of_a_thousand_records_move_by_less_than_c() -> None:
    rng, num = np.random.default_rng(0), 1024
    model = GradientIsImage(1, 1, 1).double()
    image = torch.from_numpy(abs(rng.normal(size=(num, 1, 1, 1, 1))) + 3)
    ids, valid = torch.arange(num), torch.ones(num, dtype=torch.bool)
    sums = [
        clipped_sum(
            image_losses,
            model,
            Batch(ids[n:], valid[n:], image[n:]),
            KEY,
            max_grad_norm=1.0,
            rows=num,
        ).grads["weight"]
        for n in (0, 1)
    ]
    assert 0.99 < (sums[0] - sums[1]).abs().item() < 1 - 1e-6


@pytest.mark.parametrize("name", ["vip.micro", "dpcap.micro"])
def test_the_weights_whose_rounding_is_stated_as_proven_have_one_use_each(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, seen = RECIPES[name](), []

    def noted(group: list[Slot], params: dict[str, torch.Tensor]) -> bool:
        seen.append(norm_is_own(group, params) and all(slot.uses == 1 for slot in group))
        return norm_is_own(group, params)

    monkeypatch.setattr(one_pass, "norm_is_own", noted)
    make: Callable[..., nn.Module] = make_model
    clipped_sum(
        loss_function(config),
        make(config.model, seed=0),
        example_batch(config, 2),
        KEY,
        max_grad_norm=1.0,
    )
    assert len(seen) > 15 and all(seen)
