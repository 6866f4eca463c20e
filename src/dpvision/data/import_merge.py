"""Make a store of the parts of an import: one pass over their rows, in blocks, with flat memory.

Rows with the same image are merged into one, so that one person's image is clipped and counted
once: the first stays, with the captions of all rows of its unit. Equal ids are found in sorted runs
(``sorted_runs``); what grows with the number of rows is one bit for each. Names of persons are all
in memory, since each is compared with all others (``person_names.alike``).
"""

import contextlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dpvision.data.dicom import NO_RANGE
from dpvision.data.import_labels import ImportedLabels
from dpvision.data.import_part import COPIED, PART_ROW, Part
from dpvision.data.import_people import (
    Shared,
    WithoutPerson,
    check_field,
    refuse_alike,
    refuse_shared,
)
from dpvision.data.person_check import refuse_known, runs_of
from dpvision.data.person_names import SHARED_FILE, PersonRule
from dpvision.data.record_lines import append_line, line_of
from dpvision.data.rows import ROW
from dpvision.data.shard_writer import ShardWriter
from dpvision.data.sorted_runs import in_order
from dpvision.data.store import REMEDY, SHARED_KEPT, UNDECLARED, WINDOW, write_description
from dpvision.data.table_files import UNMATCHED_FILE
from dpvision.errors import DataError

DICOM_FILE = "dicom.jsonl"
"""File under a store's confidential/: images with a burned-in annotation or an overlay."""
REPEATS_FILE = "repeats.npy"
"""File under a store's confidential/: the rows that repeat the image of an earlier one, which a
merge of stores (``store_part``) needs.
"""
REPEAT = np.dtype([("place", "<i8"), ("row", PART_ROW)])
"""place: rows of the source before this one."""
_COPIED_AT_ONCE = 1 << 20
_BLOCK_ROWS = 1 << 16
"""Also repeats that are read at once, all of which may be of one image."""


class Totals:
    """Counts and tables of all parts, checked as a whole."""

    def __init__(self, parts: Sequence[Part], people: PersonRule, labels: ImportedLabels) -> None:
        """
        Raises:
            DataError: no part has a field, persons are missing, alike or known, no image is left,
                or labels of different parts do not go together.
        """
        self.seen = self.rows = self.without_row = self.num_unknown = 0
        """num_unknown: of stores that were imported before."""
        self.counts = {
            name: Counter[str]()
            for name in ("left_out", "dropped", "suspicious", "largest", "dicom", "number")
        }
        self.name_of_unit: dict[int, str] = {}
        self.label_of: list[np.ndarray] = []
        """For each part, the provisional number of each of its labels, and -1 for none."""
        fields, no_person = set[str](), WithoutPerson()
        for part in parts:
            about, tables = part.about, part.tables()
            self.seen += about["seen"]
            self.rows += sum(about["runs"])
            self.without_row += about["without_row"]
            self.num_unknown += about.get("classes_not_declared", 0)
            for what in self.counts:
                self.counts[what] += Counter(about[what])
            fields.update(about["fields"])
            no_person.add_all(*about["without_person"])
            self.name_of_unit.update(tables["persons"])
            numbers = [labels.number(*entry) for entry in tables["labels"]]
            self.label_of.append(np.array([*numbers, -1], dtype=np.int32))
        for option, name in (("--unit-from", people.unit_from), ("--label-from", labels.field)):
            if name is not None and name != "label" and fields:
                check_field(option, name, fields)
        if people.unit_from is not None and people.unmatched == "refuse":
            no_person.refuse(people.unit_from)
        if people.unit_from is not None:
            refuse_alike(people.unit_from, self.name_of_unit.values())
        if people.apart_from is not None:
            refuse_known(people.apart_from, self.name_of_unit.values())
        left_out = dict(sorted(self.counts["left_out"].items()))
        if not self.rows:
            got = (
                f"{self.seen} files, none an image that can be read: {left_out}"
                if self.seen
                else "empty source"
            )
            what = "images with captions" if "no caption" in left_out else "images"
            raise DataError(
                f"data import: {got}; expected {what}. Check the path, or convert them to JPEG "
                "or PNG."
            )


