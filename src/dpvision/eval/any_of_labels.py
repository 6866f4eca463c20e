"""Accuracy where any of several labels is right, as in ImageNet-ReaL (Beyer et al. 2020, arXiv 2006.07159).

Many images show things of several classes, and one label was given by chance or by mistake. People looked again and wrote down, for each
image, every class that is in it. A prediction is right if it is one of them; an image for which nobody found any class does not count.

Legend: N records, C classes.
"""

import csv
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpvision.data.store import Store
from dpvision.errors import DataError
from dpvision.eval.score import wilson_interval

_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})(?!\d)")


@dataclass(frozen=True, eq=False)
class AnyOfLabels:
    """The classes that are right for each record of a store."""

    name: str
    """Of the file, for the protocol."""
    accepted_N: tuple[frozenset[int], ...]
    """By row; empty where the record does not count."""

    def measure(self, predicted_M: np.ndarray, row_M: np.ndarray) -> tuple[float, float, float, int]:
        """Share of right predictions among the records that count, its 95% interval (Wilson), and their number.

        Args:
            predicted_M: int64 classes.
            row_M: int64 rows that they are for.

        Raises:
            DataError: none of the rows counts.
        """
        right = [
            int(p) in accepted for p, row in zip(predicted_M.tolist(), row_M.tolist(), strict=True) if (accepted := self.accepted_N[row])
        ]
        if not right:
            raise DataError(
                f"labels: {self.name} has a class for none of {len(row_M)} records; expected some. Give the file of this store."
            )
        return sum(right) / len(right), *wilson_interval(sum(right), len(right)), len(right)

    def digest(self) -> str:
        """Of the classes of all rows: for the names of cached scores."""
        listed = json.dumps([sorted(accepted) for accepted in self.accepted_N])
        return hashlib.sha256(listed.encode()).hexdigest()

    def chance(self, row_M: np.ndarray) -> float:
        """What the best constant answer gets: the largest share of counted records that accept one class."""
        counted = [accepted for row in row_M.tolist() if (accepted := self.accepted_N[row])]
        if not counted:
            return 0.0
        return float(np.bincount(np.concatenate([np.fromiter(accepted, np.int64) for accepted in counted])).max() / len(counted))


def load_any_of_labels(path: str | Path, store: Store, num_classes: int | None = None) -> AnyOfLabels:
    """Labels of a file for the records of a store.

    Three forms are read:

    - JSON, a list of lists of class numbers: ReaL's own ``real.json``. The first list is that of ILSVRC2012_val_00000001, and so on, where
      the records' names have such numbers; else the lists go by the sorted names of the records, one for each.
    - JSON, an object from names to lists of class numbers.
    - CSV with the columns ``key`` and ``labels``, class numbers with spaces between them.

    A name is that of the file, with or without its folders and its ending. Class numbers are the store's own.

    Args:
        num_classes: declared; None for the number of the store's names, if it has names.

    Raises:
        DataError: the file cannot be read, is in none of these forms, names no record of the store or one twice, has another number of
            lists, or a class that is out of range.
    """
    path = Path(path)
    table = _read(path)
    keys = [store.record(row).key for row in range(store.num_records)]
    if isinstance(table, list):
        found = _by_order(path, table, keys)
    else:
        found = _by_name(path, table, keys)
    limit = num_classes if num_classes is not None else len(store.label_names) if store.label_names is not None else None
    made = []
    for key, labels in zip(keys, found, strict=True):
        whole = isinstance(labels, list) and all(type(label) is int and label >= 0 for label in labels)
        if not whole or any(limit is not None and label >= limit for label in labels):
            rule = "0 or more" if limit is None else f"0 to {limit - 1}"
            raise DataError(f"labels: {path}: {key}: {labels!r}; expected a list of class numbers, {rule}. Correct the file.")
        made.append(frozenset(labels))
    if not any(made):
        raise DataError(f"labels: {path}: no record of {store.path} has a class; expected some. Give the file of this store.")
    return AnyOfLabels(path.name, tuple(made))


def _read(path: Path) -> list[Any] | dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".csv":
            return _read_csv(path, text)
        table = json.loads(text)
    except (OSError, ValueError) as error:
        raise DataError(f"labels: {path}: {error}; expected a JSON or CSV file of labels. Correct the path, or convert it.") from None
    if not isinstance(table, list | dict) or not table:
        raise DataError(f"labels: {path}: neither a list nor an object; expected lists of class numbers. docs/evaluation.md has the forms.")
    return table


def _read_csv(path: Path, text: str) -> dict[str, Any]:
    rows = csv.DictReader(text.splitlines())
    if not {"key", "labels"} <= set(rows.fieldnames or ()):
        raise DataError(f"labels: {path}: columns {rows.fieldnames}; expected key and labels. Name them in the first line.")
    table: dict[str, Any] = {}
    for row in rows:
        key, words = row["key"], (row["labels"] or "").split()
        if key in table:
            raise DataError(f"labels: {path}: {key} stands twice; expected once, its labels with spaces between them. Join the lines.")
        table[key] = [int(word) for word in words] if all(word.isdecimal() for word in words) else row["labels"]
    return table


def _by_order(path: Path, table: list[Any], keys: list[str]) -> list[Any]:
    numbers = [_NUMBER.search(key) for key in keys]
    if all(numbers):
        places = [int(found[1]) - 1 for found in numbers if found is not None]
        if max(places) >= len(table):
            raise DataError(
                f"labels: {path} has {len(table)} lists; expected one for {keys[int(np.argmax(places))]} too. Give the whole file."
            )
        return [table[place] for place in places]
    if len(table) != len(keys):
        raise DataError(
            f"labels: {path} has {len(table)} lists; expected {len(keys)}, one for each record by its name's order. "
            "Give labels by name: an object, or a CSV with columns key and labels."
        )
    rank = np.empty(len(keys), dtype=np.int64)
    rank[np.argsort(np.array(keys), kind="stable")] = np.arange(len(keys))
    return [table[place] for place in rank]


def _by_name(path: Path, table: dict[str, Any], keys: list[str]) -> list[Any]:
    """The entry of each record, by its whole name, else by that without folders, else without ending; an empty list where there is none."""
    for shorten in (str, _without_folders, _without_ending):
        names = [shorten(key) for key in keys]
        entries: dict[str, Any] = {}
        for key, labels in table.items():
            if shorten(key) in entries:
                break
            entries[shorten(key)] = labels
        else:
            if len(set(names)) == len(names) and any(name in entries for name in names):
                return [entries.get(name, []) for name in names]
    raise DataError(
        f"labels: {path}: names such as {next(iter(table))!r} are of no record, or of several, such as {keys[0]!r}; expected the records' "
        "names. Correct the column key."
    )


def _without_folders(key: str) -> str:
    return key.rpartition("/")[2]


def _without_ending(key: str) -> str:
    name = _without_folders(key)
    return name.rpartition(".")[0] or name
