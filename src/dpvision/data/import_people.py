"""Find the persons of an import.

Every image has one person, or the operator says what becomes of it.

An image that lost its person would count as a person of its own, and the guarantee per person would
be false for the one it shows.
"""

from array import array
from collections.abc import Callable, Collection, Iterable
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dpvision.data.declared import has_units
from dpvision.data.decode import BadImage, decode
from dpvision.data.open import open_store
from dpvision.data.person_names import SHARED_FILE, PersonRule, alike
from dpvision.data.sample import Sample
from dpvision.data.store_writer import keyed_hash, read_key
from dpvision.errors import OPERATOR_ONLY, DataError

NO_PERSON = "no person"
"""Reason to leave an image out."""
_SHOWN = 5


class Shared(NamedTuple):
    """Two files with the same bytes, of two persons (None: a person of its own)."""

    first: str
    person: str | None
    second: str
    other: str | None


class WithoutPerson:
    """Counts images without a person, and keeps the first names."""

    def __init__(self) -> None:
        self.count = 0
        self._names: list[str] = []

    def add(self, key: str) -> None:
        self.count += 1
        if len(self._names) < _SHOWN:
            self._names.append(key)

    def refuse(self, field: str) -> None:
        """Raise DataError if there was one."""
        if self.count:
            raise DataError(
                f"data import: --unit-from {field}: {OPERATOR_ONLY}{self.count:,} images without "
                f"one ({_some(self._names, self.count)}); expected one each. Complete the field, "
                "or give --unmatched drop to leave them out, or --unmatched own-person if each "
                "shows a person of whom there is no other image."
            )


def refuse_shared(field: str, found: list[Shared]) -> None:
    """Raise DataError if there are images of two persons."""
    if found:
        shown = [
            f"{one.first} of {one.person or 'nobody'} = {one.second} of {one.other or 'nobody'}"
            for one in found[:_SHOWN]
        ]
        raise DataError(
            f"data import: --unit-from {field}: {OPERATOR_ONLY}{len(found):,} files have the "
            f"bytes of an image of another person ({_some(shown, len(found))}); expected one "
            "person for each image. Remove them from all but one person, or give "
            "--shared-images first to keep each for the first, listed in the store's "
            f"confidential/{SHARED_FILE}; statements then say that this is not covered."
        )


def refuse_alike(field: str, names: Iterable[str]) -> None:
    """Raise DataError if names of different persons may be spellings of one.

    ``person_names.alike`` compares them.

    Args:
        names: from ``person_name``, each once.
    """
    if found := sorted(" = ".join(sorted(group)) for group in alike(names)):
        raise DataError(
            f"data import: --unit-from {field}: {OPERATOR_ONLY}{len(found):,} persons spelled in "
            f"several ways ({_some(found, len(found))}), which would count as several; expected "
            "names that differ in more than case, leading zeros, the form of a number, the signs "
            "between letters and digits, or letters that look alike. Write each person in one way "
            "in the source; give different persons other names."
        )


def refuse_known(store_dir: Path, names: Collection[str]) -> None:
    """Raise DataError if persons are in a store of persons too, or it has none.

    Args:
        names: from ``person_name``, each once.
    """
    store, key = open_store(store_dir), read_key(store_dir)
    if not has_units(store):
        raise DataError(
            f"data import: --apart-from {store_dir}: a store without persons; expected one that "
            "was imported with --unit-from. Drop the option."
        )
    known = set(store.index["unit"].tolist())
    found = sorted(name for name in names if keyed_hash(key, person_bytes(name)) in known)
    if found:
        raise DataError(
            f"data import: --apart-from {store_dir}: {OPERATOR_ONLY}{len(found):,} of "
            f"{len(names):,} persons are in it too ({_some(found, len(found))}); expected none. "
            "Leave their images out of the source, or import all images as one store and divide "
            "it by persons: dpvision data split."
        )


def person_bytes(name: str) -> bytes:
    """Return what is hashed of a person's name."""
    return name.encode("utf-8", "surrogatepass")


def check_field(option: str, field: str, seen: set[str]) -> None:
    """Raise DataError if no sample had a field."""
    if field not in seen:
        raise DataError(
            f"data import: {option} {field}: no sample has it; expected one of {sorted(seen)}. "
            "Name one of them."
        )


def check_persons(read: Callable[[], Iterable[Sample]], rule: PersonRule) -> None:
    """Refuse images without a person or of two, and persons spelled in two ways.

    This comes before all images are decoded; only suspicious ones are.

    Args:
        read: gives the samples anew at each call; called once, and again if there are images of two
            persons.

    Raises:
        DataError: as ``WithoutPerson.refuse``, ``refuse_alike``, ``refuse_known`` and
            ``refuse_shared``, or no sample has the field.
    """
    assert rule.unit_from is not None
    digests, persons, missing, seen, names = (
        array("Q"),
        array("Q"),
        WithoutPerson(),
        set[str](),
        set[str](),
    )
    for sample in read():
        if sample.problem is not None:
            continue
        seen |= sample.fields.keys()
        name = rule.name(sample)
        if name is None and rule.unmatched != "own-person":
            if rule.unmatched == "refuse" and (missing.count or decodes(sample.image)):
                missing.add(sample.key)
            continue
        if name is not None:
            names.add(name)
        digests.append(_digest(sample.image))
        persons.append(0 if name is None else _digest(person_bytes(name)))
    if seen:
        check_field("--unit-from", rule.unit_from, seen)
    missing.refuse(rule.unit_from)
    refuse_alike(rule.unit_from, names)
    if rule.apart_from is not None:
        refuse_known(rule.apart_from, names)
    if rule.shared_images != "refuse" or not len(digests):
        return
    digest_N, person_N = (np.frombuffer(part, dtype=np.uint64) for part in (digests, persons))
    order = np.lexsort((person_N, digest_N))
    same = (digest_N[order][1:] == digest_N[order][:-1]) & (
        person_N[order][1:] != person_N[order][:-1]
    )
    suspects = set(digest_N[order][1:][same].tolist())
    if suspects:
        refuse_shared(rule.unit_from, _shared(read(), rule, suspects))


def _shared(samples: Iterable[Sample], rule: PersonRule, suspects: set[int]) -> list[Shared]:
    first: dict[int, tuple[str, str | None] | None] = {}
    found = []
    for sample in samples:
        if sample.problem is not None or (digest := _digest(sample.image)) not in suspects:
            continue
        name = rule.name(sample)
        if name is None and rule.unmatched == "drop":
            continue
        if digest not in first:
            first[digest] = (sample.key, name) if decodes(sample.image) else None
        elif (kept := first[digest]) is not None and kept[1] != name:
            found.append(Shared(*kept, sample.key, name))
    return found


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def decodes(data: bytes) -> bool:
    """Return whether the bytes are an image that can be read."""
    try:
        decode(data)
    except BadImage:
        return False
    return True


def _some(words: list[str], count: int) -> str:
    return ", ".join(words[:_SHOWN]) + (", ..." if count > _SHOWN else "")
