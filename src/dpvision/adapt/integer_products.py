"""Exact matrix products of feature digits (int8) with weights or residuals (31 bits and a sign).

    |digit| <= 128 = 2^7, |whole| < 2^31, at most 2^15 products in a sum: every sum is below 2^53

so that float64 holds each of them exactly, in whatever order it is summed. Two ways give the same bits, and ``fast_integer_products``
takes the quicker: int8 kernels on the four digits of ``whole``, or float64 kernels on tiles that stay in the processor's cache. On
processors with instructions for int8 the first is several times faster, on others up to ten times slower.
"""

import functools
import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

DIGITS = 4
"""Digits of weights and residuals."""
_LARGEST = 127
_MOST_SUMMED = 1 << 15
_TILE = (256, 1024)
"""Rows and columns of int8 that become float64 at a time: 2 MiB."""


def largest(digits: int) -> int:
    """Return the largest integer of 1 to 4 int8 digits: 127, 32,639, 8,355,711, 2,139,062,143."""
    return _LARGEST * (256**digits - 1) // 255


def split(value: Tensor, digits: int) -> tuple[Tensor, ...]:
    """Split int32 integers of at most ``largest(digits)`` into signed int8 digits in base 256, the least significant first."""
    found = []
    for _ in range(digits):
        digit = ((value + 128) & 255) - 128
        found.append(digit.to(torch.int8))
        value = (value - digit) >> 8
    return tuple(found)


def products(digit_BE: Tensor, whole_EK: Tensor) -> Iterator[Tensor]:
    """Yield exact float64 parts (B, K) of a product, one for every 32,768 columns of ``digit_BE``; they sum to it.

    Args:
        digit_BE: int8.
        whole_EK: int32, at most ``largest(DIGITS)``.
    """
    product = _by_digits if fast_integer_products() else _by_tiles
    for start in range(0, digit_BE.shape[1], _MOST_SUMMED):
        yield product(digit_BE[:, start : start + _MOST_SUMMED], whole_EK[start : start + _MOST_SUMMED])


def outer_products(whole_BK: Tensor, digit_BE: Tensor) -> Iterator[Tensor]:
    """Yield exact float64 parts (K, E) of ``whole_BK.T @ digit_BE``, one for every 32,768 records; they sum to it."""
    product = _outer_by_digits if fast_integer_products() else _outer_by_tiles
    for start in range(0, len(digit_BE), _MOST_SUMMED):
        yield product(whole_BK[start : start + _MOST_SUMMED], digit_BE[start : start + _MOST_SUMMED])


@functools.cache
def fast_integer_products() -> bool:
    """Return whether torch's int8 products are exact here, and faster than float64: some processors saturate them at 16 bits."""
    return _exact() and _faster()


def _exact() -> bool:
    rng = torch.Generator().manual_seed(0)
    extreme = torch.tensor([-128, -127, 127], dtype=torch.int8)
    for rows, width, columns in ((33, 1031, 29), (8, 4096, 3), (1, 64, 1)):
        for left_BE, right_EM in (
            (extreme[torch.randint(3, (rows, width), generator=rng)], extreme[torch.randint(3, (width, columns), generator=rng)]),
            (torch.full((rows, width), 127, dtype=torch.int8), torch.full((width, columns), 127, dtype=torch.int8)),
            (torch.full((rows, width), -128, dtype=torch.int8), torch.full((width, columns), 127, dtype=torch.int8)),
        ):
            try:
                found = torch._int_mm(left_BE, right_EM)
            except RuntimeError:  # this build of torch has no such kernel
                return False
            if not torch.equal(found.double(), left_BE.double() @ right_EM.double()):
                return False
    return True


def _faster() -> bool:
    """Time both ways on a few megabytes. The result is the same whichever wins."""
    digit_BE, whole_EK = torch.ones(256, 8192, dtype=torch.int8), torch.ones(8192, 10, dtype=torch.int32)

    def seconds(product: object) -> float:
        assert callable(product)
        taken = []
        for _ in range(4):
            start = time.perf_counter()
            product(digit_BE, whole_EK)
            taken.append(time.perf_counter() - start)
        return min(taken)

    return seconds(_by_digits) < seconds(_by_tiles)


def _by_digits(digit_BE: Tensor, whole_EK: Tensor) -> Tensor:
    return _weighed(torch._int_mm(digit_BE, torch.cat(split(whole_EK.T, DIGITS)).T), dim=1)


def _outer_by_digits(whole_BK: Tensor, digit_BE: Tensor) -> Tensor:
    return _weighed(torch._int_mm(torch.cat(split(whole_BK, DIGITS), dim=1).T, digit_BE), dim=0)


def _weighed(part: Tensor, dim: int) -> Tensor:
    """Sum the products of the digits, the least significant first: every partial sum is a product too, and exact."""
    total, *others = part.chunk(DIGITS, dim=dim)
    total = total.double()
    for d, other in enumerate(others, 1):
        total.add_(other, alpha=256.0**d)
    return total


def _by_tiles(digit_BE: Tensor, whole_EK: Tensor) -> Tensor:
    whole_KE = _padded(whole_EK.T)
    total_KB = whole_KE.new_zeros(len(whole_KE), len(digit_BE))
    for rows, columns in _tiles(digit_BE):
        total_KB[:, rows].addmm_(whole_KE[:, columns], digit_BE[rows, columns].double().T)
    return total_KB[: whole_EK.shape[1]].T


def _outer_by_tiles(whole_BK: Tensor, digit_BE: Tensor) -> Tensor:
    whole_KB = _padded(whole_BK.T)
    total_KE = whole_KB.new_zeros(len(whole_KB), digit_BE.shape[1])
    for rows, columns in _tiles(digit_BE):
        total_KE[:, columns].addmm_(whole_KB[:, rows], digit_BE[rows, columns].double())
    return total_KE[: whole_BK.shape[1]]


def _padded(whole_KX: Tensor) -> Tensor:
    """Return float64 with rows of zeros up to a multiple of 4: 12 classes take less than half the time of 10."""
    return F.pad(whole_KX.double(), (0, 0, 0, -len(whole_KX) % 4))


def _tiles(digit_BE: Tensor) -> Iterator[tuple[slice, slice]]:
    num_rows, width = digit_BE.shape
    for row in range(0, num_rows, _TILE[0]):
        for column in range(0, width, _TILE[1]):
            yield slice(row, row + _TILE[0]), slice(column, column + _TILE[1])
