"""Exact matrix products of feature digits (int8) with weights or residuals (31 bits and a sign).

    |digit| <= 128 = 2^7, |whole| < 2^31, at most 2^15 products in a sum: every sum is below 2^53

so that float64 holds each of them exactly, in whatever order it is summed. Two ways give the same
bits, and ``fast_integer_products`` takes the quicker: int8 kernels on the four digits of ``whole``,
or float64 kernels on tiles that stay in the processor's cache. On processors with instructions for
int8 the first is several times faster, on others up to ten times slower.
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
    """Split int32 integers of at most ``largest(digits)`` into signed int8 digits in base 256, the
    least significant first.
    """
    found = []
    for _ in range(digits):
        digit = ((value + 128) & 255) - 128
        found.append(digit.to(torch.int8))
        value = (value - digit) >> 8
    return tuple(found)


def to_digits(x_BE: Tensor, digits: int) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Round finite rows to integers, each scaled by its largest entry.

    Returns:
        Digits int8 (B, E), the least significant first; the scale of each row, float64, such that
        scale x q is the row; ||q||^2, float64, exact below 2^53. A row of zeros has zeros, and the
        scale 0.
    """
    most = largest(digits)
    peak_B = (
        x_BE.abs().amax(dim=1).double()
        if x_BE.shape[1]
        else x_BE.new_zeros(len(x_BE), dtype=torch.float64)
    )
    # In float32 the quotient is rounded before it becomes an integer: still a function of the
    # record, and at most 1 off.
    inverse_B = torch.where(peak_B > 0, most / peak_B, 0.0)
    q_BE = (x_BE * inverse_B.clamp(max=1e38).float()[:, None]).round_().clamp_(-most, most)
    if digits == 1:
        square_B = (q_BE * q_BE).sum(dim=1, dtype=torch.float64)
        return (q_BE.to(torch.int8),), peak_B / most, square_B
    square_B = torch.linalg.vector_norm(q_BE, dim=1, dtype=torch.float64).square()
    return split(q_BE.to(torch.int32), digits), peak_B / most, square_B


class WholeWeight:
    """A weight (K, E) as integers of 31 bits and a sign, each row scaled by its largest entry:
    products with digits are exact.

    With x_b = scale_b sum over e of 256^e digit_eb and w_k = scale_k whole_k, the score w_k x_b is
    scale_b scale_k sum over e of 256^e (digit_eb whole_k): exact integer products, one for each
    digit of the row, then three roundings that no other row takes part in.
    """

    def __init__(self, weight_KE: Tensor) -> None:
        self.value_KE = weight_KE.double()
        self._whole: tuple[Tensor, Tensor] | None = None

    def times(self, digit_BE: tuple[Tensor, ...], scale_B: Tensor) -> Tensor:
        """Return the products of all rows with the weight's first columns, float64 (B, K). A row's
        bits depend on no other row.
        """
        whole_EK, scale_K = self._integers(digit_BE[0].shape[1])
        total_BK = self.value_KE.new_zeros(len(scale_B), len(self.value_KE))
        for e, digit in enumerate(digit_BE):
            for part_BK in products(digit, whole_EK):
                total_BK.add_(part_BK, alpha=256.0**e)
        return total_BK.mul_(scale_K).mul_(scale_B[:, None])

    def _integers(self, width: int) -> tuple[Tensor, Tensor]:
        if self._whole is None:
            weight_KE = self.value_KE[:, :width]
            peak_K = weight_KE.abs().amax(dim=1)
            scale_K = torch.where(peak_K > 0, peak_K, 1.0) / largest(DIGITS)
            whole_KE = (
                torch.nan_to_num(weight_KE / scale_K[:, None], 0.0, 0.0, 0.0)
                .round()
                .to(torch.int32)
            )
            self._whole = whole_KE.T, scale_K
        return self._whole


def products(digit_BE: Tensor, whole_EK: Tensor) -> Iterator[Tensor]:
    """Yield exact float64 parts (B, K) of a product, one for every 32,768 columns of ``digit_BE``;
    they sum to it.

    Args:
        digit_BE: int8.
        whole_EK: int32, at most ``largest(DIGITS)``.
    """
    product = _by_digits if fast_integer_products() else _by_tiles
    for start in range(0, digit_BE.shape[1], _MOST_SUMMED):
        yield product(
            digit_BE[:, start : start + _MOST_SUMMED], whole_EK[start : start + _MOST_SUMMED]
        )