def write_store(
    parts: Sequence[Part],
    folder: Path,
    *,
    people: PersonRule,
    labels: ImportedLabels,
    about: dict[str, Any],
    more: Mapping[str, Any],
    unmatched: tuple[str, str],
    copied: Sequence[tuple[str, int]] | None = None,
) -> None:
    """Write the files of a store, all but its key.

    Args:
        parts: in the order of the source.
        folder: of the store, with confidential/; what is there of shards is kept.
        labels: without any label yet.
        about: entries of store.json.
        more: further counts of the summary.
        unmatched: lines of ``UNMATCHED_FILE`` before and after those of the parts.
        copied: shards of copied images that are in ``folder``; None if parts have them.

    Raises:
        DataError: as ``Totals``, or images of two persons.
    """
    totals = Totals(parts, people, labels)
    labelled = any(bool((number >= 0).any()) for number in totals.label_of)
    names, label_file, final = labels.finish(folder, labelled)
    label_of = [number if final is None else final[number] for number in totals.label_of]
    with contextlib.ExitStack() as files:
        rows = files.enter_context((folder / "rows").open("w+b", buffering=0))
        text = files.enter_context((folder / "records.jsonl").open("w+b"))
        shards = _join(parts, rows, text, label_of, ShardWriter(folder, files), copied)
        merged = _Merged(rows, text, totals, parts)
        merged.merge()
        if people.unit_from is not None and people.shared_images == "refuse":
            refuse_shared(people.unit_from, merged.shared)
        num_records, without = _write_index(folder, rows, merged)
        text_bytes = text.seek(0, os.SEEK_END)
    (folder / "rows").unlink()
    confidential = folder / "confidential"
    _write_lists(parts, confidential, merged.shared, unmatched)
    about = about | {
        "label_names": names,
        "unit_field": people.unit_from,
        "split": None,
        "may_be_unlabelled": labels.may_be_unlabelled,
    }
    if people.unit_from is not None:
        about["shared_images"] = merged.counts["unit_conflicts"]
        about |= {SHARED_KEPT: "first"} if people.shared_images == "first" else {}
    about |= {WINDOW: more["window"]} if "window" in more else {}
    counts = totals.counts
    about |= {UNDECLARED: True} if counts["largest"] or counts["dicom"][NO_RANGE] else {}
    write_description(
        folder,
        num_records,
        about,
        shards=shards,
        text=("records.jsonl", text_bytes),
        labels=label_file,
    )
    summary = {
        "seen": totals.seen,
        "records": num_records,
        "left_out": dict(sorted(counts["left_out"].items())),
        **merged.counts,
        "classes_not_declared": labels.num_unknown + totals.num_unknown,
        **without,
        **(
            {"files_without_table_row": totals.without_row}
            if "table_rows_without_file" in more
            else {}
        ),
        "captions": counts["number"]["captions"],
        "captions_cut": counts["number"]["captions_cut"],
        "captions_dropped": dict(sorted(counts["dropped"].items())),
        "captions_suspicious": dict(sorted(counts["suspicious"].items())),
        **more,
    }
    bits = sorted((int(bits), n) for bits, n in counts["largest"].items())
    largest = {f"up to {2**bits - 1}": n for bits, n in bits}
    summary |= {"largest_values_of_16_bits": largest} if largest else {}
    summary |= {"dicom": dict(sorted(counts["dicom"].items()))} if counts["dicom"] else {}
    (confidential / "import.json").write_text(json.dumps(summary, indent=1))


def _join(
    parts: Sequence[Part],
    rows: BinaryIO,
    text: BinaryIO,
    label_of: Sequence[np.ndarray],
    writer: ShardWriter,
    copied: Sequence[tuple[str, int]] | None,
) -> list[tuple[str, int]]:
    """Write the rows of all parts one after the other, with their lines and images; return the
    shards.
    """
    size_of = {tar: size for part in parts for tar, size in part.about["tars"]}  # as they were read
    place_of = {tar: place for place, tar in enumerate(size_of)}
    for part, number in zip(parts, label_of, strict=True):
        about, base = part.about, text.tell()
        _copy_text(part, text)
        images, tars = (
            about.get("images", ()),
            np.array([place_of[tar] for tar, _ in about["tars"]]),
        )
        for block in _blocks(part):
            block["caption_offset"] += np.uint64(base)
            block["label"] = number[block["label"]]
            if images:
                _join_images(block, [part.folder / name for name in images], tars, writer, size_of)
            elif len(tars):
                block["shard"] = tars[block["shard"]]
            rows.write(block.tobytes())
    made = list(copied) if copied is not None and not size_of else writer.finish()
    return [*size_of.items(), *made]


def _copy_text(part: Part, text: BinaryIO) -> None:
    """Append the lines of a part: a file of its own, or a piece of a store's records.jsonl."""
    left = part.about["text_bytes"]
    if not left:
        return
    path, start = _text_of(part)
    with path.open("rb") as lines:
        lines.seek(start)
        while left and (some := lines.read(min(left, _COPIED_AT_ONCE))):
            text.write(some)
            left -= len(some)


