"""An array on disk that grows in pieces: a writer that was killed is gone on with, and two writers of one array never meet.

While it grows it is ``.NAME.partial``, and its first bytes say how many rows are there; at the end these become numpy's header and the
file gets its name. Rows reach the disk before they are counted (data, fdatasync, count), so that neither SIGKILL nor a power cut leaves
a counted row that was never written. The count is bound to name, shape and type by a digest: a partial file of anything else counts 0.

One writer holds the partial file's lock (flock, which the system drops with the process, however it dies); the next one waits. A lock is
worth something only on the file that still has the name: a finished one has another, and is let go again.
"""

import contextlib
import fcntl
import hashlib
import io
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO

import numpy as np

from dpvision.checkpoint import sync_folder

_MAGIC = b"dpv-part"
_SYNC_S = 1.0
"""Rows are counted this often; what comes after the last count is lost with the process."""
_POLL_S = 0.2


class PartialArray:
    """An array of ``shape`` that one writer appends to; made by ``claim``.

    Args:
        file: the locked partial file.
        path: where the whole array shall lie.
    """

    def __init__(self, file: IO[bytes], path: Path, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.path, self.shape = path, shape
        self._file, self._dtype, self._header = file, dtype, _header(shape, dtype)
        self._row_bytes = int(np.prod(shape[1:])) * dtype.itemsize
        self._what = repr((path.name, shape, dtype.str)).encode()

    def rows_done(self) -> int:
        """Rows that are safely there, from the first on; 0 for a file of anything else."""
        start = os.pread(self._file.fileno(), len(self._header), 0)
        rows = _count(start, self._what)
        if start == self._header:  # killed between the last row and the new name
            rows = self.shape[0]
        whole = len(self._header) + rows * self._row_bytes <= os.fstat(self._file.fileno()).st_size
        return rows if whole and rows <= self.shape[0] else 0

    def write(self, first: int, blocks: Iterable[np.ndarray]) -> None:
        """Append blocks of rows from row ``first`` (at most ``rows_done()``) on, and give the array its name.

        Whatever stops it (Ctrl-C, an unreadable shard, a full disk), finished blocks are counted.

        Raises:
            OSError: the disk refuses.
        """
        rows, synced = first, time.monotonic()
        self._mark(first)  # what lies behind is written anew, and must not be counted meanwhile
        self._file.seek(len(self._header) + first * self._row_bytes)
        self._file.truncate()
        try:
            for block in blocks:
                self._file.write(np.ascontiguousarray(block, dtype=self._dtype).data)
                self._file.flush()
                rows += len(block)
                if time.monotonic() - synced >= _SYNC_S:
                    self._mark(rows)
                    synced = time.monotonic()
        finally:
            self._mark(rows)
        assert rows == self.shape[0], "the blocks are the whole array"
        os.pwrite(self._file.fileno(), self._header, 0)
        os.fsync(self._file.fileno())
        partial_path(self.path).replace(self.path)
        sync_folder(self.path.parent)

    def discard(self) -> None:
        """Remove the file."""
        partial_path(self.path).unlink(missing_ok=True)

    def _mark(self, rows: int) -> None:
        os.fdatasync(self._file.fileno())
        os.pwrite(self._file.fileno(), _mark(rows, self._what).ljust(len(self._header), b"\0"), 0)


@contextlib.contextmanager
def claim(path: Path, shape: tuple[int, ...], dtype: np.dtype, waiting: Callable[[int], None] | None = None) -> Iterator[PartialArray]:
    """The partial array of ``path`` for its only writer; waits while another process has it.

    Whoever waited has to look first whether the array is there by now.

    Args:
        waiting: called now and then with the rows that the other process has counted.

    Raises:
        OSError: the file cannot be made.
    """
    while True:
        with os.fdopen(os.open(partial_path(path), os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            mine = PartialArray(file, path, shape, dtype)
            if _lock(file) and _has_name(file, partial_path(path)):
                yield mine
                return
            if waiting is not None and (rows := mine.rows_done()):
                waiting(rows)
        time.sleep(_POLL_S)


def remove_unclaimed(partial: Path) -> bool:
    """Remove a partial file unless a writer has it; whether it is gone."""
    try:
        with open(partial, "r+b") as file:
            if not _lock(file):
                return False
            if _has_name(file, partial):
                partial.unlink()
            return True
    except FileNotFoundError:
        return True


def partial_path(path: Path) -> Path:
    """Where an array grows that shall lie at ``path``."""
    return path.with_name(f".{path.name}.partial")


def _lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _has_name(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape})
    return header.getvalue()


def _mark(rows: int, what: bytes) -> bytes:
    count = struct.pack("<Q", rows)
    return _MAGIC + count + hashlib.sha256(count + what).digest()


def _count(start: bytes, what: bytes) -> int:
    """Rows that the first bytes of a file count; 0 where they are not such a count, or that of something else."""
    size = len(_mark(0, what))
    if len(start) < size:
        return 0
    rows = int(struct.unpack("<Q", start[len(_MAGIC) : len(_MAGIC) + 8])[0])
    return rows if start[:size] == _mark(rows, what) else 0
