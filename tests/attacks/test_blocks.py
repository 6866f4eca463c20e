"""Attacks on heads by the size of a block: float32 products that give a record other last bits
beside other records.
"""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from dpvision.adapt.feature_stream import FeatureStream, Head
from dpvision.adapt.gradient import gradient_sum
from dpvision.adapt.integer_rows import IntegerStream
from dpvision.adapt.release import full_batch_plan
from dpvision.adapt.select import hits

PLAN = full_batch_plan(100, 1.0)


@pytest.mark.parametrize("width", [64, 512])
def test_one_record_moves_the_count_of_tied_records_by_at_most_one(width: int) -> None:
    """Rows that two classes score alike: in float32 the count moved by 2 to 16, since a block of
    one row less predicts them otherwise.
    """
    rng = np.random.default_rng(0)
    weight_KD = torch.tensor(rng.normal(size=(2, width))).float()
    head, apart = Head(weight_KD, torch.zeros(2)), (weight_KD[0] - weight_KD[1]).double().numpy()
    x = rng.normal(size=(4000, width))
    tied = torch.tensor(x - np.outer(x @ apart / (apart @ apart), apart)).float()

    def count(x: Tensor, label: Tensor) -> float:
        return float(
            hits(
                IntegerStream(FeatureStream(x.numpy(), label.numpy(), 2)).blocks(), head, PLAN
            ).grads["hits"]
        )

    for size in (1, 2, 3, 7, 8, 15, 16):
        by_size = [
            torch.cat([head.predict(part.clone()) for part in tied.split(n)])
            for n in (size + 1, size)
        ]
        chosen = (by_size[0] != by_size[1]).nonzero()[
            :size, 0
        ]  # whose predictions follow the size of the block
        rows = tied[chosen] if len(chosen) else tied[:size]
        whole = torch.cat([rows, rows[:1]])
        label = head.predict(whole)
        assert abs(count(whole, label) - count(rows, label[: len(rows)])) <= 1


@pytest.mark.parametrize("width", [32, 512])
def test_one_record_moves_the_sum_of_mapped_rows_by_at_most_c(width: int) -> None:
    """Rows that lie between two integers after the map of ``feature_covariance``: 1.000007 C."""
    rng = np.random.default_rng(1)
    map_EE = (
        torch.eye(width) + 0.3 / width**0.5 * torch.tensor(rng.normal(size=(width, width))).float()
    )

    def total(x: Tensor) -> Tensor:
        stream = FeatureStream(x.numpy(), np.zeros(len(x), dtype=np.int64), 2).mapped(map_EE)
        return gradient_sum(
            IntegerStream(stream).blocks(), torch.zeros(2, width), torch.zeros(2), "softmax", PLAN
        ).grads["weight"]

    for size in (1, 3, 15):
        y = 4 * torch.tensor((rng.integers(0, 300, size=(size + 1, width)) + 0.5) / 32639)
        y[:, 0] = 4.0
        x = torch.linalg.solve(map_EE.double(), y.T).T.float()
        alone = sum(total(x[i : i + 1]) for i in range(size))
        assert float((total(x) - total(x[:-1])).norm()) <= 1
        assert (
            float((total(x[:-1]) - alone).norm()) <= 1e-12
        )  # every record adds the same beside any others


@pytest.mark.parametrize("width", [8, 65, 512])
def test_the_bits_of_a_mapped_row_do_not_depend_on_its_block(width: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, width)).astype(np.float32)
    x[7], x[11, 3], x[13] = 0, np.nan, 1e-30 * x[13]
    map_EE = torch.tensor(rng.normal(size=(width, width))).float() / width**0.5
    stream = FeatureStream(
        x,
        np.zeros(300, dtype=np.int64),
        2,
        centre_D=torch.full((width,), 0.1),
        unit=True,
        constant=0.0,
    ).mapped(map_EE)

    def rows(chosen: np.ndarray) -> dict[int, tuple[bytes, float]]:
        (block,) = stream.blocks(chosen)
        return {
            int(i): (row.numpy().tobytes(), float(norm))
            for i, row, norm in zip(block.row_B, block.x_BE, block.norm_B, strict=True)
        }

    whole = rows(np.arange(300))
    assert len(whole) == 299
    for size, first in itertools.product((1, 2, 3, 8, 15, 16, 190), (0, 5, 101)):
        part = rows(np.arange(first, first + size))
        assert all(whole[i] == found for i, found in part.items())
    (block,) = stream.blocks()
    kept = np.setdiff1d(np.arange(300), [11])
    moved = x[kept].astype(np.float64) - 0.1
    expected = moved / np.linalg.norm(moved, axis=1, keepdims=True) @ map_EE.double().numpy().T
    assert np.abs(block.x_BE.numpy() - expected).max() < 1e-6
