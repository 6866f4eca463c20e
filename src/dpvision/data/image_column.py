"""The column of images of a parquet file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dpvision.data.captions import CAPTION_FIELDS
from dpvision.data.decode import HEAD_BYTES, may_be_image
from dpvision.errors import DataError, remedy_for


def read_arrow(path: Path, read: Callable[[], Any]) -> Any:
    """Return ``read()``. Raises DataError if the file is damaged."""
    try:
        return read()
    except (pa.ArrowException, OSError) as error:
        remedy = remedy_for(error, "Copy it again or remove it.")
        raise DataError(f"source: {path}: {error}; expected a parquet file. {remedy}") from None


def image_column(schema: pa.Schema, path: Path) -> tuple[str, int]:
    """Return the column of images, and the number of other columns that hold images too.

    Of several with bytes: the one whose first cells are images; of several such, the only image of
    Hugging Face's metadata, or `image`.
    """

    def holds_bytes(kind: pa.DataType) -> bool:
        return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)

    def may_hold(field: pa.Field) -> bool:
        in_struct = pa.types.is_struct(field.type) and any(
            f.name == "bytes" and holds_bytes(f.type) for f in field.type.fields
        )
        return field.name not in CAPTION_FIELDS and (
            holds_bytes(field.type) or in_struct
        )  # captions may be binary too

    found = [field.name for field in schema if may_hold(field)]
    if not found:
        raise DataError(
            f"source: {path}: columns {schema.names}; expected one with image bytes (binary, or "
            "a struct with `bytes`). Add it."
        )
    if len(found) == 1:
        return found[0], 0
    head = read_arrow(
        path, lambda: next(pq.ParquetFile(path).iter_batches(batch_size=8, columns=found), None)
    )
    cells = {
        name: []
        if head is None
        else [c.get("bytes") if isinstance(c, dict) else c for c in head[name].to_pylist()]
        for name in found
    }
    images = [
        name
        for name in found
        if any(cell and may_be_image(cell[:HEAD_BYTES]) for cell in cells[name])
    ]
    pool = images or found
    declared = [name for name in pool if _features(schema).get(name, {}).get("_type") == "Image"]
    for chosen in (images, declared, [name for name in pool if name.lower() == "image"]):
        if len(chosen) == 1:
            return chosen[0], len(set(images) - set(chosen))
    raise DataError(
        f"source: {path}: columns {', '.join(pool)} hold bytes, {len(images)} of them images; "
        "expected one column of images. Rename the right one to image."
    )


def _features(schema: pa.Schema) -> dict[str, Any]:
    """Return the features in the metadata of Hugging Face datasets; empty without metadata."""
    try:
        found = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    return (
        {name: feature for name, feature in found.items() if isinstance(feature, dict)}
        if isinstance(found, dict)
        else {}
    )
