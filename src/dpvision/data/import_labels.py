"""Labels of an import as they come: one a record or several, names or numbers, never both in one store."""

from pathlib import Path
from typing import Any

import numpy as np

from dpvision.data.multi_label import LABELS_FILE, LabelSetWriter
from dpvision.data.sources import Sample
from dpvision.errors import DataError

_SHOWN = 100
_REMEDY = "Correct it, or choose another --label-from."


class ImportedLabels:
    """What a field says of each record, as a number for the index; ``finish`` turns these numbers into classes.

    A list gives a record several labels, and an empty list is an answer; a field that is missing, null or -1 is none.
    """

    def __init__(self, field: str, names: list[str] | None, separator: str | None) -> None:
        """
        Args:
            names: of the classes, where the source numbers them.
            separator: between the classes of one record in a text; None: a text is one class.
        """
        if separator is not None and not separator.strip():
            raise DataError(f"data import: label_separator={separator!r}; expected a sign that no class has in its name. Use '|'.")
        self.field, self._names, self._separator = field, names, separator
        self._several: bool | None = None if separator is None else True
        self._sets = LabelSetWriter()
        self._classes: dict[str, int] = {}
        self._numbers = False

    def value(self, sample: Sample) -> Any:
        """What the field says, with a text cut at the separator; None where it says nothing."""
        value = sample.fields.get(self.field)
        if self._separator is not None and isinstance(value, str):
            return [part.strip() for part in value.split(self._separator)] if value.strip() else []
        return None if not isinstance(value, list | tuple) and value == -1 else value  # -1: how public sets mark that there is none

    def number(self, key: str, value: Any) -> int:
        """Of a value of the record ``key``: its class, or its set, as ``finish`` knows them; -1 for none.

        Raises:
            DataError: it is no class or no list of different classes, or a list where those before it were none.
        """
        if value is None:
            return -1
        several = isinstance(value, list | tuple)
        if self._several not in (None, several):
            rule = "a list of classes" if self._several else "one class"
            raise self._error(key, value, f"{rule}, as the pictures before it have. Give all of them lists, or none.")
        self._several = several
        if not several:
            return self._class(key, value, value)
        classes = [self._class(key, one, value) for one in value]
        self._check_kind()
        if len(set(classes)) < len(classes):
            raise self._error(key, value, f"each class once (no row of zeros and ones). {_REMEDY}")
        return self._sets.add(frozenset(classes))

    def _class(self, key: str, one: Any, value: Any) -> int:
        several = isinstance(value, list | tuple)
        if isinstance(one, str) and (one or not several):
            return self._classes.setdefault(one, len(self._classes))
        whole = isinstance(one, int) or (isinstance(one, float) and one.is_integer())
        if not whole or (several and isinstance(one, bool)) or not 0 <= one < (len(self._names) if self._names else 2**31):
            last = f" to {len(self._names) - 1}" if self._names else " on"
            what = "a list of classes, each" if several else "one class,"
            raise self._error(key, value, f"{what} a name or a number from 0{last}. {_REMEDY}")
        self._numbers = True
        return int(one)

    def _error(self, key: str, value: Any, rule: str) -> DataError:
        shown = repr(value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]} ..."
        return DataError(f"data import: {key}: {self.field}={shown}; expected {rule}")

    def _check_kind(self) -> None:
        if self._classes and self._numbers:
            raise DataError("data import: labels are names here and numbers there; expected one kind. Choose another --label-from.")

    def finish(self, rows: np.ndarray, folder: Path) -> tuple[list[str] | None, tuple[str, int] | None]:
        """Put classes, or places of sets, into the column ``label`` of ``rows``.

        Args:
            folder: of the store, for the file of the sets.

        Returns:
            Names of the classes, sorted where the source does not number them; name and size of the file of sets, where there are any.

        Raises:
            DataError: names and numbers in one store.
        """
        self._check_kind()
        class_of = None
        if self._classes:
            self._names = sorted(self._classes, key=int if all(name.isdecimal() for name in self._classes) else str)
            rank = {name: i for i, name in enumerate(self._names)}
            class_of = np.array([rank[name] for name in self._classes])
        labelled = bool((rows["label"] >= 0).any())
        if self._several and labelled:
            place_of = self._sets.write(folder / LABELS_FILE, class_of)
            rows["label"] = place_of[rows["label"]]
            return self._names, (LABELS_FILE, (folder / LABELS_FILE).stat().st_size)
        if class_of is not None:
            rows["label"] = np.append(class_of, -1)[rows["label"]]  # the last one serves label -1
        return self._names, None
