"""Marks: what a store and its ledger folder each remember of every run, so that neither can be lost, shortened or put back unnoticed.

The same facts lie in two files that are lost by different accidents: ``ledger_marks.json`` in the folder of each store of a family (a
store and its halves), and ``LEDGERS/<store_id>/marks.json``, which the family shares. docs/privacy.md has the rules.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dpvision.errors import DataError, PrivacyError
from dpvision.files import write_json

FORMAT = "dpvision-ledger-marks-2"


@dataclass(frozen=True)
class Mark:
    """The most that one file of marks has seen of one run's ledger."""

    steps: int
    """Charged at the time."""
    digest: str
    """Of the last line at the time."""
    header: str
    """Digest of the header: the run and the plan that it is bound to."""


@dataclass(frozen=True)
class Cap:
    """The owner's limit on the total of all runs on a store."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class Marks:
    """One file of marks."""

    store_id: str
    runs: dict[str, Mark] = field(default_factory=dict)
    cap: Cap | None = None
    places: tuple[str, ...] = ()
    """In a store's own file: names of the folders that the store lay in (``place``). Elsewhere it is a copy, or it was moved."""
    moves: int = 0
    """How often the owner declared that the store was moved."""
    members: tuple[str, ...] = ()
    """In the shared file: names of the store folders that have a file of marks."""

    def with_run(self, run_id: str, mark: Mark) -> "Marks":
        """A copy with the newest mark of a run."""
        return replace(self, runs=self.runs | {run_id: mark})


def read_marks(path: Path) -> Marks | None:
    """The marks in a file; None where there is no such file.

    Raises:
        PrivacyError: the file is damaged.
    """
    if not path.exists():
        return None
    values = read_json(path)
    try:
        if values["format"] != FORMAT:
            raise ValueError
        return Marks(
            store_id=str(values["store_id"]),
            runs={str(run): Mark(int(m["steps"]), str(m["digest"]), str(m["header"])) for run, m in values["runs"].items()},
            cap=None if values["cap"] is None else Cap(float(values["cap"]["epsilon"]), float(values["cap"]["delta"])),
            places=tuple(map(str, values["places"])),
            moves=int(values["moves"]),
            members=tuple(map(str, values["members"])),
        )
    except (TypeError, KeyError, ValueError, AttributeError):
        raise PrivacyError(f"ledger: {path}: not a file of ledger marks; expected what dpvision wrote. Restore it.") from None


def write_marks(path: Path, marks: Marks) -> None:
    """Replace a file of marks, durably.

    Raises:
        CheckpointError: the disk is full or not writable.
    """
    write_json(path, {"format": FORMAT, **asdict(marks)}, sort_keys=True)


def place(folder: Path, store_id: str) -> set[str]:
    """Names of a folder: its path, and its number on its disk. A folder that was moved keeps the second, one that is mounted elsewhere the
    first or the second; a copy has neither. The path is hashed, so that a store that is handed on does not carry it."""
    about = folder.stat()
    path = hashlib.sha256(f"{store_id}:{folder}".encode()).hexdigest()[:32]
    return {f"path:{path}", f"inode:{about.st_dev}:{about.st_ino}"}


def read_json(path: Path) -> Any:
    """Parsed JSON file.

    Raises:
        DataError: missing or not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}; expected a JSON file that dpvision wrote. Restore it.") from None
