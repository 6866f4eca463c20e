"""The folder of a new store, and the tar shards in it."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dpvision.data.decode import extension
from dpvision.data.sources import Sample
from dpvision.data.tarindex import TarWriter
from dpvision.errors import CheckpointError, DataError, remedy_for
from dpvision.files import new_folder

SHARD_BYTES = 1 << 28


def require_new(target: Path) -> None:
    """Raise DataError if there is something at ``target``."""
    if target.exists():
        raise DataError(
            f"data: {target} exists; expected a new folder. Choose another name, or remove it "
            "first."
        )


@contextlib.contextmanager
def new_store_folder(target: Path, *, private: bool) -> Iterator[Path]:
    """Yield a temporary folder next to ``target``; rename it to ``target`` if the block succeeds,
    remove it if not.

    Raises:
        DataError: ``target`` exists, or a write fails (disk full).
    """
    require_new(target)
    try:
        with new_folder(target, mode=0o700 if private else 0o777) as folder:
            yield folder
    except (OSError, CheckpointError) as error:
        problem = getattr(error, "strerror", None) or error
        remedy = remedy_for(error.__cause__ or error, "Free space or choose another disk.")
        raise DataError(
            f"data: {target}: {problem}; expected to write the store, of which nothing was kept. "
            f"{remedy}"
        ) from error


class ShardWriter:
    """Writes tar shards of about ``SHARD_BYTES``: NUMBER.jpg, and NUMBER.json with key, captions,
    label and unit.
    """

    def __init__(self, folder: Path, files: contextlib.ExitStack) -> None:
        self._folder, self._files = folder, files
        self._tar: TarWriter | None = None
        self._file: BinaryIO | None = None
        self._done: list[tuple[str, int]] = []
        self._number = 0

    def add(
        self, sample: Sample, captions: tuple[str, ...], label: Any, unit: int
    ) -> tuple[int, int]:
        """Write one sample; return its shard number and the image's offset in it."""
        if self._tar is not None and self._tar.position >= SHARD_BYTES:
            self._close()
        if self._tar is None:
            (self._folder / "shards").mkdir(exist_ok=True)
            self._file = self._files.enter_context((self._folder / self._name()).open("wb"))
            self._tar = TarWriter(self._file)
        name = f"{self._number:09d}"
        self._number += 1
        offset = self._tar.add(f"{name}.{extension(sample.image)}", sample.image)
        beside = {
            "key": sample.key,
            "captions": captions,
            "label": label,
            "unit": None if unit < 0 else f"{unit:016x}",
        }
        self._tar.add(
            f"{name}.json",
            json.dumps({k: v for k, v in beside.items() if v not in (None, ())}).encode(),
        )
        return len(self._done), offset

    def _name(self) -> str:
        return f"shards/shard-{len(self._done):06d}.tar"

    def _close(self) -> None:
        assert self._tar is not None and self._file is not None
        self._done.append((self._name(), self._tar.finish()))
        self._file.close()
        self._tar = self._file = None

    def finish(self) -> list[tuple[str, int]]:
        """Close the last shard; return (path inside the store, size in bytes) of each."""
        if self._tar is not None:
            self._close()
        return self._done
