"""Exact products, by int8 kernels and by float64: the same bits, against 64-bit integers."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from feature_sets import flat, gradient_of, multi_label

from dpvision.adapt import integer_products as module
from dpvision.adapt.feature_stream import FeatureStream
from dpvision.adapt.integer_products import (
    DIGITS,
    fast_integer_products,
    largest,
    outer_products,
    products,
    split,
)
from dpvision.adapt.release import full_batch_plan


@pytest.fixture(params=["int8", "float64"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "int8" and not module._exact():
        pytest.skip("torch's int8 products saturate on this processor")
    monkeypatch.setattr(module, "fast_integer_products", lambda: request.param == "int8")
    yield request.param


@pytest.mark.parametrize("digits", [1, 2, 4])
def test_digits_are_the_integer(digits: int) -> None:
    most = largest(digits)
    value = torch.tensor(
        [0, 1, -1, 127, -127, most, -most, most // 2, -(most // 3)], dtype=torch.int32
    ).clamp(-most, most)
    found = split(value, digits)
    assert len(found) == digits and all(digit.dtype == torch.int8 for digit in found)
    assert torch.equal(sum(digit.long() * 256**d for d, digit in enumerate(found)), value.long())


def test_products_are_exact_at_their_extremes(way: str) -> None:
    """Sums up to 2^53, where float32 has lost 29 bits and one product more could lose one of
    float64.
    """
    rng = torch.Generator().manual_seed(2)
    most = largest(DIGITS)
    for rows, width, columns in ((3, 1 << 15, 2), (40, 1001, 33), (301, 5000, 3), (1, 1, 1)):
        digit_BE = torch.randint(-128, 128, (rows, width), generator=rng, dtype=torch.int8)
        whole_EK = torch.randint(
            -most, most + 1, (width, columns), generator=rng, dtype=torch.int64
        ).to(torch.int32)
        digit_BE[0], whole_EK[:, 0] = -128, most
        (found,) = products(digit_BE, whole_EK)
        assert found.dtype == torch.float64
        assert torch.equal(found.long(), digit_BE.long() @ whole_EK.long())
        (outer,) = outer_products(whole_EK, digit_BE.T.contiguous())
        assert torch.equal(outer.long(), whole_EK.T.long() @ digit_BE.T.long())


def test_longer_sums_come_in_exact_parts(way: str) -> None:
    digit_BE, whole_EK = (
        torch.full((1, 100_000), -128, dtype=torch.int8),
        torch.full((100_000, 1), largest(DIGITS), dtype=torch.int32),
    )
    expected = -100_000 * 128 * largest(DIGITS)
    assert sum(int(part) for part in products(digit_BE, whole_EK)) == expected
    assert sum(int(part) for part in outer_products(whole_EK, digit_BE.T)) == expected


@pytest.mark.parametrize("width", [600, 9000])
@pytest.mark.parametrize("multi", [False, True])
def test_a_gradient_has_the_same_bits_either_way(
    width: int, multi: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not module._exact():
        pytest.skip("torch's int8 products saturate on this processor")
    rng = np.random.default_rng(0)
    label = multi_label(150, 5) if multi else rng.integers(0, 5, 150)
    stream = FeatureStream(
        rng.standard_t(3, size=(150, width)).astype(np.float32), label, 5, constant=0.1
    )
    weight = torch.randn(5, stream.width, generator=torch.Generator().manual_seed(1))
    found = []
    for fast in (True, False):
        monkeypatch.setattr(module, "fast_integer_products", lambda fast=fast: fast)
        found.append(
            flat(
                gradient_of(
                    stream,
                    weight,
                    torch.zeros(5),
                    "sigmoid" if multi else "softmax",
                    full_batch_plan(150, 8.0),
                )
            )
        )
    assert np.abs(found[0]).max() > 0
    assert np.array_equal(*found)


def test_a_machine_whose_products_saturate_takes_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """As kernels that multiply two pairs into 16 bits do."""

    def saturating(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        even, odd = (left[:, i::2].double() @ right[i::2].double() for i in range(2))
        return (even.clamp(-(2**15), 2**15 - 1) + odd.clamp(-(2**15), 2**15 - 1)).int()

    monkeypatch.setattr(torch, "_int_mm", saturating)
    monkeypatch.setattr(module, "_faster", lambda: True)
    fast_integer_products.cache_clear()
    try:
        assert not fast_integer_products()
    finally:
        fast_integer_products.cache_clear()
