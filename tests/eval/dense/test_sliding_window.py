"""Windows cover the image, and averaging them is what a slow loop over pixels gives."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from dpvision.eval.dense.segmentation import (
    likeliest,
    window_probabilities,
    window_starts,
)

torch.manual_seed(0)
WEIGHT = torch.randn(5, 3, 3, 3)


def pointwise(x_BCHW: Tensor) -> Tensor:
    """Logits of a network that sees one pixel at a time."""
    return torch.einsum("kc,bchw->bkhw", 3 * WEIGHT[:, :, 0, 0], x_BCHW)


def neighbours(x_BCHW: Tensor) -> Tensor:
    """Logits of a network that sees pixels around, and where in its window a pixel lies."""
    return F.conv2d(x_BCHW, WEIGHT, padding=1) + torch.linspace(0, 1, x_BCHW.shape[-1])


@given(length=st.integers(1, 300), window=st.integers(1, 100), part=st.floats(0.01, 1))
def test_windows_cover_every_place_and_none_lies_outside(
    length: int, window: int, part: float
) -> None:
    stride = max(1, int(window * part))
    starts = window_starts(length, window, stride)
    covered = {place for start in starts for place in range(start, start + window)}
    assert set(range(length)) <= covered and len(set(starts)) == len(starts)
    assert all(start >= 0 and start + window <= max(length, window) for start in starts)
    assert all(b - a <= stride for a, b in itertools.pairwise(starts))


def test_one_window_is_the_whole_image() -> None:
    x = torch.randn(3, 16, 16)
    torch.testing.assert_close(
        window_probabilities(neighbours, x, 16, 10), neighbours(x[None])[0].softmax(0)
    )


@pytest.mark.parametrize("size", [(16, 40), (33, 16), (21, 27), (9, 30), (5, 7)])
@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_the_average_is_that_of_a_loop_over_windows_and_pixels(
    size: tuple[int, int], batch_size: int
) -> None:
    x, window, stride = torch.randn(3, *size), 16, 10
    found = window_probabilities(neighbours, x, window, stride, batch_size=batch_size)
    padded = torch.zeros(3, max(size[0], window), max(size[1], window))
    padded[:, : size[0], : size[1]] = x
    total: dict[tuple[int, int], list[Tensor]] = {}
    for top in window_starts(padded.shape[1], window, stride):
        for left in window_starts(padded.shape[2], window, stride):
            answer = neighbours(padded[None, :, top : top + window, left : left + window])[
                0
            ].softmax(0)
            for i in range(window):
                for j in range(window):
                    total.setdefault((top + i, left + j), []).append(answer[:, i, j])
    assert found.shape == (5, *size)
    for i in range(size[0]):
        for j in range(size[1]):
            torch.testing.assert_close(found[:, i, j], torch.stack(total[i, j]).mean(0))


def test_a_pointwise_network_sees_no_windows_and_mirrors_with_the_image() -> None:
    x = torch.randn(3, 29, 37)
    found = window_probabilities(pointwise, x, 16, 11)
    torch.testing.assert_close(found, pointwise(x[None])[0].softmax(0))
    torch.testing.assert_close(window_probabilities(pointwise, x.flip(-1), 16, 11), found.flip(-1))


@pytest.mark.parametrize("num_classes", [2, 16, 17, 50])
@pytest.mark.parametrize("size", [(10, 12), (23, 31), (5, 6)])
def test_the_likeliest_class_is_that_of_all_classes_enlarged_together(
    num_classes: int, size: tuple[int, int]
) -> None:
    probability = torch.randn(num_classes, 10, 12).softmax(0)
    whole = F.interpolate(probability[None], size=size, mode="bilinear", align_corners=False)[0]
    assert torch.equal(likeliest(probability, size), whole.argmax(0))
