"""CSV tables, read strictly: a row whose cells do not fit the heading is refused.

``csv.DictReader`` accepts such rows. An unquoted comma then moves every later cell to the wrong
column, such as a part of a caption to the column of persons, and a quote that is never closed
swallows the rows that follow.
"""

import csv
from collections.abc import Iterable, Iterator

from dpvision.errors import DataError


def read_csv(
    lines: Iterable[str], where: str, *, skipinitialspace: bool = False
) -> tuple[list[str], Iterator[dict[str, str]]]:
    """Return the columns, without blanks around them, and the rows by column, read as they are
    asked for.

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
