"""The range of samples of more than 8 bits that was declared at an import: it travels with the
store and its runs.
"""

from collections.abc import Mapping
from typing import Any

from dpvision.data.rgb import Window
from dpvision.data.store import Store
from dpvision.errors import DataError


def window_of(manifest: Mapping[str, Any]) -> Window | None:
    """Return the declared range of the images that a checkpoint was trained on; None if none was
    declared.
    """
    found = manifest.get("window")
    return None if found is None else (float(found[0]), float(found[1]))


def check_declared(
    window: Window | None, undeclared: bool, store: Store, where: str, whose: str
) -> None:
    """Refuse a store whose 16-bit images were read without a declared range, if others were read by
    one, or the reverse.

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
