"""Check the persons of an import before its images are decoded."""

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

import numpy as np

from dpvision.data.declared import has_units
from dpvision.data.import_part import Part
from dpvision.data.import_people import (
    DIGESTS,
    WithoutPerson,
    check_field,
    person_bytes,
    refuse_alike,
    refuse_shared,
    shared_images,
    some,
)
from dpvision.data.open import open_store
from dpvision.data.person_names import PersonRule
from dpvision.data.rows import keyed_hash
from dpvision.data.sample import Sample
from dpvision.data.sorted_runs import Run, in_order
from dpvision.data.store_writer import read_key
from dpvision.errors import OPERATOR_ONLY, DataError


def check_persons(
    parts: Sequence[Part],
    rule: PersonRule,
    key: bytes,
    read: Callable[[list[int]], Iterable[Sample]],
) -> None:
    """Refuse images without a person or of two, and persons spelled in two ways.

    This comes before all images are decoded; only suspicious ones are.

    Args:
        parts: of ``import_people.write_people``, in the order of the source.
        key: the one given to it.
        read: gives the samples of some of the parts anew; called if there are images of two
            persons.

    Raises:
        DataError: as ``WithoutPerson.refuse``, ``refuse_alike``, ``refuse_known`` and
            ``refuse_shared``, or no sample has the field.
    """
    assert rule.unit_from is not None
    missing, seen, names = WithoutPerson(), set[str](), set[str]()
    for part in parts:
        seen.update(part.about["fields"])
        names.update(part.tables()["persons"])
        missing.add_all(*part.about["without_person"])
    if seen:
        check_field("--unit-from", rule.unit_from, seen)
    missing.refuse(rule.unit_from)
    refuse_alike(rule.unit_from, names)
    if rule.apart_from is not None:
        refuse_known(rule.apart_from, names)
    if rule.shared_images == "refuse" and (suspects := _suspects(parts)):
        of_interest = [i for i, part in enumerate(parts) if _has_any(part, suspects)]
        refuse_shared(rule.unit_from, shared_images(read(of_interest), rule, suspects, key))


def _suspects(parts: Sequence[Part]) -> set[int]:
    """Digests of images with two persons."""
    found = set[int]()
    for block in in_order([run for part in parts for run in runs_of(part, DIGESTS)]):
        block = block[np.lexsort((block["value"], block["id"]))]
        same, other = np.diff(block["id"]) == 0, np.diff(block["value"]) != 0
        found.update(block["id"][1:][same & other].tolist())
    return found


def _has_any(part: Part, suspects: set[int]) -> bool:
    wanted = np.array(sorted(suspects))
    return any(
        bool(np.isin(block["id"], wanted).any())
        for run in runs_of(part, DIGESTS)
        for block in in_order([run])
    )


def runs_of(part: Part, name: str, add: int = 0) -> list[Run]:
    """Return the sorted runs in a part's file."""
    starts = np.cumsum([0, *part.about["runs"]]).tolist()
    return [
        Run(part.folder / name, start, count, add)
        for start, count in zip(starts, part.about["runs"], strict=False)
    ]


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
            f"{len(names):,} persons are in it too ({some(found, len(found))}); expected none. "
            "Leave their images out of the source, or import all images as one store and divide "
            "it by persons: dpvision data split."
        )
