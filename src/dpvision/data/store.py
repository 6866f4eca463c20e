"""A store: records in tar shards, found by position and read with ``os.pread``.

The index is memory-mapped.

A store is a folder::

    store.json          format, store_id (random), visibility, num_records, shards [{path, bytes}],
                        text {path, bytes}, label_names, ...; ledger_marks true in a private store,
                        which is refused without ledger_marks.json
    index.npy           one row per record (rows.py); memory-mapped
    ledger_marks.json   marks of the runs on this store (privacy.marks)
    labels.npy          label sets, only in a store with several labels per record (multi_label.py)
    records.jsonl       one line per record: its key in the source and its captions
    shards/*.tar        WebDataset shards; tars of that format stay in place, and ``shards`` has
                        their paths
    confidential/       what the import left out and why; the key of the ids (store_writer.py)

Legend: B requested rows, V views, C channels, H height, W width, N records of the store, M labels
of all requested rows, K classes.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from dpvision.config import DataConfig
from dpvision.data.multi_label import LabelSets, zero_one
from dpvision.data.record_lines import captions_of, have_captions
from dpvision.data.rgb import Window
from dpvision.data.rows import ROW, AllRows, Rows
from dpvision.data.tarindex import BLOCK, member_size
from dpvision.errors import DataError, remedy_for
from dpvision.files import files_to_hold
from dpvision.privacy.store_marks import HAS_MARKS, StoreLedgers
from dpvision.strict_json import parse_json

if TYPE_CHECKING:  # not imported: processes that import images do without torch
    import torch
    from torch import Tensor

    from dpvision.data.keys import StepKey

FORMAT = "dpvision-store-1"
SEVERAL_FORMAT = "dpvision-store-several-1"
"""Format of a store with several labels per record: a separate name, because the column ``label``
has another meaning there.
"""
TEXTURES_FORMAT = "dpvision-textures-1"
"""Format of a store of generated textures (``data.texture_store``)."""
SHARED_KEPT = "shared_images_kept"
"""Entry of store.json: images of two persons were kept for the first, as the operator asked;
statements list it as not covered.
"""
CURATION = "curation"
"""Entry of store.json: the steps that chose the records (``curate``), for statements."""
WINDOW, UNDECLARED = "window", "undeclared_range"
"""Entries of store.json on images of more than 8 bits."""
ABOUT = (
    "store_id",
    "visibility",
    "label_names",
    "unit_field",
    "licence",
    "split",
    "metric",
    "may_be_unlabelled",
    "shared_images",
    SHARED_KEPT,
    CURATION,
    WINDOW,
    UNDECLARED,
    "deduplicated",
    "cleared_from",
)
"""Entries of store.json that say where records come from: ``metric``, how scores on the labels are
computed; ``may_be_unlabelled``, a record without a label contributes zero in training;
``shared_images``, where persons are known, files with the bytes of an image that was kept for
another one; ``deduplicated`` and ``cleared_from``, images removed from a public store (overlap.py).
"""
_CHECK_ROWS = 1 << 20
REMEDY = "Import the source again, or restore the file."


@dataclass(frozen=True)
class Record:
    """One record: an image with all its captions."""

    id: int
    """63-bit hash of the image's bytes under the store's secret key: immutable, and independent of
    the record's position.
    """
    key: str
    """The image's name in the source."""
    unit: str | None
    """The person the image belongs to, as a keyed hash of the name in 16 hexadecimal digits; if
    None, the record is its own unit.
    """
    image: bytes
    captions: tuple[str, ...]
    labels: tuple[int, ...]


