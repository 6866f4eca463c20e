"""Where the ledgers of a store lie, and what the store remembers of them, so that a shortened or older ledger is refused."""

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpvision.errors import CheckpointError, ConfigError, DataError, PrivacyError
from dpvision.privacy.ledger_format import LedgerContents, read_ledger

MARKS_FORMAT = "dpvision-ledger-marks-1"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class Mark:
    """The most that the store has seen of one run's ledger."""

    steps: int
    digest: str


@dataclass(frozen=True)
class StoreLedgers:
    """Paths of one store's ledgers: all runs on one data set meet in ``folder``, beside the store, not in it."""

    store_id: str
    folder: Path
    marks_path: Path

    @classmethod
    def of(cls, store_dir: Path) -> "StoreLedgers":
        """Paths for the store in ``store_dir``; symbolic links are followed, so that a store has one ledger folder.

        Raises:
            DataError: no readable store.json with a store_id.
        """
        root = Path(store_dir).resolve()
        values = read_json(root / "store.json")
        store_id = values.get("store_id") if isinstance(values, dict) else None
        if not isinstance(store_id, str) or not _NAME.fullmatch(store_id):
            raise DataError(f"store: {root / 'store.json'}: store_id={store_id!r}; expected the store's random id. Import the data again.")
        return cls(store_id, root.parent / "LEDGERS" / store_id, root / "ledger_marks.json")

    def ledger_path(self, run_id: str) -> Path:
        """File of a run's ledger.

        Raises:
            ConfigError: the run id would not be a plain file name.
        """
        if not _NAME.fullmatch(run_id):
            raise ConfigError(f"ledger: run_id={run_id!r}; expected letters, digits, '.', '_' or '-'. Choose another name.")
        return self.folder / f"{run_id}.jsonl"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the ledger folder's lock (waits for other processes): opening a ledger and moving a mark are exclusive."""
        fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def marks(self) -> dict[str, Mark]:
        """What the store remembers, by run id.

        Raises:
            PrivacyError: the file is damaged.
        """
        if not self.marks_path.exists():
            return {}
        values = read_json(self.marks_path)
        try:
            if values["format"] != MARKS_FORMAT:
                raise ValueError
            return {str(run_id): Mark(int(m["steps"]), str(m["digest"])) for run_id, m in values["runs"].items()}
        except (TypeError, KeyError, ValueError, AttributeError):
            raise PrivacyError(
                f"ledger: {self.marks_path}: not a file of ledger marks; expected what dpvision wrote. Restore it."
            ) from None

    def set_mark(self, run_id: str, mark: Mark) -> None:
        """Remember ``mark`` durably; call with the lock held."""
        runs = {name: vars(m) for name, m in self.marks().items()} | {run_id: vars(mark)}
        write_json(self.marks_path, {"format": MARKS_FORMAT, "runs": runs})

    def read_all(self) -> dict[str, LedgerContents]:
        """All ledgers of the store, each verified and no older than the store's mark of it.

        Raises:
            PrivacyError: a ledger was altered, shortened, replaced by an older copy, deleted, or belongs to another store.
        """
        marks = self.marks()  # before the ledgers: a run that goes on meanwhile only lengthens them
        ledgers = {path.stem: read_ledger(path) for path in sorted(self.folder.glob("*.jsonl"))}
        for run_id in sorted(marks.keys() | ledgers.keys()):
            self._check(run_id, ledgers.get(run_id), marks.get(run_id))
        return ledgers

    def _check(self, run_id: str, contents: LedgerContents | None, mark: Mark | None) -> None:
        where = f"ledger: {self.ledger_path(run_id)}"
        if contents is None:
            raise PrivacyError(f"{where}: missing; the store saw its run. Bring the LEDGERS folder along with the store, or restore it.")
        if contents.run_id != run_id or contents.store_id != self.store_id:
            raise PrivacyError(f"{where}: of run {contents.run_id} on store {contents.store_id}; expected this run and store. Restore it.")
        if mark is None:
            return
        if contents.steps < mark.steps:
            raise PrivacyError(
                f"{where}: steps={contents.steps}; expected at least {mark.steps}, which the store has seen. "
                "It was shortened or is an older copy: restore the newest one."
            )
        if mark.digest not in contents.heads and not contents.torn:
            raise PrivacyError(f"{where}: other lines than those the store has seen; expected the same ledger. Restore it.")


def read_json(path: Path) -> Any:
    """Parsed JSON file.

    Raises:
        DataError: missing or not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}; expected a JSON file that dpvision wrote. Restore it.") from None


def write_json(path: Path, values: Any) -> None:
    """Replace a JSON file by rename, durable when this returns: readers see the old file or the new one.

    Raises:
        CheckpointError: the disk is full or not writable.
    """
    write_file(path, json.dumps(values, indent=1, sort_keys=True, allow_nan=False).encode() + b"\n")


def write_file(path: Path, data: bytes) -> None:
    """Replace a file's bytes as ``write_json`` does.

    Raises:
        CheckpointError: the disk is full or not writable.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: {error.strerror}; expected room to write. Free space or permit writing, then resume.") from None


def sync_folder(folder: Path) -> None:
    """Make names just created in ``folder`` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folders(folder: Path) -> None:
    """Create ``folder`` and its missing parents durably."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        sync_folder(new.parent)
