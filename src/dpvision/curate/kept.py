"""The second pass of a curation: the steps across records, and the source without what they drop.

A record keeps its place: the order is the source's.

Legend: N records that the first pass kept, in the order of the source.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from dpvision.curate.look import IN, LEFT_OUT, LOOK_ROW, OfFile
from dpvision.curate.record import AcrossStep, about, with_captions
from dpvision.curate.sheet import EXAMPLES, Example, Examples, thumbnail
from dpvision.data.decode import decode
from dpvision.data.dicom import is_dicom
from dpvision.data.import_part import Part
from dpvision.data.sample import Sample
from dpvision.errors import DataError
from dpvision.files import name_folder
from dpvision.strict_json import parse_json

Said = Callable[[str, int], None] | None
"""Called with what is done and how many records so far."""
_COPIED_AT_ONCE = 1 << 24
_NO_STEP = "DICOM, which steps cannot read"


@dataclass(frozen=True)
class Kept:
    """The folder that the second pass wrote, complete."""

    folder: Path

    @property
    def alive_N(self) -> np.ndarray:
        """bool, memory-mapped."""
        return np.load(self.folder / "alive.npy", mmap_mode="r")

    def duplicates(self, step: str) -> tuple[np.ndarray, np.ndarray]:
        """Rows that a step left out, and their twins, memory-mapped."""
        rows, twins = (np.load(self.folder / f"{step}-{x}.npy", mmap_mode="r") for x in _LISTS)
        return rows, twins

    @property
    def digest(self) -> str:
        """What another result would change."""
        return parse_json((self.folder / "kept.json").read_text())["digest"]


_LISTS = ("rows", "twins")


def compare(
    parts: Sequence[Part], steps: Sequence[AcrossStep], folder: Path, said: Said = None
) -> Kept:
    """Run the steps across records over the parts of the first pass.

    What is complete in ``folder`` is kept, unless it is of other parts or steps.

    Args:
        folder: named when it is complete; its parent holds files meanwhile.
        said: called from time to time with the step and the number of records.

    Raises:
        DataError: as the steps.
    """
    asked, num = sha256(json.dumps([about(step) for step in steps]).encode()), 0
    for part in parts:
        found = part.about
        asked.update(json.dumps(found["stamp"]).encode())
        num += found["in"]
    digest = asked.hexdigest()
    with contextlib.suppress(OSError, ValueError):
        if Kept(folder).digest == digest:
            return Kept(folder)
    made = folder.with_name(f"{folder.name}.{os.getpid()}")
    for stale in (folder, made):
        shutil.rmtree(stale, ignore_errors=True)
    made.mkdir()
    alive_N = np.ones(num, dtype=bool)
    columns = dict[str, np.ndarray]()
    for step in steps:
        if num and step.fact not in columns:
            columns[step.fact] = _column(parts, step.fact, made / f"column-{step.fact}")
        rows, twins = np.zeros((2, 0), dtype=np.int64)
        if num:
            (made / "work").mkdir()
            rows, twins = step.duplicates(
                columns[step.fact],
                alive_N,
                made / "work",
                (lambda done: None) if said is None else partial(said, step.name),
            )
        alive_N[rows] = False
        for what, array in zip(_LISTS, (rows, twins), strict=True):
            np.save(made / f"{step.name}-{what}.npy", array)
        shutil.rmtree(made / "work", ignore_errors=True)
    columns.clear()
    for path in made.glob("column-*"):
        path.unlink()
    np.save(made / "alive.npy", alive_N)
    (made / "kept.json").write_text(json.dumps({"digest": digest}))
    name_folder(made, folder)
    return Kept(folder)


def _column(parts: Sequence[Part], name: str, path: Path) -> np.ndarray:
    """Write the column of all parts, which have some record, into one file, and map it."""
    about = (part.about for part in parts)
    (only,) = {json.dumps(found["columns"][name]) for found in about if found["in"]}
    kind, shape = parse_json(only)
    with path.open("wb") as file:
        for part in parts:
            with (
                contextlib.suppress(FileNotFoundError),
                part.folder.joinpath(f"column-{name}").open("rb") as source,
            ):
                shutil.copyfileobj(source, file, _COPIED_AT_ONCE)
    return np.memmap(path, dtype=np.dtype(kind), mode="r").reshape(-1, *shape)


@dataclass(frozen=True)
class CuratedPart(OfFile):
    """One file of the source with what the curation left of it: for the import."""

    look: Path
    """Folder that the first pass wrote."""
    kept: Kept
    first: int
    """Records that earlier files have in ``alive_N``."""
    shown: dict[int, list[tuple[str, int, int]]]
    """By row: step, order and side (0 before, 1 after) of the contact sheets that show it."""
    result: str
    """What decides the samples besides the file: the second pass's digest."""

    @property
    def settings(self) -> list[Any]:
        """Those of the file, and the result of the passes before."""
        return [*self.part.settings, self.result]

    def check(self, noted: dict[str, Any], seen: set[str]) -> None:
        """As the file."""
        self.part.check(noted, seen)

    def samples(self, noted: dict[str, Any], scratch: Path) -> Iterator[Sample]:
        """Yield what is left of the file's samples."""
        path = self.look / "rows"
        rows = np.fromfile(path, LOOK_ROW) if path.exists() else np.zeros(0, LOOK_ROW)
        alive_N, at, num = self.kept.alive_N, self.first, 0
        with contextlib.ExitStack() as files:
            changed = -1
            if (self.look / "changed").exists():
                changed = os.open(self.look / "changed", os.O_RDONLY)
                files.callback(os.close, changed)
            for num, sample in enumerate(self.part.samples(noted, scratch), start=1):
                if num > len(rows):
                    break
                state, image, size, text, text_size = rows[num - 1].item()
                if state != IN:
                    if state != LEFT_OUT:  # the import can render DICOM, which no step has seen
                        yield (
                            sample._replace(problem=_NO_STEP) if is_dicom(sample.image) else sample
                        )
                    continue
                if image >= 0:
                    sample = sample._replace(image=os.pread(changed, size, image), place=None)
                if text >= 0:
                    sample = with_captions(sample, parse_json(os.pread(changed, text_size, text)))
                if at in self.shown:
                    _show(sample, self.shown[at], scratch)
                if alive_N[at]:
                    yield sample
                at += 1
        if num != len(rows):
            raise DataError(
                f"data curate: {self.name}: changed while it was read; expected a file at rest. "
                "Run the same command again once it is written."
            )


