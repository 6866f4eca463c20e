"""Per-record gradients of a weight as sums of outer products, never written out but one by one; and
their weighted sum.

A matrix weight (P x Q) used at T places of record i has the gradient

    G_i = sum over t of  l_it r_it^T

with l the gradients of the outputs and r the inputs of a linear layer (or the reverse). ``gram``
has their norms.

Legend: B records, N records of a chunk, T places, P rows of the weight, Q columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dpvision.dp.products import OUTER_NUMBERS, accumulated, product, scaled, wide
from dpvision.dp.rounding import sum_dtype
from dpvision.dp.sides import OneHot, Side

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
        """Numbers in hand while one record's gradient is written out."""
        return max(self.written_numbers, self.left.places * max(self.left.width, self.right.width))

    def write_out(self, rows: slice) -> Tensor:
        """The gradients of some records, (N, *shape), float32 or wider."""
        return product(self.left.rows(rows).mT, self.right.rows(rows)).view(-1, *self.shape)

    def weighted_sum(self, factor_B: Tensor, keep_B: Tensor | None, blocks: list[slice]) -> Tensor:
        """sum over i of factor_i G_i, of the weight's shape; records with ``keep_B`` False are left
        out whatever they hold.

        Args:
            blocks: consecutive records that are summed in float32 (or wider) together.

        Returns:
            The sum, in the precision of the products, or in float64 where many blocks are added up
            (``rounding.sum_dtype``).
        """
        if isinstance(self.left, OneHot):
            return self._scattered(self.left, factor_B, keep_B, exact=len(blocks) > 1)
        total: Tensor | None = (
            None  # no zeros to begin with: filling a model's size with them costs a tenth of a step
        )
        scale_left = self.left.width <= self.right.width
        numbers = max(self.left.width, self.right.width) * self.left.places
        for pieces in _gathered(
            blocks,
            max(1, OUTER_NUMBERS.get(self.device.type, OUTER_NUMBERS["cuda"]) // max(1, numbers)),
        ):
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
            if len(blocks) == 1:
                total = accumulated(total, left.flatten(0, 1).mT, right.flatten(0, 1))
                continue
            here = [slice(piece.start - rows.start, piece.stop - rows.start) for piece in pieces]
            fresh = total is None
            if total is None:
                dtype = sum_dtype(
                    len(blocks),
                    blocks[-1].stop,
                    torch.promote_types(wide(left.dtype), wide(right.dtype)),
                )
                total = torch.empty(
                    self.left.width, self.right.width, dtype=dtype, device=self.device
                )
            step = max(1, _TILE_NUMBERS // self.right.width)
            for start in range(0, self.left.width, step):
                tile = total[start : start + step]
                for i, part in enumerate(here):
                    a, b = (
                        left[part].flatten(0, 1)[:, start : start + step].mT,
                        right[part].flatten(0, 1),
                    )
                    if (
                        i == 0 and fresh
                    ):  # without zeros first: filling and reading them costs a hundredth of a step
                        torch.mm(
                            a, b, out=tile
                        ) if tile.dtype == a.dtype == b.dtype else tile.copy_(
                            accumulated(None, a, b)
                        )
                    else:
                        tile += accumulated(None, a, b)
        assert total is not None
        return total.view(self.shape)

    def _scattered(
        self, left: OneHot, factor_B: Tensor, keep_B: Tensor | None, *, exact: bool
    ) -> Tensor:
        """The weighted sum where the left side only says which row; ``exact``: in float64."""
        value = self.right.rows(slice(None)) * factor_B[:, None, None]
        if keep_B is not None:
            value = value.masked_fill(~keep_B[:, None, None], 0.0)
        value = value.double() if exact else value
        total = value.new_zeros(left.width, self.right.width)
        return total.index_add_(0, left.index_BT.flatten(), value.flatten(0, 1)).view(self.shape)


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
