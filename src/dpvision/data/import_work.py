"""The folder in which an import of several files works, kept when it is stopped.

``.NAME.importing`` beside the store NAME is closed to others and has, under ``confidential/``, the
store's key and the parts that are complete. The same command goes on from there: a part is read
again only if its file, or how it is read, is another. Directly before the store gets its name, the
folder gets one that ``new_folder`` clears: after a kill, at any moment, no second store has its
key.

Legend: P parts of a source.
"""

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

import numpy as np

from dpvision.code_digest import code_digest
from dpvision.data.import_labels import with_classes
from dpvision.data.import_part import Part, ReadRule, write_part
from dpvision.data.import_people import write_people
from dpvision.data.ordered import ordered_map
from dpvision.data.rows import keyed_hash
from dpvision.data.sample import SourcePart, StoredPart, check_unchanged
from dpvision.data.shard_writer import ShardWriter
from dpvision.data.store_writer import read_key
from dpvision.errors import DataError, remedy_for
from dpvision.files import CONFIDENTIAL, hide_folder, name_folder, partial_name, sync
from dpvision.strict_json import parse_json

T = TypeVar("T")

Kind = Literal["people", "read", "store", "look"]
"""What is done with a file: ``write_people`` or ``write_part``. A ``StoredPart`` writes itself."""
COMPARED = "compared-0"
"""Folder under ``confidential/`` of a curation's steps across records."""
_FORMAT = 4
_MADE = re.compile(
    r"settings\.json|key|((people|read|store|look)-[0-9a-f]{16}|compared-0)(\.[0-9]+)?"
)
"""Names under ``confidential/``."""
_CALLED = {"data merge": "pieces of the stores"}
"""What parts are called in messages."""
_READERS = ("numpy", "pillow", "pillow-heif", "pyarrow", "pydicom", "python-gdcm")
"""Packages that decide what is read."""
_WORTH_PROCESSES_BYTES = 1 << 26
"""A process takes half a second to start, in which one core reads about as much."""
_SEEN_WITHIN_S = 120.0
"""Machines that mount one disk see names that others gave a minute later, at the latest."""


@dataclass(frozen=True)
class _Job:
    """One file to read, in this process or another."""

    kind: Kind
    part: SourcePart | StoredPart
    folder: Path
    """Becomes the part's folder when it is complete."""
    stamp: list[Any]
    """What decides the part, beside the rule."""
    rule: ReadRule
    threads: int


Spread = Callable[[Callable[[_Job], Path], Iterable[_Job]], Generator[Path, None, None]]
"""Calls a function for each job, on any machine, and yields the results in the order of jobs."""


@contextlib.contextmanager
def work_folder(
    target: Path, settings: dict[str, Any], where: str = "data import"
) -> Iterator[Path]:
    """Yield the folder in which the store ``target`` is being imported, with what is complete.

    It is removed if the store gets its name in the block, which calls ``retire`` before, and if the
    block fails before any part is complete.

    Args:
        settings: what decides what parts hold, as JSON; parts of other settings are removed.
        where: the command, for messages.

    Raises:
        DataError: another import of this store is running, what has the folder's name was not made
            by an import of this user, or the disk is full; the message says what is kept.
    """
    work = target.with_name(f".{target.name}.importing")
    descriptor = _open(work, target, where)
    try:
        try:
            shutil.rmtree(partial_name(work), ignore_errors=True)  # of a process of the same number
            try:
                _keep_only(work, settings)
                yield work
            finally:
                _bring_back(work, target)
        except (DataError, OSError, BrokenProcessPool) as error:
            raise DataError(_said(error, work, where)) from error
        finally:
            if not complete(work):
                shutil.rmtree(work, ignore_errors=True)
            shutil.rmtree(partial_name(work), ignore_errors=True)
    finally:
        os.close(descriptor)


def retire(work: Path) -> None:
    """Rename the folder so that no import goes on from it, directly before the store is named."""
    hide_folder(work)


