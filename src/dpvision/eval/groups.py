"""Attributes of test images, such as sex, age band, scanner or site, from a table beside them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dpvision.data.store import Store
from dpvision.data.table_files import join_names, read_csv
from dpvision.errors import OPERATOR_ONLY, ConfigError, DataError, remedy_for

NO_VALUE = "(none)"
"""Group of the images whose cell is empty."""
_KEYS = ("file_name", "key")
_MOST = 50


def read_groups(
    table: Path, attributes: Sequence[str], store: Store, row_N: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the value of each attribute for rows of a store: str (N,) by attribute.

    Args:
        table: CSV with a column ``file_name`` (or ``key``), the images' names in the source that
            the store was imported from, and a column for each attribute. Names of other images are
            passed over. A name without ``#`` is that of all frames of its file.
        row_N: int64 rows of the store.

    Raises:
        ConfigError: no attribute.
        DataError: the table cannot be read, lacks a column, has two rows for an image that differ,
            or no row for some image; or an attribute has more than 50 values.
    """
    if not attributes:
        raise ConfigError(
            f"evaluate: --groups {table} without attributes; expected --by COLUMN[,COLUMN]. Name "
            "columns of the table."
        )
    whose = OPERATOR_ONLY if store.results_visibility == "private" else ""
    cells = _cells(table, attributes, whose)
    keys = [store.key(row) for row in row_N.tolist()]
    files = {key: key if key in cells else key.rpartition("#")[0] or key for key in keys}
    row_of = {file: row for row, file in join_names(cells, set(files.values())).items()}
    missing = [key for key in keys if files[key] not in row_of]
    if missing:
        raise DataError(
            f"evaluate: {whose}--groups {table} has no row for {len(missing):,} of {len(keys):,} "
            f"images, for example {missing[0]!r}; expected one for each. Write the names as in the "
            "folder that was imported (file_name), with an empty cell where a value is not known."
        )
    found = {}
    for at, attribute in enumerate(attributes):
        value_N = np.array([cells[row_of[files[key]]][at] or NO_VALUE for key in keys])
        if (num := len(np.unique(value_N))) > _MOST:
            raise DataError(
                f"evaluate: {whose}--by {attribute}: {num} values; expected at most {_MOST}. "
                "Put them into bands, for example ages by decade."
            )
        found[attribute] = value_N
    return found


def _cells(table: Path, attributes: Sequence[str], whose: str) -> dict[str, tuple[str, ...]]:
    """Values of the attributes by the name of the image.

    Args:
        whose: start of errors that name an image.
    """
    made: dict[str, tuple[str, ...]] = {}
    try:
        with table.open(newline="", encoding="utf-8-sig") as lines:
            columns, rows = read_csv(lines, f"evaluate: --groups {table}")
            key = next((name for name in _KEYS if name in columns), None)
            lacking = [name for name in attributes if name not in columns]
            if key is None or lacking:
                what = f"no {' or '.join(_KEYS)}" if key is None else f"no {', '.join(lacking)}"
                raise DataError(
                    f"evaluate: --groups {table}: {what} among the columns {', '.join(columns)}; "
                    "expected the images' names and the attributes of --by. Correct the table or "
                    "--by."
                )
            for row in rows:
                values = tuple(row[name].strip() for name in attributes)
                if made.setdefault(row[key], values) != values:
                    raise DataError(
                        f"evaluate: {whose}--groups {table}: rows of {row[key]} that differ; "
                        "expected one value for an image. Correct the table."
                    )
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"evaluate: --groups {table}: {error}; expected a CSV table in UTF-8. "
            f"{remedy_for(error, 'Save it as UTF-8.')}"
        ) from None
    return made
