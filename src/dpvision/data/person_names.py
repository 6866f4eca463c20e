"""The person of an image, from a field of its source: one name for one person, however the source writes it."""

import unicodedata
from typing import Any, Literal

from dpvision.errors import DataError

Unmatched = Literal["refuse", "own-person", "drop"]
SharedImages = Literal["refuse", "first"]
_NOBODY = frozenset(["-1", "nan", "none", "null", "n/a", "<na>"])
"""What programs write where no person is known. As a name it would make one person of all these images."""
SHARED_FILE = "shared_images.jsonl"
"""File under a store's confidential/: images of two persons, with both."""


def person_name(value: Any, field: str, key: str) -> str | None:
    """Return the name under which a person's images are counted, or None where none is given.

    Tables write a whole number as 7 or, in a column with missing cells, as 7.0; texts may have surrounding spaces and, from some file
    systems, decomposed accents. If these counted as different persons, one person could take part several times. -1 and texts such as
    "nan" mean that no person is given.

    Args:
        value: of the field ``field`` of the image ``key``.

    Raises:
        DataError: the value is not a text or a whole number, such as a list of two persons.
    """
    if isinstance(value, float):
        if value != value:
            return None
        value = int(value) if value.is_integer() else value
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str):
        name = unicodedata.normalize("NFC", value.strip())
        return None if not name or name.lower() in _NOBODY else name
    if value is None:
        return None
    raise DataError(
        f"data import: --unit-from {field}: {type(value).__name__} in {key}; expected a text or a whole number that names one person. Give "
        "each image one person, and people who share an image one name."
    )
