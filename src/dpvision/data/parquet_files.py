"""Read parquet files of images: which column holds them, class names, and the rows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dpvision.data.captions import CAPTION_FIELDS
from dpvision.data.decode import HEAD_BYTES, may_be_image
from dpvision.data.img2dataset import STATUS, has_status
from dpvision.data.table_files import require_fields
from dpvision.errors import DataError, remedy_for
from dpvision.strict_json import parse_json

_MOST_ROWS, _BATCH_BYTES, _MOST_UNPACKED = 512, 1 << 26, 50


def read_arrow(path: Path, read: Callable[[], Any]) -> Any:
    """Return ``read()``. Raises DataError if the file is damaged."""
    try:
        return read()
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError: text that is no UTF-8
        remedy = remedy_for(error, "Copy it again or remove it.")
        raise DataError(f"source: {path}: {error}; expected a parquet file. {remedy}") from None


def image_column(schema: pa.Schema, path: Path, file: Any = None) -> tuple[str, int]:
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
        path,
        lambda: next(pq.ParquetFile(file or path).iter_batches(batch_size=8, columns=found), None),
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
    features = _features(schema)
    declared = [
        name
        for name in pool
        if isinstance(found_type := features.get(name), dict) and found_type.get("_type") == "Image"
    ]
    for chosen in (images, declared, [name for name in pool if name.lower() == "image"]):
        if len(chosen) == 1:
            return chosen[0], len(set(images) - set(chosen))
    raise DataError(
        f"source: {path}: columns {', '.join(pool)} hold bytes, {len(images)} of them images; "
        "expected one column of images. Rename the right one to image."
    )


def _schema(path: Path, file: Any = None) -> pa.Schema:
    """Return the columns of a file. Raises DataError for two of one name."""
    schema = read_arrow(path, partial(pq.read_schema, file or path))
    if len(set(schema.names)) < len(schema.names):
        raise DataError(
            f"source: {path}: columns {schema.names}; expected each name once. Rename the others."
        )
    return schema


def _features(schema: pa.Schema) -> dict[str, Any]:
    """Return the features in the metadata of Hugging Face datasets; empty without metadata."""
    try:
        about = parse_json((schema.metadata or {})[b"huggingface"], nan=True)
        found = about["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _class_names(schema: pa.Schema, label: str) -> list[str] | None:
    """Return the class names in that metadata, of a column of classes or of lists of classes."""
    feature: Any = _features(schema).get(label)
    try:
        if isinstance(feature, list):
            (feature,) = feature
        names = feature.get("feature", feature)["names"]
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return [str(name) for name in names] if isinstance(names, list) else None


def _batch_rows(file: pq.ParquetFile, path: Path) -> int:
    """Return how many rows to read at once.

    A cell is at most as large as its column in a row group, and many rows may name the same one of
    a dictionary: so much larger than the file may a batch be.

    Raises:
        DataError: a column unpacks to far more than its size, and would be in memory at once.
    """
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    columns = [group.column(i) for group in groups for i in range(group.num_columns)]
    for column in columns:
        size, packed = column.total_uncompressed_size, column.total_compressed_size
        if size > max(_BATCH_BYTES, _MOST_UNPACKED * packed):
            raise DataError(
                f"source: {path}: {packed:,} bytes unpack to {size:,}; expected at most "
                f"{_MOST_UNPACKED} times their size. Remove it, or write smaller row groups."
            )
    return max(
        1, min(_MOST_ROWS, _BATCH_BYTES // max([1, *(c.total_uncompressed_size for c in columns)]))
    )


@dataclass(frozen=True)
class Layout:
    """What all files of a source have in common: the first one decides."""

    first: Path
    image: str
    """The column of images."""
    columns: list[str]
    """All columns that are read, ``image`` first."""
    useful: frozenset[str]
    """Columns that a file must have, if the first one has them."""
    label: str
    label_names: list[str] | None


def parquet_layout(
    path: Path, label: str, wanted: list[str], file: Any = None
) -> tuple[Layout, int]:
    """Return the layout of a file, and the number of further columns of images.

    Args:
        label: the column of classes, if there is one.
        wanted: columns that must exist.
        file: the open file, if it is not on this machine.

    Raises:
        DataError: the file is damaged, or has no column of images.
    """
    schema = _schema(path, file)
    image, others = image_column(schema, path, file)
    require_fields(wanted, set(schema.names) - {image}, path)
    status = {STATUS} if has_status(schema.names) else set()
    useful = {label, *wanted, *CAPTION_FIELDS, *status} - {image}
    columns = [image, *sorted(useful & set(schema.names))]
    names = _class_names(schema, label)
    return Layout(path, image, columns, frozenset(useful), label, names), others


def parquet_rows(path: Path, layout: Layout) -> Iterator[tuple[str, bytes | None, dict[str, Any]]]:
    """Yield the rows of a file: image name, image file or None, other cells.

    Raises:
        DataError: the file is damaged, or has other columns or class names than the layout.
    """
    image, columns = layout.image, layout.columns
    file = read_arrow(path, partial(pq.ParquetFile, path))
    found = _schema(path)
    if image not in found.names or layout.useful & set(found.names) != set(columns) - {image}:
        raise DataError(
            f"source: {path}: columns {found.names}; expected those of {layout.first}, {columns}. "
            "Import it separately."
        )
    if _class_names(found, layout.label) != layout.label_names:
        raise DataError(
            f"source: {path}: class names unlike those of {layout.first}; expected the same, in "
            "one order. Import it apart."
        )
    batches = file.iter_batches(batch_size=_batch_rows(file, path), columns=columns)
    number = 0
    while (batch := read_arrow(path, partial(next, batches, None))) is not None:
        for row in read_arrow(path, batch.to_pylist):
            cell = row.pop(image)
            data, name = (
                (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
            )
            yield name or f"{path.stem}-{number}", data, row
            number += 1
