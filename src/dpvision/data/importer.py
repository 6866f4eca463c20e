"""Make a store from a source: check and hash images, merge identical ones, write the index.

A store is made whole or not at all.

Image bytes are kept as they are; orientation and colour modes are handled at each read (decode.py).
"""

import contextlib
import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpvision.data.caption_files import CaptionFile
from dpvision.data.captions import CaptionRule, Captions, find_captions
from dpvision.data.decode import BadImage, as_png, decode, in_8_bits, largest_undeclared
from dpvision.data.dicom import BURNED_IN, NO_RANGE, OVERLAY, is_dicom, render
from dpvision.data.dicom_source import DicomRule
from dpvision.data.folders import Missed
from dpvision.data.import_labels import ImportedLabels, LabelRule, with_classes
from dpvision.data.import_people import (
    NO_PERSON,
    Shared,
    WithoutPerson,
    check_field,
    check_persons,
    decodes,
    person_bytes,
    refuse_alike,
    refuse_known,
    refuse_shared,
)
from dpvision.data.open import open_store
from dpvision.data.ordered import ordered_map
from dpvision.data.person_names import SHARED_FILE, PersonRule
from dpvision.data.record_lines import append_line, have_captions, line_of, merge_duplicates
from dpvision.data.rgb import Window, check_window
from dpvision.data.sample import Sample, Source
from dpvision.data.sources import open_source
from dpvision.data.store import (
    ROW,
    SHARED_KEPT,
    UNDECLARED,
    WINDOW,
    Store,
    write_description,
)
from dpvision.data.store_writer import (
    ShardWriter,
    keyed_hash,
    new_key,
    new_store_folder,
    require_new,
)
from dpvision.data.table_files import UNMATCHED_FILE
from dpvision.errors import DataError

DICOM_FILE = "dicom.jsonl"
"""File under a store's confidential/: images with a burned-in annotation or an overlay."""
BLANK = "DICOM: one value only"
_CHUNK, _CHUNK_BYTES = 64, 1 << 26
"""A chunk ends at this many samples or bytes, whichever comes first."""
_ROWS_IN_LIST = 1 << 16


def import_source(
    source: str | Path,
    store_dir: str | Path,
    *,
    public: bool = False,
    people: PersonRule = PersonRule(),
    labels: LabelRule = LabelRule(),
    captions: CaptionRule = CaptionRule(),
    licence: str | None = None,
    window: Window | None = None,
    dicom: DicomRule = DicomRule(),
    workers: int = 2,
    progress: Callable[[int], None] | None = None,
) -> Store:
    """Import an image folder, parquet files, WebDataset tars or DICOM files into a new store.

    Tars are indexed in place, of DICOM files the pixels are kept, the rest is copied.

    Files that cannot be read, are oversized or damaged, or are not images are left out: counted by
    reason in ``Store.import_summary``, and named only in ``confidential/left_out.jsonl``. Rows with
    identical image bytes become one record with all their captions.

    Args:
        source: see ``sources.open_source``.
        store_dir: folder to make; must not exist.
        public: the images need no protection; what is computed from them may be shown.
        people: which field names the person, and what becomes of images without one or with two.
        labels: which field holds the labels, and the declared classes, which a private store with
            class names requires.
        captions: a file of captions, see ``caption_files``; the source's own are kept too.
        licence: licence of the images, for the statement of runs on a public store.
        window: the values that become black and white in images of more than 8 bits, which are
            stored as 8-bit PNG; images of tars are then copied too.
        dicom: which DICOM files and frames. Their field PatientID names the person unless
            ``people`` names another.
        workers: threads that decode.
        progress: called from time to time with the number of images checked so far.

    Raises:
        DataError: the source is empty, unknown or damaged, a field is missing, ``store_dir``
            exists, or the disk is full. Nothing half-made is left behind.
    """
    target, origin = Path(store_dir).resolve(), Path(source).resolve()
    require_new(target)
    if window is not None:
        check_window(window, "data import")
    if origin.is_dir() and target.is_relative_to(origin):
        raise DataError(
            f"data import: store={store_dir} lies inside the source; expected it elsewhere. "
            "Choose another folder."
        )
    labels = labels.read()
    opened = partial(
        open_source,
        source,
        unit_from=people.unit_from,
        label_from=labels.label_from,
        label_separator=labels.label_separator,
        workers=workers,
        dicom=dicom,
    )
    found = opened()
    people = _checked_rule(people, found)
    if people.unit_from is not None and "refuse" in (people.unmatched, people.shared_images):
        if captions.captions is not None:
            CaptionFile(captions.captions)  # refused before a pass over all images
        named = ImportedLabels(labels, found.label_names, private=not public)
        counts = partial(_counts, people=people, require_captions=False)
        check_persons(lambda: with_classes(opened().samples, named, counts), people)
    return import_samples(
        found,
        store_dir,
        public=public,
        people=people,
        labels=labels,
        captions=captions,
        licence=licence,
        window=window,
        workers=workers,
        progress=progress,
    )


