"""Marks: the state of every run's ledger, recorded in the store and in the ledger folder, to detect
loss, truncation or rollback of either.

The same data are in files that are lost by different accidents: ``ledger_marks.json`` in the folder
of each store of a family (a store and its halves), and ``LEDGERS/<store_id>/marks.json``, which the
family shares. Every charge is written to each of them, so that a lost one can be restored from any
other. docs/privacy.md has the rules.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dpvision.errors import DataError, PrivacyError, remedy_for
from dpvision.files import write_json
from dpvision.strict_json import parse_json

FORMAT = "dpvision-ledger-marks-2"


@dataclass(frozen=True)
class Mark:
    """The latest recorded state of one run's ledger."""

    steps: int
    """Steps charged in that state."""
    digest: str
    """Digest of the last line in that state."""
    header: str
    """Digest of the header, which binds the run, its plan and its lineage."""


@dataclass(frozen=True)
class Cap:
    """The owner's limit on the total of all runs on a store."""

    epsilon: float
    delta: float
    before_first_run: bool = False
    """Whether no step had been charged when it was set; False in files written before this was
    recorded.
    """


@dataclass(frozen=True)
class Marks:
    """Content of one file of marks."""

    store_id: str
    runs: dict[str, Mark] = field(default_factory=dict)
    cap: Cap | None = None
    places: tuple[str, ...] = ()
    """Identifiers (``place``) of the folders that held the store. In another folder it is a copy,
    or was moved. Read from the own file; the shared file keeps them for a restored one.
    """
    moves: int = 0
    """Number of times the owner declared the store moved."""
    members: tuple[str, ...] = ()
    """In the shared file: names of the store folders that have a file of marks."""
    every_charge: bool = False
    """Whether every charge of every run was written to this file. False in files of older versions,
    which wrote all charges to the shared file, and to that of the store that the run was on.
    """

    def with_runs(self, runs: Mapping[str, Mark]) -> "Marks":
        """A copy with the newest marks of some runs."""
        return replace(self, runs={**self.runs, **runs})


def read_marks(path: Path) -> Marks | None:
    """Read a file of marks; None if there is no such file.

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
            runs={
                str(run): Mark(int(m["steps"]), str(m["digest"]), str(m["header"]))
                for run, m in values["runs"].items()
            },
            cap=None if values["cap"] is None else _cap(values["cap"]),
            places=tuple(map(str, values["places"])),
            moves=int(values["moves"]),
            members=tuple(map(str, values["members"])),
            every_charge=values.get("every_charge") is True,
        )
    except (TypeError, KeyError, ValueError, AttributeError):
        raise PrivacyError(
            f"ledger: {path}: not a file of ledger marks; expected what dpvision wrote. Restore it."
        ) from None


def _cap(values: Any) -> Cap:
    return Cap(
        float(values["epsilon"]), float(values["delta"]), values.get("before_first_run") is True
    )


def write_marks(path: Path, marks: Marks) -> None:
    """Replace a file of marks, durably.

    Raises:
        CheckpointError: the disk is full or not writable.
    """
    write_json(path, {"format": FORMAT, **asdict(marks)}, sort_keys=True)


def place(folder: Path, store_id: str) -> set[str]:
    """Return two identifiers of a folder: its path, and its device and inode numbers. A folder
    moved within its disk keeps the second, one mounted elsewhere the first or the second; a copy
    has neither. The path is hashed, so that a store does not reveal it.
    """
    about = folder.stat()
    path = hashlib.sha256(f"{store_id}:{folder}".encode()).hexdigest()[:32]
    return {f"path:{path}", f"inode:{about.st_dev}:{about.st_ino}"}


def read_json(path: Path) -> Any:
    """Parse a JSON file.

    Raises:
        DataError: missing or not JSON.
    """
    try:
        return parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path}: {error}; expected a JSON file that dpvision wrote. "
            f"{remedy_for(error, 'Restore it.')}"
        ) from None
