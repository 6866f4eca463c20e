"""Read a store again as the parts of an import, so that stores are merged as files of a source are.

All rows of the import are found again: those of the index, and between them those that repeat an
image (``confidential/repeats.npy``). Images are compared with their ids in the store, and hashed
under the key of the new one. Text and copied images stay where they are until the merge.

Legend: N rows.
"""

import json
import os
import shutil
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from dpvision.data.import_merge import REPEAT, REPEATS_FILE
from dpvision.data.import_part import COPIED, PART_ROW
from dpvision.data.multi_label import NO_ARRAY
from dpvision.data.open import open_store
from dpvision.data.record_lines import have_captions
from dpvision.data.rows import ROW, keyed_hash
from dpvision.data.sample import stamp_of
from dpvision.data.sorted_runs import write_run
from dpvision.data.store import REMEDY, Store
from dpvision.data.store_writer import KEY_FILE, read_key
from dpvision.errors import DataError, remedy_for

ROWS = 1 << 20
"""Rows of a part."""
_ROWS_IN_RUN = 1 << 16
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 64, 1 << 26
"""Images in memory, whichever is less."""
_NO_COUNTS: dict[str, Any] = {
    "seen": 0,
    "without_row": 0,
    "classes_not_declared": 0,
    "without_person": [0, []],
    "fields": [],
} | {name: {} for name in ("left_out", "dropped", "suspicious", "largest", "dicom", "number")}
_LISTS = {
    "left_out": "left_out.jsonl",
    "unmatched": "unmatched.jsonl",
    "burned_in": "dicom.jsonl",
}
"""Lists under confidential/, by their names in a part."""


