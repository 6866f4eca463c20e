"""Accuracy with sets of correct labels, as in ImageNet-ReaL (Beyer et al. 2020, arXiv 2006.07159).

Many images show objects of several classes but have one label, sometimes a wrong one. Annotators
listed every class that an image shows. A prediction is correct if it is one of them; an image
without any class does not count.

Legend: N records, C classes.
"""

import hashlib
import io
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpvision.data.store import Store
from dpvision.data.table_files import one_form, read_csv
from dpvision.errors import DataError
from dpvision.eval.score import wilson_interval
from dpvision.strict_json import parse_json

_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})(?!\d)")


@dataclass(frozen=True, eq=False)
class AnyOfLabels:
    """The correct classes of each record of a store."""

    name: str
    """Name of the file, for the protocol."""
    accepted_N: tuple[frozenset[int], ...]
    """Correct classes by row; empty if the record does not count."""

    def measure(
        self, predicted_M: np.ndarray, row_M: np.ndarray
    ) -> tuple[float, float, float, int]:
        """Return the share of correct predictions among the records that count, its 95% interval
        (Wilson), and their number.

        Args:
            predicted_M: predicted classes, int64.
            row_M: their rows, int64.

        Raises:
            DataError: none of the rows counts.
        """
        right = [
            int(p) in accepted
            for p, row in zip(predicted_M.tolist(), row_M.tolist(), strict=True)
            if (accepted := self.accepted_N[row])
        ]
        if not right:
            raise DataError(
                f"labels: {self.name} has no class for any of {len(row_M)} records; expected "
                "some. Give the labels file of this store."
            )
        return sum(right) / len(right), *wilson_interval(sum(right), len(right)), len(right)

    def digest(self) -> str:
        """Return a digest of the classes of all rows, for the keys of cached scores."""
        listed = json.dumps([sorted(accepted) for accepted in self.accepted_N])
        return hashlib.sha256(listed.encode()).hexdigest()

    def chance(self, row_M: np.ndarray) -> float:
        """Return the accuracy of the best constant prediction: the largest share of counted records
        that accept one class.
        """
        counted = [accepted for row in row_M.tolist() if (accepted := self.accepted_N[row])]
        if not counted:
            return 0.0
        return float(
            np.bincount(
                np.concatenate([np.fromiter(accepted, np.int64) for accepted in counted])
            ).max()
            / len(counted)
        )


def same_numbers(numbered: Store, store: Store, any_of: AnyOfLabels | None) -> Store:
    """Return ``numbered``; refuse sets of correct classes, which have the numbers of ``store``, if
    its classes got other numbers.

    Raises:
        DataError: ``any_of`` is given, and ``numbered`` is not ``store`` itself.
    """
    if any_of is not None and numbered is not store:
        raise DataError(
            f"labels: {any_of.name} has the class numbers of {store.path}, numbered unlike the "
            "training store; expected one list of classes. Import the test images with the same "
            "--classes."
        )
    return numbered


def load_any_of_labels(
    path: str | Path, store: Store, num_classes: int | None = None
) -> AnyOfLabels:
    """Load the labels of a store's records from a file.

    Three formats are read:

    - JSON, a list of lists of class numbers, such as ReaL's ``real.json``. If the records' names
      have numbers like ILSVRC2012_val_00000001, the first list belongs to number 1, and so on;
      otherwise the lists follow the sorted record names.
    - JSON, an object from names to lists of class numbers.
    - CSV with the columns ``key`` and ``labels``, class numbers separated by spaces.

    A name is the image file's, with or without its folders and extension. Class numbers are the
    store's.

    Args:
        num_classes: as declared; if None, the number of the store's class names, if it has any.

    Raises:
        DataError: the file cannot be read, has none of these formats, names no record of the store
            or one twice, has another number of lists, a class that is out of range, or a CSV row
            with more or fewer cells than columns.
    """
    path = Path(path)
    table = _read(path)
    keys = [store.record(row).key for row in range(store.num_records)]
    if isinstance(table, list):
        found = _by_order(path, table, keys)
    else:
        found = _by_name(path, table, keys)
    limit = (
        num_classes
        if num_classes is not None
        else len(store.label_names)
        if store.label_names is not None
        else None
    )
    made = []
    for key, labels in zip(keys, found, strict=True):
        whole = isinstance(labels, list) and all(
            type(label) is int and label >= 0 for label in labels
        )
        if not whole or any(limit is not None and label >= limit for label in labels):
            rule = "0 or more" if limit is None else f"0 to {limit - 1}"
            raise DataError(
                f"labels: {path}: {key}: {labels!r}; expected a list of class numbers, {rule}. "
                "Fix this entry."
            )
        made.append(frozenset(labels))
    if not any(made):
        raise DataError(
            f"labels: {path}: no record of {store.path} has a class; expected some. Give the "
            "file of this store."
        )
    return AnyOfLabels(path.name, tuple(made))


