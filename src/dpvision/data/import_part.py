"""Read one part of a source: decode and hash its images, and write what a store needs of them.

A part is one tar or parquet file of a source of several, read in a process of its own, or a whole
source that is one stream. ``import_merge`` makes a store of parts. What a part holds follows from
its file, the store's key and the import's options alone, so parts may be read in any order, by any
number of processes, and again after a crash.

A part is a folder::

    part.json           counts, written last: a folder without it is incomplete
    tables.json         different labels and persons, read by one part at a time
    rows                PART_ROW of each record, label and shard as places in these tables
    ids                 sorted runs of (id, row)
    text                lines of records.jsonl
    left_out, ...       lines of the files under confidential/
    images.tar          copied images, of a file of several

This module and what it imports do without torch, so that processes start in half a second.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpvision.data.captions import Captions, find_captions
from dpvision.data.decode import BadImage, as_png, decode, in_8_bits, largest_undeclared
from dpvision.data.dicom import BURNED_IN, OVERLAY, is_dicom, render
from dpvision.data.import_labels import ImportedLabels, LabelRule, with_classes
from dpvision.data.import_people import NO_PERSON, WithoutPerson, decodes, person_bytes
from dpvision.data.ordered import ordered_map
from dpvision.data.person_names import PersonRule
from dpvision.data.record_lines import append_line
from dpvision.data.rgb import Window
from dpvision.data.rows import ROW, keyed_hash
from dpvision.data.sample import Sample, stamp_of
from dpvision.data.shard_writer import ShardWriter
from dpvision.data.sorted_runs import write_run
from dpvision.strict_json import parse_json

BLANK = "DICOM: one value only"
PART_ROW = np.dtype([*ROW.descr, ("captioned", "?")])
"""A row, and whether its line has a caption. The shards of a part that is read by itself are
numbers of its tars, and ``COPIED`` more than those of its copied images.
"""
COPIED = 1 << 31
_CHUNK, _CHUNK_BYTES = 64, 1 << 26
"""A chunk ends at this many samples or bytes, whichever comes first."""
_ROWS_IN_RUN = 1 << 16


@dataclass(frozen=True)
class ReadRule:
    """What decides what the parts of a source hold, beside its files."""

    key: bytes
    """The store's key."""
    public: bool
    people: PersonRule
    labels: LabelRule
    label_names: list[str] | None
    """Class names of the source, if it has integer labels."""
    require_captions: bool
    window: Window | None
    copied: bool = False
    """Whether images of tars are copied too."""

    def imported_labels(self) -> ImportedLabels:
        """Labels before the first sample."""
        return ImportedLabels(self.labels, self.label_names, private=not self.public)

    def counts(self, sample: Sample) -> bool:
        """Return whether an image is not left out for its person, captions or bytes."""
        dropped = (
            self.people.unit_from is not None
            and self.people.unmatched == "drop"
            and self.people.name(sample) is None
        )
        return (
            not dropped
            and (not self.require_captions or bool(find_captions(sample.fields).kept))
            and decodes(sample.image)
        )


@dataclass(frozen=True, slots=True)
class Part:
    """A complete part. Its files are read anew each time: a source may have 100,000 parts."""

    folder: Path

    @property
    def about(self) -> dict[str, Any]:
        """The content of part.json."""
        return parse_json((self.folder / "part.json").read_text(), nan=True)

    @classmethod
    def write(cls, folder: Path, about: dict[str, Any], tables: dict[str, Any]) -> "Part":
        """Write the two JSON files of a part."""
        (folder / "tables.json").write_text(json.dumps(tables))
        (folder / "part.json").write_text(json.dumps(about))
        return cls(folder)

    def tables(self) -> dict[str, Any]:
        """Return the content of tables.json."""
        return parse_json((self.folder / "tables.json").read_text(), nan=True)


def write_part(
    samples: Iterable[Sample],
    folder: Path,
    rule: ReadRule,
    *,
    threads: int,
    shards: ShardWriter,
    without_row: Collection[str] = (),
    progress: Callable[[int], None] | None = None,
) -> Part:
    """Read samples and write a part.

    Args:
        folder: to fill; must exist.
        threads: threads that decode; 1 decodes in this one.
        shards: takes the images that are copied.
        without_row: images that the table of the source has no row for, known when they are read.
        progress: called from time to time with the number of images read.

    Raises:
        DataError: a source is damaged, or a label or person is refused.
    """
    with contextlib.ExitStack() as files:
        part = _Part(folder, files, rule, shards, without_row)
        listed, done = with_classes(samples, part.labels, rule.counts), 0
        for chunk in _checked(listed, rule, threads):
            for checked in chunk:
                part.add(checked)
            done += len(chunk)
            if progress is not None:
                progress(done)
        about, tables = part.finish()
    return Part.write(folder, about | {"seen": done}, tables)


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


def _checked(samples: Iterable[Sample], rule: ReadRule, threads: int) -> Iterator[list[_Checked]]:
    """Yield chunks of samples in order; threads decode the images and clean the captions."""

    def check(chunk: list[Sample]) -> list[_Checked]:
        return [_check(sample, rule) for sample in chunk]

    if threads == 1:
        return map(check, _chunks(samples))
    return ordered_map(check, _chunks(samples), workers=threads, ahead=2 * threads)


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


