"""Per-record gradients of a weight as sums of outer products, never written out but one by one; and
their weighted sum.

A matrix weight (P x Q) used at T places of record i has the gradient

    G_i = sum over t of  l_it r_it^T

with l the gradients of the outputs and r the inputs of a linear layer (or the reverse). ``gram``
has their norms. Each of the two factors is a ``Side``: a tensor, or something smaller from which
its rows are made. Products are accumulated in float32 or wider, whatever their operands.

Legend: B records, N records of a chunk, T places, P rows of the weight, Q columns; I, J, K
dimensions of a product.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dpvision.devices import adds_by_place
from dpvision.dp.rounding import sum_dtype

GRAM_NUMBERS = {"cpu": 2**20, "cuda": 2**27}
"""Numbers in one chunk of Gram matrices: on a CPU, what stays in a core's cache; on a GPU, half a
gigabyte.
"""
OUTER_NUMBERS = {"cpu": 2**22, "cuda": 2**28}
"""Numbers in one chunk of scaled operands, or of written-out gradients."""
MOST_TERMS = 1024
"""Products that are added up at once; more are added up in blocks, so that the proven error is that
of a block.
"""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision in which operands of ``dtype`` are accumulated: float32, or float64 for
    float64.
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def widest(*dtypes: torch.dtype) -> torch.dtype:
    """``wide`` of the widest of several."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def in_half(a: torch.dtype, b: torch.dtype, device: torch.device) -> bool:
    """Whether a product's operands stay in half precision: on a GPU, accumulated in float32."""
    return a == b and a in (torch.float16, torch.bfloat16) and device.type == "cuda"


def most_terms_at_once(dtype: torch.dtype, device: torch.device) -> int:
    """Products that ``product`` adds up at once: all in half precision on a GPU, whose sums are
    measured, not proven, and where more and smaller products cost more than their arithmetic.
    """
    return sys.maxsize if in_half(dtype, dtype, device) else MOST_TERMS


def product(a: Tensor, b: Tensor) -> Tensor:
    """Batched matrix product, (N, I, K) x (N, K, J) -> (N, I, J), in float32 or wider, at most
    ``most_terms_at_once``.
    """
    num, rows, terms = a.shape
    if in_half(a.dtype, b.dtype, a.device):
        room = aligned_rows(num, rows, b.shape[2], a.device)
        return torch.bmm(a, b, out_dtype=torch.float32, out=room)
    if terms > MOST_TERMS:
        total = product(a[:, :, :MOST_TERMS], b[:, :MOST_TERMS])
        for start in range(MOST_TERMS, terms, MOST_TERMS):
            total += product(a[:, :, start : start + MOST_TERMS], b[:, start : start + MOST_TERMS])
        return total
    dtype = widest(a.dtype, b.dtype)
    if not adds_by_place(a.device):
        return torch.bmm(a.to(dtype), b.to(dtype))
    room = aligned_rows(num, rows, b.shape[2], a.device, dtype)
    return torch.bmm(a.to(dtype), b.to(dtype), out=room)