@contextlib.contextmanager
def scratch_folder(work: Path) -> Iterator[Path]:
    """Yield a folder in ``work``, which is removed afterwards."""
    folder = work / CONFIDENTIAL / f"read-{0:016x}.{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _bring_back(work: Path, target: Path) -> None:
    """Undo ``retire`` if the store got no name."""
    if not (work.exists() or target.exists()) and partial_name(work).exists():
        name_folder(partial_name(work), work)


def _open(work: Path, target: Path, where: str) -> int:
    """Make the folder or accept it, and return its descriptor, which has its lock."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        work.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        remedy = remedy_for(error, "Choose another folder.")
        raise DataError(
            f"{where}: {work}: {error.strerror}; expected a writable folder. {remedy}"
        ) from None
    try:
        descriptor = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        _refuse(where, work, "a link, or a folder that you cannot open")
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            _refuse(where, work, "a folder of another user")
        if mode := found.st_mode & 0o077:
            _refuse(where, work, f"a folder that others can open (mode {0o700 | mode:o})")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(found, work.lstat()):
                raise FileNotFoundError  # that import has just ended
        except OSError:
            raise DataError(
                f"{where}: {work}: another import is writing {target}; expected one at a "
                "time. Wait for it, or choose another folder."
            ) from None
        inner = work / CONFIDENTIAL
        for path in sorted([*work.iterdir(), *inner.glob("*")]):
            made = path == inner or (path.parent == inner and _MADE.fullmatch(path.name))
            if path.is_symlink() or not made:
                _refuse(where, work, f"it has {path.relative_to(work)}, which no import makes")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _refuse(where: str, work: Path, got: str) -> NoReturn:
    raise DataError(
        f"{where}: {work}: {got}; expected the folder of an import, which only you can open. "
        "Move it away, or choose another folder for the store."
    ) from None


def complete(work: Path) -> int:
    """Return the number of files of which images or persons are read."""
    folders = (path.parent.name for path in work.glob(f"{CONFIDENTIAL}/*-*/part.json"))
    return len({name.partition("-")[2] for name in folders if "." not in name})


def _said(error: BaseException, work: Path, where: str) -> str:
    if isinstance(error, DataError):
        said = str(error)
    elif isinstance(error, BrokenProcessPool):
        said = (
            f"{where}: a process that reads images was killed; expected it to end by itself. "
            "Often memory was short: give fewer --workers."
        )
    else:
        assert isinstance(error, OSError)
        said = (
            f"{where}: {work}: {error.strerror or error}; expected a writable disk with space. "
            f"{remedy_for(error, 'Free some, or choose another disk.')}"
        )
    if not (num := complete(work)):
        return said
    return (
        f"{said} What was read of {num:,} {_CALLED.get(where, 'files')} is kept in "
        f"{work}: the same command goes on from there, and reads changed files again. To give "
        "up, remove that folder."
    )


def _keep_only(work: Path, settings: dict[str, Any]) -> None:
    """Remove what an import with other settings left, and what is incomplete."""
    inner, wanted = work / CONFIDENTIAL, {"format": _FORMAT, **settings}
    file, key = inner / "settings.json", inner / "key"
    inner.mkdir(mode=0o700, exist_ok=True)
    try:
        same = parse_json(file.read_text()) == parse_json(json.dumps(wanted))
        same &= key.stat().st_size > 0  # else a kill came between
    except (OSError, ValueError):
        same = False
    if not same:
        file.unlink(missing_ok=True)  # first: a kill must not leave it with half of the parts
        key.unlink(missing_ok=True)
    for path in inner.iterdir():
        if path not in (file, key) and (not same or path.name.count(".")):
            shutil.rmtree(path, ignore_errors=True)  # a killed import's process may still write
    if not same:
        file.write_text(json.dumps(wanted))
        sync(file)


class Each(Sequence[T]):
    """Values that are made from their places when they are asked for, not kept."""

    def __init__(self, num: int, make: Callable[[int], T]) -> None:
        self._places, self._make = range(num), make

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, at: Any) -> Any:
        return self._make(self._places[at])


def read_parts(
    kind: Kind,
    parts: Sequence[SourcePart | StoredPart],
    work: Path,
    rule: ReadRule,
    workers: int,
    spread: Spread | None = None,
    progress: Callable[[int], None] | None = None,
) -> Sequence[Part]:
    """Return the parts of a source, in order; processes read those that are not complete.

    Args:
        parts: may be made when they are asked for; each is held only while it is read.
        workers: processes; where they are not worth starting, threads of this one.
        spread: reads several files in place of these processes.
        progress: called after each part with the number of images so far.

    Raises:
        DataError: a file is damaged or was changed meanwhile, or as ``write_part``.
    """
    inner, seen, size, shared = work / CONFIDENTIAL, set[str](), 0, True
    number_P = np.array([_number(part, rule.key) for part in parts], dtype=np.int64)
    todo_P = np.zeros(len(parts), dtype=bool)

    def job_of(place: int, threads: int) -> _Job:
        part = parts[place]
        folder = inner / _name(kind, number_P[place])
        return _Job(kind, part, folder, [*part.stamp, part.settings], rule, threads)

    for place in range(len(parts)):
        job = job_of(place, 1)
        if _complete(job):
            continue
        (job.folder / "part.json").unlink(missing_ok=True)  # first, as above
        shutil.rmtree(job.folder, ignore_errors=True)
        todo_P[place] = True
        size, shared = size + job.part.stamp[0], shared and job.part.shared
    several = shared and bool(todo_P.sum() > 1)
    processes = workers > 1 and several and size >= _WORTH_PROCESSES_BYTES
    begun = deque[_Job]()

    def jobs() -> Iterator[_Job]:
        elsewhere = several and (processes or spread is not None)
        for place in np.flatnonzero(todo_P).tolist():
            begun.append(job_of(place, 1 if elsewhere else workers))
            yield begun[-1]

    if spread is not None and several:  # the key stays on the disk, where no cluster logs it
        sent = replace(rule, key=b"")
        done = spread(do_elsewhere, (replace(job, rule=sent) for job in jobs()))
    elif processes:
        count = min(workers, int(todo_P.sum()))
        done = ordered_map(_do, jobs(), workers=count, ahead=2 * count, processes=True)
    else:
        done = (made for made in map(_do, jobs()))
    made = Each(len(parts), lambda place: Part(inner / _name(kind, number_P[place])))
    num = 0
    with contextlib.closing(done):
        for part, found, new in zip(parts, made, todo_P.tolist(), strict=True):
            if new:
                next(done)
                _wait_for(begun.popleft(), spread is not None)
            about = found.about
            if not isinstance(part, StoredPart):
                part.check(about["noted"], seen)
            if progress is not None:
                num += sum(about["runs"]) if kind == "store" else about["seen"]
                progress(num)
    return made


def _number(part: SourcePart | StoredPart, key: bytes) -> int:
    return keyed_hash(key, os.fsencode(part.name))


def _name(kind: Kind, number: int) -> str:
    return f"{kind}-{number:016x}"


def do_elsewhere(job: _Job) -> Path:
    """Do a job, whose rule has no key, in a process that may be on another machine.

    Raises:
        DataError: as the import; the machine does not have the folder or the same software.
    """
    work, key, settings = job.folder.parents[1], b"", dict[str, Any]()
    with contextlib.suppress(DataError, OSError, ValueError):
        settings = parse_json((job.folder.parent / "settings.json").read_text())
        key = read_key(work)
    where = f"data curate: {work}: machine {socket.gethostname()} of the cluster"
    if job.folder.name != _name(job.kind, _number(job.part, key)):
        raise DataError(
            f"{where} does not find the folder of this curation; expected a disk that all machines "
            "mount at the same path, and the same user. Put the store on one, or use --engine "
            "local."
        )
    wanted = {**settings["software"], **settings.get("curation_software", {})}
    found = {"code": _code_once(), **versions(name for name in wanted if name != "code")}
    if odd := [name for name in wanted if wanted[name] != found[name]]:
        raise DataError(
            f"{where} has other versions ("
            + ", ".join(f"{name} {found[name]}" for name in odd)
            + "); expected those of the machine where the command runs ("
            + ", ".join(f"{name} {wanted[name]}" for name in odd)
            + "), because they decide what is read. Install the same, then run the same command."
        )
    return _do(replace(job, rule=replace(job.rule, key=key)))


def _wait_for(job: _Job, elsewhere: bool) -> None:
    """Return as soon as this machine sees a part that another one may have written."""
    end = time.monotonic() + _SEEN_WITHIN_S
    while not _complete(job):
        assert elsewhere, "just written"
        if time.monotonic() > end:
            raise DataError(
                f"data curate: {job.folder}: not here, where another machine wrote it; expected "
                "one disk that all machines mount at the same path. Put the store on one, or use "
                "--engine local."
            )
        os.listdir(job.folder.parent)  # asks the disk's server for names anew
        time.sleep(0.1)


def _do(job: _Job) -> Path:
    """Read a file, write its part, and return its folder."""
    made = job.folder.with_name(f"{job.folder.name}.{secrets.randbits(48)}")  # of no other machine
    made.mkdir()
    noted: dict[str, Any] = {}
    tables: dict[str, Any]
    if isinstance(job.part, StoredPart):
        about, tables = job.part.write(made, job.rule.key)
    elif job.kind == "people":
        counts = replace(job.rule, require_captions=False).counts
        listed = with_classes(job.part.samples(noted, made), job.rule.imported_labels(), counts)
        about, persons = write_people(listed, made, job.rule.people, job.rule.key)
        tables = {"persons": persons}
    else:
        with contextlib.ExitStack() as files:
            shards = ShardWriter(made, files, whole=True)
            samples = job.part.samples(noted, made)
            part = write_part(samples, made, job.rule, threads=job.threads, shards=shards)
            images = [name for name, _ in shards.finish()]
            about, tables = part.about | {"images": images}, part.tables()
    check_unchanged([job.part])
    Part.write(made, about | {"stamp": job.stamp, "noted": noted}, tables)
    for folder, _, names in os.walk(made):
        for name in names:
            if not Path(folder, name).stat().st_size:
                Path(folder, name).unlink()
    try:
        name_folder(made, job.folder)
    except OSError:
        if not _complete(job):
            raise
        shutil.rmtree(made)  # a process of a killed import was as fast
    return job.folder


def _complete(job: _Job) -> bool:
    try:
        about = Part(job.folder).about
    except (OSError, ValueError):
        return False
    return isinstance(about, dict) and about.get("stamp") == job.stamp


def software() -> dict[str, str | None]:
    """Versions of all code that reads; None if it is not installed."""
    return {"code": _code(), **versions(_READERS)}


def versions(names: Iterable[str]) -> dict[str, str | None]:
    """Versions of packages; None of one that is not installed."""
    return {name: _version(name) for name in names}


def _code() -> str:
    return code_digest(Path(__file__).parents[1])


@cache
def _code_once() -> str:
    return _code()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def settings_of(rule: ReadRule) -> dict[str, Any]:
    """Return what ``work_folder`` compares, as JSON: the software, and the rule without its key."""
    people = {"unit_from": rule.people.unit_from, "unmatched": rule.people.unmatched}
    labels = asdict(rule.labels)
    classes = labels.pop("classes")
    ordered = list(classes.items()) if isinstance(classes, dict) else classes
    return {
        "software": software(),
        "public": rule.public,
        "people": people,
        "labels": labels | {"classes": ordered},
        "label_names": rule.label_names,
        "require_captions": rule.require_captions,
        "window": rule.window,
        "copied": rule.copied,
    }
