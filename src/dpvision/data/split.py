"""Split a store into two without copying images; all images of a person go to the same half."""

import shutil
from pathlib import Path

import numpy as np

from dpvision.data.declared import shared_images
from dpvision.data.keys import StepKey
from dpvision.data.open import open_store
from dpvision.data.store import SHARED_KEPT, Store, write_description
from dpvision.data.store_writer import copy_key, new_store_folder
from dpvision.errors import DataError
from dpvision.privacy.store_marks import StoreLedgers


def split_store(
    store_dir: str | Path, out_a: str | Path, out_b: str | Path, fraction: float, seed: int = 0
) -> tuple[Store, Store]:
    """Split a store by units: each unit (a record without one is its own) goes to A with
    probability ``fraction``, else to B.

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
    if store.visibility == "private":
        StoreLedgers.of(store.path).read_all()
    home = store.path.resolve()
    targets = [Path(out).resolve() for out in (out_a, out_b)]
    for target in targets:
        if target.parent != home.parent:
            raise DataError(
                f"data split: {target}; expected a folder in {home.parent}, where the parent's "
                "ledgers are. Choose one there."
            )
    unit = np.where(store.index["unit"] >= 0, store.index["unit"], store.index["id"])
    in_a = StepKey(seed, 0).uniform_numpy(unit, "split", 1)[:, 0] < fraction
    if in_a.all() or not in_a.any():
        raise DataError(
            f"data split: fraction={fraction}; expected records in both halves. Move it towards "
            "0.5, or change the seed."
        )
    made = []
    try:
        for target, chosen, half in zip(targets, (in_a, ~in_a), "ab", strict=True):
            _write_half(store, target, chosen, {"half": half, "fraction": fraction, "seed": seed})
            made.append(target)
    except BaseException:
        for target in made:
            shutil.rmtree(target, ignore_errors=True)
        raise
    return open_store(targets[0]), open_store(targets[1])


def _write_half(store: Store, target: Path, chosen: np.ndarray, split: dict) -> None:
    text, labels, home = store.meta["text"], store.meta.get("labels"), store.path.resolve()
    with new_store_folder(target, private=store.results_visibility == "private") as folder:
        copy_key(home, folder)
        write_description(
            folder,
            store_id=store.store_id,
            visibility=store.visibility,
            index=store.index[chosen],
            shards=[(str(home / shard["path"]), shard["bytes"]) for shard in store.meta["shards"]],
            text=(str(home / text["path"]), text["bytes"]),
            label_names=store.label_names,
            unit_field=store.meta.get("unit_field"),
            licence=store.licence,
            split=split,
            metric=store.meta.get("metric"),
            may_be_unlabelled=store.meta.get("may_be_unlabelled", False),
            shared_images=shared_images(store),
            shared_images_kept=SHARED_KEPT in store.meta,
            samples=store.meta,
            # Not cleared_from: without the removed records, this half's original number of records
            # is unknown.
            cleared={"deduplicated": store.meta["deduplicated"]}
            if "deduplicated" in store.meta
            else None,
            labels=None if labels is None else (str(home / labels["path"]), labels["bytes"]),
        )
