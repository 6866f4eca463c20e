"""Classes of two stores, or of a store and a classifier, are compared by name; numbers follow."""

import copy
from collections.abc import Sequence

import numpy as np

from dpvision.data.import_labels import canonical
from dpvision.data.store import Store
from dpvision.errors import OPERATOR_ONLY, DataError

_SHOWN = 3


def numbered_as(store: Store, names: Sequence[str] | None, where: str, whose: str) -> Store:
    """Return ``store`` with the class numbers of ``names``, matched by name.

    A class that ``store`` lacks is no difference.

    Where there are no names, class n has the name "n": a store of numbers matches another one, or
    names that are these numbers.

    Args:
        names: class names in the order of the numbers that labels are to have; None for numbers
            without names.
        where: start of the error.
        whose: who has ``names``, for the error.

    Raises:
        DataError: a class that occurs in ``store`` is not among ``names``.
    """
    theirs = store.label_names
    if (theirs is None and names is None) or (
        theirs is not None and names is not None and theirs == list(names)
    ):
        return store
    present = np.unique(store.classes(np.arange(store.num_records))[1]).tolist()
    named = {
        k: str(k) if theirs is None else canonical(theirs[k])
        for k in present
        if theirs is None or k < len(theirs)
    }
    place = None if names is None else {canonical(name): k for k, name in enumerate(names)}
    number = {
        k: _number(name) if place is None else place.get(name, -1) for k, name in named.items()
    }
    missing = [repr(named[k]) for k in named if number[k] < 0] + [
        f"label {k}, which has no name" for k in present if k not in named
    ]
    if missing:
        raise DataError(
            f"{where}: {OPERATOR_ONLY if store.visibility == 'private' else ''}"
            f"classes of the stores differ: {_some(missing)} of {store.path} "
            f"({_kind(theirs)}) not among those of {whose} ({_kind(names)}); expected the same "
            "names. Import the test images with the same --classes and --label-from."
        )
    number_of = np.full(max(len(theirs or ()), max(present, default=0) + 1), -1, dtype=np.int64)
    number_of[list(number)] = list(number.values())
    made = copy.copy(store)
    made.label_names = None if names is None else list(names)
    if store.label_sets is not None:
        made.label_sets = store.label_sets.numbered(number_of)
        return made
    index = np.array(store.index)
    labelled = index["label"] >= 0
    index["label"][labelled] = number_of[index["label"][labelled]]
    made.index = index  # type: ignore[assignment]
    return made


def all_names(names: Sequence[str] | None, num_classes: int) -> tuple[str, ...]:
    """Return a name for each of ``num_classes`` classes: its own, or its number."""
    return tuple(
        names[k] if names is not None and k < len(names) else str(k) for k in range(num_classes)
    )


def _number(name: str) -> int:
    """The class number that a name spells, or -1."""
    return int(name) if name.isascii() and name.isdecimal() and str(int(name)) == name else -1


def _kind(names: Sequence[str] | None) -> str:
    return (
        "numbers without names"
        if names is None
        else f"{len(names)}: {_some([repr(name) for name in names])}"
    )


def _some(words: Sequence[str]) -> str:
    return ", ".join(words[:_SHOWN]) + (", ..." if len(words) > _SHOWN else "")
