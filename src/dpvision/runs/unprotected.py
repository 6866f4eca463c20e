"""Digests of weights of runs without a guarantee, kept beside the store, so that a file with these
weights is recognised.

LEDGERS/<store_id>/unprotected-<run_id>.json holds digests of the tensors that such a run changed,
for every checkpoint, written before the checkpoint. They detect files saved again by another
program without lineage, as long as one tensor is unchanged; changed numbers (plus 1e-9) are not
detected. Stores in one folder share LEDGERS, so weights trained on one of them are recognised for
all.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from dpvision.data.store import Store
from dpvision.errors import PrivacyError
from dpvision.files import make_folders, write_json
from dpvision.privacy.marks import read_json
from dpvision.privacy.store_marks import StoreLedgers
from dpvision.weights import contents

FORMAT = "dpvision-unprotected-weights-1"
_PREFIX = "unprotected-"


def remember_weights(
    store: Store, run_id: str, tensors: Iterable[Tensor], start: Iterable[str]
) -> None:
    """Add the digests of a checkpoint's tensors to the file of a run without a guarantee on
    ``store``; durable when this returns.

    Args:
        start: digests (``weights.contents``) of the weights that the run started from, which are
            excluded.

    Raises:
        DataError: not a store. CheckpointError: the file cannot be written.
    """
    ledgers = StoreLedgers.of(store.path)
    path = ledgers.folder / f"{_PREFIX}{run_id}.json"
    known = set(_read(path)["tensors"]) if path.exists() else set()
    made = set(contents(tensors)) - set(start)
    if made <= known:
        return
    make_folders(ledgers.folder)
    about = {
        "format": FORMAT,
        "store_id": store.store_id,
        "visibility": store.visibility,
        "licence": store.licence,
        "run_id": run_id,
    }
    write_json(path, about | {"tensors": sorted(known | made)}, sort_keys=True)


def runs_with_these_weights(store: Store, tensors: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Lineage entries of runs without a guarantee, on ``store`` or a store in the same folder, that
    wrote one of these tensors bit for bit.

    Args:
        tensors: not read if there was no such run.

    Raises:
        DataError: not a store. PrivacyError: a file of digests is damaged.
    """
    files = sorted(StoreLedgers.of(store.path).folder.parent.glob(f"*/{_PREFIX}*.json"))
    given = set(contents(tensors)) if files else set()
    found = []
    for values in map(_read, files):
        if not given.isdisjoint(values["tensors"]):
            found.append(
                {name: values[name] for name in ("store_id", "visibility", "licence", "run_id")}
                | {"guarantee": None}
            )
    return found


def _read(path: Path) -> dict[str, Any]:
    values = read_json(path)
    fields = {"format", "store_id", "visibility", "licence", "run_id", "tensors"}
    if (
        not isinstance(values, dict)
        or values.keys() != fields
        or values["format"] != FORMAT
        or not isinstance(values["tensors"], list)
    ):
        raise PrivacyError(
            f"lineage: {path}: not a file of digests of weights; expected what dpvision wrote. "
            "Restore it from a copy."
        )
    return values
