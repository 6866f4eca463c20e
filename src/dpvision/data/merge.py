"""Merge stores into one: the store that one import of all their sources makes.

Stores of persons cannot be merged: persons are known by hashes, under another key in each store.
Nor can stores on which privacy was spent: the merged store begins with an empty ledger, so what was
spent on its records would not be counted.
"""

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from dpvision.data.import_labels import LabelRule
from dpvision.data.import_merge import write_store
from dpvision.data.import_part import ReadRule
from dpvision.data.import_work import read_parts, retire, software, work_folder
from dpvision.data.open import open_store
from dpvision.data.ordered import checked_workers
from dpvision.data.person_names import PersonRule
from dpvision.data.remote import check_local
from dpvision.data.sample import check_unchanged
from dpvision.data.store import CURATION, WINDOW, Store
from dpvision.data.store_part import parts_of
from dpvision.data.store_writer import copy_key, durable_key, new_store_folder
from dpvision.errors import DataError
from dpvision.privacy.store_marks import StoreLedgers

_OF_FIRST_FILE = "image_columns_not_read"
"""A count that is the same for all files of a source."""
_COUNTS_OF_SOURCES = (
    "table_rows_without_file",
    "captioned_pictures_missing",
    "captions_for_no_picture",
)
"""Counts that only some sources have."""


