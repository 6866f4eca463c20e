"""Per-record gradients of a weight as sums of outer products, never written out: their norms, and their weighted sum.

A matrix weight (P x Q) used at T places of record i has the gradient

    G_i = sum over t of  l_it r_it^T,     ||G_i||^2 = sum over t, t' of <l_it, l_it'> <r_it, r_it'>     (Goodfellow 2015; Li et al. 2022)

with l the gradients of the outputs and r the inputs of a linear layer (or the reverse). The Gram matrices are T x T; G_i would
be P x Q. Everything here is accumulated in float32 or wider, also for operands in half precision.

Legend: B records, N records of a chunk, T places, P rows of the weight, Q columns.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

_GRAM_NUMBERS = {"cpu": 2**20, "cuda": 2**27}
"""Numbers in one chunk of Gram matrices: on a CPU, what stays in a core's cache; on a GPU, half a gigabyte."""
_OUTER_NUMBERS = {"cpu": 2**22, "cuda": 2**28}
"""Numbers in one chunk of scaled operands, or of written-out gradients."""
_PANEL = 48
"""Rows of a symmetric Gram matrix computed at a time: with 197 places, 0.63 of the arithmetic of the whole matrix."""


class Side(Protocol):
    """One of the two factors of all records' outer products."""

    @property
    def num_records(self) -> int: ...
    @property
    def places(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def stored_numbers(self) -> int:
        """Numbers kept for one record."""
        ...

    @property
    def device(self) -> torch.device: ...
    def rows(self, rows: slice) -> Tensor:
        """(N, T, width) of some records."""
        ...


@dataclass(frozen=True, eq=False)
class Dense:
    """A tensor (B, T, width)."""

    value: Tensor

    @property
    def num_records(self) -> int:
        return self.value.shape[0]

    @property
    def places(self) -> int:
        return self.value.shape[1]

    @property
    def width(self) -> int:
        return self.value.shape[2]

    @property
    def stored_numbers(self) -> int:
        return self.places * self.width

    @property
    def device(self) -> torch.device:
        return self.value.device

    def rows(self, rows: slice) -> Tensor:
        return self.value[rows]


@dataclass(frozen=True, eq=False)
class OneHot:
    """Rows of the identity: the input of an embedding, int64 (B, T)."""

    index_BT: Tensor
    width: int
    dtype: torch.dtype

    @property
    def num_records(self) -> int:
        return self.index_BT.shape[0]

    @property
    def places(self) -> int:
        return self.index_BT.shape[1]

    @property
    def stored_numbers(self) -> int:
        return self.places

    @property
    def device(self) -> torch.device:
        return self.index_BT.device

    def rows(self, rows: slice) -> Tensor:
        return F.one_hot(self.index_BT[rows], self.width).to(self.dtype)


@dataclass(frozen=True, eq=False)
class Patches:
    """The input of a convolution (groups = 1), unfolded when needed: (B * per_record, C, H, W) -> (B, T, C * kh * kw)."""

    value: Tensor
    per_record: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def num_records(self) -> int:
        return self.value.shape[0] // self.per_record

    @property
    def places(self) -> int:
        sizes = zip(self.value.shape[2:], self.kernel, self.stride, self.padding, self.dilation, strict=True)
        height, width = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)
        return self.per_record * height * width

    @property
    def width(self) -> int:
        return self.value.shape[1] * self.kernel[0] * self.kernel[1]

    @property
    def stored_numbers(self) -> int:
        return self.value[0].numel() * self.per_record

    @property
    def device(self) -> torch.device:
        return self.value.device

    def rows(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self.num_records)
        part = self.value[start * self.per_record : stop * self.per_record]
        if self.kernel == (1, 1) and self.stride == (1, 1) and self.padding == (0, 0):
            columns = part.flatten(2)
        else:
            columns = F.unfold(part, self.kernel, self.dilation, self.padding, self.stride)  # (N * per_record, C kh kw, places)
        return columns.mT.reshape(stop - start, -1, self.width)


