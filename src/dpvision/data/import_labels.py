"""Labels at the import: one or several per record, names or numbers, one kind per store.

The one rule for class numbers is here.

A class number must not depend on private records: if the names found were numbered alphabetically,
one image of a new class would shift the numbers, and with them the contributions of other records.
So the classes of a private store are declared, in a list or as numbers; only a public store is
numbered by the names found.

Every source gives its labels as they are, and the same label gets the same number from all of them:

    text of digits          the number, as in JSON or parquet: "2", "2.0" and 2 are one label; "02"
                            too, if it is not a declared name
    -1, "", NaN, missing    no label (unless "-1" is a declared name)
    a declared list         a label that is one of its names is that class; if no name is a number,
                            number n is name n, from 0
    the source's own names  number n is name n, from 0; a declared list then decides about the name
    neither                 number n is class n; names are numbered alphabetically (public) or
                            refused (private)

What has two readings is refused with both of them: numbers without a 0 for declared names, names
among numbers, "2" and "02".
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np

from dpvision.data.multi_label import LABELS_FILE, LabelSetWriter
from dpvision.errors import DataError, remedy_for
from dpvision.strict_json import parse_json

if TYPE_CHECKING:
    from dpvision.data.sample import Sample

UnknownClasses = Literal["refuse", "unlabelled"]
_SHOWN = 100
_NAMED_AT_MOST = 5
_LOOKED_AT = 200
"""Images that are read to name more of the classes without a number."""
_REMEDY = "Change it in the source, or choose another --label-from."
_MOST = 2**31
_NUMBER = re.compile(r"([+-]?[0-9]{1,18})(\.0*)?")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, line ends, marks that override the direction of text, and halves of pairs."""
_MEANS_NOTHING = frozenset(["nan", "null", "n/a", "<na>"])
"""Texts that programs write for a missing cell; also possible names, so a declared list decides."""


@dataclass(frozen=True)
class LabelRule:
    """Which field holds the labels, and how they become class numbers."""

    label_from: str | None = None
    """Field that holds the label (class folders and `label` columns are found without it). `parent`
    for a tar of class folders. A list gives an image several labels; an empty list means that it
    belongs to none of the classes.
    """
    label_separator: str | None = None
    """Separator between an image's labels in a text field, such as "|". An empty text is an empty
    list.
    """
    classes: str | Path | Sequence[str] | Mapping[str, str] | None = None
    """The declared classes, or the file that has them (``read_classes``): names in the order of
    their numbers, or from the labels of the source to names. If None, the source's own list, else,
    in a public store only, the names found, sorted.
    """
    unknown_classes: UnknownClasses = "refuse"
    """For an image whose class is not declared: refuse the import, or keep the image unlabelled, so
    that it contributes exactly zero in training.
    """

    def read(self) -> "LabelRule":
        """Return the rule with the classes of its file. Raises as ``read_classes``."""
        if isinstance(self.classes, str | Path):
            return replace(self, classes=read_classes(self.classes))
        return self


