"""Labels at the import: one or several per record, names or numbers, one kind per store.

A class number must not depend on private records: if the names found were numbered alphabetically, one image of a new class would shift
the numbers, and with them the contributions of other records. So the classes of a private store are declared, in a list or as numbers;
only a public store is numbered by the names found.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dpvision.data.multi_label import LABELS_FILE, LabelSetWriter
from dpvision.errors import DataError

if TYPE_CHECKING:
    from dpvision.data.sources import Sample

UnknownClasses = Literal["refuse", "unlabelled"]
_SHOWN = 100
_NAMED_AT_MOST = 5
_REMEDY = "Change it in the source, or choose another --label-from."


@dataclass(frozen=True)
class ClassRule:
    """How class names become numbers."""

    declared: tuple[str, ...] | None = None
    """Class names in the order of their numbers; if None, the source's names, else, in a public store only, those found, sorted."""
    unknown: UnknownClasses = "refuse"
    """What to do with a record of another class."""


def read_classes(path: str | Path) -> tuple[str, ...]:
    """Read class names from a file, one per line or as a JSON list, in the order of their numbers.

    Raises:
        DataError: the file cannot be read, is empty, or repeats a name.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        names = json.loads(text) if text.lstrip().startswith("[") else [line.strip() for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise DataError(f"classes: {path}: {error}; expected names in UTF-8, one per line or as a JSON list. Rewrite it so.") from None
    if not all(isinstance(name, str) and name for name in names) or not names or len(set(names)) < len(names):
        raise DataError(f"classes: {path}: {len(names)} entries; expected one or more different names. Remove the repeated ones.")
    return tuple(names)


class ImportedLabels:
    """Labels from one field, as provisional numbers for the index; ``finish`` turns these into classes.

    A list gives a record several labels; an empty list means none of the classes. A field that is missing, null or -1 means no label.
    """

    def __init__(
        self, field: str, names: list[str] | None, separator: str | None, *, private: bool = True, rule: ClassRule | None = None
    ) -> None:
        """
        Args:
            names: class names, if the source has integer labels.
            separator: separates the classes of one record in a string; if None, a string is one class.
            private: number names by a declared list only.
            rule: the declared list, and what to do with other names.
        """
        if separator is not None and not separator.strip():
            raise DataError(f"data import: label_separator={separator!r}; expected a character that no class name contains. Use '|'.")
        self.field, self._names, self._separator = field, names, separator
        self._private, self._rule = private, rule or ClassRule()
        self._number_of = {name: i for i, name in enumerate(self._rule.declared or ())}
        self._unknown: dict[str, None] = {}
        self._num_unknown = 0
        self._several: bool | None = None if separator is None else True
        self._sets = LabelSetWriter()
        self._classes: dict[str, int] = {}
        self._numbers = False

    def value(self, sample: "Sample") -> Any:
        """The field's value, with a string split at the separator; None if there is no label."""
        value = sample.fields.get(self.field)
        if self._separator is not None and isinstance(value, str):
            return [part.strip() for part in value.split(self._separator)] if value.strip() else []
        return None if not isinstance(value, list | tuple) and value == -1 else value  # -1 marks a missing label in public data sets

    def number(self, key: str, value: Any) -> int:
        """Provisional number of a value's class, or set of classes, for ``finish``; -1 for no label.

        Raises:
            DataError: the value is neither a class nor a list of different classes, or some records have lists and others single classes.
        """
        if value is None:
            return -1
        several = isinstance(value, list | tuple)
        if self._several not in (None, several):
            rule = "a list of classes" if self._several else "one class"
            raise self._error(key, value, f"{rule}, as the images before it have. Give all of them lists, or none.")
        self._several = several
        classes = [self._class(key, one, value) for one in value] if several else [self._class(key, value, value)]
        if None in classes:
            self._num_unknown += 1
            return -1
        if not several:
            return classes[0]
        self._check_kind()
        if len(set(classes)) < len(classes):
            raise self._error(key, value, f"each class once (no row of zeros and ones). {_REMEDY}")
        return self._sets.add(frozenset(classes))

    def _class(self, key: str, one: Any, value: Any) -> Any:
        """Provisional number of one class; None if it is not declared."""
        several = isinstance(value, list | tuple)
        if isinstance(one, str) and (one or not several):
            if self._rule.declared is None and not self._private:
                return self._classes.setdefault(one, len(self._classes))
            if self._rule.declared is not None or not one.isdecimal():
                return self._declared(one)
            one = int(one)  # a numeric string needs no list
        whole = isinstance(one, int) or (isinstance(one, float) and one.is_integer())
        if not whole or (several and isinstance(one, bool)) or not 0 <= one < (len(self._names) if self._names else 2**31):
            last = f" to {len(self._names) - 1}" if self._names else " on"
            what = "a list of classes, each" if several else "one class,"
            raise self._error(key, value, f"{what} a name or a number from 0{last}. {_REMEDY}")
        self._numbers = True
        if self._rule.declared is not None and (self._names is not None or one >= len(self._rule.declared)):
            return self._declared(self._names[int(one)] if self._names is not None else str(int(one)))
        return int(one)

    def _declared(self, name: str) -> int | None:
        if name not in self._number_of and len(self._unknown) <= _NAMED_AT_MOST:
            self._unknown.setdefault(name)
        return self._number_of.get(name)

    @property
    def num_unknown(self) -> int:
        """int: number of records with a class that is not declared."""
        return self._num_unknown

    @property
    def may_be_unlabelled(self) -> bool:
        """bool: whether records of undeclared classes are kept without a label."""
        return self._rule.unknown == "unlabelled"

    def _check_unknown(self) -> None:
        if not self._num_unknown or self._rule.unknown == "unlabelled":
            return
        shown = ", ".join(map(repr, list(self._unknown)[:_NAMED_AT_MOST])) + (", ..." if len(self._unknown) > _NAMED_AT_MOST else "")
        if self._rule.declared is None:
            raise DataError(
                f"data import: {self.field}: class names ({shown}) in a private store; expected a declared list, because numbers derived "
                "from the names found would depend on the images. Write the classes, one per line, and pass --classes FILE; to import "
                "without labels, pass --unknown-classes unlabelled."
            )
        raise DataError(
            f"data import: {self.field}: {self._num_unknown:,} records of classes that are not declared ({shown}); expected the "
            f"{len(self._rule.declared)} declared ones. Complete the file of --classes, or pass --unknown-classes unlabelled."
        )

    def _error(self, key: str, value: Any, rule: str) -> DataError:
        shown = repr(value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]} ..."
        return DataError(f"data import: {key}: {self.field}={shown}; expected {rule}")

    def _check_kind(self) -> None:
        if self._classes and self._numbers:
            raise DataError("data import: labels are both names and numbers; expected one kind. Choose another --label-from.")

    def finish(self, rows: np.ndarray, folder: Path) -> tuple[list[str] | None, tuple[str, int] | None]:
        """Replace the provisional numbers in the column ``label`` of ``rows`` by classes, or by positions of label sets.

        Args:
            folder: the store's folder, for the file of label sets.

        Returns:
            Class names (declared, the source's, or in a public store those found, sorted); name and size of the file of label sets, if any.

        Raises:
            DataError: names and numbers in one store, or undeclared classes.
        """
        self._check_kind()
        self._check_unknown()
        if self._rule.declared is not None:
            self._names = list(self._rule.declared)
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
            rows["label"] = np.append(class_of, -1)[rows["label"]]  # the last entry serves label -1
        return self._names, None
