"""Read tables that describe images, CSV strictly, and join their names with files.

The join misses no match and guesses none.

``csv.DictReader`` accepts rows whose cells do not fit the heading. An unquoted comma then moves
every later cell to the wrong column, such as a part of a caption to the column of persons, and a
quote that is never closed swallows the rows that follow.
"""

import csv
import posixpath
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dpvision.data.captions import CAPTION_FIELDS
from dpvision.errors import DataError, remedy_for
from dpvision.strict_json import parse_json


def read_csv(
    lines: Iterable[str], where: str, *, skipinitialspace: bool = False
) -> tuple[list[str], Iterator[dict[str, str]]]:
    """Return the columns, without blanks around them, and the rows by column.

    Rows are read as they are asked for.

    Empty lines are skipped. Several columns may lack a name.

    Args:
        where: the reader and the file, the start of errors.
        skipinitialspace: as in ``csv.reader``.

    Raises:
        DataError: two columns of a name, here; quotes that are not CSV, or more or fewer cells than
            columns, at that row.
    """
    rows = _cells(lines, where, skipinitialspace)
    _, heading = next(rows, (0, []))
    columns = [name.strip() for name in heading]
    twice = [name for i, name in enumerate(columns) if name and name in columns[:i]]
    if twice:
        raise DataError(
            f"{where}: two columns {twice[0]!r}; expected one. Rename or remove the other."
        )
    return columns, _rows(rows, columns, where)


def _rows(
    rows: Iterator[tuple[int, list[str]]], columns: list[str], where: str
) -> Iterator[dict[str, str]]:
    for number, cells in rows:
        if len(cells) != len(columns):
            raise DataError(
                f"{where}, line {number}: cells={len(cells)}; expected {len(columns)}, as in the "
                "heading. Put double quotes around a cell that contains a comma, and write "
                "empty cells too."
            )
        yield dict(zip(columns, cells, strict=True))


def _cells(
    lines: Iterable[str], where: str, skipinitialspace: bool
) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the first line, from 1, and the cells of each row."""
    reader = csv.reader(lines, strict=True, skipinitialspace=skipinitialspace)
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise DataError(
                f"{where}, line {number}: {error}; expected a CSV table. Close the double "
                "quotes, and double those inside a cell."
            ) from None
        if cells is None:
            return
        if cells:
            yield number, cells


METADATA_NAMES = ("metadata.csv", "metadata.jsonl")

Row = dict[str, Any]


def read_metadata(
    root: Path,
    wanted: Iterable[str],
    may_be_empty: str | None,
    keys: Sequence[str] = ("file_name",),
) -> tuple[list[str], dict[str, Row]]:
    """Columns, and rows by normalised file_name; empty if there is no table.

    An image may have several rows, such as one for each caption: their captions are joined.

    Args:
        wanted: the columns in which all rows of an image have to agree.
        may_be_empty: the column whose empty cells are kept; those of other columns are dropped.
        keys: the columns by which images may be named; the first that there is counts.

    Raises:
        DataError: two tables, one that cannot be read or has none of ``keys``, a row whose cells do
            not fit the heading, or an image whose rows disagree.
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
            key = next((key for key in keys if key in columns), None)
            if key is None:
                raise DataError(
                    f"source: {file}: columns {columns}; expected one named "
                    f"{' or '.join(keys)}, between commas. Add it, or move the file away."
                )
            for row in rows:
                name = one_form(posixpath.normpath(row[key]))
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


def require_fields(wanted: Iterable[str], known: Iterable[str], where: object) -> None:
    """Raise DataError for a field to read that a source does not have."""
    for name in wanted:
        if name not in set(known):
            raise DataError(
                f"source: {where}: field={name!r}; expected one of {sorted(known)}. Change "
                "--unit-from or --label-from."
            )


UNMATCHED_FILE = "unmatched.jsonl"
"""File under a store's confidential/: rows without a file, and files without a row."""


def one_form(name: str) -> str:
    """Return a file name in Unicode's NFC: some file systems decompose accents, tables do not."""
    return name if name.isascii() else unicodedata.normalize("NFC", name)


def folded(name: str) -> str:
    """Return a file name as it is compared without regard to case."""
    return one_form(one_form(name).casefold())


def join_names(rows: Collection[str], files: Collection[str]) -> dict[str, str]:
    """Return the file of each row that has one.

    The name decides in one Unicode form; where two files have that form, the one spelled as the
    row. Case is ignored only for a row whose name misses, and only if one row and one file are
    alike without it.
    """
    alike: dict[str, list[str]] = {}
    for file in files:
        alike.setdefault(one_form(file), []).append(file)
    found = {}
    for row in rows:
        group = alike.get(one_form(row), [])
        if len(group) == 1 or row in group:
            found[row] = group[0] if len(group) == 1 else row
    if len(found) < len(rows):
        rows_alike = Counter(map(folded, rows))
        files_alike: dict[str, list[str]] = {}
        for file in files:
            files_alike.setdefault(folded(file), []).append(file)
        for row in rows:
            group = files_alike.get(folded(row), [])
            if row not in found and len(group) == rows_alike[folded(row)] == 1:
                found[row] = group[0]
    return found
