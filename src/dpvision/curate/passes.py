"""Curate a source into a store: look at each file, compare records, import what is left.

Three passes over the files of the source, each file by itself; what is complete survives a crash,
and the same call goes on from there. No image is copied between the passes: the import reads the
source again, so tars stay in place where nothing of an image is changed.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dpvision.curate.downloads import downloads
from dpvision.curate.kept import CuratedPart, Kept, Said, add_shown, compare, shown_pairs
from dpvision.curate.look import LookPart
from dpvision.curate.pipeline import Pipeline
from dpvision.curate.ray_engine import ray_cluster
from dpvision.curate.record import about
from dpvision.curate.sheet import Examples
from dpvision.curate.text import Caption
from dpvision.data.captions import CAPTION_FIELDS, CaptionRule
from dpvision.data.import_labels import LabelRule
from dpvision.data.import_part import Part, ReadRule
from dpvision.data.import_work import COMPARED, Each, Spread, read_parts, versions
from dpvision.data.importer import import_source
from dpvision.data.ordered import checked_workers
from dpvision.data.person_names import PersonRule
from dpvision.data.rgb import Window
from dpvision.data.sample import SourcePart, check_unchanged
from dpvision.data.store import CURATION, Store
from dpvision.errors import ConfigError, DataError
from dpvision.files import CONFIDENTIAL
from dpvision.strict_json import parse_json

FOLDER = "curation"
"""Folder under a curated store's confidential/: counts, names of what was left out, sheets."""
DOWNLOADS = "downloads"
"""Entry of counts.json: what img2dataset counted."""
_SOFTWARE = ("torch", "torchvision", "timm", "onnxruntime", "faiss-cpu", "imagehash", "py3langid")
"""Packages that decide what steps do, beside those that read images."""

Engine = Literal["local", "ray"]
"""What reads the files: processes of this machine, or a Ray cluster."""


def curate(
    source: str | Path,
    store_dir: str | Path,
    pipeline: Pipeline,
    *,
    public: bool = False,
    people: PersonRule | None = None,
    labels: LabelRule | None = None,
    window: Window | None = None,
    licence: str | None = None,
    workers: int | None = None,
    engine: Engine = "local",
    progress: Said = None,
) -> Store:
    """Make a store of what the steps leave of a source.

    The store's ``confidential/curation`` holds ``counts.json`` (by step: records that came, those
    left out by reason, changed, seconds; what img2dataset counted), ``left_out.jsonl`` with their
    names, and a contact sheet for each step that left out or changed anything.

    Args:
        source: tars or parquet files, also at a URL, or a folder of images, which is read as one
            file.
        public, people, labels, window, licence, workers: as for ``import_source``.
        engine: "ray" spreads the files over a Ray cluster (``ray_engine``), at most ``workers`` at
            once; it changes no byte.
        progress: called from time to time.

    Raises:
        ConfigError: a step's settings, a package that it needs is missing, or steps that compare
            images of persons.
        DataError: as ``import_source``. What was read is kept for the same call.
    """
    checked_workers(workers)
    if people is not None and people.unit_from is not None and pipeline.across:
        raise ConfigError(
            f"data curate: {pipeline.across[0].name} with persons ({people.unit_from}); expected "
            "steps of one image only, because the images of one person would decide which images "
            "of others stay, and the guarantee is for persons. Leave it out, or compare with "
            "public images only: --steps public_duplicates."
        )
    fields = [people.unit_from if people else None, labels.label_from if labels else None]
    if any(isinstance(step, Caption) for step in pipeline.steps):
        for name in (name for name in fields if name in CAPTION_FIELDS):
            raise ConfigError(
                f"data curate: caption, and {name} as the field of persons or labels; expected "
                "another field, because captions are replaced. Rename it in the source, or leave "
                "caption out."
            )
    with contextlib.ExitStack() as stack:
        spread = stack.enter_context(ray_cluster(workers)) if engine == "ray" else None
        return import_source(
            source,
            store_dir,
            public=public,
            people=people or PersonRule(),
            labels=labels or LabelRule(),
            captions=CaptionRule(),
            licence=licence,
            window=window,
            dicom=None,
            workers=workers,
            progress=None if progress is None else partial(progress, "importing"),
            passes=_Passes(pipeline, checked_workers(workers), spread, progress),
        )