def shown_pairs(kept: Kept, steps: Sequence[AcrossStep]) -> dict[int, list[tuple[str, int, int]]]:
    """Return which rows the sheets of the steps across records show: pairs at equal distances."""
    shown: dict[int, list[tuple[str, int, int]]] = {}
    for step in steps:
        rows, twins = kept.duplicates(step.name)
        places = np.unique(np.linspace(0, len(rows) - 1, EXAMPLES).astype(int)) if len(rows) else ()
        for order, at in enumerate(places):
            for side, row in enumerate((int(twins[at]), int(rows[at]))):
                shown.setdefault(row, []).append((step.name, order, side))
    return shown


def _show(sample: Sample, sheets: list[tuple[str, int, int]], folder: Path) -> None:
    """Write the image for the sheets that show it."""
    small = thumbnail(decode(sample.image))
    for step, order, side in sheets:
        np.save(folder / f"shown-{side}-{order}-{step}.npy", small)


def add_shown(parts: Sequence[Part], examples: Examples) -> None:
    """Add the pairs whose two images ``CuratedPart`` wrote into the parts of the import."""
    found: dict[tuple[str, int], dict[int, np.ndarray]] = {}
    for part in parts:
        for path in part.folder.glob("shown-*.npy"):
            _, side, place, name = path.stem.split("-", 3)
            found.setdefault((name, int(place)), {})[int(side)] = np.load(path)
    for (step, order), sides in found.items():
        examples.offer(step, order, Example(sides[0], sides[1]), "")
