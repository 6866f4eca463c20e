"""Write a store: its folder and secret key.

Records and persons are hashed under the key. A store's id is published with every statement, so
hashes keyed by the id would let anyone with an image and a leaked list of record ids test whether
the image is in the store. The key is random, stays in the store's ``confidential/`` folder, and no
run reads it: ids are computed once, at the import. Copies and halves of a store share it, so a
record has the same id in all of them.
"""

import contextlib
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dpvision.data.declared import shared_images
from dpvision.data.store import ABOUT, Store, write_description
from dpvision.errors import CheckpointError, DataError, remedy_for
from dpvision.files import new_folder, sync


def require_new(target: Path) -> None:
    """Raise DataError if there is something at ``target``."""
    if target.exists():
        raise DataError(
            f"data: {target} exists; expected a new folder. Choose another name, or remove it "
            "first."
        )


@contextlib.contextmanager
def new_store_folder(
    target: Path, *, private: bool, last: Callable[[Path], None] | None = None
) -> Iterator[Path]:
    """Yield a temporary folder next to ``target``.

    It is renamed to ``target`` if the block and ``last`` succeed, and removed if not; ``last`` as
    for ``files.new_folder``.

    Raises:
        DataError: ``target`` exists, or a write fails (disk full).
    """
    require_new(target)
    try:
        with new_folder(target, mode=0o700 if private else 0o777, last=last) as folder:
            yield folder
    except (OSError, CheckpointError) as error:
        problem = getattr(error, "strerror", None) or error
        remedy = remedy_for(error.__cause__ or error, "Free space or choose another disk.")
        raise DataError(
            f"data: {target}: {problem}; expected to write the store, of which nothing was kept. "
            f"{remedy}"
        ) from error


KEY_FILE = Path("confidential") / "key"
_KEY_BYTES = 32


def new_key(store_dir: Path) -> bytes:
    """Draw a key of 32 random bytes and write it to ``confidential/`` of a new store.

    Readable by its owner only.
    """
    key = secrets.token_bytes(_KEY_BYTES)
    _write(store_dir, key)
    return key


def durable_key(folder: Path) -> bytes:
    """Return the key of a folder, which gets one that survives a power cut if it has none."""
    if not (folder / KEY_FILE).exists():
        new_key(folder)
        sync(folder / KEY_FILE)
    return read_key(folder)


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
    beside = folder.resolve().parent == home.parent  # both may be moved together
    base = Path("..", home.name) if beside else home

    def there(file: dict[str, Any]) -> tuple[str, int]:
        return os.path.normpath(base / file["path"]), file["bytes"]

    kept = {name: store.meta[name] for name in ABOUT if name in store.meta and name != without}
    if store.meta.get("unit_field") is not None:
        kept["shared_images"] = shared_images(store)
    copy_key(home, folder)
    index = store.index[chosen]
    np.save(folder / "index.npy", index, allow_pickle=False)
    write_description(
        folder,
        len(index),
        kept | about,
        shards=[there(shard) for shard in store.meta["shards"]],
        text=there(store.meta["text"]),
        labels=there(store.meta["labels"]) if "labels" in store.meta else None,
    )