def _text_of(part: Part) -> tuple[Path, int]:
    """Return the file with the lines of a part, and where they begin."""
    path, start = part.about.get("text", ("text", 0))
    return part.folder / path, start


def _join_images(
    block: np.ndarray,
    images: Sequence[Path],
    tars: np.ndarray,
    writer: ShardWriter,
    in_place: Collection[str],
) -> None:
    """Append the copied images of a block of rows, and write where they are now into the block.

    Args:
        images: files with copied images.
        tars: numbers of the part's tars among ``in_place``, the tars of all parts.
    """
    from_tar = block["shard"] < COPIED
    copied = np.flatnonzero(~from_tar)
    block["shard"][from_tar] = tars[block["shard"][from_tar]] if from_tar.any() else 0
    file_N = block["shard"][copied] - np.uint32(COPIED)
    for rows in np.split(copied, np.flatnonzero(np.diff(file_N)) + 1):
        if not len(rows):
            continue
        offset_N, size_N = (block[k][rows].astype(np.int64) for k in ("offset", "size"))
        with images[int(block["shard"][rows[0]]) - COPIED].open("rb") as file:
            shard_N, block["offset"][rows] = writer.join(file, offset_N, size_N)
        block["shard"][rows] = shard_N + len(in_place)


def _blocks(part: Part) -> Iterator[np.ndarray]:
    """Yield the rows of a part in blocks."""
    num, path = sum(part.about["runs"]), part.folder / "rows"
    for at in range(0, num, _BLOCK_ROWS):
        yield np.fromfile(path, PART_ROW, _BLOCK_ROWS, offset=at * PART_ROW.itemsize)


