"""Whether a run was trained on the images that it is to be scored on."""

import numpy as np

from dpvision.config import DataConfig
from dpvision.data.open import is_store, open_store
from dpvision.data.store import Store
from dpvision.errors import DataError


def trained_store(data: DataConfig) -> Store | None:
    """The store of the run, as far as it is still where it was."""
    return open_store(data.store) if data.store is not None and is_store(data.store) else None


def check_unseen(data: DataConfig, store: Store, what: str) -> None:
    """Refuse images of the training store, as far as it is still where it was; halves of one store may be given.

    Args:
        data: of the run.
        what: is measured, for the error.
    """
    trained = trained_store(data)
    if trained is not None and trained.store_id == store.store_id and len(np.intersect1d(trained.index["id"], store.index["id"])):
        raise DataError(
            f"{what}: {store.path} shares records with the store that the run was trained on; expected other images. "
            "Hold some out before training: dpvision data split."
        )
