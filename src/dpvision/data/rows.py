"""A row of a store's index, the keyed hash that is a record's id, and all rows of a store.

It imports nothing that is slow to import: the processes of an import read this.
"""

from hashlib import blake2b
from typing import Any

import numpy as np

ROW = np.dtype(
    [
        ("shard", "<u4"),
        ("offset", "<u8"),
        ("size", "<u4"),
        ("caption_offset", "<u8"),
        ("caption_size", "<u4"),
        ("id", "<i8"),
        ("unit", "<i8"),
        ("label", "<i4"),
    ]
)
"""caption_offset and caption_size: the record's line in records.jsonl. unit and label are -1 for
none. With several labels per record, label is the position of the record's set (multi_label.py).
"""


def keyed_hash(key: bytes, data: bytes) -> int:
    """63-bit keyed BLAKE2b of ``data``.

    Reveals nothing about ``data`` without the key, and differs between stores.
    """
    return int.from_bytes(blake2b(data, key=key, digest_size=8).digest(), "little") >> 1


class AllRows:
    """The rows 0 to N - 1 of a store, of which no array is held: it would take 8 bytes each.

    Positions among them, or a slice, give the rows as an array; ``numpy.asarray`` gives all.
    """

    def __init__(self, num: int) -> None:
        self._num = num

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, place: np.ndarray | slice | int) -> np.ndarray:
        """Return int64 rows. Raises IndexError for a position outside, as an array does."""
        if isinstance(place, slice):
            return np.arange(*place.indices(self._num))
        place = np.asarray(place)
        if place.dtype.kind not in "iu":
            raise TypeError(f"AllRows: {place.dtype} positions; expected int64 ones")
        if place.size and not (-self._num <= place.min() and place.max() < self._num):
            raise IndexError(f"AllRows: position outside 0 to {self._num - 1}")
        return np.where(place < 0, place + self._num, place)[()]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.arange(self._num, dtype=dtype)


Rows = np.ndarray | AllRows
"""int64 rows of a store."""


def of_rows(column: np.ndarray, rows: Rows) -> np.ndarray:
    """Return a column of a store's index at ``rows``; for all of them no copy."""
    return column[: len(rows)] if isinstance(rows, AllRows) else column[rows]
