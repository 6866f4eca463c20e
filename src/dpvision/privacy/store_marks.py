"""Locate the ledgers of a store, and verify them against the marks of its family."""

import os
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from dpvision.errors import ConfigError, DataError, PrivacyError
from dpvision.files import locked, write_json
from dpvision.privacy.ledger_format import LedgerContents, read_ledger
from dpvision.privacy.marks import Cap, Mark, Marks, place, read_json, read_marks, write_marks

OWN_MARKS = "ledger_marks.json"
HAS_MARKS = "ledger_marks"
"""Field of a private store's store.json, true: the store has marks, so their absence is a loss."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class StoreLedgers:
    """Paths of one store's ledgers: those of all runs on one data set are in ``folder``, beside the
    store, not in it.

    A store and its halves (``data split``) have one id and one parent folder: they are a family,
    and share ledgers, marks and cap.
    """

    store_id: str
    root: Path
    """Folder of the store, symbolic links followed."""
    private: bool
    has_marks: bool = False
    """Whether store.json says that the store has marks. Older stores say so from their next charge
    on.
    """

    @classmethod
    def of(cls, store_dir: Path) -> "StoreLedgers":
        """Paths for the store in ``store_dir``; symbolic links are followed, so that a store has
        one ledger folder.

        Raises:
            DataError: no readable store.json with a store_id.
        """
        root = Path(store_dir).resolve()
        values = read_json(root / "store.json")
        store_id = values.get("store_id") if isinstance(values, dict) else None
        if not isinstance(store_id, str) or not _NAME.fullmatch(store_id):
            raise DataError(
                f"store: {root / 'store.json'}: store_id={store_id!r}; expected the store's "
                "random id. Import the data again."
            )
        return cls(
            store_id, root, values.get("visibility") != "public", values.get(HAS_MARKS) is True
        )

    @property
    def folder(self) -> Path:
        return self.root.parent / "LEDGERS" / self.store_id

    @property
    def own_path(self) -> Path:
        """Path: the marks inside the store, which move with it."""
        return self.root / OWN_MARKS

    @property
    def shared_path(self) -> Path:
        """Path: the marks in the ledger folder."""
        return self.folder / "marks.json"

    def ledger_path(self, run_id: str) -> Path:
        """File of a run's ledger.

        Raises:
            ConfigError: the run id would not be a plain file name.
        """
        if not _NAME.fullmatch(run_id):
            raise ConfigError(
                f"ledger: run_id={run_id!r}; expected letters, digits, '.', '_' or '-'. Choose "
                "another name."
            )
        return self.folder / f"{run_id}.jsonl"

    def name_path(self, run_id: str) -> Path:
        """File with the name of a run's folder; only for the owner to read."""
        return self.ledger_path(run_id).with_suffix(".name")

    def run_name(self, run_id: str) -> str | None:
        """Return the name of a run's folder, or None: runs of older versions have none."""
        try:
            return self.name_path(run_id).read_text()
        except (OSError, ValueError):
            return None

    def locked(self) -> AbstractContextManager[None]:
        """Hold the ledger folder's lock (waits for other processes): opening a ledger and updating
        a mark are exclusive.
        """
        return locked(self.folder)

    def family_marks(self) -> dict[Path, Marks]:
        """Read every file of marks of the family: the shared one, this store's own, and those in
        the neighbouring store folders.

        Raises:
            PrivacyError: a file is damaged, or this store's files are of another store.
        """
        found = {}
        for path in (self.shared_path, self.own_path):
            marks = read_marks(path)
            if marks is not None and marks.store_id != self.store_id:
                raise PrivacyError(
                    f"ledger: {path}: marks of store {marks.store_id}; expected {self.store_id}, "
                    "as store.json says. The id was replaced, or files of two stores were "
                    "mixed: restore store.json."
                )
            if marks is not None:
                found[path] = marks
        with os.scandir(self.root.parent) as entries:
            beside = [
                Path(entry.path) / OWN_MARKS for entry in entries if entry.name != self.root.name
            ]
        for path in sorted(beside):
            try:
                marks = read_marks(path)
            except (DataError, PrivacyError, OSError):
                if self._is_of_family(path.parent):
                    raise
                continue  # another store's file, or another user's
            if marks is not None and marks.store_id == self.store_id:
                found[path] = marks
        return found

    def _is_of_family(self, folder: Path) -> bool:
        try:
            return read_json(folder / "store.json")["store_id"] == self.store_id
        except (DataError, OSError, TypeError, KeyError):
            return False

    def _lost_beside(self) -> list[Path]:
        """Files of marks that private stores of the family say in store.json to have, and have
        not.
        """
        found = []
        with os.scandir(self.root.parent) as entries:
            folders = sorted(Path(entry.path) for entry in entries)
        for folder in folders:
            if not (folder / OWN_MARKS).exists() and self._is_of_family(folder):
                about = read_json(folder / "store.json")
                if about.get("visibility") != "public" and about.get(HAS_MARKS) is True:
                    found.append(folder / OWN_MARKS)
        return found

    def marks(self) -> dict[str, list[Mark]]:
        """Marks of the family by run id: one from each file that has one.

        Raises:
            PrivacyError: as ``family_marks``.
        """
        runs: dict[str, list[Mark]] = {}
        for marks in self.family_marks().values():
            for run_id, mark in marks.runs.items():
                runs.setdefault(run_id, []).append(mark)
        return runs

    def caps(self) -> set[Cap]:
        """The owner's cap: one, or two if replacing it was interrupted; none if it was never set.

        Raises:
            PrivacyError: as ``family_marks``.
        """
        return {marks.cap for marks in self.family_marks().values() if marks.cap is not None}

    def register(self) -> None:
        """Write a new store's own file of marks: its location, and its family's runs and cap so
        far. Do nothing if there is one.
        """
        own = read_marks(self.own_path)
        if own is None or not own.places:
            # Without a shared file nothing was charged yet.
            shared = read_marks(self.shared_path) or Marks(self.store_id, every_charge=True)
            here = tuple(sorted(place(self.root.parent, self.store_id)))
            new = Marks(self.store_id, shared.runs, shared.cap, every_charge=shared.every_charge)
            write_marks(self.own_path, replace(own or new, places=here))

    def begin(self) -> None:
        """Make sure that the store's own file of marks and the shared one exist, and that the
        family's private stores say so in store.json. Call with the lock held, after both were
        verified.

        The store's own file is written first: the shared one, and store.json, name it only once it
        exists, so that a named file that is missing was lost.
        """
        self.register()
        family = self.family_marks()
        shared, places = (
            family.get(self.shared_path) or Marks(self.store_id),
            family[self.own_path].places,
        )
        members = tuple(sorted({*shared.members, self.root.name}))
        places = tuple(sorted({*shared.places, *places}))
        if self.shared_path not in family or (members, places) != (shared.members, shared.places):
            write_marks(self.shared_path, replace(shared, members=members, places=places))
        for path in family:
            if path != self.shared_path and self._is_of_family(path.parent):
                about = read_json(path.parent / "store.json")
                if about.get("visibility") != "public" and about.get(HAS_MARKS) is not True:
                    write_json(path.parent / "store.json", about | {HAS_MARKS: True})

    def set_marks(self, runs: Mapping[str, Mark], *, of_all: bool = False) -> None:
        """Write marks durably to every file of the family: any of them can restore the others. Call
        with the lock held and after ``begin``.

        Args:
            of_all: ``runs`` are those of all ledgers, so that from now on every file has every
                charge.

        Raises:
            PrivacyError: the store's own file or the shared one is gone.
        """
        family = self.family_marks()
        for path in (self.own_path, self.shared_path):
            if path not in family:
                raise PrivacyError(
                    f"ledger: {path}: missing; it was there when the run started. Restore it, "
                    f"then resume: {self._restore}."
                )
        for path, marks in family.items():
            write_marks(
                path, replace(marks.with_runs(runs), every_charge=of_all or marks.every_charge)
            )

    def set_cap(self, cap: Cap) -> None:
        """Write the owner's cap to every file of the family; call with the lock held and after
        ``begin``.
        """
        for path, marks in self.family_marks().items():
            write_marks(path, replace(marks, cap=cap))

    def declared_moves(self) -> int:
        """Number of times the owner declared a store of the family moved (``declare_moved``)."""
        return max((marks.moves for marks in self.family_marks().values()), default=0)

    def declare_moved(self) -> None:
        """Record the owner's declaration that this family of stores was moved or is mounted here,
        with no copy in use elsewhere.

        Call with the lock held.

        Raises:
            PrivacyError: the ledgers were not moved along, or files are missing.
        """
        self.read_all(anywhere=True)
        here = place(self.root.parent, self.store_id)
        for path, marks in self.family_marks().items():
            known = marks.places or path != self.shared_path  # older shared marks have no places
            if known and not here & set(marks.places):
                write_marks(
                    path,
                    replace(
                        marks, places=tuple(sorted({*marks.places, *here})), moves=marks.moves + 1
                    ),
                )

    def restore_marks(self) -> None:
        """Rewrite a lost file of marks from the remaining ones, with the places that these know;
        call with the lock held.

        Raises:
            PrivacyError: none remains, none of them is known to have every charge, or the ledgers
                do not match them.
        """
        family = self.family_marks()
        if not family:
            raise self._no_marks()
        if self.shared_path not in family and not any(
            marks.every_charge for marks in family.values()
        ):
            raise PrivacyError(
                f"ledger: {self.shared_path}: missing, and the marks in "
                f"{', '.join(path.parent.name for path in family)} are of an older version, "
                "which did not write every charge there; expected a file with all of them. "
                "Restore it from a backup."
            )
        ledgers = self._read_ledgers(self.marks())
        runs = {run_id: contents.mark for run_id, contents in ledgers.items()}
        cap = min(
            (marks.cap for marks in family.values() if marks.cap),
            key=lambda cap: cap.epsilon,
            default=None,
        )
        places = tuple(sorted({known for marks in family.values() for known in marks.places}))
        for path in (self.own_path, self.shared_path):
            if path not in family:
                write_marks(
                    path,
                    Marks(
                        self.store_id,
                        runs,
                        cap,
                        places=places,
                        moves=self.declared_moves(),
                        every_charge=True,
                    ),
                )
        self.begin()

    def check_place(self) -> None:
        """Refuse a private store that is not in the folder it was imported into: a copy would have
        separate ledgers.

        Raises:
            PrivacyError: the marks have neither the path nor the inode number of the folder that
                holds the store.
        """
        marks = read_marks(self.own_path)
        if (
            not self.private
            or marks is None
            or not marks.places
            or place(self.root.parent, self.store_id) & set(marks.places)
        ):
            return
        raise PrivacyError(
            f"ledger: {self.root}: not where this store was imported; expected the original, "
            "whose ledgers list every run. If this is a copy, use the original. If the store "
            "was moved here with its LEDGERS folder, or is mounted under another path, run "
            f"`dpvision ledger {self.root} --moved`."
        )

    def read_all(self, *, anywhere: bool = False) -> dict[str, LedgerContents]:
        """Read all ledgers of the store, and verify that each is intact and not older than the
        family's marks of it.

        Args:
            anywhere: accept a store that seems to be a copy.

        Raises:
            PrivacyError: a ledger was altered, shortened, replaced by an older copy, deleted, or
                belongs to another store; a file of marks was lost; the store is a copy or was
                moved.
        """
        if not anywhere:
            self.check_place()
        family = self.family_marks()  # before the ledgers, which a running run can only lengthen
        self._check_complete(family)
        return self._read_ledgers(self.marks())

    def _check_complete(self, family: dict[Path, Marks]) -> None:
        """Refuse the family's files of marks if one was lost."""
        shared = family.get(self.shared_path)
        if shared is None and (
            known := sorted({run_id for marks in family.values() for run_id in marks.runs})
        ):
            raise PrivacyError(
                f"ledger: {self.shared_path}: missing; the store saw its runs "
                f"({', '.join(known[:3])}{', ...' if len(known) > 3 else ''}). Bring the LEDGERS "
                "folder along with the store, or restore it; if this one file is missing: "
                f"{self._restore}."
            )
        if self.private and self.has_marks and not family:
            raise self._no_marks()
        if shared is None and (lost := self._lost_beside()):
            raise PrivacyError(
                f"ledger: {lost[0]} and {self.shared_path}: both missing; expected one of them, "
                "because that store, of the same id, says in store.json that it has marks. "
                "Restore one from a backup, or from another half's: `dpvision ledger "
                f"{lost[0].parent} --restore-marks`."
            )
        listed = shared is not None and self.root.name in shared.members
        if self.own_path not in family and (listed or (self.private and self.has_marks)):
            raise PrivacyError(
                f"ledger: {self.own_path}: missing; expected the marks that the store kept of "
                "its runs. Restore it from a backup, or from the other files of marks: "
                f"{self._restore}."
            )

    def _no_marks(self) -> PrivacyError:
        return PrivacyError(
            f"ledger: {self.own_path} and {self.shared_path}: both missing; expected one of "
            "them, because nothing else records which ledgers there were. Restore one of them "
            "and the ledgers from a backup."
        )

    @property
    def _restore(self) -> str:
        return f"`dpvision ledger {self.root} --restore-marks`"

    def _read_ledgers(self, marks: dict[str, list[Mark]]) -> dict[str, LedgerContents]:
        ledgers = {path.stem: read_ledger(path) for path in sorted(self.folder.glob("*.jsonl"))}
        for run_id in sorted(marks.keys() | ledgers.keys()):
            self._check(run_id, ledgers.get(run_id), marks.get(run_id, []))
        return ledgers

    def _check(self, run_id: str, contents: LedgerContents | None, marks: list[Mark]) -> None:
        where = f"ledger: {self.ledger_path(run_id)}"
        if contents is None:
            raise PrivacyError(
                f"{where}: missing; the store saw its run. Bring the LEDGERS folder along with "
                "the store, or restore it."
            )
        if contents.run_id != run_id or contents.store_id != self.store_id:
            raise PrivacyError(
                f"{where}: of run {contents.run_id} on store {contents.store_id}; expected this "
                "run and store. Restore it."
            )
        if not marks and contents.steps:
            raise PrivacyError(
                f"{where}: steps={contents.steps}, and the store has no mark of it; expected a "
                "mark of every ledger with steps. The ledger was put there by hand, or the "
                "marks are of an older day: restore the newest files."
            )
        for mark in marks:
            if contents.header != mark.header:
                raise PrivacyError(
                    f"{where}: another plan or run in its header; expected the one that the "
                    "store has seen. Restore it."
                )
            if contents.steps < mark.steps:
                raise PrivacyError(
                    f"{where}: steps={contents.steps}; expected at least {mark.steps}, which the "
                    "store has seen. It was shortened or is an older copy: restore the newest "
                    "one."
                )
            if not contents.has(mark):
                raise PrivacyError(
                    f"{where}: other lines than those the store has seen; expected the same "
                    "ledger. Restore it."
                )
