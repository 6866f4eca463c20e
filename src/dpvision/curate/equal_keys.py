"""Records with equal keys, found with memory that does not grow with the number of records.

Keys are spread over files by a hash, so that all records of one key are in one file, in the order
of the source. A file is read block by block; the different keys of a file stay in memory, about
2^20 of them.

Legend: N records of a source, M entries, W words of 64 bits of a key.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from dpvision.curate.pairs import Pairs
from dpvision.mixing import GOLDEN, mix_numpy

_BLOCK = 1 << 20
"""Records of a block, and different keys of a file, about."""


def find_equal(
    column_N: np.ndarray,
    alive_N: np.ndarray,
    key_of: Callable[[np.ndarray], np.ndarray],
    pairs: Pairs,
    work: Path,
    progress: Callable[[int], None],
) -> None:
    """Add each record whose key an earlier one has to ``pairs``, with the first such record.

    A key of zeros is none: its record is equal to no other.

    Args:
        column_N: (N, ...), read block by block.
        alive_N: bool; other records are not looked at.
        key_of: from a block of the column to keys, uint64 (M, W).
        progress: called with the number of records done, 0 to N.
    """
    num = len(column_N)
    num_files = -(-num // _BLOCK)
    words = key_of(column_N[:0]).shape[1]
    entry = np.dtype([("row", "<i8"), ("key", "<u8", (words,))])
    for start in range(0, num, _BLOCK):
        row_M = start + np.flatnonzero(alive_N[start : start + _BLOCK])
        key_MW = key_of(np.asarray(column_N[row_M]))
        some_M = key_MW.any(axis=1)
        found = np.empty(int(some_M.sum()), dtype=entry)
        found["row"], found["key"] = row_M[some_M], key_MW[some_M]
        file_M = _mixed(found["key"]) % np.uint64(num_files)
        order = np.argsort(file_M, kind="stable")
        ends = np.searchsorted(file_M[order], np.arange(num_files + 1))
        for k in range(num_files):
            if ends[k + 1] > ends[k]:
                with (work / f"keys-{k}").open("ab") as file:
                    file.write(found[order[ends[k] : ends[k + 1]]].tobytes())
        progress(min(start + _BLOCK, num) // 2)
    for k in range(num_files):
        path = work / f"keys-{k}"
        if path.exists():
            _compare(path, entry, pairs)
            path.unlink()
        progress(num // 2 + (num - num // 2) * (k + 1) // num_files)


def _compare(path: Path, entry: np.dtype, pairs: Pairs) -> None:
    """Compare the entries of a file, in which rows ascend."""
    known, at = np.empty(0, dtype=entry), 0
    while len(block := np.fromfile(path, entry, count=_BLOCK, offset=at * entry.itemsize)):
        at += len(block)
        found = np.concatenate([known, block])
        # stable: of equal keys the first row comes first
        order = np.lexsort(found["key"].T)
        ordered_MW = found["key"][order]
        starts_M = np.r_[True, (ordered_MW[1:] != ordered_MW[:-1]).any(axis=1)]
        first_M = order[np.flatnonzero(starts_M)[np.cumsum(starts_M) - 1]]
        again_M = (order != first_M) & (order >= len(known))
        pairs.add(found["row"][order[again_M]], found["row"][first_M[again_M]])
        known = found[np.sort(order[starts_M])]


def _mixed(key_MW: np.ndarray) -> np.ndarray:
    """Return a hash of each key, uint64 (M,)."""
    mixed_M = np.zeros(len(key_MW), dtype=np.uint64)
    for word_M in key_MW.T:
        mixed_M = mix_numpy(mixed_M * np.uint64(GOLDEN) + word_M)
    return mixed_M
