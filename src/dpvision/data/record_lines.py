"""Read and write the lines of a store's records.jsonl: a record's key and its captions.

Rows with the same image are merged into one, so that one person's image is clipped and counted
once.

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
    """Return the line of a row of the index from an open records.jsonl; its position moves."""
    text.seek(int(row["caption_offset"]))
    return json.loads(text.read(int(row["caption_size"])))


def append_line(text: BinaryIO, key: str, captions: Sequence[str]) -> tuple[int, int]:
    """Write a record's line to an open records.jsonl, and return its offset and size."""
    line = json.dumps({"key": key, "captions": captions}).encode() + b"\n"
    position = text.tell()
    text.write(line)
    return position, len(line)


def merge_duplicates(
    rows: np.ndarray, text: BinaryIO
) -> tuple[np.ndarray, dict[str, int], list[tuple[np.void, np.void]]]:
    """Keep the first row of each image, with the captions of all its rows of the same unit.

    Two rows with one id have identical bytes (the chance that 63 bits collide among 200 million
    images is 0.2%, and costs one record). The first row's label (or labels) and unit are kept.
    Captions under another unit are dropped: the record is bounded and removed with the first unit,
    so it must hold nothing of another.

    Args:
        rows: ROW array in the order of the source.
        text: records.jsonl, open for reading and appending; a merged record gets a new line at its
            end.

    Returns:
        The rows kept, in order; counts for the operator: duplicates_merged, label_conflicts,
        unit_conflicts; and for each unit conflict the row kept and the row of the other unit.
    """
    order = np.argsort(rows["id"], kind="stable")
    repeats = (
        np.flatnonzero(np.diff(rows["id"][order]) == 0) + 1
    )  # places in `order` that repeat the one before
    duplicates = order[repeats]
    is_first = np.ones(len(rows), dtype=bool)
    is_first[duplicates] = False
    firsts = order[np.flatnonzero(is_first[order])][np.cumsum(is_first[order])[repeats] - 1]
    captions: dict[int, dict[str, None]] = {}
    same_unit = rows["unit"][firsts] == rows["unit"][duplicates]
    for first, duplicate in zip(
        firsts[same_unit].tolist(), duplicates[same_unit].tolist(), strict=True
    ):
        known = captions.setdefault(first, dict.fromkeys(line_of(text, rows[first])["captions"]))
        known.update(dict.fromkeys(line_of(text, rows[duplicate])["captions"]))
    for first, known in captions.items():
        line = line_of(text, rows[first])
        if list(known) != line["captions"]:
            text.seek(0, 2)
            position, size = append_line(text, line["key"], tuple(known))
            rows["caption_offset"][first], rows["caption_size"][first] = position, size
    text.seek(0, 2)
    counts = {
        "duplicates_merged": len(duplicates),
        "label_conflicts": int((rows["label"][firsts] != rows["label"][duplicates]).sum()),
        "unit_conflicts": int((~same_unit).sum()),
    }
    conflicts = zip(rows[firsts[~same_unit]], rows[duplicates[~same_unit]], strict=True)
    return rows[is_first], counts, list(conflicts)