def outer_products(whole_BK: Tensor, digit_BE: Tensor) -> Iterator[Tensor]:
    """Yield exact float64 parts (K, E) of ``whole_BK.T @ digit_BE``, one for every 32,768 records;
    they sum to it.
    """
    product = _outer_by_digits if fast_integer_products() else _outer_by_tiles
    for start in range(0, len(digit_BE), _MOST_SUMMED):
        yield product(
            whole_BK[start : start + _MOST_SUMMED], digit_BE[start : start + _MOST_SUMMED]
        )


@functools.cache
def fast_integer_products() -> bool:
    """Return whether torch's int8 products are exact here, and faster than float64: some processors
    saturate them at 16 bits.
    """
    return _exact() and _faster()


def _exact() -> bool:
    """Compare the int8 kernel with float64 where sums are largest and where sizes are odd."""
    rng = torch.Generator().manual_seed(0)
    extreme = torch.tensor([-128, -127, 127], dtype=torch.int8)
    for rows, width, columns in ((33, 1031, 29), (8, 4096, 3), (1, 64, 1)):
        for left_BE, right_EM in (
            (
                extreme[torch.randint(3, (rows, width), generator=rng)],
                extreme[torch.randint(3, (width, columns), generator=rng)],
            ),
            (
                torch.full((rows, width), 127, dtype=torch.int8),
                torch.full((width, columns), 127, dtype=torch.int8),
            ),
            (
                torch.full((rows, width), -128, dtype=torch.int8),
                torch.full((width, columns), 127, dtype=torch.int8),
            ),
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
    digit_BE, whole_EK = (
        torch.ones(256, 8192, dtype=torch.int8),
        torch.ones(8192, 10, dtype=torch.int32),
    )

    def seconds(product: object) -> float:
        assert callable(product)
        taken = []
        for _ in range(4):
            start = time.perf_counter()
            product(digit_BE, whole_EK)
            taken.append(time.perf_counter() - start)
        return min(taken)

    return seconds(_by_digits) < seconds(_by_tiles)


# By digits: whole = sum over d of 256^d w_d with int8 digits w_d, so that
#
#     digit @ whole = sum over d of 256^d (digit @ w_d)
#
# The digits w_d stand side by side as the columns of one int8 matrix. One kernel call gives all
# four products, as exact int32 (|sum| <= 2^15 x 2^14), and ``_weighed`` adds them up in float64.


def _by_digits(digit_BE: Tensor, whole_EK: Tensor) -> Tensor:
    return _weighed(torch._int_mm(digit_BE, torch.cat(split(whole_EK.T, DIGITS)).T), dim=1)


def _outer_by_digits(whole_BK: Tensor, digit_BE: Tensor) -> Tensor:
    return _weighed(torch._int_mm(torch.cat(split(whole_BK, DIGITS), dim=1).T, digit_BE), dim=0)


def _weighed(part: Tensor, dim: int) -> Tensor:
    """Sum the products of the digits, the least significant first: every partial sum is a product
    too, and exact.
    """
    total, *others = part.chunk(DIGITS, dim=dim)
    total = total.double()
    for d, other in enumerate(others, 1):
        total.add_(other, alpha=256.0**d)
    return total


# By tiles: both factors become float64, in which every product and sum is exact. As float64 the
# int8 factor takes eight times its memory, so only one tile of it is converted at a time, small
# enough to stay in the processor's cache, multiplied, and added to its rows or columns.


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
    """Return float64 with rows of zeros up to a multiple of 4: 12 classes take less than half the
    time of 10.
    """
    return F.pad(whole_KX.double(), (0, 0, 0, -len(whole_KX) % 4))


def _tiles(digit_BE: Tensor) -> Iterator[tuple[slice, slice]]:
    num_rows, width = digit_BE.shape
    for row in range(0, num_rows, _TILE[0]):
        for column in range(0, width, _TILE[1]):
            yield slice(row, row + _TILE[0]), slice(column, column + _TILE[1])
