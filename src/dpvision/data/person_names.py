"""Name the person of an image: one name for one person, however the source writes it."""

import html
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import unquote

from dpvision.errors import OPERATOR_ONLY, DataError

if TYPE_CHECKING:
    from dpvision.data.sample import Sample

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
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufff8"
    "\U00016fe4\U0001d159\U000e0000-\U000e0fff]"
)
"""Characters without a glyph, apart from those of the categories Cc (control) and Cf (format)."""
_ONE_KIND = {
    ord(c): to
    for to, alike in (
        ("'", "\u2018\u2019\u02bc\u2032\uff07`"),
        ('"', "\u201c\u201d"),
        ("-", "\u2212\u2043\u02d7"),
    )
    for c in alike
}
_SAME_LETTER = (
    "<wide>",
    "<narrow>",
    "<font>",
    "<noBreak>",
    "<small>",
    "<initial>",
    "<medial>",
    "<final>",
    "<isolated>",
)
"""Kinds of Unicode's compatibility forms that are the same letter (circled 1 is not)."""
_LOOKS_LIKE = (
    (
        "'",
        re.compile(
            "APOSTROPHE|PRIME|SINGLE (?!LOW).*QUOTATION"
            "|(GRAVE|ACUTE) ACCENT|(TURNED|REVERSED) COMMA"
        ),
    ),
    ("-", re.compile("DASH|HYPHEN|MINUS|HORIZONTAL|PROLONGED SOUND")),
    ("/", re.compile("SLASH|SOLIDUS")),
)
"""Signs that stand for one on a keyboard, by words of their Unicode names."""
_LETTERS = str.maketrans(
    "\u0430\u0432\u0435\u043a\u043c\u043d\u043e\u0440\u0441\u0442\u0443\u0445\u0456\u0455\u0458\u0501\u04bb"
    "\u04cf\u051b\u051d\u0475"
    "\u03b1\u03b2\u03b5\u03b6\u03b7\u03b9\u03ba\u03bc\u03bd\u03bf\u03c1\u03c4\u03c5\u03c7\u03f2"
    "\u0251\u0585\u00f0\u014b\u066b\u066c\u0649\u06cc\u06a9",
    "abekmhopctyxisjdhlqwvabezhikmnoptyxcaodn.,\u064a\u064a\u0643",
) | {ord("\u00fe"): "th", ord("\u00e6"): "ae", ord("\u0153"): "oe"}
"""Letters of other alphabets that look like a Latin one, small or capital; eth, eng, thorn and
ligatures; Arabic separators, and letters of which Arabic and Persian have one each.
"""
_LATIN = re.compile(
    "LATIN (?:SMALL LETTER|LETTER SMALL CAPITAL) (?:SCRIPT |DOTLESS )?([A-Z])(?: WITH .*)?"
)
"""Unicode's names of a Latin letter with a stroke, a hook and the like, which are no accents."""
_MARKS = re.compile("[\u0300-\u036f\u0591-\u05c7\u0640\u064b-\u065f\u0670]")
"""Accents of Latin, Greek and Cyrillic letters, which capitals often lack, and the vowels of Hebrew
and Arabic, which most writers leave out. In other scripts marks tell names apart.
"""
_BLANK = re.compile(r"(?<=[^\W\d_]) (?=\d)|(?<=\d) (?=[^\W\d_])")
"""A blank between a letter and a digit."""
_WHOLE = re.compile(r"([+-]?\d+)\.0{1,2}")
_GROUPED = re.compile(r"([+-]?)(\d{1,3}(?:[,' _]\d{3})+|\d{1,2}(?:,\d{2})+,\d{3})(?:\.0*)?")
_POINTS = re.compile(r"([+-]?)(\d{1,3}(?:\.\d{3})+)")
_DECIMAL_COMMA = re.compile(r"([+-]?\d{1,3}),000")
_NUMBER = re.compile(r"([+-]?\d+)(?:[.,]0*)?")
_SCIENTIFIC = re.compile(r"[+-]?\d+(?:(?:\.\d*)?[ed]\+\d{1,3}|\.\d*[ed]\d{1,3})")
_MAYBE_SCIENTIFIC = re.compile(r"\d{1,9}e\d{1,2}")
_HEXADECIMAL = re.compile(r"(?=.*\d)[\da-f]*[a-df][\da-f]*")
_DECIMAL = re.compile(r"([+-]?\d+)[.,](\d+?)0+")
_IDS = re.compile(r"[\da-f-]+")
_ZEROS_AND_LETTER = re.compile(r"^0+(?=[^\W\d_])")
_SIGNED = re.compile(r"[+-]?\d+")
_LOST = re.compile("[\ufffd\u221a\u2248\u251c\u252c\u253c]")
"""The sign for what could not be read; signs of Mac and DOS that stand for bytes of UTF-8."""
_MISREAD = re.compile(
    rb"[\xc2-\xc5\xce-\xd1\xd7-\xd9][\x80-\xbf]|\xcc[\x80-\x8f\xa7\xa8]|[\xe0-\xf4][\x80-\xbf]{2}"
)
"""UTF-8 of Latin, Greek, Cyrillic, Hebrew and Arabic letters, of accents alone, and of what takes
three bytes. Other pairs may be letters of a name, such as a Czech I and S with their accents.
"""
_LEADING_ZEROS = re.compile(r"(?<!\d)0+(?=\d+(?![^\W_]))")
"""Of a group of digits at the end of a word, so that hexadecimal ids of one length stay apart."""


