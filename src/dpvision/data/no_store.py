"""What is at a path where a store was expected."""

import os
from pathlib import Path
from shlex import quote

from dpvision.errors import DataError, remedy_for

_IMPORT = (
    "with --classes FILE if its folders or labels are class names and the images are private, "
    "or with --public if they are not"
)
_SHOWN = 3


def check_is_store(path: Path) -> None:
    """Raise DataError unless there is a store at ``path``, intact or not.

    The message says what is there instead, and what to do.

    Raises:
        DataError: nothing, a file, a run, a folder of stores, or images that were not imported; or
            it may not be read.
    """
    try:
        if (path / "store.json").exists():
            return
        found = _found(path)
    except OSError as error:
        remedy = remedy_for(error, "Check the path.")
        raise DataError(
            f"store: {path}: {error.strerror}; expected a store that can be read. {remedy}"
        ) from None
    raise DataError(f"store: {path}: {found}")


def _found(path: Path) -> str:
    if not path.exists():
        return (
            "no such folder; expected a store. Make one with `dpvision data import SOURCE STORE`."
        )
    named = path if path.name not in ("", "..") else path.resolve()
    new = f"{named.with_suffix('') if path.is_file() else named}-store"
    command = f"Import it first: dpvision data import {quote(str(path))} {quote(new)}, {_IMPORT}."
    if path.is_file():
        return f"a file; expected a store. {command}"
    if any((folder / "config.json").exists() for folder in (path, path / "confidential")):
        return (
            "a run; expected a store, which `dpvision data import SOURCE STORE` makes. Give the "
            "store's folder."
        )
    stores = [below for below in sorted(path.iterdir()) if os.path.isfile(below / "store.json")]
    if stores:
        shown = ", ".join(map(str, stores[:_SHOWN])) + (", ..." if len(stores) > _SHOWN else "")
        return f"a folder of stores; expected one of them. Give one: {shown}."
    return (
        "a folder without store.json; expected a store, because images are read from stores "
        f"only. {command}"
    )
