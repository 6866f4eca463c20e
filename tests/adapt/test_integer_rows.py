"""Gradient sums on integers: exact products, the record's part known to the last bit, and attacks
on both.
"""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from feature_sets import (
    flat,
    gradient_of,
    integer_rows,
    joined,
    multi_label,
    releases_of,
    stream_of,
)
from torch.nn import functional as F

from dpvision.adapt import integer_rows as module
from dpvision.adapt.feature_stream import FeatureStream
from dpvision.adapt.gradient import probabilities
from dpvision.adapt.heads.many_steps import many_steps
from dpvision.adapt.integer_products import to_digits
from dpvision.adapt.integer_rows import WIDE, IntegerStream
from dpvision.adapt.release import full_batch_plan
from dpvision.dp.rounding import MARGIN_EPS

C = 0.7
PLAN = full_batch_plan(100, 8.0, max_grad_norm=C)
WIDTH, CLASSES = WIDE + 40, 5
"""Wide enough for 8 bits."""


def weight_of(scale: float = 1.0, width: int = WIDTH) -> torch.Tensor:
    return scale * torch.randn(CLASSES, width, generator=torch.Generator().manual_seed(1))


def wide(count: int, *, multi: bool = False, constant: float = 0.1, seed: int = 0) -> FeatureStream:
    rng = np.random.default_rng(seed)
    x_ND = rng.standard_t(3, size=(count, WIDTH)).astype(np.float32)
    label = multi_label(count, CLASSES) if multi else rng.integers(0, CLASSES, count)
    return FeatureStream(x_ND, label, CLASSES, unit=True, constant=constant)


def without(stream: FeatureStream, row: int) -> FeatureStream:
    keep = np.arange(stream.num_records) != row
    return replace(stream, feature_ND=stream.feature_ND[keep], label=stream.label[keep])


@pytest.mark.parametrize(("width", "half"), [(300, 0.5 / 32639), (WIDTH, 0.5 / 127)])
def test_a_row_is_rounded_by_half_a_unit_of_its_largest_entry(width: int, half: float) -> None:
    rng = np.random.default_rng(0)
    x_ND = (rng.standard_t(3, size=(7, width)) * 10.0 ** np.arange(-20, 15, 5)[:, None]).astype(
        np.float32
    )
    stream = FeatureStream(x_ND, np.zeros(7, dtype=int), 2)
    peak_N = np.abs(x_ND).max(axis=1, keepdims=True)
    assert np.abs(integer_rows(stream).numpy() - x_ND).max(axis=1, initial=0) == pytest.approx(
        half * peak_N[:, 0], rel=0.1
    )
    (block,) = IntegerStream(stream).blocks()
    np.testing.assert_allclose(
        block.norm_B.numpy(), integer_rows(stream).norm(dim=1).numpy(), rtol=1e-13
    )


@pytest.mark.parametrize("multi", [False, True])
def test_the_sum_is_the_clipped_one_of_the_rounded_rows(multi: bool) -> None:
    """float64 oracle, record by record."""
    stream, weight, bias = wide(30, multi=multi), weight_of(3.0), torch.linspace(-1, 1, CLASSES)
    x_NE, label = integer_rows(stream), torch.from_numpy(stream.label)
    logit_NK = x_NE @ F.pad(weight, (0, 1), value=0.3).double().T + bias.double()
    if multi:
        residual_NK = logit_NK.sigmoid() - label
    else:
        residual_NK = logit_NK.softmax(1) - F.one_hot(label, CLASSES)
    norm_N = residual_NK.norm(dim=1) * x_NE.norm(dim=1)
    clip_norm = C * (1 - MARGIN_EPS * torch.finfo(torch.float32).eps)
    expected = (residual_NK * (clip_norm / norm_N).clamp(max=1)[:, None]).T @ x_NE
    found = gradient_of(
        stream, F.pad(weight, (0, 1), value=0.3), bias, "sigmoid" if multi else "softmax", PLAN
    )
    assert 0 < int((norm_N > C).sum()) <= 30
    torch.testing.assert_close(
        found.grads["weight"], expected, rtol=1e-6, atol=1e-8
    )  # the factors are float32
    torch.testing.assert_close(found.norms_B, norm_N.float(), rtol=1e-6, atol=0)


