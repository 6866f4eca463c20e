"""The table of Hugging Face's imagefolder layout, metadata.csv or metadata.jsonl: fields of the
images of a folder by file_name.
"""

import posixpath
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dpvision.data.captions import CAPTION_FIELDS
from dpvision.data.csv_table import read_csv
from dpvision.data.join import one_form
from dpvision.errors import DataError, remedy_for
from dpvision.strict_json import parse_json

METADATA_NAMES = ("metadata.csv", "metadata.jsonl")

Row = dict[str, Any]


def read_metadata(
    root: Path, wanted: Iterable[str], may_be_empty: str | None
) -> tuple[list[str], dict[str, Row]]:
    """Columns, and rows by normalised file_name; empty if there is no table.

    An image may have several rows, such as one for each caption: their captions are joined.

    Args:
        wanted: the columns in which all rows of an image have to agree.
        may_be_empty: the column whose empty cells are kept; those of other columns are dropped.

    Raises:
        DataError: two tables, one that cannot be read or has no file_name, a row whose cells do not
            fit the heading, or an image whose rows disagree.
    """
    files = [root / name for name in METADATA_NAMES if (root / name).exists()]
    if not files:
        return [], {}
    if len(files) > 1:
        raise DataError(
            f"source: {root} has {' and '.join(METADATA_NAMES)}; expected one of them. Move the "
            "other away."
        )
    (file,) = files
    made: dict[str, Row] = {}
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            columns, rows = (
                read_csv(lines, f"source: {file}") if file.suffix == ".csv" else _jsonl_rows(lines)
            )
            if "file_name" not in columns:
                raise DataError(
                    f"source: {file}: columns {columns}; expected one named file_name. Add it, "
                    "or move the file away."
                )
            for row in rows:
                name = one_form(posixpath.normpath(row["file_name"]))
                cells = {
                    k: v
                    for k, v in row.items()
                    if k and (v not in ("", None) or (k == may_be_empty and v is not None))
                }
                made[name] = (
                    _joined(made[name], cells, wanted, f"{file}: {name}") if name in made else cells
                )
    except DataError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        remedy = remedy_for(error, "Repair it, or move it away.")
        raise DataError(
            f"source: {file}: {error}; expected a readable table in UTF-8. {remedy}"
        ) from None
    return columns, made


def _joined(first: Row, second: Row, wanted: Iterable[str], where: str) -> Row:
    for name in wanted:
        if name not in CAPTION_FIELDS and first.get(name) != second.get(name):
            raise DataError(
                f"source: {where}: rows that differ in {name!r}; expected one row for an image, "
                f"or rows with the same {name}. Write several labels into one cell "
                "(--label-separator); an image can have only one person."
            )
    texts = {
        name: [*_listed(first.get(name)), *_listed(second.get(name))]
        for name in CAPTION_FIELDS
        if name in first or name in second
    }
    return second | first | texts


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [] if value is None else [value]


def _jsonl_rows(lines: Iterable[str]) -> tuple[list[str], Iterable[Row]]:
    rows = [parse_json(line, nan=True) for line in lines if line.strip()]
    return list(dict.fromkeys(name for row in rows for name in row)), rows
