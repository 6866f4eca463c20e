"""Make a store from a source: check and hash images, merge identical ones, write the index.

A store is made whole or not at all. A source of several tar or parquet files is read by processes,
each file by itself, and what was read survives a crash (import_work.py); any other source is one
stream, which threads decode.

Image bytes are kept as they are; orientation and colour modes are handled at each read (decode.py).
"""

import contextlib
import json
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from dpvision.data.caption_files import CaptionFile
from dpvision.data.captions import CaptionRule
from dpvision.data.dicom_source import DicomRule
from dpvision.data.folders import Missed
from dpvision.data.import_labels import LabelRule, with_classes
from dpvision.data.import_merge import write_store
from dpvision.data.import_part import Part, ReadRule, write_part
from dpvision.data.import_people import write_people
from dpvision.data.import_work import (
    Spread,
    read_parts,
    retire,
    scratch_folder,
    settings_of,
    work_folder,
)
from dpvision.data.open import open_store
from dpvision.data.ordered import checked_workers
from dpvision.data.person_check import check_persons
from dpvision.data.person_names import PersonRule
from dpvision.data.remote import check_local, is_url, local_folder
from dpvision.data.rgb import Window, check_window
from dpvision.data.sample import Sample, Source, SourcePart, check_unchanged
from dpvision.data.shard_writer import ShardWriter
from dpvision.data.sources import FolderPart, open_source
from dpvision.data.store import Store
from dpvision.data.store_writer import (
    copy_key,
    durable_key,
    new_key,
    new_store_folder,
    require_new,
)
from dpvision.errors import DataError

_Progress = Callable[[int], None] | None


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
    dicom: DicomRule | None = DicomRule(),
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
    passes: "Passes | None" = None,
) -> Store:
    """Import an image folder, parquet files, WebDataset tars or DICOM files into a new store.

    Tars are indexed in place, of DICOM files the pixels are kept, the rest is copied, as are tars
    at a URL.

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
            ``people`` names another. If None, such files are refused.
        workers: processes that read the files of a source of several, else threads that decode; if
            None, the cores of this process. It changes no byte of the store.
        progress: called from time to time with the number of images checked so far.
        passes: what ``curate`` does before and after; then a folder of images is read as one file.

    Raises:
        ConfigError: ``workers`` is below 1.
        DataError: the source is empty, unknown or damaged, a field is missing, ``store_dir``
            exists, or the disk is full. Nothing half-made is left behind.
    """
    check_local(store_dir, "data import")
    target = Path(store_dir).resolve()
    origin = local_folder(str(source)) if is_url(source) else Path(source).resolve()
    workers = checked_workers(workers)
    require_new(target)
    if window is not None:
        check_window(window, "data import")
    if origin is not None and origin.is_dir() and target.is_relative_to(origin):
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
    if passes is not None and not found.parts:
        folder = FolderPart.of(Path(source), opened)
        found = found._replace(parts=(folder,), counts={})  # counted where the folder is read
    making = _Making.of(found, public, people, labels, captions, licence, window)
    if found.remote and making.captions is not None:
        raise DataError(
            f"data import: captions={captions.captions} for files at {source}; expected captions "
            "in the files (KEY.txt, KEY.json, or a column). Put them there, or copy the files to a "
            "disk."
        )
    if passes is not None or ((len(found.parts) > 1 or found.remote) and making.captions is None):
        return _import_parts(making, target, workers, progress, passes)
    return _import_stream(making, target, workers, progress, again=opened)


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
    workers: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Store:
    """Import a source or any iterable of samples into a new store; see ``import_source``.

    Args:
        source: e.g. of ``datasets.dataset_source``, or ``Source(samples, label_names)``.
        licence: if None, the source's.
    """
    check_local(store_dir, "data import")
    source = source if isinstance(source, Source) else Source(iter(source))
    making = _Making.of(source, public, people, labels.read(), captions, licence, window)
    workers = checked_workers(workers)
    return _import_stream(making, Path(store_dir).resolve(), workers, progress)