@dataclass(frozen=True, eq=False)
class Remade:
    """Rows too large to keep, computed anew when needed, with their Gram matrix, which is small."""

    make: Callable[[slice], Tensor]
    gram_BTT: Tensor
    width: int
    working_width: int
    """Numbers kept per place from which the rows are made."""

    @property
    def num_records(self) -> int:
        return self.gram_BTT.shape[0]

    @property
    def places(self) -> int:
        return self.gram_BTT.shape[1]

    @property
    def stored_numbers(self) -> int:
        return self.places * self.working_width

    @property
    def device(self) -> torch.device:
        return self.gram_BTT.device

    def rows(self, rows: slice) -> Tensor:
        return self.make(rows)


@dataclass(frozen=True, eq=False)
class Outer:
    """G_i = sum_t l_it r_it^T for all records."""

    left: Side
    right: Side
    shape: torch.Size
    """Shape of the weight: rows and columns, unfolded (a convolution's kernel)."""

    @property
    def num_records(self) -> int:
        return self.left.num_records

    @property
    def device(self) -> torch.device:
        return self.left.device

    @property
    def written_numbers(self) -> int:
        """Numbers of one record's gradient, written out."""
        return self.left.width * self.right.width

    @property
    def stored_numbers(self) -> int:
        """Numbers of one record's two factors."""
        return self.left.stored_numbers + self.right.stored_numbers

    @property
    def working_numbers(self) -> int:
        """Numbers in hand while one record's gradient is written out."""
        return max(self.written_numbers, self.left.places * max(self.left.width, self.right.width))

    def write_out(self, rows: slice) -> Tensor:
        """The gradients of some records, (N, *shape), float32 or wider."""
        return product(self.left.rows(rows).mT, self.right.rows(rows)).view(-1, *self.shape)

    def weighted_sum(self, factor_B: Tensor, keep_B: Tensor | None) -> Tensor:
        """sum over i of factor_i G_i, of the weight's shape; records with ``keep_B`` False are left out whatever they hold."""
        if isinstance(self.left, OneHot):
            return self._scattered(self.left, factor_B, keep_B)
        total: Tensor | None = None  # no zeros to begin with: filling a model's size with them costs a tenth of a step
        scale_left = self.left.width <= self.right.width
        numbers = max(self.left.width, self.right.width) * self.left.places
        for rows in chunks(self.left.num_records, numbers, _OUTER_NUMBERS, self.device):
            left, right = self.left.rows(rows), self.right.rows(rows)
            if scale_left:
                left = scaled(left, factor_B[rows])
            else:
                right = scaled(right, factor_B[rows])
            if keep_B is not None:  # 0 x NaN is NaN: a factor of zero would not do
                dropped_B11 = ~keep_B[rows, None, None]
                left, right = left.masked_fill(dropped_B11, 0.0), right.masked_fill(dropped_B11, 0.0)
            total = accumulated(total, left.flatten(0, 1).mT, right.flatten(0, 1))
        assert total is not None
        return total.view(self.shape)

    def _scattered(self, left: OneHot, factor_B: Tensor, keep_B: Tensor | None) -> Tensor:
        """The weighted sum where the left side only says which row."""
        value = self.right.rows(slice(None)) * factor_B[:, None, None]
        if keep_B is not None:
            value = value.masked_fill(~keep_B[:, None, None], 0.0)
        total = value.new_zeros(left.width, self.right.width)
        return total.index_add_(0, left.index_BT.flatten(), value.flatten(0, 1)).view(self.shape)


