"""Labels of an import as they come: one a record or several, names or numbers, never both in one store.

A class's number must not depend on private records: numbers by the alphabet of the names that were found shift when one more image brings a
class of its own, and with them every contribution of every other record. So the classes of a private store are declared, in a list or by
numbers; only those of a public store are numbered by the names found.
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
_REMEDY = "Correct it, or choose another --label-from."


@dataclass(frozen=True)
class ClassRule:
    """How names become classes."""

    declared: tuple[str, ...] | None = None
    """Names of the classes in the order of their numbers; if None, the source's, else those found, sorted, in a public store only."""
    unknown: UnknownClasses = "refuse"
    """What becomes of a record with a class that is not among them."""


def read_classes(path: str | Path) -> tuple[str, ...]:
    """Names of classes from a file, one a line or as a JSON list; their order is that of the numbers.

    Raises:
        DataError: it cannot be read, is empty, or has a name twice.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        names = json.loads(text) if text.lstrip().startswith("[") else [line.strip() for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise DataError(f"classes: {path}: {error}; expected a list of names in UTF-8, one a line or as JSON. Check the file.") from None
    if not all(isinstance(name, str) and name for name in names) or not names or len(set(names)) < len(names):
        raise DataError(f"classes: {path}: {len(names)} entries; expected one or more different names. Correct the list.")
    return tuple(names)


class ImportedLabels:
    """What a field says of each record, as a number for the index; ``finish`` turns these numbers into classes.

    A list gives a record several labels, and an empty list is an answer; a field that is missing, null or -1 is none.
    """

    def __init__(
        self, field: str, names: list[str] | None, separator: str | None, *, private: bool = True, rule: ClassRule | None = None
    ) -> None:
        """
        Args:
            names: of the classes, where the source numbers them.
            separator: between the classes of one record in a text; if None, a text is one class.
            private: names are numbered by a declared list only.
            rule: that list, and what becomes of other names.
        """
        if separator is not None and not separator.strip():
            raise DataError(f"data import: label_separator={separator!r}; expected a sign that no class has in its name. Use '|'.")
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
        """Of one class of a record its number, as ``finish`` knows it; None where it is not declared."""
        several = isinstance(value, list | tuple)
        if isinstance(one, str) and (one or not several):
            if self._rule.declared is None and not self._private:
                return self._classes.setdefault(one, len(self._classes))
            if self._rule.declared is not None or not one.isdecimal():
                return self._declared(one)
            one = int(one)  # a text that is a number needs no list
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
        """Records with a class that is not declared."""
        return self._num_unknown

    @property
    def may_be_unlabelled(self) -> bool:
        """Whether the operator has said that records without a known class stay, without a label."""
        return self._rule.unknown == "unlabelled"

    def _check_unknown(self) -> None:
        if not self._num_unknown or self._rule.unknown == "unlabelled":
            return
        shown = ", ".join(map(repr, list(self._unknown)[:_NAMED_AT_MOST])) + (", ..." if len(self._unknown) > _NAMED_AT_MOST else "")
        if self._rule.declared is None:
            raise DataError(
                f"data import: {self.field}: names of classes ({shown}) in a private store; expected a declared list, for numbers by the "
                "names found would depend on the images. Write the classes, one a line, and say --classes FILE; to import without labels, "
                "say --unknown-classes unlabelled."
            )
        raise DataError(
            f"data import: {self.field}: {self._num_unknown:,} records of classes that are not declared ({shown}); expected those of the "
            f"list of {len(self._rule.declared)}. Complete --classes, or say --unknown-classes unlabelled."
        )

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
            Names of the classes: declared, the source's, or of a public store those found, sorted; name and size of the file of sets, where
            there are any.

        Raises:
            DataError: names and numbers in one store, or classes that are not declared.
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
            rows["label"] = np.append(class_of, -1)[rows["label"]]  # the last one serves label -1
        return self._names, None
