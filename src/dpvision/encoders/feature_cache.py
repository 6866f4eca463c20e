"""Features and scores kept beside the store that they were computed from, so that a second evaluation does not pay for them again.

Features of private images are as private as the images: they lie under STORE/confidential/features/, readable by the owner only. A
file's name is a digest of all that decides its content: the encoder (weights, and what it makes of fixed noise), the way from bytes to
pixels (settings, our source, versions of the libraries), the store and its rows. Another name is another file; nothing is ever updated.

Legend: N records, D feature dimensions, B images, C channels, H height, W width.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import numpy as np
import PIL
import sklearn
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dpvision.data import decode, loader, transform
from dpvision.data.store import Store
from dpvision.encoders import collect, pooled
from dpvision.errors import DataError
from dpvision.files import replacing, sync

MAX_BYTES = 4 << 30
"""A store's cache is kept below this: what was used longest ago goes first."""
_LEFT_S = 24 * 3600
_SYNC_S = 1.0
"""Rows of a growing array are counted this often; what comes after the last count is lost with the process."""
_POLL_S = 0.2
_COUNT = 8
"""Bytes of the count."""


class FeatureCache:
    """The cache of one store. A disk that refuses (full, read-only) or a damaged file costs time, not the evaluation."""

    def __init__(self, store_dir: Path, max_bytes: int = MAX_BYTES) -> None:
        self.folder, self.max_bytes = store_dir / "confidential" / "features", max_bytes

    def load(self, key: str) -> dict[str, Tensor] | None:
        """The tensors kept under ``key``, or None."""
        path = self.folder / f"{key}.safetensors"
        try:
            tensors = load_file(path)
            os.utime(path)
            return tensors
        except (OSError, SafetensorError):
            return None

    def save(self, key: str, tensors: dict[str, Tensor]) -> None:
        """Keep tensors under ``key``, unless they are larger than the cache."""
        if sum(t.numel() * t.element_size() for t in tensors.values()) <= self.max_bytes:
            self._write(f"{key}.safetensors", lambda path: save_file({k: t.contiguous().clone() for k, t in tensors.items()}, path))

    def load_array(self, key: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray | None:
        """The array kept under ``key``, memory-mapped and read-only, or None; one of another shape or type is damaged."""
        path = self.folder / f"{key}.npy"
        try:
            found = np.load(path, mmap_mode="r", allow_pickle=False)
            os.utime(path)
        except (OSError, ValueError, EOFError):
            return None
        return found if found.shape == shape and found.dtype == dtype else None

    def save_array(
        self,
        key: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        blocks_from: Callable[[int], Iterable[np.ndarray]],
        *,
        step: int = 1,
        progress: Callable[[int], None] | None = None,
    ) -> np.ndarray:
        """Write an array of any size in pieces along its first axis, and give it as ``load_array`` does. The folder has to be there.

        Going on where an earlier process stopped or was killed; while another one writes the same array, it is waited for. The array may
        be larger than the cache: then it is all that stays.

        Args:
            blocks_from: the blocks from a row on, a multiple of ``step``, in order.
            progress: called with the rows of another process, while it is waited for.

        Raises:
            DataError: the disk refuses. What is done stays.
        """
        try:
            with claim(self.folder / f"{key}.npy", shape, dtype, progress) as partial:
                if self.load_array(key, shape, dtype) is not None:  # the one that was waited for has finished
                    growing_path(partial.path).unlink(missing_ok=True)
                else:
                    first = partial.rows_done() // step * step
                    partial.write(first, blocks_from(first))
            self._make_room()
        except OSError as error:
            raise DataError(
                f"features: {self.folder} ({error.strerror or error}); expected a writable place with space. Make room, then repeat."
            ) from None
        written = self.load_array(key, shape, dtype)
        assert written is not None, "just written"
        return written

    def has_room(self, key: str, num_bytes: int) -> bool:
        """Whether the folder is there, or can be made, and its disk takes what is missing of an array of ``num_bytes``."""
        if not self.make_folder():
            return False
        partial = growing_path(self.folder / f"{key}.npy")
        there = partial.stat().st_size if partial.exists() else 0
        return shutil.disk_usage(self.folder).free > 1.05 * num_bytes - there

    def make_folder(self) -> bool:
        """Whether the folder is there, or could be made, readable by its owner only."""
        try:
            # Each level on its own: mkdir's mode does not reach the parents that it makes on the way.
            for folder in (self.folder.parent, self.folder):
                folder.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            return False
        return os.access(self.folder, os.W_OK)

    def load_json(self, key: str) -> Any:
        """The value kept under ``key``, or None."""
        try:
            return json.loads((self.folder / f"{key}.json").read_bytes())
        except (OSError, ValueError):
            return None

    def save_json(self, key: str, value: Any) -> None:
        """Keep a JSON value under ``key``."""
        self._write(f"{key}.json", lambda path: path.write_text(json.dumps(value, allow_nan=False)))

    def _write(self, name: str, write: Callable[[Path], object]) -> None:
        with contextlib.suppress(OSError, SafetensorError):  # the second is how safetensors reports a full disk
            if self.make_folder():
                with replacing(self.folder / name) as partial:
                    write(partial)
                self._make_room()

    def _make_room(self) -> None:
        for entry in os.scandir(self.folder):  # left by a process that was killed while it wrote
            if re.search(r"\.partial-\d+$", entry.name) and time.time() - entry.stat().st_mtime > _LEFT_S:
                os.unlink(entry)
        files = sorted(((entry.stat().st_mtime_ns, entry.stat().st_size, entry.path) for entry in os.scandir(self.folder)), reverse=True)
        total = 0
        for place, (_, size, path) in enumerate(files):
            total += size
            if total > self.max_bytes and place:  # the newest stays, whatever its size; what grows stays with its writer
                with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
                    if not path.endswith(".partial") or _locked(file, Path(path)):
                        os.unlink(path)


class GrowingArray:
    """An array of ``shape`` that grows under a name of its own, of which one writer at a time has the lock (``claim``).

    The file is numpy's from the start, but that the first eight bytes, numpy's magic string and version, are the number of rows written.
    Rows reach the disk before they are counted (data, fdatasync, count), so that neither SIGKILL nor a power cut leaves a counted row
    that was never written. Blocks are written, not mapped: a full disk is an OSError.

    Args:
        file: the locked file.
        path: where the whole array shall lie.
    """

    def __init__(self, file: IO[bytes], path: Path, shape: tuple[int, ...], dtype: np.dtype) -> None:
        self.path, self.shape = path, shape
        self._file, self._dtype, self._header = file, dtype, _header(shape, dtype)
        self._row_bytes = math.prod(shape[1:]) * dtype.itemsize

    def rows_done(self) -> int:
        """Rows that are safely there, from the first on; 0 for a file of anything else."""
        start = os.pread(self._file.fileno(), len(self._header), 0)
        if start[_COUNT:] != self._header[_COUNT:]:
            return 0
        # killed between the last row and the new name: the magic string is there
        rows = self.shape[0] if start == self._header else int.from_bytes(start[:_COUNT], "little")
        return rows if len(self._header) + rows * self._row_bytes <= os.fstat(self._file.fileno()).st_size else 0

    def write(self, first: int, blocks: Iterable[np.ndarray]) -> None:
        """Append blocks of rows from row ``first`` (at most ``rows_done()``) on, and give the array its name.

        Whatever stops it (Ctrl-C, an unreadable shard, a full disk), finished blocks are counted.

        Raises:
            OSError: the disk refuses.
        """
        rows, synced = first, time.monotonic()
        self._count(first)  # what lies behind is written anew, and must not be counted meanwhile
        self._file.seek(len(self._header) + first * self._row_bytes)
        self._file.truncate()
        try:
            for block in blocks:
                self._file.write(np.ascontiguousarray(block, dtype=self._dtype).data)
                self._file.flush()
                rows += len(block)
                if time.monotonic() - synced >= _SYNC_S:
                    self._count(rows)
                    synced = time.monotonic()
        finally:
            self._count(rows)
        assert rows == self.shape[0], "the blocks are the whole array"
        os.pwrite(self._file.fileno(), self._header, 0)
        sync(growing_path(self.path))
        growing_path(self.path).replace(self.path)
        sync(self.path.parent)

    def _count(self, rows: int) -> None:
        os.fdatasync(self._file.fileno())
        os.pwrite(self._file.fileno(), rows.to_bytes(_COUNT, "little") + self._header[_COUNT:], 0)


@contextlib.contextmanager
def claim(path: Path, shape: tuple[int, ...], dtype: np.dtype, waiting: Callable[[int], None] | None = None) -> Iterator[GrowingArray]:
    """The growing array of ``path`` for its only writer; waits while another process has it.

    Whoever waited has to look first whether the array is there by now. The system drops the lock (flock) with the process, however it
    dies.

    Args:
        waiting: called now and then with the rows that the other process has counted.

    Raises:
        OSError: the file cannot be made.
    """
    while True:
        with os.fdopen(os.open(growing_path(path), os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            mine = GrowingArray(file, path, shape, dtype)
            if _locked(file, growing_path(path)):
                yield mine
                return
            if waiting is not None and (rows := mine.rows_done()):
                waiting(rows)
        time.sleep(_POLL_S)


def growing_path(path: Path) -> Path:
    """Where an array grows that shall lie at ``path``."""
    return path.with_name(f".{path.name}.partial")


def _locked(file: IO[bytes], path: Path) -> bool:
    """Lock a file, unless another process has it; of use only while it has its name: a finished one has another, and is let go again."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        return False


def _header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape})
    return header.getvalue()


def features_key(encoder: str, store: Store, rows: np.ndarray) -> str:
    """Name of the features of ``rows`` by the encoder with this fingerprint."""
    digest = _digest([encoder, store.store_id, code_digest(decode, loader, transform, collect, pooled)])
    digest.update(store.index["id"][rows].tobytes())
    return digest.hexdigest()[:40]


def score_key(*parts: Any) -> str:
    """Name of a score that ``parts`` (JSON values) decide."""
    return _digest(list(parts)).hexdigest()[:40]


def code_digest(*modules: ModuleType) -> str:
    """Digest of our modules' source and of the versions of the libraries below them: a change of either is a change of the result."""
    digest = _digest([torch.__version__, PIL.__version__, np.__version__, sklearn.__version__])
    for module in modules:
        digest.update(Path(module.__file__ or "").read_bytes())
    return digest.hexdigest()


def _digest(value: Any) -> Any:
    return hashlib.sha256(json.dumps(value).encode())
