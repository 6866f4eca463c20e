"""The run behind a score: its averaged weights, its classes, and the training images that it must
not be scored on.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpvision.config import DataConfig
from dpvision.data.declared import check_declared
from dpvision.data.open import is_store, open_store
from dpvision.data.rows import keyed_hash
from dpvision.data.store import Store
from dpvision.data.store_writer import KEY_FILE, read_key
from dpvision.errors import OPERATOR_ONLY, ConfigError, DataError


def is_run(spec: str | Path) -> bool:
    """Return whether ``spec`` is a run or checkpoint folder, rather than the name of another
    encoder.
    """
    return Path(spec).is_dir()


def with_averages(specs: Sequence[str], ema: bool) -> list[bool]:
    """Return for each encoder whether its averaged weights are asked for: ``ema`` for runs, False
    for encoders that have none.

    Raises:
        ConfigError: ``ema`` without a run among them.
    """
    if ema and not any(map(is_run, specs)):
        raise ConfigError(
            f"encoder: --ema with {', '.join(specs)}; expected a run, the only encoder with "
            "averaged weights. Drop --ema."
        )
    return [ema and is_run(spec) for spec in specs]


def trained_store(data: DataConfig) -> Store | None:
    """Open the run's training store, or return None if it is no longer there."""
    return open_store(data.store) if data.store is not None and is_store(data.store) else None


def trained_classes(
    data: DataConfig, manifest: Mapping[str, Any] | None, what: str
) -> list[str] | None:
    """Return the class names of a classifier's run in the order of its scores; None if its classes
    are numbers without names.

    Args:
        data: the run's data config.
        manifest: of its checkpoint; None for a run that has not started.
        what: name of the evaluation, for the error.

    Raises:
        DataError: the checkpoint is of a version that did not write the names, and the training
            store is gone.
    """
    if manifest is not None and "class_names" in manifest:
        return manifest["class_names"]
    trained = trained_store(data)
    if trained is None:
        raise DataError(
            f"{what}: the training store {data.store} is not there, and the checkpoint lacks its "
            "class names; expected one of them, because labels are matched by name. Put the "
            "store back."
        )
    return trained.label_names


def check_unseen(data: DataConfig, store: Store, what: str) -> None:
    """Refuse test images that are in the training store, if it is still there, or whose 16-bit
    samples were read otherwise. Parts of one store are allowed. A second import of the same files
    is refused if it is public (``check_not_private``).

    Args:
        data: the run's data config.
        what: name of the evaluation, for the error.
    """
    trained = trained_store(data)
    if trained is not None:
        check_declared(
            trained.window,
            trained.undeclared_range,
            store,
            what,
            "the images that the run was trained on",
        )
    if (
        trained is not None
        and trained.store_id == store.store_id
        and len(np.intersect1d(trained.index["id"], store.index["id"]))
    ):
        raise DataError(
            f"{what}: {store.path} shares records with the store that the run was trained on; "
            "expected other images. Hold some out before training: dpvision data split."
        )
    if trained is not None:
        check_not_private(trained, store, what)


def check_not_private(trained: Store, store: Store, what: str) -> None:
    """Refuse a public store with image files of the private store that a run was trained on, whose
    scores would be released. Stores of one import are not compared, nor is one without its key.

    Files are compared by size, and those of a size that occurs by their hash; none is decoded. The
    message holds a private count: it is for the operator's terminal.
    """
    if (
        (trained.visibility, store.results_visibility) != ("private", "public")
        or trained.store_id == store.store_id
        or store.generated
        or not (trained.path / KEY_FILE).exists()
    ):
        return
    key = read_key(trained.path)
    rows = np.flatnonzero(np.isin(store.index["size"], trained.index["size"]))
    ids = [keyed_hash(key, store.read(row)) for row in rows.tolist()]
    if found := int(np.isin(np.array(ids, dtype=np.int64), trained.index["id"]).sum()):
        raise DataError(
            f"{what}: {store.path}: {OPERATOR_ONLY}{found:,} of its images are among those of "
            f"{trained.path}, which the run was trained on; expected none in a public store. See "
            f"which: dpvision data overlap {store.path} {trained.path}. Import other public images."
        )
