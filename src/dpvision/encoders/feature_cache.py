"""A cache of features, scores and image signatures in the folder of the store that they are of.

Features of private images are as private as the images: they are under
STORE/confidential/features/, readable by the owner only. A file's name is a digest of what
determines its content: the encoder (weights, preprocessing, and features of fixed noise),
``FEATURES_VERSION``, the versions of the image decoders, the store and its rows. Files are never
updated, and never deleted, except one that could not be finished: to free the space, delete the
folder; what is needed is computed again.

Legend: N records, D feature dimension, B images, C channels, H height, W width.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import PIL
import simplejpeg
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dpvision.data.multi_label import NO_ARRAY
from dpvision.data.store import Store
from dpvision.errors import DataError, remedy_for
from dpvision.files import replacing, sync

FEATURES_VERSION = 1
"""Raise it with every change of decoding, preprocessing or a fixed encoder that changes features:
those kept before are then computed again. tests/encoders/test_features_version.py reminds you.
"""
_SYNC_S = 1.0
"""Interval at which the rows of a growing array are counted; uncounted rows are lost with the
process.
"""
_POLL_S = 0.2
_COUNT = 8
"""Size of the count in bytes."""


class FeatureCache:
    """The cache of one store. A full or read-only disk or a damaged file only costs time."""

    def __init__(self, store_dir: Path) -> None:
        self.folder = store_dir / "confidential" / "features"

    def load(self, key: str) -> dict[str, Tensor] | None:
        """Return the tensors cached under ``key``, or None."""
        try:
            return load_file(self.folder / f"{key}.safetensors")
        except (OSError, SafetensorError):
            return None

    def save(self, key: str, tensors: dict[str, Tensor]) -> None:
        """Cache tensors under ``key``, if the disk has space for them."""
        if self.has_room(key, sum(t.numel() * t.element_size() for t in tensors.values())):
            made = {k: t.contiguous().clone() for k, t in tensors.items()}
            self._write(f"{key}.safetensors", lambda path: save_file(made, path))

    def load_array(self, key: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray | None:
        """Return the array cached under ``key``, memory-mapped and read-only, or None if missing or
        of another shape or type.
        """
        try:
            found = np.load(self.folder / f"{key}.npy", mmap_mode="r", allow_pickle=False)
        except NO_ARRAY:
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
        """Write an array of any size in blocks along its first axis, and return it like
        ``load_array``. The folder must exist.

        Continues where an earlier process stopped or was killed, and waits while another process
        writes the same array.

        Args:
            blocks_from: yields the blocks in order, starting at a given row, a multiple of
                ``step``.
            progress: called with the number of rows written by another process while waiting for
                it.

        Raises:
            DataError: the disk cannot be written. Finished rows are kept.
        """
        try:
            with claim(self.folder / f"{key}.npy", shape, dtype, progress) as partial:
                written = self.load_array(key, shape, dtype)
                if written is not None:  # the other process has finished it
                    growing_path(partial.path).unlink(missing_ok=True)
                else:
                    first = partial.rows_done() // step * step
                    partial.write(first, blocks_from(first))
                    written = self.load_array(key, shape, dtype)
        except OSError as error:
            remedy = remedy_for(error, "Free space, then repeat.")
            raise DataError(
                f"features: {self.folder} ({error.strerror or error}); expected a writable "
                f"folder with free space. {remedy}"
            ) from None
        assert written is not None, "just written"
        return written

    def has_room(self, key: str, num_bytes: int) -> bool:
        """Return whether the folder exists or can be made, and its disk has space for the rest of
        an array of ``num_bytes``.
        """
        if not self.make_folder():
            return False
        partial = growing_path(self.folder / f"{key}.npy")
        there = 0
        with contextlib.suppress(FileNotFoundError):
            there = partial.stat().st_size
        return shutil.disk_usage(self.folder).free > 1.05 * num_bytes - there

    def make_folder(self) -> bool:
        """Make the folder, readable by its owner only, if it does not exist. Return whether it is
        writable.
        """
        try:
            # Level by level: mkdir's mode does not apply to parents.
            for folder in (self.folder.parent, self.folder):
                folder.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            return False
        return os.access(self.folder, os.W_OK)

    def load_json(self, key: str) -> Any:
        """Return the JSON value cached under ``key``, or None."""
        try:
            return json.loads((self.folder / f"{key}.json").read_bytes())
        except (OSError, ValueError):
            return None

    def save_json(self, key: str, value: Any) -> None:
        """Cache a JSON value under ``key``."""
        self._write(f"{key}.json", lambda path: path.write_text(json.dumps(value, allow_nan=False)))

    def _write(self, name: str, write: Callable[[Path], object]) -> None:
        with contextlib.suppress(
            OSError, SafetensorError
        ):  # the second is how safetensors reports a full disk
            if self.make_folder():
                with replacing(self.folder / name) as partial:
                    write(partial)


class GrowingArray:
    """An array that grows in a temporary file, locked by one writer at a time (``claim``).

    The file is a .npy file whose first eight bytes, numpy's magic string and version, hold the
    number of rows written until it is complete. Rows reach the disk before they are counted (data,
    fdatasync, count), so that neither SIGKILL nor a power cut leaves a counted row that was not
    written. Blocks are written, not mapped, so that a full disk raises OSError.

    Args:
        file: the locked file.
        path: final path of the array.
    """

    def __init__(
        self, file: IO[bytes], path: Path, shape: tuple[int, ...], dtype: np.dtype
    ) -> None:
        self.path, self.shape = path, shape
        self._file, self._dtype, self._header = file, dtype, _header(shape, dtype)
        self._row_bytes = math.prod(shape[1:]) * dtype.itemsize

    def rows_done(self) -> int:
        """Return the number of rows durably written; 0 for a file with another header."""
        start = os.pread(self._file.fileno(), len(self._header), 0)
        if start[_COUNT:] != self._header[_COUNT:]:
            return 0
        # With the magic string the array is complete: the process was killed before the rename.
        rows = self.shape[0] if start == self._header else int.from_bytes(start[:_COUNT], "little")
        return (
            rows
            if len(self._header) + rows * self._row_bytes <= os.fstat(self._file.fileno()).st_size
            else 0
        )

    def write(self, first: int, blocks: Iterable[np.ndarray]) -> None:
        """Append blocks of rows from row ``first`` (at most ``rows_done()``) on, and rename the
        file to its final path.

        Finished blocks are counted even if writing is interrupted (Ctrl-C, an unreadable shard, a
        full disk).

        Raises:
            OSError: the disk cannot be written.
        """
        rows, synced = first, time.monotonic()
        self._count(first)  # later rows are rewritten and must not count meanwhile
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
def claim(
    path: Path,
    shape: tuple[int, ...],
    dtype: np.dtype,
    waiting: Callable[[int], None] | None = None,
) -> Iterator[GrowingArray]:
    """Yield the growing array of ``path``, locked; wait while another process has the lock.

    After waiting, check first whether the array is complete. The system releases the lock (flock)
    when the process ends, in any way.

    Args:
        waiting: called repeatedly with the number of rows that the other process has counted.

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
    """Return the temporary path of an array that grows towards ``path``."""
    return path.with_name(f".{path.name}.partial")


def _locked(file: IO[bytes], path: Path) -> bool:
    """Try to lock a file. Return False if another process has the lock, or if the file was renamed
    because it is finished.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except (BlockingIOError, FileNotFoundError):
        return False


def _header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header,
        {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape},
    )
    return header.getvalue()


def features_key(encoder: str, store: Store, rows: np.ndarray) -> str:
    """Return the cache key of the features of ``rows`` by the encoder with this fingerprint."""
    digest = _digest([encoder, store.store_id, FEATURES_VERSION, *_decoders()])
    digest.update(store.index["id"][rows].tobytes())
    return digest.hexdigest()[:40]


def score_key(*parts: Any) -> str:
    """Return the cache key of a score that ``parts`` (JSON values) determine."""
    return _digest(list(parts)).hexdigest()[:40]


def _decoders() -> list[str]:
    """Return the versions of the libraries that decode images."""
    try:
        import pillow_heif

        heif = pillow_heif.__version__
    except ImportError:
        heif = "absent"
    return [PIL.__version__, simplejpeg.__version__, heif]


def _digest(value: Any) -> Any:
    return hashlib.sha256(json.dumps(value).encode())