@dataclass(frozen=True)
class PersonRule:
    """Which field names the person, and what becomes of images without one or with two."""

    unit_from: str | None = None
    """Field that names the person: column, JSON field, or `parent` for the folder's name. Without
    it, images have no persons.
    """
    unmatched: Unmatched = "refuse"
    """With --unit-from, for an image without a person: refuse the import, make it a person of its
    own, or leave it out.
    """
    shared_images: SharedImages = "refuse"
    """With --unit-from, for an image of two persons: refuse the import, or keep it for the first.
    Statements then list this as not covered.
    """
    apart_from: Path | None = None
    """With --unit-from: refuse persons who are also in this store, such as the training store of a
    model that the images will test.
    """

    @property
    def checked_first(self) -> bool:
        """bool: whether persons are checked before the images are decoded."""
        return self.unit_from is not None and "refuse" in (self.unmatched, self.shared_images)

    def check(self) -> None:
        """Raise DataError for a choice about persons where there are none."""
        if self.unit_from is None and self != PersonRule():
            raise DataError(
                f"data import: unmatched={self.unmatched}, shared_images={self.shared_images}, "
                f"apart_from={self.apart_from} without unit_from; expected the field that names "
                "the person. Give --unit-from FIELD, or drop them."
            )

    def name(self, sample: "Sample") -> str | None:
        """The person of an image, or None. Raises as ``person_name``."""
        if self.unit_from is None:
            return None
        return person_name(sample.fields.get(self.unit_from), self.unit_from, sample.key)


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
            number that a float does not hold exactly, or a text that was read in a wrong encoding.
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
        if _misread(value):
            raise DataError(
                f"data import: --unit-from {field}: {OPERATOR_ONLY}{value!r} in {key}; expected "
                "letters as they were written: these bytes were read in another encoding, so one "
                "person may have two names. Save the source as UTF-8, or correct the name."
            )
        name = one_spelling(value)
        return None if not name or name.casefold() in _NOBODY else name
    if value is None:
        return None
    raise DataError(
        f"data import: --unit-from {field}: {type(value).__name__} in {key}; expected a text or "
        "a whole number that names one person. Give each image one person, and people who share "
        "an image one name."
    )


def _misread(text: str) -> bool:
    """Return whether a text has lost letters, or is UTF-8 that was read as another encoding."""
    if text.isascii():
        return False
    if _LOST.search(text):
        return True
    try:
        raw = b"".join(c.encode("latin-1" if c < "\u0100" else "cp1252") for c in text)
        raw.decode()
    except UnicodeError:
        return False
    return _MISREAD.search(raw) is not None


def one_spelling(text: str) -> str:
    """Return a text in the form in which persons are compared.

    Spellings that look the same become one; one spelling never becomes two.

    Unicode's NFC, with letters of other widths and fonts as the plain ones; without control and
    zero-width characters; every space, dash, apostrophe and decimal digit of one kind; single
    spaces, none around; 7.0 and 7.00 as 7 (7.000 may be 7,000).
    """
    if text.isascii() and text.isalnum():
        return text
    folded = "".join(map(_folded, unicodedata.normalize("NFC", text).translate(_ONE_KIND)))
    name = " ".join(unicodedata.normalize("NFC", folded).split())
    whole = _WHOLE.fullmatch(name)
    return whole[1] if whole else name


def _folded(c: str) -> str:
    category = unicodedata.category(c)
    if c.isspace() or c == "\u2800":  # a blank of Braille
        return " "
    if category in ("Cc", "Cf") or _INVISIBLE.match(c):
        return ""
    if unicodedata.decomposition(c).startswith(_SAME_LETTER):
        plain = unicodedata.normalize("NFKC", c).translate(_ONE_KIND)
        return "".join(map(_folded, plain)) if plain != c else c
    return "-" if category == "Pd" else str(unicodedata.decimal(c)) if category == "Nd" else c