ROWS = {
    "flat": np.ones(WIDTH),
    "one entry": np.where(np.arange(WIDTH) == 7, 1.0, 0.0),
    "just above a rounding step": np.where(np.arange(WIDTH) == 0, 1.0, (63.5 + 1e-3) / 127),
    "just below a rounding step": np.where(np.arange(WIDTH) == 0, 1.0, (63.5 - 1e-3) / 127),
    "a huge entry hides the others": np.where(np.arange(WIDTH) == 0, 1e9, 1.0),
    "along the weights": weight_of(1.0)[0].numpy(),
    "against the weights": -1e14 * weight_of(1.0)[0].numpy(),
    "tiny": np.full(WIDTH, 1e-37),
}


@pytest.mark.parametrize("constant", [0.0, 0.1])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e3, 1e30])
@pytest.mark.parametrize("multi", [False, True])
def test_no_constructed_record_moves_the_sum_by_more_than_c(
    multi: bool, scale: float, constant: float
) -> None:
    """Wherever it stands among the others; and by exactly what it adds alone, which float64 totals
    change by 1e-12 at most.
    """
    stream = wide(20, multi=multi, constant=constant)
    weight, bias = weight_of(scale, stream.width), torch.zeros(CLASSES)
    loss, largest_move = "sigmoid" if multi else "softmax", 0.0
    before = flat(gradient_of(stream, weight, bias, loss, PLAN))
    for x in ROWS.values():
        label = np.array([1, 0, 1, 0, 1], dtype=np.uint8) if multi else 3
        alone = flat(gradient_of(joined(without_all(stream), x, label), weight, bias, loss, PLAN))
        more = joined(stream, x, label)
        order = np.random.default_rng(1).permutation(21)
        for other in (
            more,
            replace(more, feature_ND=more.feature_ND[order], label=more.label[order]),
        ):
            moved = flat(gradient_of(other, weight, bias, loss, PLAN)) - before
            assert np.linalg.norm(moved) <= C
            assert np.abs(moved - alone).max() < 1e-12
            largest_move = max(largest_move, float(np.linalg.norm(moved)))
    assert largest_move > 0.99 * C, "no record came near C: the test would not see a missing clip"


def without_all(stream: FeatureStream) -> FeatureStream:
    return replace(stream, feature_ND=stream.feature_ND[:0], label=stream.label[:0])