@dataclass(frozen=True, eq=False)
class SquareNorms:
    """Squared norms from Gram matrices, and how far to trust them."""

    value_B: Tensor
    """float64, possibly below zero by rounding."""
    doubt_B: Tensor
    """(sum over t of |l_t| |r_t|)^2 / T, float64: the squared norm that T incoherent outer products of these lengths would have. Where
    the value is much smaller, the outer products cancel, and the value's error, about eps x doubt, is no longer small beside it."""
    length_B: Tensor
    """(sum over t of |l_t| |r_t|)^2, float64: bounds what rounding the factors of the outer products can do to their sum."""

    def __add__(self, other: "SquareNorms") -> "SquareNorms":
        return SquareNorms(self.value_B + other.value_B, self.doubt_B + other.doubt_B, self.length_B + other.length_B)

    @staticmethod
    def certain(value_B: Tensor) -> "SquareNorms":
        """Of gradients written out: what is normed is what is added."""
        return SquareNorms(value_B, torch.zeros_like(value_B), torch.zeros_like(value_B))


def square_norms(outers: list[Outer]) -> SquareNorms:
    """||sum over uses u of G_ui||^2 for every record: the squared norm of one weight's gradient.

    Args:
        outers: all uses of the weight by the same records.
    """
    first = outers[0]
    total_B = torch.zeros(first.num_records, dtype=torch.float64, device=first.device)
    length_B = torch.zeros_like(total_B)
    for i, a in enumerate(outers):
        for b in outers[i:]:
            for rows in chunks(len(total_B), 2 * a.left.places * b.left.places, _GRAM_NUMBERS, total_B.device):
                if a is b:
                    value_N, length_N = _own_dot(a, rows)
                    total_B[rows] += value_N
                    length_B[rows] += length_N
                else:
                    product_NTS = _cross_gram(a.left, b.left, rows) * _cross_gram(a.right, b.right, rows)
                    total_B[rows] += 2 * product_NTS.sum((1, 2)).double()
    length_B = length_B.square()
    return SquareNorms(total_B, length_B / sum(outer.left.places for outer in outers), length_B)


def square_norms_of_shared(lefts: list[Side], right: Side) -> SquareNorms:
    """sum over u of ||G_ui||^2 of different weights that share their input: one Gram matrix of it for all."""
    total_B = torch.zeros(right.num_records, dtype=torch.float64, device=right.device)
    length_B = torch.zeros_like(total_B)
    for rows in chunks(len(total_B), 2 * right.places**2, _GRAM_NUMBERS, total_B.device):
        total_B[rows], length_B[rows] = _symmetric_dot([left.rows(rows) for left in lefts], right.rows(rows))
    length_B = length_B.square()
    return SquareNorms(total_B, length_B / right.places, length_B)


def square_length(outer: Outer, rows: slice) -> Tensor:
    """(sum over t of |l_t| |r_t|)^2 of some records of one use, float64, from the lengths of its factors."""
    lengths_NT = [torch.linalg.vector_norm(side.rows(rows), dim=2, dtype=torch.float64) for side in (outer.left, outer.right)]
    return (lengths_NT[0] * lengths_NT[1]).sum(1).square()


def _own_dot(outer: Outer, rows: slice) -> tuple[Tensor, Tensor]:
    if not any(isinstance(side, OneHot | Remade) for side in (outer.left, outer.right)):
        return _symmetric_dot([outer.left.rows(rows)], outer.right.rows(rows))
    product_NTT = _cross_gram(outer.left, outer.left, rows) * _cross_gram(outer.right, outer.right, rows)
    return product_NTT.sum((1, 2)).double(), _lengths(product_NTT)


def _symmetric_dot(lefts_NTP: list[Tensor], right_NTQ: Tensor) -> tuple[Tensor, Tensor]:
    """sum over t, t' of (sum over lefts of l l^T) o (r r^T), by panels of rows, each from its diagonal block on; and sum of |l_t| |r_t|."""
    places = right_NTQ.shape[1]
    panel = _PANEL if places >= 2 * _PANEL else places
    total_N = torch.zeros(len(right_NTQ), dtype=torch.float64, device=right_NTQ.device)
    length_N = torch.zeros_like(total_N)
    start = 0
    while start < places:
        stop = start + panel if places - start >= panel + panel // 2 else places  # no sliver at the end
        gram = product(lefts_NTP[0][:, start:stop], lefts_NTP[0][:, start:].mT)
        for left in lefts_NTP[1:]:
            gram += product(left[:, start:stop], left[:, start:].mT)
        gram *= product(right_NTQ[:, start:stop], right_NTQ[:, start:].mT)
        square, beyond = gram[:, :, : stop - start], gram[:, :, stop - start :]
        total_N += square.sum((1, 2)).double() + 2 * beyond.sum((1, 2)).double()
        length_N += _lengths(square)
        start = stop
    return total_N, length_N