def aligned_rows(
    num: int, rows: int, columns: int, device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """An uninitialised (num, rows, columns) whose rows begin at multiples of 32 bytes.

    For 197 columns an H100 took kernels for unaligned rows, at a fifth of the speed of others; and
    sums of a row would depend on where it begins (``devices.padded_rows``).
    """
    return torch.empty(num, rows, -(-columns // 8) * 8, device=device, dtype=dtype)[:, :, :columns]


def accumulated(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a b, two-dimensional, in place where there is a total; accumulated in float32 or
    wider.
    """
    if in_half(a.dtype, b.dtype, a.device):
        part = torch.mm(a, b, out_dtype=torch.float32)
        return part if total is None else total.add_(part)
    dtype = widest(a.dtype, b.dtype)
    return a.to(dtype) @ b.to(dtype) if total is None else total.addmm_(a.to(dtype), b.to(dtype))


def scaled(value_NTP: Tensor, factor_N: Tensor) -> Tensor:
    """Rows times their record's factor: in float32 or wider, and on a GPU rounded once to the
    operand's half precision.

    With l rounded to l (1 + d), |d| <= u = ``rounding``, the sum of outer products moves by at most
    u x sum of |l_t| |r_t|: that is added to the norm before the factor is chosen, so that the
    rounded contribution is no longer than C.
    """
    if value_NTP.is_cuda and rounding(value_NTP.dtype, value_NTP.device):
        from dpvision.dp.pass_triton import scaled_rows

        return scaled_rows(value_NTP, factor_N.float())
    value = value_NTP * factor_N[:, None, None]  # factors are float32 or wider, so is the product
    return value.to(value_NTP.dtype) if rounding(value_NTP.dtype, value_NTP.device) else value


def rounding(dtype: torch.dtype, device: torch.device) -> float:
    """Largest relative error of ``scaled``: 2^-8 for bfloat16 and 2^-11 for float16 on a GPU, else
    0.
    """
    return (
        torch.finfo(dtype).eps / 2
        if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
        else 0.0
    )


def chunks(
    num_records: int, numbers: int, room: dict[str, int], device: torch.device
) -> Iterator[slice]:
    """Slices of records of which each holds about as many numbers as there is room for, of even
    sizes.
    """
    per_chunk = max(1, room.get(device.type, room["cuda"]) // max(1, numbers))
    count = max(1, -(-num_records // per_chunk))
    for i in range(count):
        yield slice(i * num_records // count, (i + 1) * num_records // count)


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
        """int: numbers kept per record."""
        ...

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def rows(self, rows: slice) -> Tensor:
        """Return the rows of a slice of records, (N, T, width)."""
        ...


@dataclass(frozen=True, eq=False)
class _Kept:
    """The common part of sides, whose sizes are those of the tensor that they keep."""

    kept: Tensor

    @property
    def num_records(self) -> int:
        return self.kept.shape[0]

    @property
    def places(self) -> int:
        return self.kept.shape[1]

    @property
    def device(self) -> torch.device:
        return self.kept.device

    @property
    def dtype(self) -> torch.dtype:
        return self.kept.dtype


@dataclass(frozen=True, eq=False)
class _Rows(_Kept):
    """The common part of sides that keep their rows, (B, T, width)."""

    @property
    def width(self) -> int:
        return self.kept.shape[2]

    @property
    def stored_numbers(self) -> int:
        return self.places * self.width

    def rows(self, rows: slice) -> Tensor:
        return self.kept[rows]


class Dense(_Rows):
    """Rows that are kept, (B, T, width)."""


@dataclass(frozen=True, eq=False)
class OneHot(_Kept):
    """Rows of the identity: the input of an embedding. The indices are kept, int64 (B, T)."""

    width: int
    kind: torch.dtype

    @property
    def stored_numbers(self) -> int:
        return self.places

    @property
    def dtype(self) -> torch.dtype:
        return self.kind

    def rows(self, rows: slice) -> Tensor:
        return F.one_hot(self.kept[rows], self.width).to(self.kind)


@dataclass(frozen=True, eq=False)
class Patches(_Kept):
    """The input of a convolution (groups = 1), (B * per_record, C, H, W), unfolded when needed to
    (B, T, C * kh * kw).
    """

    per_record: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def num_records(self) -> int:
        return self.kept.shape[0] // self.per_record

    @property
    def output_size(self) -> tuple[int, int]:
        sizes = zip(
            self.kept.shape[2:], self.kernel, self.stride, self.padding, self.dilation, strict=True
        )
        height, width = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)
        return height, width

    @property
    def places(self) -> int:
        return self.per_record * math.prod(self.output_size)

    @property
    def width(self) -> int:
        return self.kept.shape[1] * self.kernel[0] * self.kernel[1]

    @property
    def stored_numbers(self) -> int:
        return self.kept[0].numel() * self.per_record

    def rows(self, rows: slice) -> Tensor:
        part = self._images(rows)
        if self._is_flat:
            columns = part.flatten(2)
        else:
            columns = F.unfold(
                part, self.kernel, self.dilation, self.padding, self.stride
            )  # (N * per_record, C kh kw, places)
        return columns.mT.reshape(len(part) // self.per_record, -1, self.width)

    def _images(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self.num_records)
        return self.kept[start * self.per_record : stop * self.per_record]

    @property
    def _is_flat(self) -> bool:
        return self.kernel == (1, 1) and self.stride == (1, 1) and self.padding == (0, 0)

    @property
    def by_convolution(self) -> bool:
        """Whether sums of outer products come from ``kernel_gradient``."""
        return one_by_one_pays(self.kept.device) and not self._is_flat

    def kernel_gradient(self, left_NTP: Tensor, rows: slice, keep_N: Tensor | None) -> Tensor:
        """Sum over some records of the outer products with their rows, (P, C, kh, kw), float32 or
        wider; without those with ``keep_N`` False, whatever they hold.
        """
        images = self._images(rows)
        dtype = widest(left_NTP.dtype, images.dtype)
        if keep_N is not None:
            left_NTP = left_NTP.masked_fill(~keep_N[:, None, None], 0.0)
            dropped = ~keep_N.repeat_interleave(self.per_record)[:, None, None, None]
            images = images.masked_fill(dropped, 0.0)
        rows_P = left_NTP.reshape(len(images), -1, left_NTP.shape[2])
        g = rows_P.mT.unflatten(2, self.output_size).to(dtype)
        shape = left_NTP.shape[2], images.shape[1], *self.kernel
        geometry = self.stride, self.padding, self.dilation, 1
        return kernel_gradient(g, images.to(dtype), torch.Size(shape), geometry)


def one_by_one_pays(device: torch.device) -> bool:
    """Whether ``kernel_gradient`` of one record at a time is faster than products with unfolded
    inputs: on a CPU, in a fifth of the time.
    """
    return device.type == "cpu"


def kernel_gradient(g: Tensor, x: Tensor, shape: torch.Size, geometry: Any) -> Tensor:
    """Gradient of a convolution's kernel, summed over images.

    Args:
        g: gradient of the output.
        shape: of the kernel.
        geometry: stride, padding, dilation, groups.
    """
    stride, padding, dilation, groups = geometry
    kernel = g.new_empty(1).expand(shape)  # its numbers do not count
    return torch.ops.aten.convolution_backward(
        g, x, kernel, None, stride, padding, dilation, False, [0] * len(stride), groups,
        [False, True, False],
    )[1]  # fmt: skip


@dataclass(frozen=True, eq=False)
class WithGram(_Rows):
    """Rows that are kept with their Gram matrices: gradients of a vocabulary's logits."""

    gram_BTT: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the Gram matrices, float32 or wider."""
        return self.gram_BTT.dtype


_TILE_NUMBERS = 2**22
"""Numbers of a weight that the sums of blocks are added to at a time."""


@dataclass(frozen=True, eq=False)
class OuterProducts:
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
        """Numbers held while one record's gradient is written out."""
        return max(self.written_numbers, self.left.places * max(self.left.width, self.right.width))

    def write_out(self, rows: slice) -> Tensor:
        """The gradients of some records, (N, *shape), float32 or wider."""
        if isinstance(self.right, Patches) and self.right.by_convolution:
            ones = [slice(i, i + 1) for i in range(*rows.indices(self.num_records))]
            made = [self.right.kernel_gradient(self.left.rows(one), one, None) for one in ones]
            return torch.stack(made).reshape(-1, *self.shape)
        return product(self.left.rows(rows).mT, self.right.rows(rows)).reshape(-1, *self.shape)

    def weighted_sum(
        self, factor_B: Tensor, keep_B: Tensor | None, blocks: list[slice], *, exact: bool = False
    ) -> Tensor:
        """sum over i of factor_i G_i, of the weight's shape; records with ``keep_B`` False are left
        out whatever they hold.

        Args:
            blocks: consecutive records that are summed in float32 (or wider) together.
            exact: whether blocks are added up in float64 (``rounding.sum_dtype``).

        Returns:
            The sum, in the precision of the products, or in float64 where many blocks are added up
            (``rounding.sum_dtype``).
        """
        # The factor is multiplied into the narrower side; then a block's sum is one matrix product
        # over all its records' places. With one block, chunks of records are accumulated in place.
        # With several, each chunk takes as many whole blocks as it has room for, and each block's
        # product is added, tile by tile of the weight, to a total that is wider if need be.
        if isinstance(self.left, OneHot):
            return self._scattered(self.left, factor_B, keep_B, exact=exact or len(blocks) > 1)
        if isinstance(self.right, Patches) and self.right.by_convolution:
            return self._by_convolution(self.right, factor_B, keep_B, blocks, exact=exact)
        total: Tensor | None = (
            None  # no zeros to begin with: filling a model's size with them costs a tenth of a step
        )
        scale_left = self.left.width <= self.right.width
        numbers = max(self.left.width, self.right.width) * self.left.places
        most = max(1, OUTER_NUMBERS.get(self.device.type, OUTER_NUMBERS["cuda"]) // max(1, numbers))
        gathered = list(_gathered(blocks, most))
        num_added = sum(map(len, gathered))
        for pieces in gathered:
            rows = slice(pieces[0].start, pieces[-1].stop)
            left, right = self.left.rows(rows), self.right.rows(rows)
            if scale_left:
                left = scaled(left, factor_B[rows])
            else:
                right = scaled(right, factor_B[rows])
            if keep_B is not None:  # 0 x NaN is NaN: a factor of zero would not do
                dropped_B11 = ~keep_B[rows, None, None]
                left, right = (
                    left.masked_fill(dropped_B11, 0.0),
                    right.masked_fill(dropped_B11, 0.0),
                )
            left, right = left.flatten(0, 1), right.flatten(0, 1)
            if len(blocks) == 1:
                total = accumulated(total, left.mT, right)
                continue
            here = [
                slice(*((at - rows.start) * self.left.places for at in (piece.start, piece.stop)))
                for piece in pieces
            ]
            fresh = total is None
            if total is None:
                dtype = widest(left.dtype, right.dtype)
                dtype = sum_dtype(num_added, blocks[-1].stop, dtype, exact=exact)
                total = torch.empty(
                    self.left.width, self.right.width, dtype=dtype, device=self.device
                )
            step = max(1, _TILE_NUMBERS // self.right.width)
            for start in range(0, self.left.width, step):
                tile = total[start : start + step]
                for i, part in enumerate(here):
                    a, b = left[part, start : start + step].mT, right[part]
                    if i or not fresh:
                        tile += accumulated(None, a, b)
                    elif tile.dtype == a.dtype == b.dtype:
                        # Without zeros first: filling and reading them costs a hundredth of a step.
                        torch.mm(a, b, out=tile)
                    else:
                        tile.copy_(accumulated(None, a, b))
        assert total is not None
        return total.view(self.shape)

    def _by_convolution(
        self,
        right: Patches,
        factor_B: Tensor,
        keep_B: Tensor | None,
        blocks: list[slice],
        *,
        exact: bool,
    ) -> Tensor:
        """The weighted sum as a convolution's backward pass over each block, a chunk of records at
        a time.
        """
        numbers = self.stored_numbers
        most = max(1, OUTER_NUMBERS.get(self.device.type, OUTER_NUMBERS["cuda"]) // numbers)
        total: Tensor | None = None
        for block in blocks:
            pieces = (piece for several in _gathered([block], most) for piece in several)
            part: Tensor | None = None
            for rows in pieces:
                left = scaled(self.left.rows(rows), factor_B[rows])
                kept = None if keep_B is None else keep_B[rows]
                piece = right.kernel_gradient(left, rows, kept).reshape(self.shape)
                part = piece if part is None else part.add_(piece)
            assert part is not None
            if total is None:
                dtype = sum_dtype(len(blocks), blocks[-1].stop, part.dtype, exact=exact)
                total = part.to(dtype)
            else:
                total += part
        assert total is not None
        return total

    def _scattered(
        self, left: OneHot, factor_B: Tensor, keep_B: Tensor | None, *, exact: bool
    ) -> Tensor:
        """The weighted sum with one-hot rows on the left: each right row is added to its row of the
        total; ``exact``: in float64.
        """
        value = self.right.rows(slice(None)) * factor_B[:, None, None]
        if keep_B is not None:
            value = value.masked_fill(~keep_B[:, None, None], 0.0)
        value = value.double() if exact else value
        total = value.new_zeros(left.width, self.right.width)
        return total.index_add_(0, left.kept.flatten(), value.flatten(0, 1)).view(self.shape)


def _gathered(blocks: list[slice], most: int) -> Iterator[list[slice]]:
    """The blocks in their order, together as many as hold ``most`` records; a block that holds more
    is cut.
    """
    pieces: list[slice] = []
    for block in blocks:
        count = -(-(block.stop - block.start) // most)
        size = block.stop - block.start
        for i in range(count):
            piece = slice(block.start + i * size // count, block.start + (i + 1) * size // count)
            if pieces and piece.stop - pieces[0].start > most:
                yield pieces
                pieces = []
            pieces.append(piece)
    if pieces:
        yield pieces
