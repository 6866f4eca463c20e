"""Feature rows as integers, so that the matrix products of a gradient step are exact.

A row is scaled by its largest entry, rounded to 8 bits (16 for narrow rows), and stored as signed
digits in base 256:

    x_i = scale_i (q_i, constant / scale_i),    q_i = sum over d of 256^d digit_id,    every digit
                                                an int8

Weights and residuals are rounded to four such digits, and products are exact
(``integer_products``). So a logit depends only on its record and the weights, a record's
contribution to a block's sum depends on no other record, and the order of records does not matter
(docs/heads.md, "Rounding"). It is also fast: 8 bits are half as much to read as a float16 feature.

The constant is far larger than the entries of a wide row and is stored separately.

Legend: N records, B records of a block, E row width, K classes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dpvision.adapt.feature_stream import Block, FeatureStream
from dpvision.adapt.integer_products import DIGITS, to_digits

WIDE = 8192
"""Rows wider than this have 8 bits; others have 16, since features of few dimensions may have
outliers.
"""
_KEEP_BYTES = 2 << 30
_BLOCK_BYTES = 1 << 26
_READ_BYTES = 1 << 22
_MOST_RECORDS = 1 << 16


@dataclass(frozen=True)
class IntegerBlock:
    """Valid records only, so that B is secret."""

    digit_BE: tuple[Tensor, ...]
    """int8, least significant first."""
    scale_B: Tensor
    """float64."""
    norm_B: Tensor
    """float64 norm of the whole integer row, constant included: exact up to float64 rounding."""
    label_B: Tensor | None
    """As in ``Block``."""
    target_BK: Tensor | None
    constant: float
    """Last entry of every row, not stored as an integer; 0 if there is none."""
    row_B: np.ndarray
    """As in ``Block``."""


class IntegerStream:
    """The records of a ``FeatureStream`` as integers. Kept in memory if they take at most 2 GiB,
    otherwise recomputed at every pass.

    No record is read before the first call of ``blocks``. ``Releases.release`` accepts it in place
    of the stream.
    """

    def __init__(self, stream: FeatureStream) -> None:
        self._constant = 0.0 if stream.map_EE is not None else stream.constant
        self._stream = replace(stream, constant=0.0) if self._constant else stream
        self._digits = 1 if self._stream.width > WIDE else 2
        self._kept: tuple[IntegerBlock, np.ndarray] | None = None

    @property
    def num_records(self) -> int:
        return self._stream.num_records

    def blocks(self, rows: np.ndarray | None = None) -> Iterator[IntegerBlock]:
        """Yield the valid records, or those among ``rows`` (sorted int64), in order."""
        if self._digits * self.num_records * self._stream.width > _KEEP_BYTES:
            yield from self._made(rows)
            return
        if not self.num_records:
            return
        whole, place_N = self._whole()
        index = np.arange(len(whole.norm_B)) if rows is None else place_N[rows]
        index = index[index >= 0]
        for start in range(0, len(index), step := self._step()):
            here = index[start : start + step]
            yield _taken(
                whole, slice(start, start + step) if rows is None else torch.from_numpy(here)
            )

    def _made(self, rows: np.ndarray | None) -> Iterator[IntegerBlock]:
        """Yield blocks computed from the features."""
        parts: list[IntegerBlock] = []
        # Small blocks of float32 rows stay in the processor's cache while they become integers.
        for block in self._stream.blocks(rows, _READ_BYTES):
            parts.append(self._integers(block))
            if sum(len(part.norm_B) for part in parts) >= self._step():
                yield _joined(parts)
                parts = []
        if parts:
            yield _joined(parts)

    def _step(self) -> int:
        """Return the number of records in a block, whose integers and logits each take at most
        about 64 MiB.
        """
        return min(
            _MOST_RECORDS,
            max(1, _BLOCK_BYTES // max(self._stream.width, 16 * DIGITS * self._stream.num_classes)),
        )

    def _integers(self, block: Block) -> IntegerBlock:
        digit_BE, scale_B, square_B = to_digits(block.x_BE, self._digits)
        norm_B = (square_B * scale_B.square() + self._constant**2).sqrt()
        return IntegerBlock(
            digit_BE, scale_B, norm_B, block.label_B, block.target_BK, self._constant, block.row_B
        )

    def _whole(self) -> tuple[IntegerBlock, np.ndarray]:
        """Return all valid records as one block, and each record's position in it, -1 for invalid
        records.
        """
        if self._kept is None:
            most, classes = self.num_records, self._stream.num_classes
            several = self._stream.multi_label
            # Allocated beforehand: small tensors that outlive a block would fragment the memory
            # that it frees.
            whole = IntegerBlock(
                tuple(
                    torch.empty(most, self._stream.width, dtype=torch.int8)
                    for _ in range(self._digits)
                ),
                torch.empty(most, dtype=torch.float64),
                torch.empty(most, dtype=torch.float64),
                None if several else torch.empty(most, dtype=torch.int64),
                torch.empty(most, classes) if several else None,
                self._constant,
                np.empty(most, dtype=np.int64),
            )
            place_N, count = np.full(most, -1), 0
            for block in self._stream.blocks(num_bytes=_READ_BYTES):
                here = slice(count, count + len(block.norm_B))
                for kept, new in zip(
                    _columns(_taken(whole, here)), _columns(self._integers(block)), strict=True
                ):
                    kept.copy_(new)
                place_N[block.row_B] = np.arange(here.start, here.stop)
                whole.row_B[here] = block.row_B
                count = here.stop
            self._kept = _taken(whole, slice(count)), place_N
        return self._kept


def _taken(whole: IntegerBlock, index: slice | Tensor) -> IntegerBlock:
    return replace(
        whole,
        digit_BE=tuple(digit[index] for digit in whole.digit_BE),
        scale_B=whole.scale_B[index],
        norm_B=whole.norm_B[index],
        label_B=None if whole.label_B is None else whole.label_B[index],
        target_BK=None if whole.target_BK is None else whole.target_BK[index],
        row_B=whole.row_B[index if isinstance(index, slice) else index.numpy()],
    )


def _columns(block: IntegerBlock) -> list[Tensor]:
    return [
        *block.digit_BE,
        block.scale_B,
        block.norm_B,
        *(x for x in (block.label_B, block.target_BK) if x is not None),
    ]


def _joined(parts: list[IntegerBlock]) -> IntegerBlock:
    """Concatenate blocks."""
    labels = [part.label_B for part in parts if part.label_B is not None]
    targets = [part.target_BK for part in parts if part.target_BK is not None]
    return replace(
        parts[0],
        digit_BE=tuple(
            torch.cat(same) for same in zip(*(part.digit_BE for part in parts), strict=True)
        ),
        scale_B=torch.cat([part.scale_B for part in parts]),
        norm_B=torch.cat([part.norm_B for part in parts]),
        label_B=torch.cat(labels) if labels else None,
        target_BK=torch.cat(targets) if targets else None,
        row_B=np.concatenate([part.row_B for part in parts]),
    )