@pytest.mark.parametrize("width", [60, WIDTH])
def test_removing_a_record_shifts_every_other_and_changes_none(width: int) -> None:
    """In float32 the others' sums round anew when each moves up one place; here what is left over
    is the record's own part.
    """
    rng = np.random.default_rng(3)
    count = 3000 if width == 60 else 120
    x_ND = (
        rng.normal(size=(count, width)) * np.where(np.arange(count) % 2, 1, -1)[:, None]
    ).astype(np.float32)
    stream = FeatureStream(x_ND, rng.integers(0, CLASSES, count), CLASSES, unit=True)
    weight, bias = weight_of(5.0, width), torch.zeros(CLASSES)
    alone = flat(
        gradient_of(
            replace(stream, feature_ND=x_ND[:1], label=stream.label[:1]),
            weight,
            bias,
            "softmax",
            PLAN,
        )
    )
    moved = flat(gradient_of(stream, weight, bias, "softmax", PLAN)) - flat(
        gradient_of(without(stream, 0), weight, bias, "softmax", PLAN)
    )
    assert np.abs(moved - alone).max() < 1e-11 * C
    assert 0 < np.linalg.norm(moved) <= C


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_a_probability_has_the_same_bits_wherever_its_record_stands(loss: str) -> None:
    for classes in (2, 5, 10, 37):
        logit_BK = 4 * torch.randn(
            501, classes, generator=torch.Generator().manual_seed(classes), dtype=torch.float64
        )
        whole_BK = probabilities(logit_BK, loss)  # type: ignore[arg-type]
        torch.testing.assert_close(
            whole_BK,
            logit_BK.sigmoid() if loss == "sigmoid" else logit_BK.softmax(1),
            rtol=1e-14,
            atol=0,
        )
        for start in range(0, 501, 7):
            assert torch.equal(probabilities(logit_BK[start:].clone(), loss), whole_BK[start:])  # type: ignore[arg-type]
    assert torch.equal(
        probabilities(torch.tensor([[-1e4, 1e4]]).double(), loss),
        torch.tensor([[0.0, 1.0]]).double(),
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [60, WIDTH])
def test_rows_that_are_kept_are_those_that_are_made_again(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With broken records among them, for all records and for drawn ones, and whatever the size of
    blocks.
    """
    rng = np.random.default_rng(0)
    x_ND = rng.normal(size=(50, width)).astype(np.float16)
    x_ND[[0, 20]] = np.nan
    label = rng.integers(0, CLASSES, 50)
    label[7] = CLASSES
    stream = FeatureStream(x_ND, label, CLASSES, unit=True, constant=0.1)

    def read(rows: np.ndarray | None) -> list[torch.Tensor]:
        blocks = list(IntegerStream(stream).blocks(rows))
        columns = [[*b.digit_BE, b.scale_B, b.norm_B, b.label_B] for b in blocks]
        return [torch.cat(same) for same in zip(*columns, strict=True)]

    drawn = [None, np.array([0, 3, 7, 21, 49]), np.arange(50)]
    kept = [read(rows) for rows in drawn]
    assert [len(found[-1]) for found in kept] == [47, 3, 47]
    assert not list(IntegerStream(stream).blocks(np.zeros(0, dtype=np.int64)))
    for keep_bytes, block_bytes, read_bytes in (
        (0, 1 << 26, 1 << 22),
        (0, 11 * width, 16 * width),
        (1 << 31, 9 * width, 16 * width),
    ):
        monkeypatch.setattr(module, "_KEEP_BYTES", keep_bytes)
        monkeypatch.setattr(module, "_BLOCK_BYTES", block_bytes)
        monkeypatch.setattr(module, "_READ_BYTES", read_bytes)
        for rows, before in zip(drawn, kept, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(read(rows), before, strict=True))


def test_no_record_is_read_before_the_first_charge(tmp_path: Path) -> None:
    stream = wide(40)
    np.save(tmp_path / "x.npy", stream.feature_ND.astype(np.float16))
    read: list[str] = []

    class Watched(np.ndarray):
        def __getitem__(self, key: object) -> object:
            read.append("read")
            return super().__getitem__(key)

    feature_ND = np.load(tmp_path / "x.npy", mmap_mode="r").view(Watched)
    steps = iter(range(3))

    def charge() -> int:
        read.append("charged")
        return next(steps)

    plan = full_batch_plan(40, 4.0, steps=3)
    trained = many_steps(replace(stream, feature_ND=feature_ND), releases_of(plan, charge=charge))
    # Kept after the first step: two more charges, and no more reading.
    assert read[0] == "charged" and read[-2:] == ["charged", "charged"] and read.count("read") >= 1
    assert torch.isfinite(trained.last.weight_KD).all()


def test_rows_of_zeros_and_records_without_labels_of_their_own_add_what_they_should() -> None:
    stream = joined(stream_of(0, constant=0.5), np.zeros(12), 2)
    total = gradient_of(
        stream, torch.zeros(4, 13), torch.zeros(4), "softmax", full_batch_plan(1, 8.0)
    ).grads["weight"]
    assert not total[:, :12].any()
    torch.testing.assert_close(
        total[:, 12], 0.5 * torch.tensor([0.25, 0.25, -0.75, 0.25]).double(), rtol=1e-12, atol=0
    )
    assert math.isclose(float(to_digits(torch.zeros(1, 5), 1)[2]), 0.0)
