"""Find the persons of an import.

Every image has one person, or the operator says what becomes of it.

An image that lost its person would count as a person of its own, and the guarantee per person would
be false for the one it shows.
"""

from array import array
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpvision.data.decode import BadImage, decode
from dpvision.data.person_names import SHARED_FILE, PersonRule, alike
from dpvision.data.rows import keyed_hash
from dpvision.data.sample import Sample
from dpvision.data.sorted_runs import write_run
from dpvision.errors import OPERATOR_ONLY, DataError

NO_PERSON = "no person"
"""Reason to leave an image out."""
DIGESTS = "digests"
"""File of ``write_people``."""
_SHOWN = 5
_IN_RUN = 1 << 16


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
        self.names: list[str] = []

    def add(self, key: str) -> None:
        self.count += 1
        if len(self.names) < _SHOWN:
            self.names.append(key)

    def add_all(self, count: int, names: list[str]) -> None:
        """Count images of another part, and keep the first names."""
        self.count += count
        self.names += names[: _SHOWN - len(self.names)]

    def refuse(self, field: str) -> None:
        """Raise DataError if there was one."""
        if self.count:
            raise DataError(
                f"data import: --unit-from {field}: {OPERATOR_ONLY}{self.count:,} images without "
                f"one ({some(self.names, self.count)}); expected one each. Complete the field, "
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
            f"bytes of an image of another person ({some(shown, len(found))}); expected one "
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
            f"several ways ({some(found, len(found))}), which would count as several; expected "
            "names that differ in more than case, leading zeros, the form of a number, the signs "
            "between letters and digits, or letters that look alike. Write each person in one way "
            "in the source; give different persons other names."
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


def write_people(
    samples: Iterable[Sample], folder: Path, rule: PersonRule, key: bytes
) -> tuple[dict[str, Any], list[str]]:
    """Collect the persons of a part of a source, before its images are decoded.

    Args:
        folder: gets a file ``digests`` of sorted runs: hashes of an image and of its person.
        key: the store's, under which they are hashed.

    Returns:
        Counts that ``person_check.check_persons`` needs, and the names of the persons.
    """
    missing, seen, names, runs = WithoutPerson(), set[str](), set[str](), list[int]()
    digests, persons = array("q"), array("q")
    with (folder / DIGESTS).open("wb") as file:

        def flush() -> None:
            write_run(file, *(np.frombuffer(part, dtype=np.int64) for part in (digests, persons)))
            runs.append(len(digests))

        for sample in samples:
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
            digests.append(keyed_hash(key, sample.image))
            persons.append(-1 if name is None else keyed_hash(key, person_bytes(name)))
            if len(digests) == _IN_RUN:
                flush()
                digests, persons = array("q"), array("q")
        if digests:
            flush()
    without = [missing.count, missing.names]
    return {"fields": sorted(seen), "without_person": without, "runs": runs}, sorted(names)


def shared_images(
    samples: Iterable[Sample], rule: PersonRule, suspects: set[int], key: bytes
) -> list[Shared]:
    """Return the images of two persons among those whose hash under ``key`` is in ``suspects``."""
    first: dict[int, tuple[str, str | None] | None] = {}
    found = []
    for sample in samples:
        if sample.problem is not None:
            continue
        if (hashed := keyed_hash(key, sample.image)) not in suspects:
            continue
        name = rule.name(sample)
        if name is None and rule.unmatched == "drop":
            continue
        if hashed not in first:
            first[hashed] = (sample.key, name) if decodes(sample.image) else None
        elif (kept := first[hashed]) is not None and kept[1] != name:
            found.append(Shared(*kept, sample.key, name))
    return found


def decodes(data: bytes) -> bool:
    """Return whether the bytes are an image that can be read."""
    try:
        decode(data)
    except BadImage:
        return False
    return True


def some(words: list[str], count: int) -> str:
    """Return the first of ``count`` words, for a message."""
    return ", ".join(words[:_SHOWN]) + (", ..." if count > _SHOWN else "")
