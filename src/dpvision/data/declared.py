"""Compare declared public values with stores: numbers of records and units, range of samples.

A store's counts are private: they are for the operator only. The declared range of samples of more
than 8 bits travels with the store and its runs.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dpvision.data.rgb import Window
from dpvision.data.rows import Rows, of_rows
from dpvision.data.store import Store
from dpvision.errors import DataError
from dpvision.privacy.sampling import TOLERANCE

_RECORDS_OF_A_UNIT = (1, 2, 4, 8)


def fits(count: int, declared: int, *, at_most: bool = False) -> bool:
    """Return whether ``count`` is within 1% of ``declared``, and with ``at_most`` no larger."""
    return math.fabs(count - declared) <= TOLERANCE * declared and not (
        at_most and count > declared
    )


def rounded_up(count: int) -> int:
    """Round ``count`` up to the largest multiple of 1, 2, 5, 10, 20 ... that 1% allows: 8981 gives
    9000, 501 gives 505. Below 100 only the count itself is within 1%.
    """
    for power in range(len(str(count)) - 1, 0, -1):
        for step in (10**power, 10**power // 2, 10**power // 5):
            rounded = -(-count // step) * step
            if fits(count, rounded, at_most=True):
                return rounded
    return count


def has_units(store: Store) -> bool:
    """Return whether the import recorded units (persons)."""
    return store.meta.get("unit_field") is not None


def numbers_to_declare(store: Store) -> list[dict[str, int]]:
    """Return rounded numbers to declare for a store, for one to eight records per unit.

    Without units there is only the number of records.
    """
    if not has_units(store):
        return [{"dataset_size": rounded_up(store.meta.get("cleared_from", store.num_records))}]
    found: list[dict[str, int]] = []
    for k in _RECORDS_OF_A_UNIT:
        rows = store.eligible_rows(k, 0)
        units = rounded_up(count_units(store, rows))
        size = min(rounded_up(len(rows)), k * units)
        if found and size == found[-1]["dataset_size"]:
            break  # no unit has more records
        found.append({"max_records_per_unit": k, "num_units": units, "dataset_size": size})
    return found


def shared_images(store: Store) -> int:
    """Number of files whose image was kept for another unit, or for none."""
    if "shared_images" in store.meta:
        return int(store.meta["shared_images"])
    try:  # a store of an older version
        return int(store.import_summary().get("unit_conflicts", 0))
    except DataError:
        return 0


def count_units(store: Store, rows: Rows) -> int:
    """Number of units among int64 ``rows``; a record without one is its own unit."""
    unit = of_rows(store.index["unit"], rows)
    return len(np.unique(unit[unit >= 0])) + int((unit < 0).sum())


def window_of(manifest: Mapping[str, Any]) -> Window | None:
    """Return the declared range of the images that a checkpoint was trained on, or None."""
    found = manifest.get("window")
    return None if found is None else (float(found[0]), float(found[1]))


def check_declared(
    window: Window | None, undeclared: bool, store: Store, where: str, whose: str
) -> None:
    """Refuse stores of 16-bit images of which only one has a declared range.

    Two declared ranges may differ, as devices do.

    Args:
        window, undeclared: of the others, as ``Store.window`` and ``Store.undeclared_range``.
        whose: what the others are, for the error.

    Raises:
        DataError: names the store and the option.
    """
    if window is not None and store.undeclared_range:
        raise DataError(
            f"{where}: {store.path} has images of 16 bits without a declared range, and {whose} "
            f"were read from {window[0]:g} to {window[1]:g}; expected a declared range for both. "
            f"Import it again with --window {window[0]:g} {window[1]:g}, or its own."
        )
    if undeclared and store.window is not None:
        low, high = store.window
        raise DataError(
            f"{where}: {store.path} was imported with the range {low:g} to {high:g}, and {whose} "
            "have 16 bits without a declared range; expected a declared range for both. Import "
            "those again with --window, 0 65535 if they fill it."
        )
