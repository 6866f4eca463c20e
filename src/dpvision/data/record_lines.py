"""Lines of a store's records.jsonl: the key in the source and the captions of one record each.

Legend: B rows asked for.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

_LIST_END = 4  # of a line's bytes: the one before `]}` and the line's end


def captions_of(line: bytes) -> tuple[str, ...]:
    """Captions of a line; none of a damaged one."""
    try:
        captions = json.loads(line)["captions"]
    except (ValueError, KeyError, TypeError):
        return ()
    return tuple(captions) if isinstance(captions, list) and all(isinstance(c, str) for c in captions) else ()


def have_captions(text: Path, offset_B: np.ndarray, size_B: np.ndarray) -> np.ndarray:
    """Which lines of a records.jsonl hold a caption, by their ends: ``append_line`` closes an empty list with `[]}`, others with `"]}`."""
    if not len(offset_B):
        return np.zeros(0, dtype=bool)
    data = np.memmap(text, dtype=np.uint8, mode="r")
    return data[offset_B.astype(np.int64) + size_B - _LIST_END] == ord('"')


def append_line(text: BinaryIO, key: str, captions: Sequence[str]) -> tuple[int, int]:
    """Write a record's line at the place of ``text``, an open records.jsonl; returns its offset and size."""
    line = json.dumps({"key": key, "captions": captions}).encode() + b"\n"
    position = text.tell()
    text.write(line)
    return position, len(line)
