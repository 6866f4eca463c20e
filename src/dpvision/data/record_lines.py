"""Read and write the lines of a store's records.jsonl: a record's key and its captions.

Legend: B requested rows.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

_LIST_END = 4  # from the end of a line to the byte before `]}` and the newline


def captions_of(line: bytes) -> tuple[str, ...]:
    """Return the captions of a line; a damaged line has none."""
    try:
        captions = json.loads(line)["captions"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ()
    return (
        tuple(captions)
        if isinstance(captions, list) and all(isinstance(c, str) for c in captions)
        else ()
    )


def have_captions(text: Path, offset_B: np.ndarray, size_B: np.ndarray) -> np.ndarray:
    """Return which lines of records.jsonl hold a caption, bool (B,).

    It is read from their ends: `[]}` closes an empty list, `"]}` any other.
    """
    if not len(offset_B):
        return np.zeros(0, dtype=bool)
    data = np.memmap(text, dtype=np.uint8, mode="r")
    return data[offset_B.astype(np.int64) + size_B - _LIST_END] == ord('"')


def line_of(text: BinaryIO, row: np.void) -> dict[str, Any]:
    """Return the line of a row of the index from an open records.jsonl; its position moves.

    Raises:
        ValueError: it is damaged.
    """
    text.seek(int(row["caption_offset"]))
    line = text.read(int(row["caption_size"]))
    try:
        found = json.loads(line)
        key, captions = found["key"], found["captions"]
        whole = isinstance(key, str) and isinstance(captions, list)
        whole = whole and all(isinstance(caption, str) for caption in captions)
    except (KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise ValueError("no key and captions")
    return found


def append_line(text: BinaryIO, key: str, captions: Sequence[str]) -> tuple[int, int]:
    """Write a record's line to an open records.jsonl, and return its offset and size."""
    line = json.dumps({"key": key, "captions": captions}).encode() + b"\n"
    position = text.tell()
    text.write(line)
    return position, len(line)