def read_classes(path: str | Path) -> tuple[str, ...] | dict[str, str]:
    """Read declared classes from a file: names, one per line or as a JSON list, in the order of
    their numbers; or a JSON object from the labels of the source to names, {"1": "cat", "2":
    "dog"}, in the order of the labels if these are numbers, else of the file.

    Raises:
        DataError: the file cannot be read, is empty, or repeats a name.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        found = (
            parse_json(text)
            if text.lstrip().startswith(("[", "{"))
            else [line for line in text.splitlines() if line.strip()]
        )
    except (OSError, ValueError) as error:
        remedy = remedy_for(error, "Rewrite it so.")
        raise DataError(
            f"classes: {path}: {error}; expected names in UTF-8, one per line or as a JSON list. "
            f"{remedy}"
        ) from None
    labels: list[str] | None = None
    if isinstance(found, dict):
        labels = list(found)
        if all(_number_in(label) is not None for label in labels):
            labels.sort(key=lambda label: _number_in(label) or 0)
        found = [found[label] for label in labels]
        labels = [canonical(label) for label in labels]
    names = [canonical(name) if isinstance(name, str) else name for name in found]
    for entries in (names, labels or []):
        if (
            not all(isinstance(name, str) and name for name in entries)
            or len(set(entries)) < len(entries)
            or not names
        ):
            raise DataError(
                f"classes: {path}: {len(names)} entries; expected one or more different names. "
                "Remove the repeated and the empty ones."
            )
    return tuple(names) if labels is None else dict(zip(labels, names, strict=True))


def canonical(name: str) -> str:
    """Return a class name in the form in which names are compared and stored.

    Without surrounding spaces, in Unicode's NFC.
    """
    return name.strip() if name.isascii() else unicodedata.normalize("NFC", name.strip())


def _class_name(name: str) -> str:
    """``canonical`` of a name that the store will have: it is printed, and written to pages."""
    if _UNPRINTABLE.search(name := canonical(name)):
        raise DataError(
            f"data import: class={name!r}; expected a name without line ends, control characters "
            "and marks of text direction. Rename the class in the source, or in the file of "
            "--classes."
        )
    return name


def _number_in(text: str) -> int | None:
    """The whole number that a text spells, or None."""
    found = _NUMBER.fullmatch(text.strip())
    return None if found is None else int(found[1])


def _reading(one: Any) -> tuple[str, int | None]:
    """The canonical text of a label, and its number if it is one."""
    if isinstance(one, str):
        text = canonical(one)
        return text, _number_in(text)
    if isinstance(one, bool):
        return str(one).lower(), int(one)
    if isinstance(one, int):
        return str(one), one
    if isinstance(one, float) and one.is_integer():
        return str(int(one)), int(one)
    return repr(one), None


class _Declared:
    """Declared classes by label: by name first, then by number."""

    def __init__(self, classes: Sequence[str] | Mapping[str, str]) -> None:
        spelled, labels = list(classes), isinstance(classes, Mapping)
        names = classes.values() if isinstance(classes, Mapping) else classes
        self.names = list(map(_class_name, names))
        self._place = {canonical(label): k for k, label in enumerate(spelled)}
        numbers = [_number_in(label) for label in spelled]
        self._place_of_number = {
            n: k for k, n in enumerate(numbers) if n is not None and numbers.count(n) == 1
        }
        self.by_place = not labels and not any(n is not None for n in numbers)
        """bool: whether number n means the name at place n."""
        self.places: set[int] = set()
        """Numbers that were read so."""

    def of_name(self, text: str) -> int | None:
        return self._place.get(text)

    def of_label(self, text: str, number: int | None) -> int | None:
        place = self._place.get(text)
        if place is not None or number is None or number < 0:
            return place
        if not self.by_place:
            return self._place_of_number.get(number)
        self.places.add(number)
        return number if number < len(self.names) else None

    def check(self, field: str) -> None:
        """Refuse numbers that may count from 0 or from 1.

        Which of the two never follows from the numbers found, which may be private.
        """
        if not self.places or 0 in self.places:
            return
        first = min(self.places)
        name = [
            self.names[k] if 0 <= k < len(self.names) else "no class" for k in (first, first - 1)
        ]
        example = [
            json.dumps({str(k + start): name for k, name in enumerate(self.names[:2])})[:-1]
            + ", ...}"
            for start in (0, 1)
        ]
        raise DataError(
            f"data import: {field}: numbers {first} to {max(self.places)} and no 0, with "
            f"{len(self.names)} declared names; expected one reading: counted from 0, {first} is "
            f"{name[0]!r}; counted from 1, {first} is {name[1]!r}. Say which in a JSON file for "
            f"--classes: {example[0]} or {example[1]}."
        )


class ImportedLabels:
    """Labels from one field, as provisional numbers that ``finish`` turns into classes.

    A list gives a record several labels; an empty list means none of the classes. A field that is
    missing, null, empty or -1 means no label.
    """

    def __init__(
        self,
        rule: LabelRule,
        names: list[str] | None,
        *,
        private: bool = True,
    ) -> None:
        """
        Args:
            names: class names, if the source has integer labels.
            private: number names by a declared list only.
        """
        rule, separator = rule.read(), rule.label_separator
        if separator is not None and not separator.strip():
            raise DataError(
                f"data import: label_separator={separator!r}; expected a character that no class "
                "name contains. Use '|'."
            )
        self.field, self._separator = rule.label_from or "label", separator
        self._names = None if names is None else [_class_name(name) for name in names]
        self._private, self.may_be_unlabelled = private, rule.unknown_classes == "unlabelled"
        """bool: whether records of undeclared classes are kept without a label."""
        assert not isinstance(rule.classes, str | Path), "read above"
        self._declared = None if rule.classes is None else _Declared(rule.classes)
        self._place = {name: k for k, name in enumerate(self._names or ())}
        self._unknown: dict[str, None] = {}
        self._num_unknown = 0
        self._several: bool | None = None if separator is None else True
        self._sets = LabelSetWriter()
        self._classes: dict[str, int] = {}
        self._spelled: dict[int, str] = {}

    def value(self, sample: "Sample") -> Any:
        """The field's value, with a string split at the separator; None if there is no label."""
        value = sample.fields.get(self.field)
        if isinstance(value, list | tuple):
            return value
        if isinstance(value, str) and self._separator is not None and _number_in(value) != -1:
            return [part.strip() for part in value.split(self._separator)] if value.strip() else []
        if value is None or (isinstance(value, float) and value != value):
            return None
        text, number = _reading(value)
        declares = self._declared is not None and self._declared.of_name(text) is not None
        return (
            None if not text or (number == -1 and not declares) else value
        )  # -1 marks a missing label in public data sets

    def unlisted(self, sample: "Sample") -> list[str]:
        """Names in a sample's label that have no number.

        There are some if the store is private and its classes were not declared.
        """
        if (
            not self._private
            or self._declared is not None
            or self._names is not None
            or self.may_be_unlabelled
        ):
            return []
        if sample.fields.get(self.field) is None:
            return []
        value = self.value(sample)
        parts = value if isinstance(value, list | tuple) else [value]
        return [
            text
            for text in (canonical(one) for one in parts if isinstance(one, str))
            if text and _number_in(text) is None
        ]

    def refuse_unlisted(self, names: Iterable[str]) -> NoReturn:
        """Raise the DataError of ``finish`` for these names."""
        for name in names:
            self._unknown_class(name)
            self._num_unknown += 1
            if len(self._unknown) > _NAMED_AT_MOST:
                break
        self._check_unknown()
        raise AssertionError("no name")

    def number(self, key: str, value: Any, count: int = 1) -> int:
        """Provisional number of a value's class, or set of classes; -1 for no label.

        ``finish`` takes it.

        Args:
            count: records that have the value, of which ``key`` is the first.

        Raises:
            DataError: the value is neither a class nor a list of different classes, or some records
                have lists and others single classes.
        """
        if value is None:
            return -1
        several = isinstance(value, list | tuple)
        if self._several not in (None, several):
            rule = "a list of classes" if self._several else "one class"
            raise self._error(
                key,
                value,
                f"{rule}, as the images before it have. Give all of them lists, or none.",
            )
        self._several = several
        classes = (
            [self._class(key, one, value) for one in value]
            if several
            else [self._class(key, value, value)]
        )
        if None in classes:
            self._num_unknown += count
            return -1
        if not several:
            return classes[0]
        self._check_kind()
        if len(set(classes)) < len(classes):
            raise self._error(key, value, f"each class once (no row of zeros and ones). {_REMEDY}")
        return self._sets.add(frozenset(classes))

    def _class(self, key: str, one: Any, value: Any) -> Any:
        """Provisional number of one class; None if it is not declared."""
        several, is_text = isinstance(value, list | tuple), isinstance(one, str)
        text, number = _reading(one)
        plain = (
            isinstance(one, str | int | float)
            and bool(text)
            and not (several and isinstance(one, bool))
        )
        if self._names is not None and is_text and text in self._place:
            return self._of_source(self._place[text])
        if self._names is None and self._declared is not None and plain:
            place = self._declared.of_label(text, number)
            if place is not None:
                return place
        if is_text and text and number is None:
            return self._named(key, text, value)
        if (
            not plain
            or number is None
            or not 0 <= number < (_MOST if self._names is None else len(self._names))
        ):
            last = " on" if self._names is None else f" to {len(self._names) - 1}"
            what = "a list of classes, each" if several else "one class,"
            raise self._error(key, value, f"{what} a name or a number from 0{last}. {_REMEDY}")
        if self._names is not None:
            return self._of_source(number)
        if self._declared is not None:
            return self._unknown_class(text)
        self._check_spelling(key, one, number, value)
        return number

    def _of_source(self, number: int) -> int | None:
        """Provisional number of a class that the source's own list numbers."""
        assert self._names is not None
        if self._declared is None:
            return number
        place = self._declared.of_name(self._names[number])
        return self._unknown_class(self._names[number]) if place is None else place

    def _named(self, key: str, text: str, value: Any) -> int | None:
        """Provisional number of a name that is no number and is in no list."""
        if self._declared is not None or self._names is not None or self._private:
            return self._unknown_class(text)
        if text.lower() in _MEANS_NOTHING:
            raise self._error(
                key,
                value,
                f"one reading: {text!r} may be a class, or no label. Leave the field empty, or "
                "declare the class with --classes.",
            )
        return self._classes.setdefault(_class_name(text), len(self._classes))

    def _check_spelling(self, key: str, one: Any, number: int, value: Any) -> None:
        """Refuse two spellings of one number that may be two classes, as 2 and 02."""
        spelled = _NUMBER.fullmatch(canonical(one))[1] if isinstance(one, str) else str(number)  # type: ignore[index]
        before = self._spelled.setdefault(number, spelled)
        if before != spelled:
            raise self._error(
                key,
                value,
                f"one spelling: {before!r} and {spelled!r} may be one class or two. Rename one, "
                "or declare both with --classes.",
            )

    def _unknown_class(self, name: str) -> int | None:
        if len(self._unknown) <= _NAMED_AT_MOST:
            self._unknown.setdefault(name)
        return None

    @property
    def num_unknown(self) -> int:
        """int: number of records with a class that is not declared."""
        return self._num_unknown

    def _check_unknown(self) -> None:
        if not self._num_unknown or self.may_be_unlabelled:
            return
        shown = ", ".join(map(repr, list(self._unknown)[:_NAMED_AT_MOST])) + (
            ", ..." if len(self._unknown) > _NAMED_AT_MOST else ""
        )
        names = self._declared.names if self._declared is not None else self._names
        if names is None:
            raise DataError(
                f"data import: {self.field}: class names ({shown}) in a private store; expected "
                "a declared list, because numbers derived from the names found would depend on "
                "the images. Write the classes, one per line, and pass --classes FILE; to "
                "import without labels, pass --unknown-classes unlabelled."
            )
        raise DataError(
            f"data import: {self.field}: {self._num_unknown:,} records of classes that are not "
            f"declared ({shown}); expected the {len(names)} declared ones. Complete the file of "
            "--classes, or pass --unknown-classes unlabelled."
        )

    def _error(self, key: str, value: Any, rule: str) -> DataError:
        shown = repr(value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]} ..."
        return DataError(f"data import: {key}: {self.field}={shown}; expected {rule}")

    def _check_kind(self) -> None:
        if self._classes and self._spelled:
            name, number = next(iter(self._classes)), next(iter(self._spelled.values()))
            raise DataError(
                f"data import: {self.field}: labels are both names and numbers, such as {name!r} "
                f"and {number!r}; expected one kind: {number!r} may be the name of a class or "
                "its number. Declare all classes with --classes, or choose another --label-from."
            )

    def finish(
        self, folder: Path, labelled: bool
    ) -> tuple[list[str] | None, tuple[str, int] | None, np.ndarray | None]:
        """Return what the provisional numbers become: classes, or places of sets.

        Args:
            folder: the store's folder, for the file of label sets.
            labelled: whether a record has a label.

        Returns:
            Class names (declared, the source's, or in a public store those found, sorted); name and
            size of the file of label sets, if any; the final number of each provisional one, int32,
            with -1 appended for unlabelled records, or None if they are final.

        Raises:
            DataError: names and numbers in one store, undeclared classes, or numbers with two
                readings.
        """
        self._check_kind()
        if self._declared is not None:
            self._declared.check(self.field)
            self._names = self._declared.names
        self._check_unknown()
        class_of = None
        if self._classes:
            self._names = sorted(self._classes)
            rank = {name: i for i, name in enumerate(self._names)}
            class_of = np.array([rank[name] for name in self._classes], dtype=np.int32)
        if self._several and labelled:
            place_of = self._sets.write(folder / LABELS_FILE, class_of)
            return self._names, (LABELS_FILE, (folder / LABELS_FILE).stat().st_size), place_of
        if class_of is not None:
            return self._names, None, np.append(class_of, np.int32(-1))
        return self._names, None, None


def with_classes(
    samples: Iterable["Sample"], labels: ImportedLabels, counts: Callable[["Sample"], bool]
) -> Iterator["Sample"]:
    """Yield the samples; refuse undeclared class names of a private store.

    The first one is refused before its image is decoded.

    Args:
        counts: whether an image is not left out for another reason; asked of images with such a
            name only.

    Raises:
        DataError: names the class, and others among the next images.
    """
    rest = iter(samples)
    for sample in rest:
        if sample.problem is None and (names := labels.unlisted(sample)) and counts(sample):
            later = (
                name
                for one in islice(rest, _LOOKED_AT)
                if one.problem is None
                for name in labels.unlisted(one)
            )
            labels.refuse_unlisted(chain(names, later))
        yield sample