def import_samples(
    source: Source | Iterable[Sample],
    store_dir: str | Path,
    *,
    public: bool = False,
    people: PersonRule = PersonRule(),
    labels: LabelRule = LabelRule(),
    captions: CaptionRule = CaptionRule(),
    licence: str | None = None,
    window: Window | None = None,
    workers: int = 2,
    progress: Callable[[int], None] | None = None,
) -> Store:
    """Import a source or any iterable of samples into a new store; see ``import_source``.

    Args:
        source: e.g. of ``datasets.dataset_source``, or ``Source(samples, label_names)``.
        licence: if None, the source's.
    """
    target = Path(store_dir).resolve()
    source = source if isinstance(source, Source) else Source(iter(source))
    people = _checked_rule(people, source)
    caption_file = None if captions.captions is None else CaptionFile(captions.captions)
    with new_store_folder(target, private=not public) as folder, contextlib.ExitStack() as files:
        imported = ImportedLabels(labels, source.label_names, private=not public)
        build = _Build(folder, files, people, imported, source.missed)
        samples = source.samples if caption_file is None else caption_file.attach(source.samples)
        counts = partial(_counts, people=people, require_captions=captions.require_captions)
        listed, done = with_classes(samples, imported, counts), 0
        for chunk in _checked(listed, build.key, captions.require_captions, window, workers):
            for checked in chunk:
                build.add(checked)
            done += len(chunk)
            if progress is not None:
                progress(done)
        more: dict[str, Any] = dict(source.counts)
        if caption_file is not None:
            more |= caption_file.summary()
            build.write_missed(caption_file.missed())
        more |= {} if window is None else {"window": list(window)}
        about = {
            "visibility": "public" if public else "private",
            "licence": licence or source.licence,
            "metric": source.metric,
        }
        build.finish(about, done, more)
    return open_store(target)


def _checked_rule(people: PersonRule, source: Source) -> PersonRule:
    """Return the rule with the source's field of persons, where none is declared."""
    people = replace(people, unit_from=people.unit_from or source.unit_from)
    people.check()
    return people


def _counts(sample: Sample, people: PersonRule, require_captions: bool) -> bool:
    """Return whether an image is not left out for its person, its captions or its bytes."""
    dropped = (
        people.unit_from is not None and people.unmatched == "drop" and people.name(sample) is None
    )
    return (
        not dropped
        and (not require_captions or bool(find_captions(sample.fields).kept))
        and decodes(sample.image)
    )


class _Checked(NamedTuple):
    sample: Sample
    problem: str | None
    """Reason to leave the image out, or None."""
    record_id: int
    text: Captions
    largest: int | None
    """Largest sample of an image of 16 bits whose file does not state their range."""
    remarks: tuple[str, ...]
    """Of a DICOM file, for the operator; see ``dicom.Rendered``."""


def _checked(
    samples: Iterable[Sample],
    key: bytes,
    require_captions: bool,
    window: Window | None,
    workers: int,
) -> Iterator[list[_Checked]]:
    """Yield chunks of samples in order; threads decode the images and clean the captions."""

    def check(chunk: list[Sample]) -> list[_Checked]:
        return [_check(sample, key, require_captions, window) for sample in chunk]

    return ordered_map(check, _chunks(samples), workers=workers, ahead=2 * workers)


