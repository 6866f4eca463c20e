"""The two factors of all records' outer products: a tensor, one-hot rows, unfolded patches, or
recomputed rows.

Legend: B records, N records of a chunk, T positions (``places``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


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

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

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
    """The input of a convolution (groups = 1), unfolded when needed: (B * per_record, C, H, W) ->
    (B, T, C * kh * kw).
    """

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
        sizes = zip(
            self.value.shape[2:], self.kernel, self.stride, self.padding, self.dilation, strict=True
        )
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

    @property
    def dtype(self) -> torch.dtype:
        return self.value.dtype

    def rows(self, rows: slice) -> Tensor:
        start, stop, _ = rows.indices(self.num_records)
        part = self.value[start * self.per_record : stop * self.per_record]
        if self.kernel == (1, 1) and self.stride == (1, 1) and self.padding == (0, 0):
            columns = part.flatten(2)
        else:
            columns = F.unfold(
                part, self.kernel, self.dilation, self.padding, self.stride
            )  # (N * per_record, C kh kw, places)
        return columns.mT.reshape(stop - start, -1, self.width)


@dataclass(frozen=True, eq=False)
class Recomputed:
    """Rows too large to keep, recomputed when needed, with their Gram matrix, which is small.

    One record at a time: a record's bits must not depend on which others are recomputed with it.
    """

    make: Callable[[slice], Tensor]
    gram_BTT: Tensor
    width: int
    working_width: int
    """Numbers kept per position, from which the rows are recomputed."""

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

    @property
    def dtype(self) -> torch.dtype:
        return self.gram_BTT.dtype

    def rows(self, rows: slice) -> Tensor:
        return torch.cat(
            [self.make(slice(i, i + 1)) for i in range(*rows.indices(self.num_records))]
        )
