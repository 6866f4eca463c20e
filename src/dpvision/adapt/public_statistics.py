"""Standardise features by public images: (x - mean) / sqrt(variance + 0.1 x mean variance), with
the mean and variances of a public store's features by the same encoder.

Both are public numbers and cost no privacy (docs/heads.md, "Public statistics"). A public store
that holds private images is refused; lineage and statement say how it was compared (decision 0054).

Legend: N images, D feature dimension.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpvision.data.open import open_store
from dpvision.data.overlap import find_matches
from dpvision.data.store import Store
from dpvision.devices import loader_threads
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.feature_file import feature_array, rows_of_pass
from dpvision.encoders.feature_matches import kept_signatures, methods_of
from dpvision.errors import OPERATOR_ONLY, DataError, PrivacyError
from dpvision.runs.lineage import store_entry

MOST_IMAGES = 10_000
"""Images of a store that take part, at equal distances; a hundred do nearly as well."""
FEWEST_IMAGES = 100
_RAISED = 0.1
"""Part of the mean variance that is added to each: a dimension which hardly varies on public images
may vary on others.
"""

Say = Callable[[str], None]


def open_public(path: str, private: Store) -> Store:
    """Open a public store for the statistics of a head on ``private``.

    Raises:
        PrivacyError: the store was imported without --public, was cleared of private images, or is
            the private store, or a part of it.
        DataError: no store, or one of textures or of few images.
    """
    where = f"public_store: {path}"
    try:
        public = open_store(path)
    except DataError as error:
        raise DataError(f"public_store: {error}") from None
    if public.visibility != "public":
        raise PrivacyError(
            f"{where} is private; expected public images: their mean and spread are released with "
            "the head as they are. Pass a store that was imported with --public."
        )
    if public.results_visibility != "public":
        raise PrivacyError(
            f"{where} was cleared of private images; expected a whole public store: which images "
            "are missing could be read from their mean. Pass other public images."
        )
    if public.store_id == private.store_id:
        raise PrivacyError(
            f"{where} and {private.path} are of one import; expected images that the head is not "
            "trained on. Import other public images with --public."
        )
    if public.generated or public.num_records < FEWEST_IMAGES:
        held = "generated textures" if public.generated else f"{public.num_records} images"
        raise DataError(
            f"{where} holds {held}; expected {FEWEST_IMAGES} photographs or more, of any kind. "
            "Leave out --public-store: the texture centre needs no images."
        )
    return public


def public_entry(public: Store, private: Store) -> dict[str, Any]:
    """Return the lineage entry of the public images, with what they are compared with."""
    compared = {"against": [private.store_id], "methods": methods_of()}
    return store_entry(public, None, None) | {"deduplicated": compared}


def require_apart(
    public: Store, private: Store, *, workers: int = 2, say: Say = lambda text: None
) -> None:
    """Refuse a public store with images that are in the private one too, nearly or exactly
    (``data overlap``). The signatures of both are kept in their caches.

    The message holds a private count: it is for the operator's terminal, and goes into no file of
    the run.

    Raises:
        DataError: an image is in both. ConfigError: imagehash is not installed.
    """
    ours, theirs = (kept_signatures(store, workers=workers, say=say) for store in (public, private))
    found = len(find_matches(ours, theirs).public_M)
    if found:
        raise DataError(
            f"public_store: {public.path}: {OPERATOR_ONLY}{found} of its images are among those "
            f"of {private.path}, or look like one; expected none. See which: dpvision data overlap "
            f"{public.path} {private.path}. Pass other public images."
        )


def rows_used(public: Store) -> np.ndarray:
    """Return the rows of the images that take part, sorted int64."""
    count = min(public.num_records, MOST_IMAGES)
    return np.arange(count) * public.num_records // count


def public_statistics(
    encoder: Encoder,
    pooling: str,
    width: int,
    public: Store,
    *,
    batch_size: int,
    workers: int | None,
    device: torch.device,
    progress: Callable[[int], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the mean of a public store's features and the spread to divide by, float32 (D,).
    Features are kept in the store's folder.

    Args:
        width: D.
        batch_size, workers: hardware settings, as of the run.
        progress: as for ``feature_array``.

    Raises:
        DataError: too few images have features, or all features are alike.
    """
    rows = rows_used(public)
    feature_ND = feature_array(
        encoder,
        pooling,
        width,
        public,
        rows,
        # Of confidential weights even public images have private features.
        keep=not encoder.confidential,
        batch_size=rows_of_pass(encoder, batch_size, device),
        workers=loader_threads(workers, device),
        device=device,
        progress=progress,
    )
    x_ND = feature_ND[np.isfinite(feature_ND).all(axis=1)].astype(np.float64)
    variance_D = x_ND.var(axis=0) if len(x_ND) else np.zeros(width)
    spread_D = np.sqrt(variance_D + _RAISED * variance_D.mean()).astype(np.float32)
    if len(x_ND) < FEWEST_IMAGES or not 0 < spread_D.min() <= spread_D.max() < np.inf:
        raise DataError(
            f"public_store: {public.path}: {len(x_ND)} of {len(rows)} images have features, of "
            f"mean variance {variance_D.mean():.3g}; expected {FEWEST_IMAGES} or more that "
            "differ. Import other public images."
        )
    return torch.from_numpy(x_ND.mean(axis=0)).float(), torch.from_numpy(spread_D)
