"""Captions as they come, and as the store keeps them: read without guessing, repaired, cleaned, cut, each once.

All of it happens once, at the import, so that ``records.jsonl`` holds what is trained on.
"""

import codecs
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import ftfy

CAPTION_FIELDS = ("captions", "caption", "text")
MAX_CAPTION_CHARS = 1000
"""A learned entry of a tokenizer is rarely longer than twenty characters, so that 40 tokens (DP-Cap) see no more than this."""
MAX_TEXT_BYTES = 1 << 20
"""Of a file beside an image: longer ones are no captions."""

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    # UTF-32's little-endian mark begins with UTF-16's: it has to be asked for first
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_JOINERS = "\u200c\u200d"  # part of the spelling of Persian, Hindi and emoji
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x9f]")
_CONTROLS_IN_TEXT = 0.1


class Captions(NamedTuple):
    """What a sample's caption fields gave."""

    kept: tuple[str, ...]
    """Clean, distinct, in the order of the source."""
    num_cut: int
    """Of ``kept``: those that were longer than MAX_CAPTION_CHARS."""
    dropped: Counter[str]
    """Captions that were given and not kept, by reason; one that repeats another is merged with it, and not counted."""


def find_captions(fields: Mapping[str, Any]) -> Captions:
    """Captions of a sample from its ``CAPTION_FIELDS``, each a text, the bytes of a text file, or a list of them.

    Nothing here raises: what is no text, is empty once cleaned, or is in an encoding that cannot be told, is dropped and counted.
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
    return Captions(tuple(kept), sum(kept.values()), dropped)


def clean_caption(text: str) -> str:
    """The caption as it is stored: broken encodings, HTML entities, curly quotes and ligatures repaired (ftfy), control and format
    characters removed, white space squeezed to single blanks, at most ``MAX_CAPTION_CHARS`` characters, cut between words where it can be.

    Case stays: folding it is the tokenizer's business. The result may be empty.
    """
    return _clean(text)[0]


def decode_text(data: bytes) -> str | None:
    """The text of a file, or None where its encoding cannot be told.

    UTF-8, or UTF-16 and UTF-32 with their mark at the beginning: these can be checked. Windows-1252, Latin-2, Shift-JIS and the like
    cannot: any bytes are text in several of them, and a wrong guess garbles without a word. NUL, escape sequences or many control
    characters are the traces of other encodings whose bytes happen to be valid UTF-8 (UTF-16 without a mark, ISO-2022).
    """
    try:
        text = data.decode(text_encoding(data))
    except UnicodeDecodeError:
        return None
    if "\0" in text or "\x1b" in text:
        return None
    return text if len(_CONTROL.findall(text)) <= _CONTROLS_IN_TEXT * len(text) else None


def text_encoding(head: bytes) -> str:
    """Python's name of the encoding that the mark at the beginning says; UTF-8, to be checked by decoding, without one."""
    return next((name for mark, name in _MARKS if head.startswith(mark)), "utf-8")


def _clean(text: str) -> tuple[str, bool]:
    squeezed = " ".join(text.split())
    # ten times: repairs can shorten a text (an entity is up to ten characters long), and cost time where it is long
    raw = squeezed[: 10 * MAX_CAPTION_CHARS]
    if not (raw.isascii() and raw.isprintable() and "&" not in raw):  # such a text is what ftfy makes of it
        raw = "".join(c for c in ftfy.fix_text(raw) if c.isspace() or c in _JOINERS or unicodedata.category(c) not in ("Cc", "Cf"))
        raw = " ".join(raw.split())
    is_cut = len(raw) > MAX_CAPTION_CHARS or len(squeezed) > 10 * MAX_CAPTION_CHARS
    if len(raw) > MAX_CAPTION_CHARS:
        between = raw.rfind(" ", 0, MAX_CAPTION_CHARS + 1)
        raw = raw[: between if between > 0 else MAX_CAPTION_CHARS]
    return raw, is_cut
