"""The folder in which an import of several files works, kept when it is stopped.

``.NAME.importing`` beside the store NAME is closed to others and has, under ``confidential/``, the
store's key and the parts that are complete. The same command goes on from there: a part is read
again only if its file, or how it is read, is another. Directly before the store gets its name, the
folder gets one that ``new_folder`` clears: after a kill, at any moment, no second store has its
key.
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
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, NoReturn

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


Spread = Callable[[Callable[[_Job], Path], Sequence[_Job]], Generator[Path, None, None]]
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


def read_parts(
    kind: Kind,
    parts: Sequence[SourcePart | StoredPart],
    work: Path,
    rule: ReadRule,
    workers: int,
    spread: Spread | None = None,
) -> Iterator[Part]:
    """Yield each part of a source, in order; processes read those that are not complete.

    Args:
        workers: processes; where they are not worth starting, threads of this one.
        spread: reads several files in place of these processes.

    Raises:
        DataError: a file is damaged or was changed meanwhile, or as ``write_part``.
    """
    seen: set[str] = set()
    jobs, todo = [], []
    for part in parts:
        stamp = [*part.stamp, part.settings]
        folder = work / CONFIDENTIAL / _name(kind, part, rule.key)
        job = _Job(kind, part, folder, stamp, rule, threads=workers)
        jobs.append(job)
        if _complete(job) is None:
            (job.folder / "part.json").unlink(missing_ok=True)  # first, as above
            shutil.rmtree(job.folder, ignore_errors=True)
            todo.append(job)
    several = len(todo) > 1 and all(job.part.shared for job in todo)
    processes = workers > 1 and several
    if spread is not None and several:  # the key stays on the disk, where no cluster logs it
        sent = replace(rule, key=b"")
        done = spread(do_elsewhere, [replace(job, threads=1, rule=sent) for job in todo])
    elif processes and sum(job.part.stamp[0] for job in todo) >= _WORTH_PROCESSES_BYTES:
        todo = [replace(job, threads=1) for job in todo]
        count = min(workers, len(todo))
        done = ordered_map(_do, todo, workers=count, ahead=2 * count, processes=True)
    else:
        done = (made for made in map(_do, todo))
    waiting = {job.folder for job in todo}
    with contextlib.closing(done):
        for job in jobs:
            if job.folder in waiting:
                next(done)
            found = _complete(job) or (None if spread is None else _seen_later(job))
            assert found is not None, "just written"
            if not isinstance(job.part, StoredPart):
                job.part.check(found.about["noted"], seen)
            yield found


def _name(kind: Kind, part: SourcePart | StoredPart, key: bytes) -> str:
    return f"{kind}-{keyed_hash(key, os.fsencode(part.name)):016x}"


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
    if job.folder.name != _name(job.kind, job.part, key):
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


def _seen_later(job: _Job) -> Part | None:
    """Return a part that another machine wrote, as soon as this one sees it."""
    end = time.monotonic() + _SEEN_WITHIN_S
    while (found := _complete(job)) is None:
        if time.monotonic() > end:
            raise DataError(
                f"data curate: {job.folder}: not here, where another machine wrote it; expected "
                "one disk that all machines mount at the same path. Put the store on one, or use "
                "--engine local."
            )
        os.listdir(job.folder.parent)  # asks the disk's server for names anew
        time.sleep(0.1)
    return found


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
        if _complete(job) is None:
            raise
        shutil.rmtree(made)  # a process of a killed import was as fast
    return job.folder


def _complete(job: _Job) -> Part | None:
    try:
        about = parse_json((job.folder / "part.json").read_text(), nan=True)
    except (OSError, ValueError):
        return None
    whole = isinstance(about, dict) and about.get("stamp") == job.stamp
    # the job's stamp, which shares its settings with all others: kilobytes for each file otherwise
    return Part(job.folder, about | {"stamp": job.stamp}) if whole else None


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
