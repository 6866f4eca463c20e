"""Records with the earlier record because of which they are left out, found in any order and given
back in the order of the source, with memory that does not grow with their number.
"""

from pathlib import Path

import numpy as np

from dpvision.curate.record import Duplicates
from dpvision.data.sorted_runs import Run, in_order, write_run

_BUFFER = 1 << 18
"""Pairs in memory before a run is written."""


class Pairs:
    """Pairs (row, twin) in sorted runs on the disk.

    Args:
        num: number of records of the source.
        work: folder for the files; the result is read from there.
    """

    def __init__(self, num: int, work: Path) -> None:
        self._work = work
        # ids of sorted runs are spread over [0, 2^63)
        self._scale = (1 << 63) // max(1, num)
        self._file = (work / "pairs").open("wb")
        self._runs: list[Run] = []
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self._num_waiting = self._written = 0

    def add(self, row_M: np.ndarray, twin_M: np.ndarray) -> None:
        """Add pairs; of several with one row the smallest twin counts."""
        if len(row_M):
            self._waiting.append((row_M.astype(np.int64), twin_M.astype(np.int64)))
            self._num_waiting += len(row_M)
        if self._num_waiting >= _BUFFER:
            self._write()

    def _write(self) -> None:
        if self._waiting:
            row_M, twin_M = (np.concatenate(part) for part in zip(*self._waiting, strict=True))
            write_run(self._file, row_M * self._scale, twin_M)
            self._runs.append(Run(self._work / "pairs", self._written, len(row_M)))
            self._written += len(row_M)
            self._waiting, self._num_waiting = [], 0

    def duplicates(self) -> Duplicates:
        """Return all pairs, as arrays that are read from the disk. Called once, at the end."""
        self._write()
        self._file.close()
        paths, num = (self._work / "rows", self._work / "twins"), 0
        with paths[0].open("wb") as rows, paths[1].open("wb") as twins:
            for block in in_order(self._runs):
                block = block[np.lexsort((block["value"], block["id"]))]
                block = block[np.r_[True, np.diff(block["id"]) != 0]]
                rows.write((block["id"] // self._scale).tobytes())
                twins.write(block["value"].tobytes())
                num += len(block)
        if not num:
            return Duplicates(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))
        return Duplicates(*(np.memmap(path, dtype=np.int64, mode="r") for path in paths))