def _lengths(square_NTT: Tensor) -> Tensor:
    """sum over t of |l_t| |r_t|, from the diagonal of the product of two Gram matrices."""
    return square_NTT.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt().sum(1).double()


def _cross_gram(a: Side, b: Side, rows: slice) -> Tensor:
    """<a_t, b_t'>, (N, Ta, Tb)."""
    if a is b and isinstance(a, Remade):
        return a.gram_BTT[rows]
    if isinstance(a, OneHot) and isinstance(b, OneHot):
        return (a.index_BT[rows, :, None] == b.index_BT[rows, None, :]).to(wide(a.dtype))
    if isinstance(a, OneHot):
        return _cross_gram(b, a, rows).mT
    if isinstance(b, OneHot):
        value_NTP = a.rows(rows)
        index_NTS = b.index_BT[rows, None, :].expand(-1, value_NTP.shape[1], -1)
        return value_NTP.gather(2, index_NTS).to(wide(value_NTP.dtype))
    return product(a.rows(rows), b.rows(rows).mT)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision in which operands of ``dtype`` are accumulated: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Batched matrix product, (N, I, K) x (N, K, J) -> (N, I, J), accumulated and stored in float32 or wider."""
    if a.dtype == b.dtype and a.dtype in (torch.float16, torch.bfloat16) and a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    dtype = wide(torch.promote_types(a.dtype, b.dtype))
    return torch.bmm(a.to(dtype), b.to(dtype))


def accumulated(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a b, two-dimensional, in place where there is a total; accumulated in float32 or wider."""
    if a.dtype == b.dtype and a.dtype in (torch.float16, torch.bfloat16) and a.is_cuda:
        part = torch.mm(a, b, out_dtype=torch.float32)
        return part if total is None else total.add_(part)
    dtype = wide(torch.promote_types(a.dtype, b.dtype))
    return a.to(dtype) @ b.to(dtype) if total is None else total.addmm_(a.to(dtype), b.to(dtype))


def scaled(value_NTP: Tensor, factor_N: Tensor) -> Tensor:
    """Rows times their record's factor: in float32 or wider, and on a GPU rounded once to the operand's half precision.

    With l rounded to l (1 + d), |d| <= u = ``rounding``, the sum of outer products moves by at most u x sum of |l_t| |r_t|: that is
    added to the norm before the factor is chosen, so that the rounded contribution is no longer than C.
    """
    wide_NTP = value_NTP * factor_N[:, None, None]  # factors are float32 or wider, so is the product
    return wide_NTP.to(value_NTP.dtype) if rounding(value_NTP.dtype, value_NTP.device) else wide_NTP


def rounding(dtype: torch.dtype, device: torch.device) -> float:
    """Largest relative error of ``scaled``: 2^-8 for bfloat16 and 2^-11 for float16 on a GPU, else 0."""
    return torch.finfo(dtype).eps / 2 if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16) else 0.0


def chunks(num_records: int, numbers: int, room: dict[str, int], device: torch.device) -> Iterator[slice]:
    """Slices of records of which each holds about as many numbers as there is room for, of even sizes."""
    per_chunk = max(1, room.get(device.type, room["cuda"]) // max(1, numbers))
    count = max(1, -(-num_records // per_chunk))
    for i in range(count):
        yield slice(i * num_records // count, (i + 1) * num_records // count)
