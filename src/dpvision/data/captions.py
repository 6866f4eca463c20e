"""Clean captions at the import: decode without guessing, repair, truncate, drop repeats.

This happens once, so ``records.jsonl`` holds the text that is trained on.
"""

import codecs
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple


@dataclass(frozen=True)
class CaptionRule:
    """Where an import finds captions beside those of the source, and whether it needs them."""

    captions: Path | None = None
    """File of captions: COCO's captions_*.json, lines NAME#NUMBER<TAB>CAPTION, or a CSV with
    columns image and caption. Captions next to an image (NAME.txt, NAME.json, a column `captions`,
    `caption` or `text`) are found without it.
    """
    require_captions: bool = False
    """Leave out images without a caption; a captioner needs at least one per image."""


CAPTION_FIELDS = ("captions", "caption", "text")
MAX_CAPTION_CHARS = 1000
"""A tokenizer's entries are rarely longer than 20 characters, so 40 tokens (DP-Cap) reach no
further.
"""
MAX_TEXT_BYTES = 1 << 20
"""Limit for the text file of an image; a longer one is not a caption."""

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    # UTF-32's little-endian mark begins with UTF-16's, so it is tested first
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_JOINERS = "\u200c\u200d"  # part of the spelling of Persian, Hindi and emoji
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f]")
_CONTROLS_IN_TEXT = 0.1
_MISSING = frozenset(
    [
        "nan",
        "nat",
        "none",
        "null",
        "n/a",
        "na",
        "#n/a",
        "<na>",
        "undefined",
        "untitled",
        "no caption",
    ]
)
"""What programs, and people, write where there is no caption."""
_FILE_NAME = re.compile(r"\S+\.(?:jpe?g|png|gif|webp|tiff?|bmp|heic|avif|svg)", re.IGNORECASE)


class Captions(NamedTuple):
    """Captions of a sample, and counts of those cut or dropped."""

    kept: tuple[str, ...]
    """Clean, distinct, in the order of the source."""
    num_cut: int
    """Number of ``kept`` that were longer than ``MAX_CAPTION_CHARS``."""
    dropped: Counter[str]
    """Number of captions dropped, by reason. Repeats are merged and not counted."""
    suspicious: tuple[str, ...] = ()
    """The ``suspicion`` of each of ``kept`` that may say nothing about the image."""


def find_captions(fields: Mapping[str, Any]) -> Captions:
    """Collect a sample's captions from its ``CAPTION_FIELDS``.

    A field holds a string, the bytes of a text file, or a list of these.

    Never raises: a value that is not text, is empty once cleaned, or has an unknown encoding is
    dropped and counted.
    """
    kept: dict[str, bool] = {}
    dropped: Counter[str] = Counter()
    for name in CAPTION_FIELDS:
        value = fields.get(name)
        for given in value if isinstance(value, list | tuple) else [] if value is None else [value]:
            text = decode_text(given[:MAX_TEXT_BYTES]) if isinstance(given, bytes) else given
            if isinstance(given, bytes) and len(given) > MAX_TEXT_BYTES:
                dropped["oversized"] += 1
            elif isinstance(given, bytes) and text is None:
                dropped["another encoding"] += 1
            elif not isinstance(text, str):
                dropped["no text"] += 1
            else:
                clean, is_cut = _clean(text)
                if clean:
                    kept.setdefault(clean, is_cut)
                else:
                    dropped["empty"] += 1
    return Captions(
        tuple(kept),
        sum(kept.values()),
        dropped,
        tuple(found for caption in kept if (found := suspicion(caption))),
    )


def suspicion(caption: str) -> str | None:
    """Return why a clean caption may say nothing about its image, or None.

    Such captions are kept, and counted for the operator.
    """
    if caption.lower() in _MISSING:
        return "text of a missing value"
    if not any(map(str.isalpha, caption)):
        return "no letter"
    return "file name" if _FILE_NAME.fullmatch(caption) else None


def clean_caption(text: str) -> str:
    """Return the caption as it is stored.

    Broken encodings, HTML entities, curly quotes and ligatures are repaired (ftfy), control and
    format characters removed, and white space collapsed. At most ``MAX_CAPTION_CHARS`` characters
    are kept, cut between words if possible.

    Case is kept; the tokenizer folds it. The result may be empty.
    """
    return _clean(text)[0]


def decode_text(data: bytes) -> str | None:
    """Return the text of a file, or None if its encoding cannot be determined.

    UTF-8, and UTF-16 and UTF-32 with a byte order mark, can be checked. Windows-1252, Latin-2,
    Shift-JIS and the like cannot: any bytes are valid in several of them, and a wrong guess garbles
    the text silently. NUL, escape sequences or many control characters indicate other encodings
    whose bytes happen to be valid UTF-8 (UTF-16 without a mark, ISO-2022).
    """
    try:
        text = data.decode(text_encoding(data))
    except UnicodeDecodeError:
        return None
    if "\0" in text or "\x1b" in text:
        return None
    return text if len(_CONTROL.findall(text)) <= _CONTROLS_IN_TEXT * len(text) else None


def text_encoding(head: bytes) -> str:
    """Return Python's name of the encoding that the byte order mark gives.

    Without a mark it is UTF-8, which decoding checks.
    """
    return next((name for mark, name in _MARKS if head.startswith(mark)), "utf-8")


def _clean(text: str) -> tuple[str, bool]:
    squeezed = " ".join(text.split())
    # ten times the limit: repairs shorten text (an HTML entity has up to ten characters), and are
    # slow on long text
    raw = squeezed[: 10 * MAX_CAPTION_CHARS]
    if not (
        raw.isascii() and raw.isprintable() and "&" not in raw
    ):  # ftfy leaves such text unchanged
        import ftfy  # 0.14 s, which runs without captions need not wait for

        raw = "".join(
            c
            for c in ftfy.fix_text(raw)
            if c.isspace() or c in _JOINERS or unicodedata.category(c) not in ("Cc", "Cf")
        )
        raw = " ".join(raw.split())
    is_cut = len(raw) > MAX_CAPTION_CHARS or len(squeezed) > 10 * MAX_CAPTION_CHARS
    if len(raw) > MAX_CAPTION_CHARS:
        between = raw.rfind(" ", 0, MAX_CAPTION_CHARS + 1)
        raw = raw[: between if between > 0 else MAX_CAPTION_CHARS]
    return raw, is_cut
