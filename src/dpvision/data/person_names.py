"""Name the person of an image: one name for one person, however the source writes it."""

import re
import unicodedata
from decimal import Decimal
from typing import Any, Literal

from dpvision.errors import DataError

Unmatched = Literal["refuse", "own-person", "drop"]
SharedImages = Literal["refuse", "first"]
_NOBODY = frozenset(
    [
        "-1",
        "nan",
        "nat",
        "na",
        "n/a",
        "n.a.",
        "#n/a",
        "<na>",
        "none",
        "null",
        "unknown",
        "missing",
        "?",
    ]
)
"""What programs and people write where no person is known. As a name it would make one person of
all these images.
"""
SHARED_FILE = "shared_images.jsonl"
"""File under a store's confidential/: images of two persons, with both."""
_EXACT = 2**53
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufff8\U000e0000-\U000e0fff]"
)
"""Characters without a glyph, apart from those of the categories Cc (control) and Cf (format)."""
_ONE_KIND = {
    ord(c): to
    for to, alike in (
        ("'", "\u2018\u2019\u02bc\u2032`"),
        ('"', "\u201c\u201d"),
        ("-", "\u2212\u2043\u02d7"),
    )
    for c in alike
}
_WHOLE = re.compile(r"([+-]?\d+)\.0+")
_THOUSANDS = re.compile(r"([+-]?)(\d{1,3}(?:[,' ]\d{3})+)(?:\.0*)?")
_NUMBER = re.compile(r"([+-]?\d+)(?:[.,]0*)?")
_SCIENTIFIC = re.compile(r"[+-]?\d+(?:(?:\.\d*)?e\+\d{1,2}|\.\d*e\d{1,2})")
_LEADING_ZEROS = re.compile(r"(?<!\d)0+(?=\d+(?![^\W_]))")
"""Of a group of digits at the end of a word, so that hexadecimal ids of one length stay apart."""


def person_name(value: Any, field: str, key: str) -> str | None:
    """Return the name under which a person's images are counted, or None where none is given.

    Tables write a whole number as 7 or, in a column with missing cells, as 7.0; texts come with
    other spaces, dashes and Unicode forms, and with signs that nobody sees. If these counted as
    different persons, one person could take part several times. -1 and texts such as "nan" or
    "unknown" mean that no person is given.

    Args:
        value: of the field ``field`` of the image ``key``.

    Raises:
        DataError: the value is not a text or a whole number, such as a list of two persons, or a
            number that a float does not hold exactly.
    """
    if isinstance(value, float):
        if value != value:
            return None
        if value.is_integer() and not abs(value) < _EXACT:
            raise DataError(
                f"data import: --unit-from {field}: {value!r} in {key}; expected whole numbers "
                "below 2^53, which a floating-point column holds exactly: it makes one person "
                "of several, or several of one. Write the persons as texts or integers."
            )
        value = int(value) if value.is_integer() else value
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    if isinstance(value, str):
        name = one_spelling(value)
        return None if not name or name.casefold() in _NOBODY else name
    if value is None:
        return None
    raise DataError(
        f"data import: --unit-from {field}: {type(value).__name__} in {key}; expected a text or "
        "a whole number that names one person. Give each image one person, and people who share "
        "an image one name."
    )


def one_spelling(text: str) -> str:
    """Return a text in the form in which persons are compared.

    Spellings that look the same become one; one spelling never becomes two.

    Unicode's NFKC; without control and zero-width characters; every space, dash, apostrophe and
    decimal digit of one kind; single spaces, none around; 7.00 as 7.
    """
    if text.isascii() and text.isalnum():
        return text
    folded = "".join(map(_folded, unicodedata.normalize("NFKC", text).translate(_ONE_KIND)))
    name = " ".join(unicodedata.normalize("NFKC", folded).split())
    whole = _WHOLE.fullmatch(name)
    return whole[1] if whole else name


def _folded(c: str) -> str:
    category = unicodedata.category(c)
    if c.isspace() or c == "\u2800":  # a blank of Braille
        return " "
    if category in ("Cc", "Cf") or _INVISIBLE.match(c):
        return ""
    return "-" if category == "Pd" else str(unicodedata.decimal(c)) if category == "Nd" else c


def loosely(name: str) -> str:
    """Return a key that is equal for names which may be one person's.

    They differ in case, in leading zeros, or in how a number is written.

    Args:
        name: from ``person_name``.
    """
    text = one_spelling(name.casefold()).strip(
        "'\"= "
    )  # as ="007", by which spreadsheets keep zeros
    if found := _THOUSANDS.fullmatch(text):
        text = found[1] + re.sub(r"\D", "", found[2])
    elif found := _NUMBER.fullmatch(text):
        text = found[1]
    elif _SCIENTIFIC.fullmatch(text):
        text = one_spelling(f"{Decimal(text):f}")
    return _LEADING_ZEROS.sub("", text.removeprefix("+"))