def _read(path: Path) -> list[Any] | dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".csv":
            return _read_csv(path, text)
        table = parse_json(text, nan=True)
    except (OSError, ValueError) as error:
        raise DataError(
            f"labels: {path}: {error}; expected a JSON or CSV file of labels. Check the path, or "
            "convert the file."
        ) from None
    if not isinstance(table, list | dict) or not table:
        raise DataError(
            f"labels: {path}: neither a list nor an object; expected lists of class numbers. "
            "docs/evaluation.md has the forms."
        )
    return table


def _read_csv(path: Path, text: str) -> dict[str, Any]:
    columns, rows = read_csv(io.StringIO(text, newline=""), f"labels: {path}")
    if not {"key", "labels"} <= set(columns):
        raise DataError(
            f"labels: {path}: columns {columns}; expected key and labels. Name them in the first "
            "line."
        )
    table: dict[str, Any] = {}
    for row in rows:
        key, words = row["key"], row["labels"].split()
        if key in table:
            raise DataError(
                f"labels: {path}: {key} occurs twice; expected once, its labels separated by "
                "spaces. Join the lines."
            )
        table[key] = (
            [int(word) for word in words]
            if all(word.isdecimal() for word in words)
            else row["labels"]
        )
    return table


def _by_order(path: Path, table: list[Any], keys: list[str]) -> list[Any]:
    numbers = [_NUMBER.search(key) for key in keys]
    if all(numbers):
        places = [int(found[1]) - 1 for found in numbers if found is not None]
        if max(places) >= len(table):
            raise DataError(
                f"labels: {path} has {len(table)} lists; expected one for "
                f"{keys[int(np.argmax(places))]} too. Give the whole file."
            )
        return [table[place] for place in places]
    if len(table) != len(keys):
        raise DataError(
            f"labels: {path} has {len(table)} lists; expected {len(keys)}, one per record in the "
            "order of their names. Give labels by name: an object, or a CSV with columns key "
            "and labels."
        )
    rank = np.empty(len(keys), dtype=np.int64)
    rank[np.argsort(np.array(keys), kind="stable")] = np.arange(len(keys))
    return [table[place] for place in rank]


def _by_name(path: Path, table: dict[str, Any], keys: list[str]) -> list[Any]:
    """Return the entry of each record by its full name, or its name without folders, or without
    extension; [] if there is none.
    """
    for shorten in (str, _without_folders, _without_ending):
        names = [one_form(shorten(key)) for key in keys]
        entries: dict[str, Any] = {}
        for key, labels in table.items():
            if (name := one_form(shorten(key))) in entries:
                break
            entries[name] = labels
        else:
            if len(set(names)) == len(names) and any(name in entries for name in names):
                return [entries.get(name, []) for name in names]
    raise DataError(
        f"labels: {path}: names such as {next(iter(table))!r} match no record or several; "
        f"expected names such as {keys[0]!r}. Change the names (column key)."
    )


def _without_folders(key: str) -> str:
    return key.rpartition("/")[2]


def _without_ending(key: str) -> str:
    name = _without_folders(key)
    return name.rpartition(".")[0] or name