class _Shard:
    """An open file, closed when its last reader releases it."""

    fd = -1

    def __init__(self, path: Path) -> None:
        try:
            self.fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise DataError(
                f"store: {path}: {error.strerror}; expected a readable shard. "
                f"{remedy_for(error, REMEDY)}"
            ) from None

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class Store:
    """Records by position, 0 ... num_records - 1.

    Opened by ``data.open.open_store``; safe to read from several threads.
    """

    generated: ClassVar[bool] = False
    """Whether the images are generated, not imported."""
    label_sets: LabelSets | None = None
    """Label sets of a store with several labels per record, else None."""

    def __init__(
        self,
        path: Path,
        meta: dict[str, Any],
        index: np.memmap,
        label_sets: LabelSets | None = None,
    ) -> None:
        self.path = path
        self.meta = meta
        self.index = index
        self.label_sets = label_sets
        rows = np.asarray(
            index
        )  # the same memory; plain arrays are looked up faster than numpy's memmap class
        self._where = rows["shard"], rows["size"], rows["offset"]
        self.store_id: str = meta["store_id"]
        self.visibility: Literal["private", "public"] = meta["visibility"]
        self.num_records: int = meta["num_records"]
        self.label_names: list[str] | None = meta["label_names"]
        self.licence: str | None = meta.get("licence")
        self.shard_paths = paths = [path / shard["path"] for shard in meta["shards"]]
        self._num_open = files_to_hold(len(paths))
        # without a cycle: files are closed when the last reader lets go of the store
        self._shard = functools.lru_cache(self._num_open)(lambda i: _Shard(paths[i]))
        self._text = functools.lru_cache(1)(lambda: _Shard(path / meta["text"]["path"]))

    @property
    def results_visibility(self) -> Literal["private", "public"]:
        """str: visibility of results computed from these records.

        "private" for a public store cleared of private twins (overlap.py): its images are public,
        but which and how many of them remain depends on the private store.
        """
        return "private" if "deduplicated" in self.meta else self.visibility

    @property
    def window(self) -> Window | None:
        """tuple: declared range by which images of more than 8 bits were read, or None.

        It was declared at the import (``--window``).
        """
        found = self.meta.get(WINDOW)
        return None if found is None else (float(found[0]), float(found[1]))

    @property
    def undeclared_range(self) -> bool:
        """bool: whether there are images of 16 bits that are read by their whole range.

        No other range is stated or declared for them.
        """
        return bool(self.meta.get(UNDECLARED))

    def check(self) -> None:
        """Raise DataError unless all files are whole.

        Every file has its recorded size, every row lies inside its file, and the last row of each
        shard follows a tar header of its size.
        """
        files = [*zip(self.shard_paths, (s["bytes"] for s in self.meta["shards"]), strict=True)]
        text = self.meta["text"]
        for file, size in [*files, (self.path / text["path"], text["bytes"])]:
            try:
                found = file.stat().st_size
            except OSError as error:
                raise DataError(
                    f"store: {file}: {error.strerror}; expected a file of {size} bytes. "
                    f"{remedy_for(error, REMEDY)}"
                ) from None
            if found != size:
                raise DataError(
                    f"store: {file}: {found} bytes; expected {size}, as when it was indexed. "
                    f"{REMEDY}"
                )
        shard_bytes = np.array([size for _, size in files], dtype=np.uint64)
        last = np.full(len(files), -1, dtype=np.int64)
        entry_of = np.zeros(len(files), dtype=ROW)
        for start in range(0, self.num_records, _CHECK_ROWS):
            rows = self.index[start : start + _CHECK_ROWS]
            if rows["shard"].max() >= len(files):
                raise DataError(
                    f"store: {self.path}: index names shard {rows['shard'].max()}; expected "
                    f"{len(files)} shards. {REMEDY}"
                )
            limit = shard_bytes[rows["shard"]]
            outside = (
                (rows["offset"] < BLOCK)
                | (rows["offset"] > limit)
                | (rows["offset"] + rows["size"] > limit)
            )
            outside |= rows["caption_offset"] + rows["caption_size"] > text["bytes"]
            if self.label_sets is not None:
                self.label_sets.check(rows["label"])
            if outside.any():
                row = start + int(outside.argmax())
                raise DataError(
                    f"store: {self.path}: index row {row} lies outside its file; expected it "
                    f"inside. {REMEDY}"
                )
            last[rows["shard"]] = np.arange(start, start + len(rows))
            # read now: to look rows up again one by one would map most of the index
            entry_of[rows["shard"]] = rows
            self._release()
        for row, entry in zip(last[last >= 0].tolist(), entry_of[last >= 0], strict=True):
            header = os.pread(
                self._shard(int(entry["shard"])).fd, BLOCK, int(entry["offset"]) - BLOCK
            )
            try:
                size = member_size(header)
            except ValueError:
                size = -1
            if size != entry["size"]:
                file = self.shard_paths[entry["shard"]]
                raise DataError(
                    f"store: index row {row} does not match {file}; expected the member it was "
                    f"made from. {REMEDY}"
                )

    def read(self, row: int) -> bytes:
        """Bytes of one image file. Raises DataError if the shard cannot be read."""
        return self.read_many(np.array([row]))[0]

    def read_many(self, rows: np.ndarray) -> list[bytes]:
        """Bytes of the image files of int64 ``rows`` (B,), in their order.

        Raises:
            DataError: a shard can no longer be read, or ends early.
        """
        num = self._num_open
        if len(self.shard_paths) <= num:
            return self._read_some(rows)
        parts = [self._read_some(rows[i : i + num]) for i in range(0, len(rows), num)]
        return [image for part in parts for image in part]

    def read_rows(self, rows: np.ndarray) -> list[bytes]:
        """Bytes of the images at the places that ``rows`` (B,) give, in the form of the index.

        Raises:
            DataError: as ``read_many``.
        """
        num, where = self._num_open, [rows[name] for name in ("shard", "size", "offset")]
        parts = ((column[i : i + num] for column in where) for i in range(0, len(rows), num))
        return [image for part in parts for image in self._read(*(c.tolist() for c in part))]

    def _read_some(self, rows: np.ndarray) -> list[bytes]:
        """Images of rows in at most as many shards as are held open."""
        return self._read(*(column[rows].tolist() for column in self._where))

    def _read(self, shards: list[int], sizes: list[int], offsets: list[int]) -> list[bytes]:
        """Written for speed: its overhead over os.pread is benchmarked."""
        held = {
            shard: self._shard(shard) for shard in set(shards)
        }  # keeps the files open until they are read
        fd_of = {shard: file.fd for shard, file in held.items()}
        try:
            read = list(map(os.pread, map(fd_of.__getitem__, shards), sizes, offsets))
        except OSError as error:
            raise DataError(
                f"store: {self.path}: {error.strerror}; expected readable shards. "
                f"{remedy_for(error, REMEDY)}"
            ) from None
        if sum(map(len, read)) != sum(sizes):  # none can be longer than requested
            raise DataError(
                f"store: {self.path}: a shard ends early; expected the size it was indexed with. "
                f"{REMEDY}"
            )
        return read

    def views(
        self,
        rows: np.ndarray,
        key: StepKey,
        data: DataConfig,
        image_size: int,
        device: str | torch.device = "cpu",
    ) -> tuple[Tensor, Tensor]:
        """This step's augmented views of int64 ``rows`` (B,).

        image_BVCHW uint8, and valid_B bool, False if a file does not decode.

        Both are on the CPU; ``device`` matters to generated images only. Raises DataError as
        ``read_many`` does.
        """
        import torch

        from dpvision.data.transform import random_views

        pixels_BVCHW, valid_B = random_views(
            self.read_many(rows), self.index["id"][rows].astype(np.int64), key, data, image_size
        )
        return torch.from_numpy(pixels_BVCHW), torch.from_numpy(valid_B)

    def captions(self, row: int) -> tuple[str, ...]:
        """Captions of one record, from all rows of the source that had the same image and unit."""
        return tuple(self._line(row)["captions"])

    def captions_many(self, rows: np.ndarray) -> list[tuple[str, ...]]:
        """Captions of each of the int64 ``rows`` (B,).

        A damaged line has none: in a step it removes its own record only.

        Raises:
            DataError: records.jsonl can no longer be read, or ends early.
        """
        # held while it is read: if two threads open it at once, the cache keeps only one of the
        # files
        text = self._text()
        sizes, offsets = (
            self.index[name][rows].tolist() for name in ("caption_size", "caption_offset")
        )
        try:
            lines = [
                os.pread(text.fd, size, offset) for size, offset in zip(sizes, offsets, strict=True)
            ]
        except OSError as error:
            raise DataError(
                f"store: {self.path}: {error.strerror}; expected readable captions. "
                f"{remedy_for(error, REMEDY)}"
            ) from None
        if sum(map(len, lines)) != sum(sizes):
            raise DataError(
                f"store: {self.path}: the captions end early; expected the size they were "
                f"indexed with. {REMEDY}"
            )
        return [captions_of(line) for line in lines]

    def has_captions(self, rows: Rows) -> np.ndarray:
        """Which of the int64 ``rows`` (B,) have at least one caption, bool (B,).

        No line is parsed: a second per million.
        """
        text, has_B = self.path / self.meta["text"]["path"], np.empty(len(rows), dtype=bool)
        for start in range(0, len(rows), _CHECK_ROWS):
            part = self.index[rows[start : start + _CHECK_ROWS]]
            has_B[start : start + len(part)] = have_captions(
                text, part["caption_offset"], part["caption_size"]
            )
            self._release()
        return has_B

    def _release(self) -> None:
        """Let go of the pages of the index that were read: they stay in the system's cache."""
        if isinstance(self.index, np.memmap):
            self.index._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]

    def record(self, row: int) -> Record:
        """One record with its image, captions and labels."""
        entry, line = self.index[row], self._line(row)
        unit = int(entry["unit"])
        return Record(
            id=int(entry["id"]),
            key=line["key"],
            unit=None if unit < 0 else f"{unit:016x}",
            image=self.read(row),
            captions=tuple(line["captions"]),
            labels=tuple(self.classes(np.array([row]))[1].tolist()),
        )

    def key(self, row: int) -> str:
        """The name of one record's image in the source."""
        return str(self._line(row)["key"])

    def _line(self, row: int) -> dict[str, Any]:
        entry, text = self.index[row], self._text()
        line = os.pread(text.fd, int(entry["caption_size"]), int(entry["caption_offset"]))
        try:
            found = json.loads(line)
            if not (isinstance(found["key"], str) and isinstance(found["captions"], list)):
                raise TypeError("key or captions of another kind")
            return found
        except (ValueError, KeyError, TypeError, RecursionError):
            where = self.path / self.meta["text"]["path"]
            raise DataError(
                f"store: {where}: row {row} is damaged; expected a line of JSON. {REMEDY}"
            ) from None

    @property
    def multi_label(self) -> bool:
        """bool: whether records may have several labels."""
        return self.label_sets is not None

    @property
    def labelled(self) -> np.ndarray:
        """bool (N,): which records have a label, or a list of labels, which may be empty."""
        return self.index["label"] >= 0

    @functools.cached_property
    def has_labels(self) -> bool:
        """bool: whether any record has a label; the first use may read the whole index."""
        for start in range(0, self.num_records, _CHECK_ROWS):
            if bool((self.index["label"][start : start + _CHECK_ROWS] >= 0).any()):
                return True
            self._release()
        return False

    @property
    def labels(self) -> np.ndarray:
        """int64 (N,): label of each record, -1 for none.

        Raises DataError if records may have several.
        """
        if self.multi_label:
            raise DataError(
                f"store: {self.path} has several labels a record; expected one each for this. "
                "Use `dpvision adapt` or `dpvision train` with --model.multi-label, and "
                "`dpvision evaluate RUN --test STORE` on such a run."
            )
        return self.index["label"].astype(np.int64)

    def classes(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All labels of int64 ``rows`` (B,), in order.

        Position in ``rows`` and class of each, int64 (M,).
        """
        label_B = self.index["label"][rows]
        if self.label_sets is not None:
            return self.label_sets.listed(label_B)
        place_M = np.flatnonzero(label_B >= 0)
        return place_M, label_B[place_M].astype(np.int64)

    def targets(self, rows: np.ndarray, num_classes: int) -> np.ndarray:
        """Labels of int64 ``rows`` (B,) as zeros and ones, uint8 (B, K).

        ``multi_label.NOT_KNOWN`` throughout for a record that is unlabelled or has a class outside
        0 ... K - 1.
        """
        return zero_one(*self.classes(rows), self.index["label"][rows] >= 0, num_classes)

    def eligible_rows(self, max_records_per_unit: int, seed: int) -> Rows:
        """Rows that may be drawn when a unit (person) contributes at most k records: sorted int64,
        or ``AllRows`` of a store without units.

        Which k of a unit's records stay is decided by a keyed hash of (seed, record id): it depends
        on the unit's own records only, so adding or removing a person does not change other
        people's rows. A record without a unit is its own unit.
        """
        if not max_records_per_unit >= 1:
            raise DataError(
                f"eligible_rows: max_records_per_unit={max_records_per_unit}; expected at least "
                "1. Use 1 for one record each."
            )
        if self.meta.get("unit_field") is None:
            return AllRows(self.num_records)
        from dpvision.data.keys import StepKey

        alone = self.index["unit"] < 0
        rows = np.flatnonzero(~alone)
        unit, record_id = self.index["unit"][rows], self.index["id"][rows]
        priority = StepKey(seed, 0).uniform_numpy(record_id, "contribution", 1)[:, 0]
        order = np.lexsort((record_id, priority, unit))
        starts_unit = np.r_[True, unit[order][1:] != unit[order][:-1]][: len(rows)]
        first = np.maximum.accumulate(np.where(starts_unit, np.arange(len(rows)), 0))
        kept = rows[order[np.arange(len(rows)) - first < max_records_per_unit]]
        return np.sort(np.concatenate([np.flatnonzero(alone), kept])).astype(np.int64)

    def import_summary(self) -> dict[str, Any]:
        """Counts of the import: records, images left out by reason, duplicates merged.

        Private: for the operator only.
        """
        try:
            return parse_json((self.path / "confidential" / "import.json").read_text())
        except (OSError, ValueError) as error:
            raise DataError(
                f"store: {self.path}: no summary of the import ({error}); expected "
                f"confidential/import.json. {remedy_for(error, REMEDY)}"
            ) from None


def write_description(
    folder: Path,
    num_records: int,
    about: Mapping[str, Any],
    *,
    shards: Sequence[tuple[str, int]],
    text: tuple[str, int],
    labels: tuple[str, int] | None = None,
) -> None:
    """Write store.json and ledger_marks.json: with index.npy they make a folder a store.

    Args:
        about: the entries of ``ABOUT``; the first five are required, others may be missing.
        shards, text: path and size of each file, relative to ``folder`` or absolute.
        labels: path and size of labels.npy, for several labels per record.
    """

    def file(path: str, size: int) -> dict[str, Any]:
        return {"path": path, "bytes": size}

    meta = {
        "format": FORMAT if labels is None else SEVERAL_FORMAT,
        "num_records": num_records,
        "shards": [file(*shard) for shard in shards],
        "text": file(*text),
        **about,
        **({} if about["visibility"] == "public" else {HAS_MARKS: True}),
        **({} if labels is None else {"labels": file(*labels)}),
    }
    (folder / "store.json").write_text(json.dumps(meta, indent=1))
    StoreLedgers.of(folder).register()