@dataclass
class _Passes:
    """The two passes before the import, and what is written after it (``importer.Passes``)."""

    pipeline: Pipeline
    workers: int
    spread: Spread | None
    said: Said
    where: str = "data curate"
    _looked: Sequence[Part] = ()
    _first_P: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int64))
    """Records of the parts before each, and of all."""
    _kept: Kept | None = None
    _downloads: dict[str, Any] | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The steps, and the packages that they use."""
        return {"curation": self.pipeline.about(), "curation_software": versions(_SOFTWARE)}

    @property
    def about(self) -> dict[str, Any]:
        """The steps."""
        return {CURATION: self.pipeline.about()}

    def before(
        self, parts: Sequence[SourcePart], work: Path, rule: ReadRule
    ) -> Sequence[SourcePart]:
        """Run both passes."""
        self._downloads = downloads([part.name for part in parts])
        threads = self.workers if len(parts) == 1 else 1
        steps = self.pipeline.of_one_record
        stated = [{"name": step.name, **about(step)} for step in steps]
        looks = Each(
            len(parts), lambda at: LookPart(parts[at], steps, stated, rule.window, threads)
        )
        said = None if self.said is None else partial(self.said, "looking")
        looked = read_parts("look", looks, work, rule, self.workers, self.spread, said)
        check_unchanged(parts)
        first_P = np.cumsum([0, *(look.about["in"] for look in looked)])
        self._looked, self._first_P = looked, first_P
        if not first_P[-1] and (why := _reasons(looked)):
            raise DataError(
                f"data curate: the steps left out all images: {why}; expected some that "
                "stay. Change the settings of that step, or leave it out."
            )
        kept = compare(looked, self.pipeline.across, work / CONFIDENTIAL / COMPARED, self.said)
        self._kept, shown = kept, shown_pairs(kept, self.pipeline.across)
        digest = kept.digest

        def curated(at: int) -> CuratedPart:
            first, last = first_P[at : at + 2].tolist()
            here = {row: sides for row, sides in shown.items() if first <= row < last}
            return CuratedPart(parts[at], looked[at].folder, kept, first, here, digest)

        return Each(len(parts), curated)

    def after(self, parts: Sequence[Part], folder: Path) -> None:
        """Write counts, names and sheets."""
        out = folder / CONFIDENTIAL / FOLDER
        out.mkdir(parents=True)
        assert self._kept is not None, "before() ran"
        counts = _counts(self.pipeline, self._looked, self._kept)
        names = _Names(self._looked, self._first_P)
        if self._downloads is not None:
            counts = {DOWNLOADS: self._downloads, **counts}
        (out / "counts.json").write_text(json.dumps(counts, indent=1))
        with (out / "left_out.jsonl").open("w", encoding="utf-8") as file:
            for part in self._looked:
                file.writelines(_lines(part, "left_out"))
            for step in self.pipeline.across:
                for row, twin in zip(*self._kept.duplicates(step.name), strict=True):
                    line = {"step": step.name, "reason": "duplicate", "of": names.of(twin)}
                    file.write(json.dumps(names.of(row) | line) + "\n")
        if counts["captions_dropped"]:
            with (out / "captions_dropped.jsonl").open("w", encoding="utf-8") as file:
                for part in self._looked:
                    file.writelines(_lines(part, "captions_dropped"))
        examples = Examples()
        for part in self._looked:
            examples.read(part.folder)
        add_shown(parts, examples)
        for name, sheet in examples.sheets():
            sheet.save(out / f"{name}.png")


def _reasons(looked: Sequence[Part]) -> str:
    """Say why images were left out, by step; empty if none were."""
    counts = Counter[str]()
    for part in looked:
        for step, found in part.about["counts"].items():
            found.pop("changed", None)
            counts.update({f"{step} ({reason})": num for reason, num in found.items()})
    return ", ".join(f"{num:,} {reason}" for reason, num in counts.most_common())


def _counts(pipeline: Pipeline, looked: Sequence[Part], kept: Kept) -> dict[str, Any]:
    """Return, by step in order: records that came, what became of them, and seconds."""
    total: dict[str, Counter[str]] = {}
    came, seconds = Counter[str](), Counter[Any]()
    for part in looked:
        came.update(part.about["came"])
        seconds.update(part.about["seconds"])
        for step, counts in part.about["counts"].items():
            total.setdefault(step, Counter()).update(counts)
    found: dict[str, Any] = {"seen": sum(part.about["seen"] for part in looked)}
    num = sum(part.about["in"] for part in looked)
    for step in pipeline.of_one_record:
        changed = total.get(step.name, Counter()).pop("changed", 0)
        found[step.name] = {
            "came": came[step.name],
            "left_out": dict(sorted(total.get(step.name, Counter()).items())),
            "changed": changed,
            "seconds": round(seconds[step.name], 3),
        }
    for across in pipeline.across:
        rows, _ = kept.duplicates(across.name)
        entry = found.setdefault(across.name, {})
        entry |= {"came": num, "left_out": {"duplicate": len(rows)} if len(rows) else {}}
        num -= len(rows)
    dropped = sum((Counter(part.about["captions_dropped"]) for part in looked), Counter[str]())
    return found | {"captions_dropped": dict(sorted(dropped.items())), "to_import": num}


def _lines(part: Part, name: str) -> Iterator[str]:
    path = part.folder / name
    if path.exists():
        with path.open(encoding="utf-8") as file:
            yield from file


class _Names:
    """Names of records that the first pass kept, read when they are asked for."""

    def __init__(self, looked: Sequence[Part], first_P: np.ndarray) -> None:
        self._looked, self._first_P = looked, first_P
        self._opened = lru_cache(64)(self._open)

    def _open(self, place: int) -> tuple[mmap, np.ndarray]:
        folder = self._looked[place].folder
        with (folder / "keys").open("rb") as file:
            keys = mmap(file.fileno(), 0, access=ACCESS_READ)
        return keys, np.memmap(folder / "places", np.int64, mode="r")

    def of(self, row: int) -> dict[str, str]:
        """Return the entries "key" and "tar" of a record."""
        place = int(np.searchsorted(self._first_P, row, side="right")) - 1
        keys, start_N = self._opened(place)
        start = int(start_N[row - self._first_P[place]])
        return parse_json(keys[start : keys.find(b"\n", start)])