def alike(names: Iterable[str]) -> list[list[str]]:
    """Return the groups of two names or more that may be one person's.

    Args:
        names: from ``person_name``, each once.
    """
    texts = {name: _text(name) for name in names}
    hexadecimal = any(map(_HEXADECIMAL.fullmatch, texts.values()))
    # Ids of one length have all their zeros: 00a01 and 0a001 are two persons.
    of_one_length = len(set(map(len, texts.values()))) == 1 and all(
        map(_IDS.fullmatch, texts.values())
    )
    groups: dict[str, list[str]] = {}
    for name, text in texts.items():
        # 101_770 as 101-770 and as 101770
        keys = [_short(_whole(text))] if of_one_length else [loosely(name), _runs(text)]
        if found := _POINTS.fullmatch(text):
            keys.append(_short(found[1] + found[2].replace(".", "")))
        elif found := _DECIMAL_COMMA.fullmatch(text):
            keys.append(_short(found[1]))
        elif _MAYBE_SCIENTIFIC.fullmatch(text) and not hexadecimal:
            keys.append(_short(f"{Decimal(text):f}"))
        if found := _DECIMAL.fullmatch(text):  # 1.50 as 1.5
            keys.append(_runs(f"{found[1]}.{found[2]}"))
        if "'" in text:  # O'Brien as OBrien
            keys.append(_runs(text.replace("'", "")))
        for key in dict.fromkeys(keys):
            groups.setdefault(key, []).append(name)
    several = dict.fromkeys(tuple(group) for group in groups.values() if len(group) > 1)
    return [list(group) for group in several]


def loosely(name: str) -> str:
    """Return a key that is equal for names which may be one person's.

    They differ in case, accents, leading zeros, the signs and blanks between runs of letters and
    digits, how a number is written, or in letters that look alike.

    Args:
        name: from ``person_name``.
    """
    return _runs(_whole(_text(name)))


def _whole(text: str) -> str:
    """Return a whole number without separators, decimals or exponent; another text as it is."""
    if found := _GROUPED.fullmatch(text):
        return found[1] + re.sub(r"\D", "", found[2])
    if found := _NUMBER.fullmatch(text):
        return found[1]
    if _SCIENTIFIC.fullmatch(text):
        return one_spelling(f"{Decimal(text.replace('d', 'e')):f}")
    return text


def _short(number: str) -> str:
    short = _LEADING_ZEROS.sub("", number.removeprefix("+"))
    return "0" if short == "-0" else short


def _runs(text: str) -> str:
    """Return the runs of letters and of digits in a text, without leading zeros; of a whole number
    also its sign.
    """
    if _SIGNED.fullmatch(text):
        return _short(text)
    text = _ZEROS_AND_LETTER.sub("", text)
    runs = ["".join(run) for kind, run in groupby(text, _kind) if kind]
    return "/".join(run.lstrip("0") or "0" if run[0].isdecimal() else run for run in runs) or text


@cache
def _kind(c: str) -> str:
    """Digit, letter, or nothing for a sign. Marks that tell names apart belong to their letters."""
    if c.isdecimal():
        return "digit"
    return "" if unicodedata.category(c)[0] in "PSZ" else "letter"


def _text(name: str) -> str:
    """A name with signs and letters that look alike as one, in small letters."""
    name = html.unescape(unquote(name))
    if not name.isascii():
        name = "".join(
            map(_plain_sign, unicodedata.normalize("NFKC", "".join(map(_plain_sign, name))))
        )
    bare = _MARKS.sub("", unicodedata.normalize("NFKD", name.casefold()))
    folded = unicodedata.normalize("NFKC", bare).translate(_LETTERS)
    if not folded.isascii():
        folded = "".join(map(_plain_letter, folded))
    # as ="007", by which spreadsheets keep zeros
    return _BLANK.sub("", one_spelling(folded).strip("'\"= .,;"))


@cache
def _plain_letter(c: str) -> str:
    found = _LATIN.fullmatch(unicodedata.name(c, ""))
    return found[1].lower() if found else c


def _plain_sign(c: str) -> str:
    if c.isascii() or unicodedata.category(c) in ("Lu", "Ll", "Lt", "Lo", "Mn", "Mc"):
        return c
    if unicodedata.category(c) in ("Me", "Co", "Cn"):  # around others, or without a meaning
        return ""
    called = unicodedata.name(c, "")
    return next((to for to, words in _LOOKS_LIKE if words.search(called)), c)