@dataclass(frozen=True, eq=False)
class OldRows:
    """The rows of a store as its import read them, before repeats were merged."""

    store: Store
    repeats: np.ndarray
    """REPEAT, ascending by place."""

    @classmethod
    def of(cls, store: Store) -> "OldRows":
        """
        Raises:
            DataError: the store has no readable list of repeats although it had some.
        """
        wanted = store.import_summary().get("duplicates_merged", 0)
        path = store.path / "confidential" / REPEATS_FILE
        if not wanted:
            return cls(store, np.empty(0, dtype=REPEAT))
        try:
            repeats = np.load(path, mmap_mode="r", allow_pickle=False)
        except FileNotFoundError:
            raise DataError(
                f"data merge: {store.path}: repeated images were merged by an earlier version, "
                "which did not note where they were; expected a store of this version. Import its "
                "source again."
            ) from None
        except NO_ARRAY as error:
            remedy = remedy_for(error, REMEDY)
            raise DataError(
                f"store: {path}: {error}; expected the rows of repeated images. {remedy}"
            ) from None
        if repeats.dtype != REPEAT or repeats.shape != (wanted,):
            raise DataError(
                f"store: {path}: {repeats.dtype} of shape {repeats.shape}; expected {wanted} rows "
                f"of repeated images. {REMEDY}"
            )
        return cls(store, repeats)

    def check(self) -> None:
        """Raise DataError unless the rows of repeats lie in their files, in ascending places."""
        shards, text, before = len(self.store.shard_paths), self.store.meta["text"]["bytes"], -1
        for start in range(0, len(self.repeats), _ROWS_IN_RUN):
            some = np.array(self.repeats[start : start + _ROWS_IN_RUN])
            place, rows = np.append(before, some["place"]), some["row"]
            inside = (np.diff(place) > 0).all() and place[-1] < len(self)
            inside &= (rows["shard"] < shards).all()
            inside &= (rows["caption_offset"] + rows["caption_size"] <= text).all()
            if not inside:
                raise DataError(
                    f"store: {self.store.path / 'confidential' / REPEATS_FILE}: rows that lie "
                    f"outside their files; expected rows of repeated images. {REMEDY}"
                )
            if self.store.label_sets is not None:
                self.store.label_sets.check(rows["label"])
            before = place[-1]

    def __len__(self) -> int:
        return self.store.num_records + len(self.repeats)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the rows from ``start`` to ``stop``, PART_ROW (N,), with their first lines."""
        rows = self._merged(start, stop)
        later = np.flatnonzero(rows["caption_offset"] >= self._end)
        if not len(later):
            return rows
        with self.text.open("rb") as text:
            for i in later.tolist():
                begin = _line_end(rows[i - 1]) if i else self._begin(start)
                text.seek(begin)
                rows["caption_offset"][i], rows["caption_size"][i] = begin, len(text.readline())
        rows["captioned"][later] = self._captioned(rows[later])
        return rows

    def _merged(self, start: int, stop: int) -> np.ndarray:
        """Rows with the lines that they have after the import."""
        first, last = np.searchsorted(self.repeats["place"], [start, stop])
        repeat = np.zeros(stop - start, dtype=bool)
        repeat[self.repeats["place"][first:last] - start] = True
        rows = np.empty(stop - start, dtype=PART_ROW)
        rows[repeat] = self.repeats["row"][first:last]
        index = self.store.index[start - first : stop - last]
        kept = np.empty(len(index), dtype=PART_ROW)
        for name in ROW.names or ():
            kept[name] = index[name]
        kept["captioned"] = self._captioned(kept)
        rows[~repeat] = kept
        return rows

    def _captioned(self, rows: np.ndarray) -> np.ndarray:
        return have_captions(self.text, rows["caption_offset"], rows["caption_size"])

    def _begin(self, start: int) -> int:
        """Return where the first line of a row begins: after the one before."""
        back = start
        while back and self._merged(back - 1, back)["caption_offset"][0] >= self._end:
            back -= 1
        begin = _line_end(self._merged(back - 1, back)[0]) if back else 0
        with self.text.open("rb") as text:
            text.seek(begin)
            for _ in range(start - back):
                text.readline()
            return text.tell()

    def used(self, column: str, start: int, stop: int) -> np.ndarray:
        """Return the different values of a column of the index in some rows, ascending."""
        first, last = np.searchsorted(self.repeats["place"], [start, stop])
        index = self.store.index[column][start - first : stop - last]
        return np.union1d(index, self.repeats["row"][column][first:last])

    @property
    def text(self) -> Path:
        """Path: the lines."""
        return self.store.path / self.store.meta["text"]["path"]

    @cached_property
    def _end(self) -> int:
        """End of the lines of the import's rows: lines of merged rows follow. The last row is no
        earlier one of which it could be a repeat, so its line is its first.
        """
        return _line_end(self._merged(len(self) - 1, len(self))[0])


def _line_end(row: np.void) -> int:
    return int(row["caption_offset"]) + int(row["caption_size"])


@dataclass(frozen=True)
class StorePart:
    """Rows ``start`` to ``stop`` of a store's import."""

    path: Path
    start: int
    stop: int
    stamp: list[Any]
    shared: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """The store and the first row."""
        return f"{self.path}, images from {self.start:,}"

    def now(self) -> list[Any]:
        """``stamp_of_store``."""
        return stamp_of_store(self.path)

    @property
    def settings(self) -> list[Any]:
        """The last row."""
        return [self.stop]

    def write(self, folder: Path, key: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
        """Write the rows of a part and their ids under ``key``.

        Returns:
            The entries of part.json and tables.json.

        Raises:
            DataError: the store is damaged, or an image is not the one that was imported.
        """
        store = open_store(self.path, check=False)  # ``parts_of`` did
        old, own_key, runs = OldRows.of(store), read_key(self.path), list[int]()
        shard_N, label_N = (old.used(name, self.start, self.stop) for name in ("shard", "label"))
        paths = [store.shard_paths[shard] for shard in shard_N.tolist()]
        in_place = np.array([_in_place(store, shard) for shard in shard_N.tolist()])
        number_N = np.where(in_place, in_place.cumsum(), COPIED + (~in_place).cumsum()) - 1
        labels = [label for label in label_N.tolist() if label >= 0]
        begin = int(old.read(self.start, self.start + 1)["caption_offset"][0])
        end = begin
        with (folder / "rows").open("wb") as rows_file, (folder / "ids").open("wb") as ids:
            for at in range(self.start, self.stop, _ROWS_IN_RUN):
                rows = old.read(at, min(at + _ROWS_IN_RUN, self.stop))
                ends = rows["caption_offset"] + rows["caption_size"]
                if (rows["caption_offset"] != np.append(np.uint64(end), ends[:-1])).any():
                    raise DataError(
                        f"store: {old.text}: lines in another order than their records; expected "
                        f"them one after the other. {REMEDY}"
                    )
                end = int(ends[-1])
                rows["id"] = _hashes(store, rows, own_key, key)
                rows["shard"] = number_N[np.searchsorted(shard_N, rows["shard"])]
                rows["label"] = np.where(
                    rows["label"] < 0, -1, np.searchsorted(labels, rows["label"])
                )
                rows["caption_offset"] -= np.uint64(begin)
                first = at - self.start
                write_run(ids, rows["id"], np.arange(first, first + len(rows)))
                rows_file.write(rows.tobytes())
                runs.append(len(rows))
        sizes = [store.meta["shards"][shard]["bytes"] for shard in shard_N.tolist()]
        used = list(zip(paths, sizes, in_place.tolist(), strict=True))
        about = {
            **_NO_COUNTS,
            **(self._counts(store, folder) if self.start == 0 else {}),
            "runs": runs,
            "text": [str(old.text.resolve()), begin],
            "text_bytes": end - begin,
            "tars": [[os.path.abspath(path), size] for path, size, stays in used if stays],
            "images": [str(path.resolve()) for path, _, stays in used if not stays],
        }
        listed = [[str(self.path), _value(store, label), 0] for label in labels]
        return about, {"labels": listed, "persons": []}

    def _counts(self, store: Store, folder: Path) -> dict[str, Any]:
        """Counts of the store's import, and its lists: in one part only."""
        found = store.import_summary()
        for name, list_name in _LISTS.items():
            source = self.path / "confidential" / list_name
            if source.exists():
                shutil.copyfile(source, folder / name)
        largest = {
            str(int(name.split()[-1]).bit_length()): num
            for name, num in found.get("largest_values_of_16_bits", {}).items()
        }
        return {
            "seen": found.get("seen", 0),
            "without_row": found.get("files_without_table_row", 0),
            "classes_not_declared": found.get("classes_not_declared", 0),
            "left_out": found.get("left_out", {}),
            "dropped": found.get("captions_dropped", {}),
            "suspicious": found.get("captions_suspicious", {}),
            "largest": largest,
            "dicom": found.get("dicom", {}),
            "number": {name: found.get(name, 0) for name in ("captions", "captions_cut")},
        }


def _in_place(store: Store, shard: int) -> bool:
    """Return whether a shard is a tar that the import left where it was, or another store's."""
    path = Path(store.meta["shards"][shard]["path"])
    return path.is_absolute() or path.parts[0] == ".."


def _hashes(store: Store, rows: np.ndarray, own_key: bytes, key: bytes) -> np.ndarray:
    """Return the ids of rows under ``key``, int64 (N,).

    Raises:
        DataError: an image is not the one that was imported.
    """
    made, at = np.empty(len(rows), dtype=np.int64), 0
    ends = np.cumsum(rows["size"].astype(np.int64))
    while at < len(rows):
        room = (ends[at - 1] if at else 0) + _BYTES_AT_ONCE
        stop = min(at + _ROWS_AT_ONCE, max(at + 1, int(np.searchsorted(ends, room, "right"))))
        some = rows[at:stop]
        for i, image in enumerate(store.read_rows(some)):
            if keyed_hash(own_key, image) != some["id"][i]:
                where = store.shard_paths[some["shard"][i]]
                raise DataError(
                    f"store: {where}: other bytes at {some['offset'][i]} than when it was "
                    f"imported; expected the same image. {REMEDY}"
                )
            made[at + i] = keyed_hash(key, image)
        at = stop
    return made


def _value(store: Store, label: int) -> Any:
    """Return a label as a source has it: names if classes have names, a list of several."""
    names = store.label_names
    flat = None if store.label_sets is None else store.label_sets.flat
    classes = [label] if flat is None else flat[label + 1 : label + 1 + int(flat[label])].tolist()
    if names is not None:
        if not all(0 <= one < len(names) for one in classes):
            raise DataError(
                f"store: {store.path}: class {max(classes)} of {len(names)} names; expected one of "
                f"them. {REMEDY}"
            )
        classes = [names[one] for one in classes]
    return classes[0] if flat is None else classes


def stamp_of_store(path: Path) -> list[Any]:
    """Return the size of a store's files, and what a change of any of them would change.

    Ledgers and marks are not among them.
    """
    store = open_store(path, check=False)
    inner = path / "confidential"
    files = [path / "store.json", path / "index.npy", path / KEY_FILE, inner / "import.json"]
    files += [path / store.meta[name]["path"] for name in ("text", "labels") if name in store.meta]
    optional = (inner / name for name in (REPEATS_FILE, *_LISTS.values()))
    files += [*store.shard_paths, *(file for file in optional if file.exists())]
    stamps = [stamp_of(file) for file in files]
    told = json.dumps([[os.fsdecode(file) for file in files], stamps])
    return [sum(stamp[0] for stamp in stamps), blake2b(told.encode(), digest_size=16).hexdigest()]


def parts_of(store: Store) -> list[StorePart]:
    """Return a store as parts of ``ROWS`` rows.

    Raises:
        DataError: as ``OldRows.of`` and ``OldRows.check``.
    """
    old = OldRows.of(store)
    old.check()
    stamp, num = stamp_of_store(store.path), len(old)
    return [StorePart(store.path, at, min(at + ROWS, num), stamp) for at in range(0, num, ROWS)]