def merge_stores(
    stores: Sequence[str | Path],
    out: str | Path,
    *,
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Store:
    """Merge stores, in the order given, into a new one with a key, an id and ledgers of its own.

    The store has the bytes of one import of all their sources, with the same options: identical
    images of different stores become one record. Tars that were left in place stay there; copied
    images are copied again. The stores are not changed.

    Args:
        stores: two or more folders.
        out: folder to make; must not exist.
        workers: processes that read; if None, the cores of this process. It changes no byte.
        progress: called from time to time with the number of images read so far.

    Raises:
        ConfigError: ``workers`` is below 1.
        DataError: the stores do not go together, one of them is damaged or has persons, ``out``
            exists, or the disk is full. What was read is kept for the same call.
        PrivacyError: ledgers or marks of a private store are incomplete.
    """
    check_local(out, "data merge")
    target, workers = Path(out).resolve(), checked_workers(workers)
    if len(stores) < 2 or target.exists() or "*" in target.name:
        got = f", and {target} exists" if target.exists() else ""  # not to be removed: OUT may lack
        got = f", and the pattern {target}" if "*" in target.name else got
        raise DataError(
            f"data merge: {len(stores)} stores{got}; expected two or more, and a new folder for "
            "the merged one. Name it last: dpvision data merge STORE STORE OUT."
        )
    opened = [open_store(Path(path).resolve()) for path in stores]
    _check_places(opened, target)
    for store in opened:
        _check_kind(store)
    about = _about(opened)
    _check_unspent(opened)
    names = _class_names(opened)
    public = about["visibility"] == "public"
    labels = LabelRule(
        classes=names,
        unknown_classes="unlabelled"
        if any(store.meta.get("may_be_unlabelled") for store in opened)
        else "refuse",
    )
    sources = [part for store in opened for part in parts_of(store)]
    with work_folder(target, {"merge": True, "software": software()}, "data merge") as work:
        rule = ReadRule(durable_key(work), public, PersonRule(), labels, None, False, None)
        parts = read_parts("store", sources, work, rule, workers, progress=progress)

        def last(folder: Path) -> None:
            check_unchanged([part for part in sources if part.start == 0])
            _check_unspent(opened)
            open_store(folder)
            retire(work)

        with new_store_folder(target, private=not public, last=last) as folder:
            copy_key(work, folder)
            write_store(
                parts,
                folder,
                people=rule.people,
                labels=rule.imported_labels(),
                about=about | {"store_id": secrets.token_hex(16)},
                more=_more(opened),
                unmatched=("", ""),
            )
    return open_store(target)


def _check_places(stores: Sequence[Store], target: Path) -> None:
    for store in stores:
        if target.is_relative_to(store.path):
            raise DataError(
                f"data merge: {target} lies in the store {store.path}; expected it elsewhere. "
                "Choose another folder."
            )
    for place, store in enumerate(stores):
        for other in stores[:place]:
            if other.path == store.path or other.store_id == store.store_id:
                raise DataError(
                    f"data merge: {other.path} and {store.path} are one store; expected different "
                    "ones. Name each once, and of a divided store only the whole."
                )


def _check_kind(store: Store) -> None:
    """Refuse a store whose records one import of sources could not have."""
    for given, got, remedy in (
        (store.generated, "generated textures", "Make one store with `dpvision synth`."),
        (
            store.meta.get("unit_field") is not None,
            "persons, known by hashes under this store's own key",
            "Import the sources together, with --unit-from, so that one person's images are found.",
        ),
        (
            bool(store.meta.get("split")),
            "a part of a divided store, which shares its ledgers",
            "Name the whole store.",
        ),
        (
            "deduplicated" in store.meta or "cleared_from" in store.meta,
            "a store cleared of private images",
            "Merge the stores before dpvision data overlap.",
        ),
        (
            CURATION in store.meta,
            "a curated store, whose steps did not see the other's records",
            "Curate the sources together: dpvision data curate takes several files.",
        ),
    ):
        if given:
            raise DataError(
                f"data merge: {store.path}: {got}; expected an import without. {remedy}"
            )


def _check_unspent(stores: Sequence[Store]) -> None:
    """Refuse private stores with charges or a cap, which the merged store would not have."""
    for store in stores:
        ledgers = StoreLedgers.of(store.path)
        if not ledgers.private:
            continue
        if charged := sorted(name for name, one in ledgers.read_all().items() if one.steps):
            raise DataError(
                f"data merge: {store.path}: {len(charged)} runs were charged on it "
                f"({', '.join(charged[:3])}{', ...' if len(charged) > 3 else ''}); expected none, "
                "because the merged store begins with an empty ledger. Import all sources "
                "together before the first run, or train on the stores one by one."
            )
        if ledgers.caps():
            raise DataError(
                f"data merge: {store.path}: its owner set a cap; expected none, because the merged "
                "store would have none. Import all sources together, and set the cap there: "
                "dpvision ledger STORE --set-cap."
            )


def _about(stores: Sequence[Store]) -> dict[str, Any]:
    """Return the entries of store.json that all stores must share."""
    first = stores[0]
    for store in stores[1:]:
        again = "Import one of the sources again, with the options of the other."
        for said, one, other, remedy in (
            (
                "visibility",
                first.visibility,
                store.visibility,
                "Merge private stores with each other, and public ones.",
            ),
            ("scores (--dataset)", first.meta.get("metric"), store.meta.get("metric"), again),
            ("declared range of values (--window)", first.window, store.window, again),
        ):
            if one != other:
                raise DataError(
                    f"data merge: {first.path} and {store.path}: {said}: {_word(one)} and "
                    f"{_word(other)}; expected the same. {remedy}"
                )
    licences = dict.fromkeys(store.licence for store in stores)
    joined = "; ".join(one or "not stated" for one in licences)
    return {
        "visibility": first.visibility,
        "licence": None if set(licences) == {None} else joined,
        "metric": first.meta.get("metric"),
    }


def _word(value: Any) -> str:
    return "none" if value is None else str(value)


def _class_names(stores: Sequence[Store]) -> tuple[str, ...] | None:
    """Return the class names of the merged store: those of all, or of public stores all that they
    found.
    """
    with_labels = [store for store in stores if store.label_names is not None or store.has_labels]
    if len({store.multi_label for store in stores if store.has_labels}) > 1:
        raise DataError(
            "data merge: one label per image in "
            f"{_places(s for s in stores if s.has_labels and not s.multi_label)} and several in "
            f"{_places(s for s in stores if s.multi_label)}; expected one kind. Import them again "
            "with lists of labels, or without."
        )
    lists = {None if s.label_names is None else tuple(s.label_names) for s in with_labels}
    if len(lists) <= 1:
        return next(iter(lists), None)
    if None not in lists and all(store.visibility == "public" for store in stores):
        return tuple(sorted({name for names in lists for name in names or ()}))
    first, other = (
        with_labels[0],
        next(store for store in with_labels if store.label_names != with_labels[0].label_names),
    )
    raise DataError(
        f"data merge: {first.path} and {other.path}: different class names, "
        f"{_some(first.label_names)} and {_some(other.label_names)}; expected one list, in one "
        "order. Import both with the same --classes."
    )


def _places(stores: Iterable[Store]) -> str:
    return ", ".join(str(store.path) for store in stores)


def _some(names: list[str] | None) -> str:
    if names is None:
        return "numbers without names"
    return f"{len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"


def _more(stores: Sequence[Store]) -> dict[str, Any]:
    """Return the counts that only some sources have, and the declared range."""
    total, columns = Counter[str](), 0
    for store in stores:
        found = store.import_summary()
        columns = max(columns, found.get(_OF_FIRST_FILE, 0))
        total.update({name: found[name] for name in _COUNTS_OF_SOURCES if name in found})
    window = stores[0].meta.get(WINDOW)
    return {
        **({_OF_FIRST_FILE: columns} if columns else {}),
        **total,
        **({} if window is None else {"window": window}),
    }