def _check(sample: Sample, rule: ReadRule) -> _Checked:
    problem, text, largest = sample.problem, find_captions(sample.fields), None
    remarks: tuple[str, ...] = ()
    if problem is None and sample.place is not None and is_dicom(sample.image):
        problem = "DICOM in a tar"  # under the name of an image
    if problem is None:
        try:
            if is_dicom(sample.image):
                pixels, remarks = render(sample.image, rule.window)
                sample = sample._replace(image=as_png(pixels), place=None)
                # the blank frames of a volume are alike for all persons
                problem = BLANK if pixels.min() == pixels.max() else None
            elif rule.window is None:
                decode(sample.image)
                largest = largest_undeclared(sample.image)
            else:
                sample = sample._replace(image=in_8_bits(sample.image, rule.window), place=None)
        except BadImage as error:
            problem = error.reason
    if problem is None and rule.require_captions and not text.kept:
        problem = "no caption"
    if problem is None and rule.copied:
        sample = sample._replace(place=None)
    record_id = -1 if problem is not None else keyed_hash(rule.key, sample.image)
    return _Checked(sample, problem, record_id, text, largest, remarks)


class _Part:
    """A part under construction in ``folder``."""

    def __init__(
        self,
        folder: Path,
        files: contextlib.ExitStack,
        rule: ReadRule,
        shards: ShardWriter,
        without_row: Collection[str],
    ) -> None:
        self._rule, self._shards = rule, shards
        self.labels = rule.imported_labels()
        self._text, self._rows_file, self._ids = (
            files.enter_context((folder / name).open("wb")) for name in ("text", "rows", "ids")
        )
        self._left_out, self._unmatched, self._burned = (
            files.enter_context((folder / name).open("w"))
            for name in ("left_out", "unmatched", "burned_in")
        )
        self._without_row, self._num_without_row = without_row, 0
        self._no_person, self._name_of_unit = WithoutPerson(), dict[int, str]()
        self._in_place: dict[Path, int] = {}
        self._values: dict[str, int] = {}
        self._labels: list[list[Any]] = []
        self._rows: list[tuple[Any, ...]] = []
        self._runs: list[int] = []
        self._counts: dict[str, Counter[str]] = {
            name: Counter()
            for name in ("left_out", "dropped", "suspicious", "largest", "dicom", "number")
        }
        self._fields_seen: set[str] = set()

    def add(self, checked: _Checked) -> None:
        sample, problem, record_id, text, largest, remarks = checked
        people, counts = self._rule.people, self._counts
        counts["dropped"] += text.dropped
        counts["suspicious"].update(text.suspicious if problem is None else ())
        person = None if problem is not None else people.name(sample)
        if (
            problem is None
            and person is None
            and people.unit_from is not None
            and people.unmatched != "own-person"
        ):
            self._no_person.add(sample.key)
            problem = NO_PERSON
        if sample.fields:
            self._fields_seen |= sample.fields.keys()
        if problem is not None:
            counts["left_out"][problem] += 1
            where = {"tar": sample.place[0].name} if sample.place else {}
            self._left_out.write(json.dumps({"key": sample.key, "reason": problem, **where}) + "\n")
            return
        if largest is not None:
            counts["largest"][str(largest.bit_length())] += 1
        counts["dicom"].update(remarks)
        if burned := [remark for remark in remarks if remark in (BURNED_IN, OVERLAY)]:
            self._burned.write(json.dumps({"key": sample.key, "dicom": burned}) + "\n")
        if sample.key in self._without_row:
            self._num_without_row += 1
            self._unmatched.write(json.dumps({"file_without_row": sample.key}) + "\n")
        captions, unit, value = text.kept, self._unit(person), self.labels.value(sample)
        label = self._label(sample.key, value)
        counts["number"].update(captions=len(captions), captions_cut=text.num_cut)
        if sample.place is None:
            shard, offset = self._shards.add(sample, captions, value, unit)
            shard += COPIED if self._shards.whole else 0
        else:
            shard, offset = (
                self._in_place.setdefault(sample.place[0], len(self._in_place)),
                sample.place[1],
            )
        position, size = append_line(self._text, sample.key, captions)
        self._rows.append(
            (
                *(shard, offset, len(sample.image), position, size, record_id, unit, label),
                bool(captions),
            )
        )
        if len(self._rows) == _ROWS_IN_RUN:
            self._flush()

    def _unit(self, person: str | None) -> int:
        if person is None:
            return -1
        unit = keyed_hash(self._rule.key, person_bytes(person))
        self._name_of_unit[unit] = person
        return unit

    def _label(self, key: str, value: Any) -> int:
        """Place of a value in the part's table of labels, or -1 for none.

        The merge numbers the classes of the whole store: a table of the different values, in the
        order of their first images, is all that it needs. Numbered here too, so that a label which
        is refused stops the import at once.
        """
        if value is None:
            return -1
        spelled = repr(value)
        place = self._values.get(spelled)
        if place is None:
            self.labels.number(key, value)
            place = self._values[spelled] = len(self._labels)
            self._labels.append([key, value, 0])
        self._labels[place][2] += 1
        return place

    def _flush(self) -> None:
        rows = np.array(self._rows, dtype=PART_ROW)
        first = sum(self._runs)
        write_run(self._ids, rows["id"], np.arange(first, first + len(rows)))
        self._rows_file.write(rows.tobytes())
        self._runs.append(len(rows))
        self._rows.clear()

    def finish(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Write the last rows; return the entries of part.json and of tables.json."""
        if self._rows:
            self._flush()
        about = {
            "runs": self._runs,
            "text_bytes": self._text.tell(),
            "tars": [[str(path), stamp_of(path)[0]] for path in self._in_place],
            "without_person": [self._no_person.count, self._no_person.names],
            "without_row": self._num_without_row,
            "fields": sorted(self._fields_seen),
            **self._counts,
        }
        persons = [[unit, name] for unit, name in self._name_of_unit.items()]
        return about, {"labels": self._labels, "persons": persons}
