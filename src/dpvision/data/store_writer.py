"""Write a store: its folder, tar shards, and secret key.

Records and persons are hashed under the key. A store's id is published with every statement, so
hashes keyed by the id would let anyone with an image and a leaked list of record ids test whether
the image is in the store. The key is random, stays in the store's ``confidential/`` folder, and no
run reads it: ids are computed once, at the import. Copies and halves of a store share it, so a
record has the same id in all of them.
"""

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dpvision.data.declared import shared_images
from dpvision.data.decode import extension
from dpvision.data.sample import Sample
from dpvision.data.store import ABOUT, Store, write_description
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
    """Yield a temporary folder next to ``target``.

    It is renamed to ``target`` if the block succeeds, and removed if not.

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
    """Writes tar shards of about ``SHARD_BYTES``.

    NUMBER.jpg, and NUMBER.json with key, captions, label and unit.
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


KEY_FILE = Path("confidential") / "key"
_KEY_BYTES = 32


def new_key(store_dir: Path) -> bytes:
    """Draw a key of 32 random bytes and write it to ``confidential/`` of a new store.

    Readable by its owner only.
    """
    key = secrets.token_bytes(_KEY_BYTES)
    _write(store_dir, key)
    return key


def copy_key(source_dir: Path, store_dir: Path) -> None:
    """Copy the key to a store that shares the records.

    Does nothing if the source has no key (textures).
    """
    if (source_dir / KEY_FILE).exists():
        _write(store_dir, read_key(source_dir))


def read_key(store_dir: Path) -> bytes:
    """Read the key of a store, to find the records of an image or a person again.

    Raises:
        DataError: the key is missing, not readable, or malformed.
    """
    path = store_dir / KEY_FILE
    try:
        key = bytes.fromhex(path.read_text())
    except (OSError, ValueError) as error:
        remedy = remedy_for(error, "Restore it from a copy of the store.")
        raise DataError(f"store: {path}: {error}; expected the store's key. {remedy}") from None
    if len(key) != _KEY_BYTES:
        raise DataError(
            f"store: {path}: {len(key)} bytes; expected {_KEY_BYTES}. Restore it from a copy of "
            "the store."
        )
    return key


def keyed_hash(key: bytes, data: bytes) -> int:
    """63-bit keyed BLAKE2b of ``data``.

    Reveals nothing about ``data`` without the key, and differs between stores.
    """
    return int.from_bytes(blake2b(data, key=key, digest_size=8).digest(), "little") >> 1


def _write(store_dir: Path, key: bytes) -> None:
    path = store_dir / KEY_FILE
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key.hex())


def write_part(
    store: Store, folder: Path, chosen: np.ndarray, about: dict[str, Any], without: str = ""
) -> None:
    """Write the store of some records of another one.

    It reads that store's shards in place and shares its id and key.

    Args:
        chosen: bool (N,), the records of the part.
        about: entries of store.json that differ from those of ``store``.
        without: an entry that the part does not have.
    """
    home = store.path.resolve()

    def there(name: str) -> tuple[str, int]:
        file = store.meta[name]
        return str(home / file["path"]), file["bytes"]

    kept = {name: store.meta[name] for name in ABOUT if name in store.meta and name != without}
    if store.meta.get("unit_field") is not None:
        kept["shared_images"] = shared_images(store)
    copy_key(home, folder)
    write_description(
        folder,
        store.index[chosen],
        kept | about,
        shards=[(str(home / shard["path"]), shard["bytes"]) for shard in store.meta["shards"]],
        text=there("text"),
        labels=there("labels") if "labels" in store.meta else None,
    )