@dataclass(frozen=True)
class _Making:
    """A store to be made."""

    source: Source
    rule: ReadRule
    """Without a key yet."""
    captions: CaptionFile | None
    about: dict[str, Any]
    """Entries of store.json."""

    @classmethod
    def of(
        cls,
        source: Source,
        public: bool,
        people: PersonRule,
        labels: LabelRule,
        captions: CaptionRule,
        licence: str | None,
        window: Window | None,
    ) -> "_Making":
        """Read the file of captions, and complete the rules by what the source declares."""
        people = replace(people, unit_from=people.unit_from or source.unit_from)
        people.check()
        about = {
            "visibility": "public" if public else "private",
            "licence": licence or source.licence,
            "metric": source.metric,
        }
        rule = ReadRule(
            b"", public, people, labels, source.label_names, captions.require_captions, window
        )
        rule = replace(rule, copied=source.remote)
        rule.imported_labels()  # refuses a separator before anything is made
        file = None if captions.captions is None else CaptionFile(captions.captions)
        return cls(source, rule, file, about)

    def write(
        self,
        parts: Sequence[Part],
        folder: Path,
        copied: Sequence[tuple[str, int]] | None = None,
    ) -> None:
        """Write the store of the parts; arguments as for ``import_merge.write_store``."""
        more: dict[str, Any] = dict(self.source.counts)
        before, after = _lines(self.source.missed._replace(files=frozenset())), ""
        if self.captions is not None:
            more |= self.captions.summary()
            after = _lines(self.captions.missed())
        more |= {} if self.rule.window is None else {"window": list(self.rule.window)}
        write_store(
            parts,
            folder,
            people=self.rule.people,
            labels=self.rule.imported_labels(),
            about=self.about | {"store_id": secrets.token_hex(16)},
            more=more,
            unmatched=(before, after),
            copied=copied,
        )

    def check(self, folder: Path) -> None:
        """Raise DataError if a file of the source was changed, or the store cannot be opened."""
        check_unchanged(self.source.parts)
        open_store(folder)


def _lines(missed: Missed) -> str:
    """Names of a join that have no counterpart, as lines of JSON."""
    return "".join(
        json.dumps({kind: name, "table": missed.table}) + "\n"
        for kind, names in (("row_without_file", missed.rows), ("file_without_row", missed.files))
        for name in names
    )


class Passes(Protocol):
    """What comes before and after the files of a source are read: a curation's passes."""

    where: str
    """The command, for messages."""
    spread: Spread | None
    """Reads the files of a source of several, if not processes of this machine."""

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the passes, as JSON."""

    @property
    def about(self) -> dict[str, Any]:
        """Entries of store.json."""

    def before(
        self, parts: Sequence[SourcePart], work: Path, rule: ReadRule
    ) -> Sequence[SourcePart]:
        """Return what is read in place of the files."""

    def after(self, parts: Sequence[Part], folder: Path) -> None:
        """Write what belongs to the store beside its own files."""


def _import_parts(
    making: _Making,
    target: Path,
    workers: int,
    progress: _Progress,
    passes: Passes | None = None,
) -> Store:
    """Import each file by itself; what is complete is kept if the import fails."""
    source, rule = making.source, making.rule
    where, settings, spread = "data import", settings_of(rule), None
    if passes is not None:
        spread = passes.spread
        where, settings = passes.where, settings | passes.settings
        making = replace(making, about=making.about | passes.about)
    with work_folder(target, settings, where) as work:
        rule = replace(rule, key=durable_key(work))
        files = source.parts if passes is None else passes.before(source.parts, work, rule)
        if rule.people.checked_first:
            check_persons(
                read_parts("people", files, work, rule, workers, spread),
                rule.people,
                rule.key,
                lambda some: _samples_of([files[i] for i in some], work),
            )
        parts = read_parts("read", files, work, rule, workers, spread, progress)
        check_unchanged(source.parts)

        def last(folder: Path) -> None:
            making.check(folder)
            retire(work)

        with new_store_folder(target, private=not rule.public, last=last) as folder:
            copy_key(work, folder)
            making.write(parts, folder)
            if passes is not None:
                passes.after(parts, folder)
    return open_store(target)


def _samples_of(parts: Iterable[SourcePart], work: Path) -> Iterator[Sample]:
    """Yield the samples of some parts again."""
    with scratch_folder(work) as scratch:
        for part in parts:
            yield from part.samples({}, scratch)


def _import_stream(
    making: _Making,
    target: Path,
    workers: int,
    progress: _Progress,
    again: Callable[[], Source] | None = None,
) -> Store:
    """Import a source that is one stream, whole or not at all.

    Args:
        again: opens the source anew; if None, persons are checked last only.
    """
    source, people = making.source, making.rule.people
    with (
        new_store_folder(target, private=not making.rule.public, last=making.check) as folder,
        contextlib.ExitStack() as files,
    ):
        rule, work = replace(making.rule, key=new_key(folder)), folder / "confidential" / "part"
        work.mkdir()
        if again is not None and people.checked_first:
            counts = replace(rule, require_captions=False).counts
            listed = with_classes(again().samples, rule.imported_labels(), counts)
            about, persons = write_people(listed, work, people, rule.key)
            facts = Part.write(work, about, {"persons": persons})
            check_persons([facts], people, rule.key, lambda some: again().samples)
        samples, shards = source.samples, ShardWriter(folder, files)
        part = write_part(
            samples if making.captions is None else making.captions.attach(samples),
            work,
            rule,
            threads=workers,
            shards=shards,
            without_row=source.missed.files,
            progress=progress,
        )
        making.write([part], folder, shards.finish())
        shutil.rmtree(work)
    return open_store(target)