def _chunks(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    chunk, size = list[Sample](), 0
    for sample in samples:
        chunk.append(sample)
        size += len(sample.image)
        if len(chunk) == _CHUNK or size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _check(sample: Sample, key: bytes, require_captions: bool, window: Window | None) -> _Checked:
    problem, text, largest = sample.problem, find_captions(sample.fields), None
    remarks: tuple[str, ...] = ()
    if problem is None:
        try:
            if is_dicom(sample.image):
                pixels, remarks = render(sample.image, window)
                sample = sample._replace(image=as_png(pixels), place=None)
                # the blank frames of a volume are alike for all persons
                problem = BLANK if pixels.min() == pixels.max() else None
            elif window is None:
                decode(sample.image)
                largest = largest_undeclared(sample.image)
            else:
                sample = sample._replace(image=in_8_bits(sample.image, window), place=None)
        except BadImage as error:
            problem = error.reason
    if problem is None and require_captions and not text.kept:
        problem = "no caption"
    record_id = -1 if problem is not None else keyed_hash(key, sample.image)
    return _Checked(sample, problem, record_id, text, largest, remarks)


class _Build:
    """A store under construction in ``folder``."""

    def __init__(
        self,
        folder: Path,
        files: contextlib.ExitStack,
        people: PersonRule,
        labels: ImportedLabels,
        missed: Missed,
    ) -> None:
        self.store_id = secrets.token_hex(16)
        self._folder = folder
        self._people, self._labels = people, labels
        self._no_person, self._name_of_unit = WithoutPerson(), dict[int, str]()
        self.key = new_key(folder)
        self._text = files.enter_context((folder / "records.jsonl").open("w+b"))
        self._left_out = files.enter_context((folder / "confidential" / "left_out.jsonl").open("w"))
        self._unmatched = files.enter_context((folder / "confidential" / UNMATCHED_FILE).open("w"))
        self._without_row, self._num_without_row = missed.files, 0
        self.write_missed(missed._replace(files=frozenset()))
        self._writer = ShardWriter(folder, files)
        self._in_place: dict[Path, int] = {}
        self._rows: list[tuple[int, ...]] = []
        self._blocks: list[np.ndarray] = []
        self._reasons: Counter[str] = Counter()
        self._num_captions = self._num_cut = 0
        self._dropped: Counter[str] = Counter()
        self._suspicious: Counter[str] = Counter()
        self._largest: Counter[int] = Counter()
        self._remarks: Counter[str] = Counter()
        self._burned: list[str] = []
        self._fields_seen: set[str] = set()

    def add(self, checked: _Checked) -> None:
        sample, problem, record_id, text, largest, remarks = checked
        self._dropped += text.dropped
        self._suspicious.update(text.suspicious if problem is None else ())
        person = None if problem is not None else self._people.name(sample)
        if (
            problem is None
            and person is None
            and self._people.unit_from is not None
            and self._people.unmatched != "own-person"
        ):
            self._no_person.add(sample.key)
            problem = NO_PERSON
        if sample.fields:
            self._fields_seen |= sample.fields.keys()
        if problem is not None:
            self._reasons[problem] += 1
            where = {"tar": sample.place[0].name} if sample.place else {}
            self._left_out.write(json.dumps({"key": sample.key, "reason": problem, **where}) + "\n")
            return
        if largest is not None:
            self._largest[largest.bit_length()] += 1
        self._remarks.update(remarks)
        if burned := [remark for remark in remarks if remark in (BURNED_IN, OVERLAY)]:
            self._burned.append(json.dumps({"key": sample.key, "dicom": burned}) + "\n")
        if sample.key in self._without_row:
            self._num_without_row += 1
            self._unmatched.write(json.dumps({"file_without_row": sample.key}) + "\n")
        captions, unit, value = text.kept, self._unit(person), self._labels.value(sample)
        label = self._labels.number(sample.key, value)
        self._num_captions += len(captions)
        self._num_cut += text.num_cut
        if sample.place is None:
            shard, offset = self._writer.add(sample, captions, value, unit)
        else:
            shard, offset = (
                self._in_place.setdefault(sample.place[0], len(self._in_place)),
                sample.place[1],
            )
        position, size = append_line(self._text, sample.key, captions)
        self._rows.append(
            (shard, offset, len(sample.image), position, size, record_id, unit, label)
        )
        if len(self._rows) == _ROWS_IN_LIST:
            self._flush()

    def _flush(self) -> None:
        self._blocks.append(np.array(self._rows, dtype=ROW))
        self._rows.clear()

    def write_missed(self, missed: Missed) -> None:
        """List the names of a join that have no counterpart, under confidential/."""
        for kind, names in (("row_without_file", missed.rows), ("file_without_row", missed.files)):
            for name in names:
                self._unmatched.write(json.dumps({kind: name, "table": missed.table}) + "\n")

    def _unit(self, person: str | None) -> int:
        if person is None:
            return -1
        unit = keyed_hash(self.key, person_bytes(person))
        self._name_of_unit[unit] = person
        return unit

    def _write_shared(self, pairs: list[tuple[np.void, np.void]]) -> None:
        """Refuse images of two persons, or list them with both, under confidential/."""

        def of(row: np.void) -> tuple[str, str | None]:
            return line_of(self._text, row)["key"], self._name_of_unit.get(int(row["unit"]))

        found = [Shared(*of(first), *of(second)) for first, second in pairs]
        self._text.seek(0, 2)
        if self._people.unit_from is not None and self._people.shared_images == "refuse":
            refuse_shared(self._people.unit_from, found)
        if found:
            lines = [json.dumps(shared._asdict()) + "\n" for shared in found]
            (self._folder / "confidential" / SHARED_FILE).write_text("".join(lines))

    def _check_fields(self) -> None:
        for option, name in (
            ("--unit-from", self._people.unit_from),
            ("--label-from", self._labels.field),
        ):
            if name is not None and name != "label" and self._fields_seen:
                check_field(option, name, self._fields_seen)
        if self._people.unit_from is not None and self._people.unmatched == "refuse":
            self._no_person.refuse(self._people.unit_from)
        if self._people.unit_from is not None:
            refuse_alike(self._people.unit_from, self._name_of_unit.values())
        if self._people.apart_from is not None:
            refuse_known(self._people.apart_from, self._name_of_unit.values())

    def finish(self, about: dict[str, Any], num_seen: int, more: dict[str, Any]) -> None:
        self._check_fields()
        self._flush()
        rows = np.concatenate(self._blocks)
        left_out = dict(sorted(self._reasons.items()))
        if not len(rows):
            got = (
                f"{num_seen} files, none an image that can be read: {left_out}"
                if num_seen
                else "empty source"
            )
            what = "images with captions" if "no caption" in left_out else "images"
            raise DataError(
                f"data import: {got}; expected {what}. Check the path, or convert them to JPEG "
                "or PNG."
            )
        names, labels = self._labels.finish(rows, self._folder)
        rows, merged, shared = merge_duplicates(rows, self._text)
        self._write_shared(shared)
        shards = [
            (str(path), path.stat().st_size) for path in self._in_place
        ] or self._writer.finish()
        self._text.flush()
        self._unmatched.flush()
        if not self._unmatched.tell():
            (self._folder / "confidential" / UNMATCHED_FILE).unlink()
        about = about | {
            "store_id": self.store_id,
            "label_names": names,
            "unit_field": self._people.unit_from,
            "split": None,
            "may_be_unlabelled": self._labels.may_be_unlabelled,
        }
        if self._people.unit_from is not None:
            about["shared_images"] = merged["unit_conflicts"]
            about |= {SHARED_KEPT: "first"} if self._people.shared_images == "first" else {}
        about |= {WINDOW: more["window"]} if "window" in more else {}
        about |= {UNDECLARED: True} if self._largest or self._remarks[NO_RANGE] else {}
        text = ("records.jsonl", self._text.tell())
        write_description(self._folder, rows, about, shards=shards, text=text, labels=labels)
        summary = {
            "seen": num_seen,
            "records": len(rows),
            "left_out": left_out,
            **merged,
            "classes_not_declared": self._labels.num_unknown,
            "without_label": int((rows["label"] < 0).sum()),
            "without_unit": int((rows["unit"] < 0).sum()),
            "without_caption": int(
                (
                    ~have_captions(
                        self._folder / "records.jsonl", rows["caption_offset"], rows["caption_size"]
                    )
                ).sum()
            ),
            **(
                {"files_without_table_row": self._num_without_row}
                if "table_rows_without_file" in more
                else {}
            ),
            "captions": self._num_captions,
            "captions_cut": self._num_cut,
            "captions_dropped": dict(sorted(self._dropped.items())),
            "captions_suspicious": dict(sorted(self._suspicious.items())),
            **more,
        }
        largest = {f"up to {2**bits - 1}": n for bits, n in sorted(self._largest.items())}
        summary |= {"largest_values_of_16_bits": largest} if largest else {}
        summary |= {"dicom": dict(sorted(self._remarks.items()))} if self._remarks else {}
        if self._burned:
            (self._folder / "confidential" / DICOM_FILE).write_text("".join(self._burned))
        (self._folder / "confidential" / "import.json").write_text(json.dumps(summary, indent=1))
