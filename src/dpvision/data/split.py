"""Split a store into two without copying images; all images of a person go to the same half."""

import contextlib
import shutil
from pathlib import Path

import numpy as np

from dpvision.data.keys import StepKey
from dpvision.data.open import open_store
from dpvision.data.store import Store
from dpvision.data.store_writer import new_store_folder, require_new, write_part
from dpvision.errors import DataError, DPVisionError
from dpvision.files import make_folders
from dpvision.privacy.store_marks import StoreLedgers
from dpvision.strict_json import parse_json


def split_store(
    store_dir: str | Path, out_a: str | Path, out_b: str | Path, fraction: float, seed: int = 0
) -> tuple[Store, Store]:
    """Split a store by units.

    Each unit (a record without one is its own) goes to A with probability ``fraction``, else to B.

    A unit's half follows from a keyed hash of (seed, unit), so it does not depend on other units;
    the sizes are therefore only close to the fraction. Both halves read the parent's shards in
    place and keep its record ids, their key and its ``store_id``: they share one privacy account,
    so they must be in the parent's folder, where its ledgers are.

    Args:
        store_dir: the parent, which must be kept.
        out_a, out_b: folders to make, in the folder of the parent.
        fraction: expected share of the units in A, strictly between 0 and 1.
        seed: public.

    Raises:
        DataError: ``fraction`` is out of range, a half would be empty, a folder exists or lies
            elsewhere.
        PrivacyError: a private parent's ledgers or marks are incomplete: the halves would have new
            marks.
    """
    if not 0 < fraction < 1:
        raise DataError(
            f"data split: fraction={fraction}; expected strictly between 0 and 1. Use 0.8."
        )
    store = open_store(store_dir)
    if store.generated:
        raise DataError(
            f"data split: {store_dir} holds textures; expected images. Make a second store with "
            "`dpvision synth --first`."
        )
    ledgers = StoreLedgers.of(store.path)
    if store.visibility == "private":
        ledgers.read_all()
    home = store.path.resolve()
    targets = [Path(out).resolve() for out in (out_a, out_b)]
    for target in targets:
        if target.parent != home.parent:
            raise DataError(
                f"data split: {target}; expected a folder in {home.parent}, where the parent's "
                "ledgers are. Choose one there."
            )
        require_new(target)
    if targets[0] == targets[1]:
        raise DataError(
            f"data split: {targets[0]} is named twice; expected two folders, neither of which "
            "exists. Name another."
        )
    unit = np.where(store.index["unit"] >= 0, store.index["unit"], store.index["id"])
    in_a = StepKey(seed, 0).uniform_numpy(unit, "split", 1)[:, 0] < fraction
    if in_a.all() or not in_a.any():
        raise DataError(
            f"data split: fraction={fraction}; expected records in both halves. Move it towards "
            "0.5, or change the seed."
        )
    private = store.results_visibility == "private"
    made = []
    with contextlib.ExitStack() as stack:
        if store.visibility == "private":
            # A run that is charged meanwhile writes its marks to the files of the family, of which
            # the halves' are not yet.
            make_folders(ledgers.folder)
            stack.enter_context(ledgers.locked())
        try:
            for target, chosen, half in zip(targets, (in_a, ~in_a), "ab", strict=True):
                split = {"half": half, "fraction": fraction, "seed": seed}
                with new_store_folder(target, private=private) as folder:
                    # Without the removed records, this half's original number of records is
                    # unknown.
                    write_part(store, folder, chosen, {"split": split}, without="cleared_from")
                made.append(target)
        except BaseException:
            for target in made:
                shutil.rmtree(target, ignore_errors=True)
            raise
    return open_store(targets[0]), open_store(targets[1])


def other_half(store: Store) -> Store | None:
    """Return the other part of a split store (``data split``), if it is beside it."""
    split = store.meta.get("split")
    if not split:
        return None
    wanted = store.store_id, {**split, "half": "b" if split["half"] == "a" else "a"}
    for file in sorted(store.path.resolve().parent.glob("*/store.json")):
        with contextlib.suppress(OSError, ValueError, DPVisionError):
            meta = parse_json(file.read_bytes())
            if not isinstance(meta, dict) or (meta.get("store_id"), meta.get("split")) != wanted:
                continue
            found = open_store(file.parent)
            # A part of a part may have the same numbers.
            if not len(np.intersect1d(found.index["id"], store.index["id"])):
                return found
    return None
