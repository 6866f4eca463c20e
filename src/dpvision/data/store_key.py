"""The secret of a store under which records and persons are hashed.

A store's id is published with every statement. Hashes under it would let whoever holds an image and a leaked list of record ids test
whether that image is in the store. The key is random, never leaves the store's ``confidential/`` folder, and no run reads it: an id is
computed once, at the import. Halves of a split store and copies share it, so a record has one id in all of them.
"""

import os
import secrets
from hashlib import blake2b
from pathlib import Path

from dpvision.errors import DataError

KEY_FILE = Path("confidential") / "key"
_KEY_BYTES = 32


def new_key(store_dir: Path) -> bytes:
    """A fresh key of 32 random bytes, written to the ``confidential/`` folder of a store that is being made; readable by its owner only."""
    key = secrets.token_bytes(_KEY_BYTES)
    _write(store_dir, key)
    return key


def copy_key(source_dir: Path, store_dir: Path) -> None:
    """Give a store that shares the records of another one its key too; a store without a key (textures) has none to give."""
    if (source_dir / KEY_FILE).exists():
        _write(store_dir, read_key(source_dir))


def read_key(store_dir: Path) -> bytes:
    """The key of a store, to find the records of an image or of a person again.

    Raises:
        DataError: it is not there, may not be read, or is no key.
    """
    path = store_dir / KEY_FILE
    try:
        key = bytes.fromhex(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"store: {path}: {error}; expected the store's key. Restore it from a copy of the store.") from None
    if len(key) != _KEY_BYTES:
        raise DataError(f"store: {path}: {len(key)} bytes; expected {_KEY_BYTES}. Restore it from a copy of the store.")
    return key


def keyed_hash(key: bytes, data: bytes) -> int:
    """63-bit BLAKE2b of ``data`` under a store's key: without the key it says nothing of ``data``, and ids of two stores do not match."""
    return int.from_bytes(blake2b(data, key=key, digest_size=8).digest(), "little") >> 1


def _write(store_dir: Path, key: bytes) -> None:
    path = store_dir / KEY_FILE
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(key.hex())
