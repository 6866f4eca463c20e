"""Numbers of 63 bits in sorted runs on the disk, read back in ascending order with flat memory.

The numbers are hashes, so they are spread evenly: each of R equal intervals of [0, 2^63) holds
about the same share of every run, and is sorted in memory on its own.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

ENTRY = np.dtype([("id", "<i8"), ("value", "<i8")])
"""id: the number that orders. value: goes along with it."""
_IN_MEMORY = 1 << 20
"""Entries of an interval, about."""


class Run(NamedTuple):
    """Sorted entries in a file."""

    path: Path
    start: int
    """Entries of the file before the run."""
    num: int
    add: int = 0
    """Is added to the values when they are read."""


def write_run(file: BinaryIO, id_N: np.ndarray, value_N: np.ndarray) -> None:
    """Append a run to a file; equal ids keep their order."""
    order = np.argsort(id_N, kind="stable")
    entries = np.empty(len(order), dtype=ENTRY)
    entries["id"], entries["value"] = id_N[order], value_N[order]
    file.write(entries.tobytes())


def in_order(runs: Sequence[Run], *, in_memory: int | None = None) -> Iterator[np.ndarray]:
    """Yield the entries of all runs, ascending by id, in blocks of dtype ENTRY.

    Entries with one id are in one block, in the order of the runs.

    Args:
        in_memory: entries of a block, about, unless many have one id.
    """
    wanted = _IN_MEMORY if in_memory is None else in_memory
    num = max(1, -(-sum(run.num for run in runs) // wanted))
    edges = np.array([k * (1 << 63) // num for k in range(1, num)], dtype=np.int64)
    cuts = [np.searchsorted(_read(run, 0, run.num)["id"], edges).astype(np.int32) for run in runs]
    for k in range(num):
        parts = []
        for run, cut in zip(runs, cuts, strict=True):
            start = int(cut[k - 1]) if k else 0
            end = int(cut[k]) if k < num - 1 else run.num
            if end > start:
                parts.append(_read(run, start, end))
        if parts:
            block = np.concatenate(parts)
            yield block[np.argsort(block["id"], kind="stable")]


def _read(run: Run, start: int, end: int) -> np.ndarray:
    # not memory-mapped: the pages would count as this process's memory
    found = np.fromfile(
        run.path, ENTRY, count=end - start, offset=(run.start + start) * ENTRY.itemsize
    )
    found["value"] += run.add
    return found
