"""Open a store: image files in tar shards (``store``), or textures (``texture_store``)."""

from pathlib import Path
from typing import Any

import numpy as np

from dpvision.data.multi_label import NO_ARRAY, LabelSets
from dpvision.data.no_store import check_is_store
from dpvision.data.rows import ROW
from dpvision.data.store import (
    FORMAT,
    REMEDY,
    SEVERAL_FORMAT,
    TEXTURES_FORMAT,
    WINDOW,
    Store,
)
from dpvision.errors import DataError, remedy_for
from dpvision.strict_json import parse_json


def is_store(path: str | Path) -> bool:
    """Return whether a folder is a store, intact or not."""
    return (Path(path) / "store.json").exists()


def open_store(path: str | Path, *, check: bool = True) -> Store:
    """Open a store and check its files.

    Every shard has its recorded size, every row lies inside its shard, and the last row of each
    shard follows a tar header of its size.

    Args:
        check: whether to check all that; False for a store that was opened before.

    Raises:
        DataError: not a store, written by another version, or files and index do not match.
    """
    path = Path(path)
    meta = _description(path)
    if meta["format"] == TEXTURES_FORMAT:
        from dpvision.data.texture_store import TextureStore  # with torch

        return TextureStore(path, meta)
    try:
        index = np.load(path / "index.npy", mmap_mode="r", allow_pickle=False)
    except NO_ARRAY as error:
        raise DataError(
            f"store: {path / 'index.npy'}: {error}; expected the index of the store. "
            f"{remedy_for(error, REMEDY)}"
        ) from None
    if index.dtype != ROW or index.shape != (meta["num_records"],):
        got = f"{index.dtype} of shape {index.shape}"
        raise DataError(
            f"store: {path}: index is {got}; expected {meta['num_records']} rows of {FORMAT}. "
            f"{REMEDY}"
        )
    sets = (
        LabelSets.open(path / meta["labels"]["path"], meta["labels"]["bytes"])
        if meta["format"] == SEVERAL_FORMAT
        else None
    )
    store = Store(path, meta, index, sets)
    if check:
        store.check()
    return store


def _description(path: Path) -> dict[str, Any]:
    """Return the content of store.json, with every field present."""
    check_is_store(path)
    file = path / "store.json"
    try:
        meta = parse_json(file.read_text())
    except OSError as error:
        raise DataError(
            f"store: {file}: {error.strerror}; expected the description of a store. "
            f"{remedy_for(error, REMEDY)}"
        ) from None
    except ValueError:
        raise DataError(
            f"store: {file}: not JSON; expected the description of a store. {REMEDY}"
        ) from None
    if not isinstance(meta, dict) or meta.get("format") not in (
        FORMAT,
        SEVERAL_FORMAT,
        TEXTURES_FORMAT,
    ):
        got = meta.get("format") if isinstance(meta, dict) else meta
        raise DataError(
            f"store: {file}: format={got!r}; expected {FORMAT}. Import the source again with "
            "this version."
        )
    files = {"first", "size_px"} if meta["format"] == TEXTURES_FORMAT else {"shards", "text"}
    files |= {"labels"} if meta["format"] == SEVERAL_FORMAT else set()
    kinds: dict[str, Any] = {"store_id": str, "num_records": int, "label_names": list}
    kinds |= {"shards": list, "text": dict, "labels": dict, "first": int, "size_px": int}
    missing = {"store_id", "visibility", "num_records", "label_names", *files} - set(meta)
    if missing or meta["visibility"] not in ("private", "public"):
        raise DataError(
            f"store: {file}: incomplete ({sorted(missing)}); expected every field of {FORMAT}. "
            f"{REMEDY}"
        )
    wrong = [name for name, kind in kinds.items() if not isinstance(meta.get(name), kind | None)]
    wrong += [name for name in files | {"store_id", "num_records"} if meta[name] is None]
    if wrong or not _fits(meta):
        raise DataError(
            f"store: {file}: values of another kind ({', '.join(wrong) or 'files, names or range'})"
            f"; expected {FORMAT} as it was written. {REMEDY}"
        )
    return meta


def _fits(meta: dict[str, Any]) -> bool:
    """Whether the parts of lists and objects in store.json are of the kinds that are written."""
    files = [*(meta.get("shards") or []), *filter(None, map(meta.get, ("text", "labels")))]
    numbers = [0, 0] if meta.get(WINDOW) is None else meta[WINDOW]
    return (
        all(
            isinstance(file, dict)
            and isinstance(file.get("path"), str)
            and "\0" not in file["path"]
            and type(file.get("bytes")) is int
            and 0 <= file["bytes"] < 1 << 60
            for file in files
        )
        and all(isinstance(name, str) for name in meta["label_names"] or [])
        and 0 <= meta["num_records"] < 1 << 40
        and isinstance(numbers, list)
        and [type(number) in (int, float) for number in numbers] == [True, True]
    )
