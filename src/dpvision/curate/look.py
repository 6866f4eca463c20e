"""The first pass of a curation: the steps of one record, over one file of the source.

It writes, into a folder that ``data.import_work`` completes and keeps::

    part.json           counts by step and reason, seconds by step
    rows                LOOK_ROW of each sample, in order
    keys, places        lines {"key", "tar"} of each record that is in (no tar for others), and
                        where each begins, int64
    column-NAME         what steps across records compare, for these records
    changed             image files, and captions, that replace the source's
    left_out            lines {"key", "tar", "step", "reason"}
    captions_dropped    lines {"key", "tar", "caption", "reason"}
    examples            pairs of thumbnails, of records that a step changed or left out
"""

import json
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from time import perf_counter
from typing import Any, BinaryIO, NamedTuple
from zlib import crc32

import numpy as np

from dpvision.curate.record import Record, RecordStep
from dpvision.curate.sheet import Example, Examples
from dpvision.data.decode import BadImage
from dpvision.data.ordered import ordered_map
from dpvision.data.rgb import Window
from dpvision.data.rows import keyed_hash
from dpvision.data.sample import Sample, SourcePart

IN, LEFT_OUT, NOT_READ = 0, 1, 2
"""States of a row. The import counts what cannot be read."""
LOOK_ROW = np.dtype(
    [
        ("state", "u1"),
        ("image", "<i8"),
        ("image_size", "<i8"),
        ("text", "<i8"),
        ("text_size", "<i8"),
    ]
)
"""Places in ``changed`` of an image and of captions; -1 where nothing is changed."""
_CHUNK = 64
_JPEG, _PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"
_IHDR_END = 8 + 25
"""Of PNG: the signature and the chunk that comes first."""
_Apply = Callable[[Sequence[Record]], None]


@dataclass(frozen=True)
class OfFile:
    """What stands for one file of the source."""

    part: SourcePart

    @property
    def name(self) -> str:
        """The file."""
        return self.part.name

    @property
    def stamp(self) -> list[Any]:
        """Of the file."""
        return self.part.stamp

    @property
    def shared(self) -> bool:
        """Whether other processes can read it."""
        return self.part.shared

    def now(self) -> list[Any]:
        """Of the file."""
        return self.part.now()


