"""Writes that survive a power cut: a name holds the whole old file or the whole new one, and what
is renamed is on the disk before.

A file or a folder is made under a temporary name beside its own (``.NAME.partial-PID``), synced,
renamed, and the folder that holds the name is synced. Functions raise the system's OSError where
they say nothing else: callers know what the reader can do about it.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from dpvision.errors import CheckpointError, ConfigError, DataError, remedy_for

CONFIDENTIAL = "confidential"
"""Name of the folders that files on private records must lie in."""
_TAIL_BYTES = 1 << 16
"""More than a line of a log has."""
_HOLDERS = 8
"""More stores than a process opens at once: pairs of train and test, public and private."""
_OTHER_FILES = 1024
"""Room for files and sockets of others in this process."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name to write a file under: it takes the place of ``path`` when the block ends
    well, and is removed when it fails. A missing folder named ``confidential`` is made, closed to
    others.
    """
    partial = partial_name(path)
    if path.parent.name == CONFIDENTIAL and path.parent.parent.is_dir():
        path.parent.mkdir(mode=0o700, exist_ok=True)
    try:
        yield partial
        sync(partial)
        partial.replace(path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(
    folder: Path,
    *,
    mode: int = 0o777,
    replace: bool = False,
    last: Callable[[Path], None] | None = None,
) -> Iterator[Path]:
    """A temporary folder to fill: with all its files it becomes ``folder`` when the block ends
    well, and is removed when it fails. The temporary folders beside it of processes that were
    killed are removed first.

    Args:
        replace: remove a folder of that name first; otherwise a folder with files in it raises
            OSError.
        last: called with the temporary folder when it is on the disk, directly before it gets its
            name, which it does not get if this raises.
    """
    partial = partial_name(folder)
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, partial, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.parent):  # or another process removes the new folder before its lock
            for left in folder.parent.glob(".*.partial-*"):
                if left.is_dir() and not left.is_symlink() and _abandoned(left):
                    shutil.rmtree(left, ignore_errors=True)
            partial.mkdir(mode=mode)
            stack.enter_context(locked(partial))
        yield partial
        _sync_all(partial)
        if last is not None:
            last(partial)
        old = partial.with_name(f"{partial.name}-old")
        if not (replace and folder.exists() and _exchange(partial, folder)):
            if replace and folder.exists():
                folder.rename(old)
            partial.rename(folder)
        sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)


def name_folder(made: Path, folder: Path) -> None:
    """Give a folder that is complete its name, its files synced before. Raises OSError where there
    is a folder with files.
    """
    _sync_all(made)
    made.rename(folder)


def _sync_all(folder: Path) -> None:
    for below, _, names in os.walk(folder):
        for name in names:
            sync(Path(below, name))
        sync(Path(below))


def _exchange(one: Path, two: Path) -> bool:
    """Exchange two names at once, and return whether the system can: between two renames a kill
    would leave neither folder under its name.
    """
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):  # not Linux
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return call(here, os.fsencode(one), here, os.fsencode(two), exchange) == 0


def remove_folder(folder: Path) -> None:
    """Remove a folder: its name is gone before any of its files. What a kill leaves goes with the
    next ``new_folder`` beside it.
    """
    hide_folder(folder)
    shutil.rmtree(partial_name(folder))


def hide_folder(folder: Path) -> None:
    """Give a folder its ``partial_name``; ``name_folder`` gives it back."""
    folder.rename(partial_name(folder))


def _abandoned(folder: Path) -> bool:
    """Return whether the process that filled a temporary folder has ended."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # another user's
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes) -> None:
    """Replace a file's bytes.

    Raises:
        CheckpointError: the disk is full or not writable.
    """
    with disk_refusals("write", path, "Free some, then repeat."), replacing(path) as partial:
        partial.write_bytes(data)


@contextlib.contextmanager
def disk_refusals(where: str, path: Path, remedy: str) -> Iterator[None]:
    """Turn an OSError of the block, which writes ``path``, into a CheckpointError.

    Args:
        remedy: what to do if permissions are not the reason.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{where}: {path} ({error.strerror or error}); expected a writable disk with space. "
            f"{remedy_for(error, remedy)}"
        ) from error


def write_json(path: Path, value: Any, *, sort_keys: bool = False) -> None:
    """Replace a JSON file; raises as ``write_file``."""
    write_file(
        path, json.dumps(value, indent=1, sort_keys=sort_keys, allow_nan=False).encode() + b"\n"
    )


def create(path: Path, data: bytes) -> None:
    """Write a file that is not there yet. Raises FileExistsError where it is; after any other error
    it is gone again.
    """
    with path.open("xb") as file:
        try:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            sync(path.parent)
        except OSError:
            path.unlink(missing_ok=True)
            raise


def append(descriptor: int, data: bytes) -> None:
    """Write all of ``data`` at a descriptor's position, and wait until it is on the disk."""
    while data:
        data = data[os.write(descriptor, data) :]
    os.fsync(descriptor)


def append_lines(path: Path) -> TextIO:
    """Open a file of lines to add to it. A last line that a crash tore is removed."""
    with path.open("a+b") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - _TAIL_BYTES))
        tail = file.read()
        file.truncate(end - len(tail) + tail.rfind(b"\n") + 1)
    return path.open("a")


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock; waits for the process that has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def make_folders(folder: Path) -> None:
    """Create ``folder`` and its missing parents durably."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        sync(new.parent)


def partial_name(path: Path) -> Path:
    """Return the name that ``new_folder`` clears once this process has ended."""
    return path.with_name(f".{path.name}.partial-{os.getpid()}")


def files_to_hold(wanted: int) -> int:
    """Return how many of ``wanted`` files one of several holders may hold open: at most an eighth
    of what the system allows this process, and at least one. The process's own limit is raised for
    it, up to the system's.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = _HOLDERS * wanted + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < enough:
        most = enough if hard == resource.RLIM_INFINITY else min(enough, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft // _HOLDERS))


def check_out(path: Path, where: str, *suffixes: str, name: str = "out") -> None:
    """Raise ConfigError for a file to write that is of another kind, or in no folder.

    Args:
        name: the option that gives it.
    """
    if path.suffix not in suffixes or path.is_dir():
        raise ConfigError(
            f"{where}: {name}={str(path)!r}; expected a file that ends in {' or '.join(suffixes)}. "
            "Rename it."
        )
    folder = path.absolute().parent
    # ``replacing`` makes a folder named confidential
    if not (folder.parent if folder.name == CONFIDENTIAL else folder).is_dir():
        raise ConfigError(
            f"{where}: {name}={str(path)!r}; expected an existing folder. Run mkdir -p "
            f"{path.parent}."
        )


@contextlib.contextmanager
def writing_text(path: Path, where: str, name: str = "out") -> Iterator[TextIO]:
    """Yield a text file that takes the place of ``path`` when the block ends without an error.

    Bytes of a file name that are no UTF-8 are written as escapes: \\udce9 is the byte 0xe9.

    Args:
        name: the option that gives the file.

    Raises:
        DataError: the file cannot be written.
    """
    try:
        with (
            replacing(path) as partial,
            partial.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file,
        ):
            yield file
    except OSError as error:
        raise DataError(
            f"{where}: {path} ({error.strerror or error}); expected a writable path with free "
            f"space. Choose another --{name}."
        ) from None
