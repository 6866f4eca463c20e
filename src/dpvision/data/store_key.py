"""The secret key of a store, under which records and persons are hashed.

A store's id is published with every statement. Hashes keyed by it would let anyone with an image
and a leaked list of record ids test whether the image is in the store. The key is random, stays in
the store's ``confidential/`` folder, and no run reads it: ids are computed once, at the import.
Copies and halves of a store share it, so a record has the same id in all of them.
"""

import os
import secrets
from hashlib import blake2b
from pathlib import Path

from dpvision.errors import DataError, remedy_for

KEY_FILE = Path("confidential") / "key"
_KEY_BYTES = 32


def new_key(store_dir: Path) -> bytes:
    """Draw a key of 32 random bytes and write it to the ``confidential/`` folder of a new store,
    readable by its owner only.
    """
    key = secrets.token_bytes(_KEY_BYTES)
    _write(store_dir, key)
    return key


def copy_key(source_dir: Path, store_dir: Path) -> None:
    """Copy the key to a store that shares the records; does nothing if the source has no key
    (textures).
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
    """63-bit keyed BLAKE2b of ``data``: reveals nothing about ``data`` without the key, and differs
    between stores.
    """
    return int.from_bytes(blake2b(data, key=key, digest_size=8).digest(), "little") >> 1


def _write(store_dir: Path, key: bytes) -> None:
    path = store_dir / KEY_FILE
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key.hex())