@dataclass(frozen=True)
class LookPart(OfFile):
    """One file of the source, of which the first pass writes a part."""

    steps: tuple[RecordStep, ...]
    stated: list[dict[str, Any]]
    """``about`` each step, asked once for all files."""
    window: Window | None = None
    """Declared range of samples of more than 8 bits."""
    threads: int = 1
    """Threads that run the steps; they change no byte."""

    @property
    def settings(self) -> list[Any]:
        """Those of the file, and the steps."""
        return [*self.part.settings, self.stated]

    def write(self, folder: Path, key: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
        """See ``StoredPart``."""
        apply = [
            (step, _opened(step, json.dumps(said)))
            for step, said in zip(self.steps, self.stated, strict=True)
        ]
        with ExitStack() as files:
            look = _Look(folder, files, key)
            chunks = _chunks(self.part.samples({}, folder))
            for seen in ordered_map(
                lambda chunk: _steps(chunk, apply, self.window),
                chunks,
                workers=self.threads,
                ahead=2 * self.threads,
            ):
                look.add(seen)
            return look.finish(), {}


def _chunks(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    chunk = list[Sample]()
    for sample in samples:
        chunk.append(sample)
        if len(chunk) == _CHUNK:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _write_line(file: BinaryIO, line: dict[str, str]) -> None:
    file.write(json.dumps(line).encode() + b"\n")


def marked(image: bytes, key: bytes, source: bytes) -> bytes:
    """Return a changed JPEG or PNG file with a comment that only ``source`` gets under ``key``.

    Files that differ in their metadata only can become the same file, which the import would merge:
    one image of the source would then change the record of another (docs/proofs.md).
    """
    mark = f"{keyed_hash(key, source):016x}".encode()
    if image.startswith(_JPEG):
        return image[:2] + b"\xff\xfe" + struct.pack(">H", len(mark) + 2) + mark + image[2:]
    assert image.startswith(_PNG), "steps write JPEG and PNG"
    chunk = b"tEXt" + b"Comment\0" + mark
    size = struct.pack(">I", len(chunk) - 4)
    return image[:_IHDR_END] + size + chunk + struct.pack(">I", crc32(chunk)) + image[_IHDR_END:]


@lru_cache(16)
def _opened(step: RecordStep, stated: str) -> _Apply:
    """Open a step once a process, and again if its files are others."""
    return step.opened()


@dataclass
class _Seen:
    """A record after all steps."""

    record: Record
    given: Sample
    """As it came."""
    unread: bool = False
    left_by: str = ""
    """Step that left it out."""
    changed: dict[str, Example | None] = field(default_factory=dict)
    """Pixels before and after a step that changed the image; None if it changed captions only."""


class _Chunk(NamedTuple):
    seen: list[_Seen]
    came: Counter[str]
    """Records that came to each step."""
    seconds: dict[str, float]


def _steps(
    samples: list[Sample], apply: Sequence[tuple[RecordStep, _Apply]], window: Window | None
) -> _Chunk:
    seen = [_Seen(Record(sample, window=window), sample) for sample in samples]
    chunk = _Chunk(seen, Counter(), {})
    for one in chunk.seen:
        one.unread = one.given.problem is not None
    for step, function in apply:
        live = [one for one in chunk.seen if not one.unread and one.record.reason is None]
        start = perf_counter()
        if step.decodes:
            for one in live:
                try:
                    one.record.pixels()
                except BadImage:
                    one.unread = True
            live = [one for one in live if not one.unread]
        given = [(one.record.sample.image, one.record.captions) for one in live]
        if live:
            function([one.record for one in live])
        chunk.seconds[step.name] = perf_counter() - start
        chunk.came[step.name] += len(live)
        for one, (image, captions) in zip(live, given, strict=True):
            if one.record.reason is not None:
                one.left_by = step.name
            elif one.record.sample.image is not image:
                assert one.record.before is not None, "change_image keeps it"
                one.changed[step.name] = Example(one.record.before, one.record.pixels())
            elif one.record.captions is not captions:
                one.changed[step.name] = None
    return chunk


class _Look:
    """A part of the first pass under construction."""

    def __init__(self, folder: Path, files: ExitStack, key: bytes) -> None:
        self._folder, self._files, self._key = folder, files, key
        self._rows, self._keys, self._places, self._changed, self._left_out, self._dropped_lines = (
            files.enter_context((folder / name).open("wb"))
            for name in ("rows", "keys", "places", "changed", "left_out", "captions_dropped")
        )
        self._columns: dict[str, tuple[BinaryIO, str, tuple[int, ...]]] = {}
        self._examples = Examples()
        self._counts: dict[str, Counter[str]] = {}
        self._dropped = Counter[str]()
        self._came, self._seconds = Counter[str](), dict[str, float]()
        self._num = self._num_in = 0

    def add(self, chunk: _Chunk) -> None:
        rows = [self._row(one) for one in chunk.seen]
        self._rows.write(np.array(rows, dtype=LOOK_ROW).tobytes())
        self._came += chunk.came
        for step, seconds in chunk.seconds.items():
            self._seconds[step] = self._seconds.get(step, 0.0) + seconds
        self._num += len(rows)

    def _row(self, one: _Seen) -> tuple[int, int, int, int, int]:
        record, key, place = one.record, one.given.key, one.given.place
        named = {"key": key} | ({"tar": place[0].name} if place is not None else {})
        for caption, reason in record.dropped:
            self._dropped[reason] += 1
            _write_line(self._dropped_lines, named | {"caption": caption, "reason": reason})
        for step, pair in one.changed.items():
            self._counts.setdefault(step, Counter())["changed"] += 1
            if pair is not None:
                self._examples.offer(step, self._order(step, key), pair, "")
        if one.unread:
            return NOT_READ, -1, 0, -1, 0
        if record.reason is not None:
            step = one.left_by
            self._counts.setdefault(step, Counter())[record.reason] += 1
            _write_line(self._left_out, named | {"step": step, "reason": record.reason})
            order = self._order(step, key)
            if self._examples.wants(step, order):
                with suppress(BadImage):  # a step that needs no pixels saw it
                    self._examples.offer(step, order, Example(record.pixels(), None), record.reason)
            return LEFT_OUT, -1, 0, -1, 0
        self._num_in += 1
        self._places.write(self._keys.tell().to_bytes(8, "little"))
        _write_line(self._keys, named)
        for name, value in record.facts.items():
            self._column(name, value)
        image = text = (-1, 0)
        if record.sample.image is not one.given.image:
            image = self._store(marked(record.sample.image, self._key, one.given.image))
        if record.captions is not None:
            text = self._store(json.dumps(record.captions).encode())
        return IN, *image, *text

    def _order(self, step: str, key: str) -> int:
        return keyed_hash(self._key, f"{step} {key}".encode())

    def _store(self, data: bytes) -> tuple[int, int]:
        at = self._changed.tell()
        self._changed.write(data)
        return at, len(data)

    def _column(self, name: str, value: np.ndarray) -> None:
        if name not in self._columns:
            made = self._files.enter_context((self._folder / f"column-{name}").open("wb"))
            self._columns[name] = (made, value.dtype.str, value.shape)
        file, kind, shape = self._columns[name]
        assert (value.dtype.str, value.shape) == (kind, shape), f"column {name} changes its type"
        file.write(np.ascontiguousarray(value).tobytes())

    def finish(self) -> dict[str, Any]:
        """Write the examples; return the entries of part.json."""
        self._examples.write(self._folder)
        return {
            "seen": self._num,
            "in": self._num_in,
            "counts": self._counts,
            "captions_dropped": self._dropped,
            "came": self._came,
            "seconds": self._seconds,
            "columns": {name: [kind, shape] for name, (_, kind, shape) in self._columns.items()},
        }
