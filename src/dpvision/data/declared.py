"""Compare declared public numbers (of records, of units) with a store's counts, which are private: for the operator only."""

import math

import numpy as np

from dpvision.data.store import Store
from dpvision.errors import DataError

TOLERANCE = 0.01
"""Largest relative difference between a store's count and the declared number, which is public and may be rounded."""


def fits(count: int, declared: int, *, at_most: bool = False) -> bool:
    """Return whether ``count`` is within 1% of ``declared``, and with ``at_most`` no larger."""
    return math.fabs(count - declared) <= TOLERANCE * declared and not (at_most and count > declared)


def rounded_up(count: int) -> int:
    """Round ``count`` up to as few significant digits as 1% allows: 8981 gives 9000."""
    for power in range(len(str(count)) - 1, 0, -1):
        rounded = -(-count // 10**power) * 10**power
        if fits(count, rounded, at_most=True):
            return rounded
    return count


def has_units(store: Store) -> bool:
    """Return whether the import recorded units (persons)."""
    return store.meta.get("unit_field") is not None


def shared_images(store: Store) -> int:
    """Number of files of the source with the bytes of an image that was kept for another unit, or for none."""
    if "shared_images" in store.meta:
        return int(store.meta["shared_images"])
    try:  # a store of an older version
        return int(store.import_summary().get("unit_conflicts", 0))
    except DataError:
        return 0


def count_units(store: Store, rows: np.ndarray) -> int:
    """Number of units among int64 ``rows``; a record without one is its own unit."""
    unit = store.index["unit"][rows]
    return len(np.unique(unit[unit >= 0])) + int((unit < 0).sum())