class _Merged:
    """Which rows repeat the image of an earlier one, and what the earlier one gets of them."""

    def __init__(
        self, rows: BinaryIO, text: BinaryIO, totals: Totals, parts: Sequence[Part]
    ) -> None:
        self._rows, self._text, self._name_of = rows, text, totals.name_of_unit
        self._parts = parts
        self._dropped = np.zeros(-(-totals.rows // 8), dtype=np.uint8)
        self.shared: list[Shared] = []
        """Images of two persons."""
        self.counts = {"duplicates_merged": 0, "label_conflicts": 0, "unit_conflicts": 0}

    def merge(self) -> None:
        """Keep the first row of each image, with the captions of all its rows of the same unit.

        Two rows with one id have identical bytes (the chance that 63 bits collide among 200 million
        images is 0.2%, and costs one record). The first row's label (or labels) and unit are kept.
        Captions under another unit are dropped: the record is bounded and removed with the first
        unit, so it must hold nothing of another. A merged record gets a new line at the end.
        """
        runs, base = [], 0
        for part in self._parts:
            runs += runs_of(part, "ids", base)
            base += sum(part.about["runs"])
        for block in in_order(runs):
            repeats = np.flatnonzero(np.diff(block["id"]) == 0) + 1
            if len(repeats):
                is_first = np.ones(len(block), dtype=bool)
                is_first[repeats] = False
                firsts = block["value"][is_first][np.cumsum(is_first)[repeats] - 1]
                self._merge(firsts, block["value"][repeats])

    def _merge(self, firsts: np.ndarray, duplicates: np.ndarray) -> None:
        np.bitwise_or.at(self._dropped, duplicates >> 3, (128 >> (duplicates & 7)).astype(np.uint8))
        captions: dict[int, dict[str, None]] = {}
        entry_of: dict[int, np.void] = {}
        for start in range(0, len(firsts), _BLOCK_ROWS):
            some = firsts[start : start + _BLOCK_ROWS]
            first = self._read(some)
            other = self._read(duplicates[start : start + _BLOCK_ROWS])
            same_unit = first["unit"] == other["unit"]
            adds = same_unit & other["captioned"]
            for row, kept, repeat in zip(
                some[adds].tolist(), first[adds], other[adds], strict=True
            ):
                if row not in captions:
                    entry_of[row] = kept.copy()
                    captions[row] = dict.fromkeys(self._line(kept)["captions"])
                captions[row].update(dict.fromkeys(self._line(repeat)["captions"]))
            for kept, repeat in zip(first[~same_unit], other[~same_unit], strict=True):
                self.shared.append(Shared(*self._said(kept), *self._said(repeat)))
            self.counts["label_conflicts"] += int((first["label"] != other["label"]).sum())
            self.counts["unit_conflicts"] += int((~same_unit).sum())
        self.counts["duplicates_merged"] += len(duplicates)
        for row, known in captions.items():
            line = self._line(entry_of[row])
            if list(known) != line["captions"]:
                self._text.seek(0, os.SEEK_END)
                position, size = append_line(self._text, line["key"], tuple(known))
                entry = entry_of[row]
                entry["caption_offset"], entry["caption_size"] = position, size
                entry["captioned"] = True
                os.pwrite(self._rows.fileno(), entry.tobytes(), row * PART_ROW.itemsize)

    def _said(self, row: np.void) -> tuple[str, str | None]:
        return self._line(row)["key"], self._name_of.get(int(row["unit"]))

    def _line(self, row: np.void) -> dict[str, Any]:
        """Return a row's line. Raises DataError if it is damaged, as it may be in an old store."""
        try:
            return line_of(self._text, row)
        except ValueError:
            at = int(row["caption_offset"])
            for part in self._parts:
                path, start = _text_of(part)
                if at < part.about["text_bytes"]:
                    break
                at -= part.about["text_bytes"]
            raise DataError(
                f"store: {path}: damaged line at byte {start + at}; expected a key and captions. "
                f"{REMEDY}"
            ) from None

    def _read(self, rows: np.ndarray) -> np.ndarray:
        size, fd = PART_ROW.itemsize, self._rows.fileno()
        return np.frombuffer(
            b"".join([os.pread(fd, size, row * size) for row in rows.tolist()]), dtype=PART_ROW
        )

    def kept(self, start: int, stop: int) -> np.ndarray:
        """Return which of the rows from ``start``, a multiple of 8, are records: bool."""
        bits = np.unpackbits(self._dropped[start // 8 : -(-stop // 8)])
        return bits[: stop - start] == 0

    @property
    def num_records(self) -> int:
        """int: rows that are records."""
        total = os.fstat(self._rows.fileno()).st_size // PART_ROW.itemsize
        return total - self.counts["duplicates_merged"]


def _write_index(folder: Path, rows: BinaryIO, merged: _Merged) -> tuple[int, dict[str, int]]:
    """Write index.npy and the list of repeats; return how many records there are, and lack what."""
    without = {"without_label": 0, "without_unit": 0, "without_caption": 0}
    total = os.fstat(rows.fileno()).st_size // PART_ROW.itemsize
    with contextlib.ExitStack() as files:
        index = files.enter_context((folder / "index.npy").open("wb"))
        _write_header(index, ROW, merged.num_records)
        repeats = None
        if merged.num_records < total:
            repeats = files.enter_context((folder / "confidential" / REPEATS_FILE).open("wb"))
            _write_header(repeats, REPEAT, total - merged.num_records)
        for start in range(0, total, _BLOCK_ROWS):
            block = np.fromfile(
                folder / "rows", PART_ROW, _BLOCK_ROWS, offset=start * PART_ROW.itemsize
            )
            kept = merged.kept(start, start + len(block))
            if repeats is not None:
                again = np.empty(int((~kept).sum()), dtype=REPEAT)
                again["place"], again["row"] = start + np.flatnonzero(~kept), block[~kept]
                repeats.write(again.tobytes())
            block = block[kept]
            without["without_label"] += int((block["label"] < 0).sum())
            without["without_unit"] += int((block["unit"] < 0).sum())
            without["without_caption"] += int((~block["captioned"]).sum())
            made = np.empty(len(block), dtype=ROW)
            for name in ROW.names or ():
                made[name] = block[name]
            index.write(made.tobytes())
    return merged.num_records, without


def _write_header(file: BinaryIO, dtype: np.dtype, num: int) -> None:
    """Begin a .npy file of ``num`` entries."""
    about = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (num,)}
    np.lib.format.write_array_header_1_0(file, about)


def _write_lists(
    parts: Sequence[Part],
    confidential: Path,
    shared: Sequence[Shared],
    unmatched: tuple[str, str],
) -> None:
    """Write the lists under confidential/; all but the first only if there is something in them."""
    for name, source, before, after in (
        ("left_out.jsonl", "left_out", "", ""),
        (UNMATCHED_FILE, "unmatched", *unmatched),
        (DICOM_FILE, "burned_in", "", ""),
    ):
        with (confidential / name).open("wb") as file:
            file.write(before.encode())
            for part in parts:
                if (part.folder / source).exists():
                    with (part.folder / source).open("rb") as lines:
                        shutil.copyfileobj(lines, file, 1 << 20)
            file.write(after.encode())
            size = file.tell()
        if not size and source != "left_out":
            (confidential / name).unlink()
    if shared:
        (confidential / SHARED_FILE).write_text(
            "".join(json.dumps(one._asdict()) + "\n" for one in shared)
        )
