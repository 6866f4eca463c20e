"""Attacks on the account of a store: files lost, put back, copied or forged, none of which may
lower what the store was charged.
"""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from dpvision import files
from dpvision.cli import main
from dpvision.config import PrivacyConfig
from dpvision.data.split import split_store
from dpvision.data.synthetic_store import write_scenes
from dpvision.errors import CheckpointError, PrivacyError
from dpvision.privacy import ledger
from dpvision.privacy.account import declare_moved, restore_marks
from dpvision.privacy.ledger import Ledger, set_cap, store_account
from dpvision.privacy.ledger_format import (
    digest,
    encode,
    header_line,
    recovery_line,
    start_line,
    step_line,
)
from dpvision.privacy.plan import DPPlan, make_plan
from dpvision.privacy.store_marks import StoreLedgers

STEPS = 10
STORE_ID = "5701e5701e"


@pytest.fixture(scope="module")
def plan() -> DPPlan:
    """Ten full batches at noise 1: epsilon about 14."""
    return make_plan(
        PrivacyConfig(
            dataset_size=100,
            expected_batch_size=100,
            sampling="full_batch",
            noise_multiplier=1.0,
            steps=STEPS,
            delta=1e-3,
        )
    )


def make_store(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "store.json").write_text(json.dumps({"store_id": STORE_ID, "visibility": "private"}))
    StoreLedgers.of(folder).register()  # as the import does
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return make_store(tmp_path / "data" / "all")


@pytest.fixture
def family(tmp_path: Path) -> dict[str, Path]:
    """A store and its halves, as ``data split`` leaves them: one folder, one id."""
    return {name: make_store(tmp_path / "data" / name) for name in ("all", "a", "b")}


def charge(
    store: Path, plan: DPPlan, steps: int = STEPS, run_id: str = "run", *, resume: bool = False
) -> Path:
    with Ledger.open(store, run_id, plan, resume=resume) as ledger:
        for _ in range(steps):
            ledger.append()
        return ledger.path


def refused(store: Path, plan: DPPlan) -> None:
    """Neither the account nor a new run nor a resumed one accepts the state of the files."""
    for attempt in (
        lambda: store_account(store),
        lambda: charge(store, plan, 0, "another"),
        lambda: charge(store, plan, 0, resume=True),
    ):
        with pytest.raises((PrivacyError, CheckpointError)):
            print("accepted:", attempt())


def forged(plan: DPPlan, steps: int, **change: float) -> list[bytes]:
    """Lines of a valid ledger of ``steps`` steps under another plan."""
    other = DPPlan.from_dict({**plan.to_dict(), **change})
    lines = [encode(header_line("run", STORE_ID, other, []))]
    lines.append(encode(start_line(digest(lines[-1]), resume=False)))
    for step in range(steps):
        lines.append(encode(step_line(digest(lines[-1]), step)))
    return lines


def test_a_torn_tail_does_not_excuse_another_plan(store: Path, plan: DPPlan) -> None:
    path = charge(store, plan)
    for steps in (STEPS, STEPS - 1, 1, 0):
        path.write_bytes(b"\n".join(forged(plan, steps, noise_multiplier=1000.0)) + b"\n{")
        refused(store, plan)


def test_a_torn_tail_does_not_excuse_a_shortened_ledger(store: Path, plan: DPPlan) -> None:
    path = charge(store, plan)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(
        b"".join(lines[:-1]) + b"{"
    )  # the count is right, the last line is not the one that the store saw
    refused(store, plan)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:-1])  # torn by one byte
    refused(store, plan)


def test_a_sealed_line_does_not_carry_the_digest_of_another_ledger(
    store: Path, plan: DPPlan
) -> None:
    path = charge(store, plan)
    last = path.read_bytes().splitlines()[-1]
    # What was torn may hold any bytes: here the very line that the mark remembers, in a ledger of
    # another plan.
    lines = forged(plan, STEPS - 1, noise_multiplier=1000.0)
    path.write_bytes(b"\n".join([*lines, last, encode(recovery_line(digest(last), STEPS))]) + b"\n")
    refused(store, plan)


def test_recovery_lines_reduce_nothing(store: Path, plan: DPPlan) -> None:
    path = charge(store, plan, 5)
    before = path.read_bytes().splitlines()
    for place in range(2, len(before)):
        for steps in (0, place - 3, place - 2, place - 1):
            seal = encode(recovery_line(digest(before[place]), steps))
            path.write_bytes(b"\n".join([*before[: place + 1], seal]) + b"\n")
            refused(store, plan)


def test_a_ledger_or_its_marks_lost_is_refused(store: Path, plan: DPPlan) -> None:
    path = charge(store, plan)
    data = store.parent
    shutil.copytree(data, data.with_name("kept"))
    for lost in (
        [store / "ledger_marks.json"],
        [store / "ledger_marks.json", path],
        [path.parent / "marks.json"],
        [path.parent / "marks.json", path],
        [path.parent],
        [path],
    ):
        for file in lost:
            if file.is_dir():
                shutil.rmtree(file)
            elif file.exists():
                file.unlink()
        refused(store, plan)
        shutil.rmtree(data)
        shutil.copytree(data.with_name("kept"), data)


def test_a_run_taken_out_of_a_file_of_marks_is_refused(store: Path, plan: DPPlan) -> None:
    path = charge(store, plan)
    for file in (store / "ledger_marks.json", path.parent / "marks.json"):
        if not file.exists():
            continue
        before = file.read_bytes()
        values = json.loads(before)
        values["runs"] = {}
        file.write_text(json.dumps(values))
        kept = path.read_bytes()
        path.unlink()
        refused(store, plan)
        path.write_bytes(kept)
        file.write_bytes(before)
    assert store_account(store).runs[0].steps == STEPS


def test_a_ledger_under_another_name_is_refused(store: Path, plan: DPPlan) -> None:
    path = charge(store, plan)
    path.rename(path.with_name("other.jsonl"))
    refused(store, plan)
    shutil.copy(path.with_name("other.jsonl"), path)
    refused(store, plan)  # twice


def test_marks_belong_to_the_family_of_stores(family: dict[str, Path], plan: DPPlan) -> None:
    set_cap(family["all"], plan.epsilon * 1.2, 1e-3)  # type: ignore[operator]
    path = charge(family["a"], plan)
    path.unlink()
    for member in family.values():
        refused(member, plan)


def test_the_family_remembers_without_the_ledger_folder(
    family: dict[str, Path], plan: DPPlan
) -> None:
    path = charge(family["a"], plan)
    shutil.rmtree(path.parent.parent)
    for member in family.values():
        refused(member, plan)


def test_the_family_remembers_without_the_half_that_was_trained_on(
    family: dict[str, Path], plan: DPPlan
) -> None:
    path = charge(family["a"], plan)
    shutil.rmtree(family["a"])
    assert store_account(family["b"]).epsilon == pytest.approx(plan.epsilon)
    shutil.rmtree(path.parent)
    for name in ("b", "all"):
        refused(family[name], plan)


def test_an_older_copy_of_the_ledgers_is_refused_by_every_half(
    family: dict[str, Path], plan: DPPlan
) -> None:
    path = charge(family["a"], plan, 2)
    shutil.copytree(path.parent, path.parent.with_name("kept"))
    charge(family["a"], plan, 3, resume=True)
    shutil.rmtree(path.parent)
    path.parent.with_name("kept").rename(path.parent)
    for member in family.values():
        refused(member, plan)


def test_another_id_in_store_json_opens_no_second_account(store: Path, plan: DPPlan) -> None:
    charge(store, plan)
    (store / "store.json").write_text(json.dumps({"store_id": "0" * 16, "visibility": "private"}))
    refused(store, plan)


def copied(store: Path) -> Path:
    """A copy of the folder that holds a store, elsewhere."""
    there = store.parent.with_name("elsewhere")
    shutil.copytree(store.parent, there)
    return there / store.name


@pytest.mark.parametrize("charged", [False, True])
def test_a_copy_made_elsewhere_has_no_account_of_its_own(
    store: Path, plan: DPPlan, charged: bool
) -> None:
    if charged:
        charge(store, plan)
    there = copied(store)
    with pytest.raises(PrivacyError, match="not where this store was imported"):
        store_account(there)
    with pytest.raises(PrivacyError, match="--moved"):
        charge(there, plan, 0, "another")
    with pytest.raises(PrivacyError, match="use the original"):
        set_cap(there, 1.0, 1e-3)
    assert sorted(p.name for p in there.parent.iterdir()) == sorted(
        p.name for p in store.parent.iterdir()
    )


def test_a_half_taken_elsewhere_has_no_account_of_its_own(
    family: dict[str, Path], plan: DPPlan
) -> None:
    there = family["a"].parent.with_name("elsewhere")
    there.mkdir()
    moved = family["a"].rename(there / "a")  # on one disk, before the first run
    with pytest.raises(PrivacyError, match="not where this store was imported"):
        charge(moved, plan, 0)


def test_a_copy_beside_the_original_shares_its_account(store: Path, plan: DPPlan) -> None:
    shutil.copytree(store, store.with_name("copy"))
    charge(store, plan)
    assert store_account(store.with_name("copy")) == store_account(store)
    charge(store.with_name("copy"), plan, 0, "another")
    assert len(store_account(store).runs) == 2


def test_a_store_that_moves_with_its_ledgers_goes_on_after_one_word(
    store: Path, plan: DPPlan
) -> None:
    charge(store, plan, 3)
    before = store_account(store)
    there = copied(store)
    shutil.rmtree(store.parent)
    declare_moved(there)
    assert store_account(there) == dataclasses.replace(before, moves=1)
    charge(there, plan, 1, resume=True)
    declare_moved(there)  # nothing new to declare
    assert store_account(there).moves == 1
    back = (
        there.parent.rename(store.parent) / store.name
    )  # on one disk, the whole folder: still the same place
    assert store_account(back).runs[0].steps == 4


def test_a_store_that_left_its_ledgers_behind_stays_refused(store: Path, plan: DPPlan) -> None:
    charge(store, plan)
    there = copied(store)
    shutil.rmtree(there.parent / "LEDGERS")
    with pytest.raises(PrivacyError, match="Bring the LEDGERS folder"):
        declare_moved(there)
    refused(there, plan)


def test_a_lost_file_of_marks_is_restored_from_the_other_and_only_from_it(
    store: Path, plan: DPPlan
) -> None:
    set_cap(store, 100.0, 1e-3)
    path = charge(store, plan, 3)
    before = store_account(store)
    both = [store / "ledger_marks.json", path.parent / "marks.json"]
    for lost in both:
        lost.unlink()
        restore_marks(store)
        assert store_account(store) == before
        charge(store, plan, 0, resume=True)
        before = store_account(store)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    both[0].unlink()
    with pytest.raises(PrivacyError, match="shortened"):
        restore_marks(store)
    both[1].unlink()
    with pytest.raises(PrivacyError, match="both missing"):
        restore_marks(store)


def test_the_cap_is_not_lost_with_one_file(store: Path, plan: DPPlan) -> None:
    set_cap(store, plan.epsilon * 1.2, 1e-3)  # type: ignore[operator]
    charge(store, plan)
    shared = store.parent / "LEDGERS" / STORE_ID / "marks.json"
    for path in (store / "ledger_marks.json", shared):
        before = path.read_text()
        path.write_text(json.dumps({**json.loads(before), "cap": None}))
        with pytest.raises(PrivacyError, match="cap"):
            charge(store, plan, 0, "another")
        path.write_text(before)


def test_a_crash_between_the_two_marks_is_no_loss(
    store: Path, plan: DPPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = files.write_file
    for crash_at in range(1, 12):
        left = [crash_at]

        def crashes(path: Path, data: bytes, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            real(path, data)

        for module in (files, ledger):
            monkeypatch.setattr(module, "write_file", crashes)
        seen = 0
        try:
            with Ledger.open(store, "run", plan, resume=False) as opened:
                for _ in range(3):
                    opened.append()
                    seen += 1
        except KeyboardInterrupt:
            pass
        monkeypatch.undo()
        known = {run.run_id: run.steps for run in store_account(store).runs}
        assert known.get("run", 0) >= seen
        charge(store, plan, 1, resume="run" in known)
        shutil.rmtree(store.parent)
        make_store(store)


def test_marks_deleted_while_a_run_goes_on_stop_it(store: Path, plan: DPPlan) -> None:
    with Ledger.open(store, "run", plan, resume=False) as opened:
        opened.append()
        (store / "ledger_marks.json").unlink()
        with pytest.raises(PrivacyError, match="--restore-marks"):
            opened.append()
    restore_marks(store)
    assert (
        store_account(store).runs[0].steps == 2
    )  # the second was charged before the loss was seen


def test_damaged_marks_of_a_half_are_refused_and_those_of_a_stranger_are_not_read(
    family: dict[str, Path], plan: DPPlan
) -> None:
    stranger = family["all"].with_name("stranger")
    stranger.mkdir()
    (stranger / "ledger_marks.json").write_text("{")
    charge(family["a"], plan, 1)
    (family["b"] / "ledger_marks.json").write_text('{"format": "dpvision-ledger-marks-1"}')
    refused(family["a"], plan)


# A cleanup: ledgers and marks removed together


@pytest.fixture
def imported(tmp_path: Path) -> Path:
    """A private store as an import writes it."""
    store = tmp_path / "data" / "all"
    write_scenes(store, 12, 16, public=False)
    return store


def cleaned(store: Path) -> Path:
    """Remove all ledgers, and every file of marks of the family."""
    shutil.rmtree(store.parent / "LEDGERS", ignore_errors=True)
    for marks in store.parent.glob("*/ledger_marks.json"):
        marks.unlink()
    return store


def has_marks(store: Path) -> object:
    return json.loads((store / "store.json").read_text()).get("ledger_marks")


@pytest.mark.parametrize("charged", [False, True])
def test_a_private_store_without_any_marks_has_no_account(
    imported: Path, plan: DPPlan, charged: bool, capsys
) -> None:
    """Before: "No run yet", epsilon 0, where 14 was spent."""
    if charged:
        charge(imported, plan)
    refused(cleaned(imported), plan)
    with pytest.raises(PrivacyError, match=r"ledger_marks.json.*missing; expected.*from a backup"):
        set_cap(imported, 1.0, 1e-3)
    with pytest.raises(PrivacyError, match=r"missing; expected.*from a backup"):
        restore_marks(imported)
    assert main(["ledger", str(imported)]) == 2
    output = capsys.readouterr()
    assert "No run yet" not in output.out and len(output.err.splitlines()) == 1


def test_a_copied_store_without_its_marks_has_no_account_of_its_own(
    imported: Path, plan: DPPlan
) -> None:
    charge(imported, plan)
    there = copied(imported)
    shutil.rmtree(there.parent / "LEDGERS")
    (there / "ledger_marks.json").unlink()
    refused(there, plan)
    for way in (declare_moved, restore_marks):
        with pytest.raises(PrivacyError, match="missing"):
            way(there)
    assert store_account(imported).epsilon == pytest.approx(plan.epsilon)


def test_restored_marks_do_not_make_a_copy_an_original(imported: Path, plan: DPPlan) -> None:
    """Before: a copy whose own marks were deleted and restored from the copied ledger folder took
    its new place for the import's.
    """
    charge(imported, plan, 3)
    there = copied(imported)
    (there / "ledger_marks.json").unlink()
    restore_marks(there)
    with pytest.raises(PrivacyError, match="--moved"):
        store_account(there)
    with pytest.raises(PrivacyError, match="--moved"):
        charge(there, plan, 0, "another")
    declare_moved(there)
    assert store_account(there).moves == 1


def test_halves_have_no_account_without_marks_and_cannot_be_made_without(
    imported: Path, plan: DPPlan
) -> None:
    """Before: splitting a store whose marks were lost gave two stores with fresh ones."""
    data = imported.parent
    split_store(imported, data / "a", data / "b", 0.5)
    charge(data / "a", plan)
    for member in ("all", "a", "b"):
        refused(cleaned(data / member), plan)
    with pytest.raises(PrivacyError, match="missing"):
        split_store(imported, data / "c", data / "d", 0.5)
    assert not (data / "c").exists()


def test_a_half_without_its_own_marks_gets_them_from_the_family(
    imported: Path, plan: DPPlan
) -> None:
    data = imported.parent
    split_store(imported, data / "a", data / "b", 0.5)
    charge(data / "a", plan)
    (data / "b" / "ledger_marks.json").unlink()
    with pytest.raises(PrivacyError, match="--restore-marks"):
        store_account(data / "b")
    restore_marks(data / "b")
    assert store_account(data / "b").epsilon == pytest.approx(plan.epsilon)


def cut(path: Path, lines: int) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:lines]))


@pytest.mark.parametrize("lines", [2, 5])
def test_marks_restored_from_another_half_know_every_charge(
    family: dict[str, Path], plan: DPPlan, lines: int
) -> None:
    """Both marks of the store that was trained on removed, its ledger cut: the other half's mark of
    the run's start made 12 steps 0.
    """
    charge(family["b"], plan, 1, "before")
    path = charge(family["a"], plan, 8)
    for lost in (family["a"] / "ledger_marks.json", path.parent / "marks.json"):
        lost.unlink()
    whole = path.read_bytes()
    cut(path, lines)
    for member in family.values():
        with pytest.raises(PrivacyError, match="shortened"):
            restore_marks(member)
        refused(member, plan)
    path.write_bytes(whole)
    for member in family.values():
        restore_marks(member)
        assert {run.run_id: run.steps for run in store_account(member).runs} == {
            "before": 1,
            "run": 8,
        }


def of_older_version(store: Path, **runs: int) -> None:
    """The store's own marks as an older version left them: of runs elsewhere, only what was charged
    at their start.
    """
    path = store / "ledger_marks.json"
    values = json.loads(path.read_text())
    del values["every_charge"]
    for run_id, steps in runs.items():
        lines = (store.parent / "LEDGERS" / STORE_ID / f"{run_id}.jsonl").read_bytes().splitlines()
        values["runs"][run_id] |= {"steps": steps, "digest": digest(lines[1 + steps])}
    path.write_text(json.dumps(values))


def test_marks_of_an_older_version_restore_nothing_that_they_may_not_know(
    family: dict[str, Path], plan: DPPlan
) -> None:
    path = charge(family["a"], plan, 8)
    shared = path.parent / "marks.json"
    of_older_version(family["b"], run=0)
    of_older_version(family["all"], run=0)
    kept = shared.read_bytes(), path.read_bytes()
    for lost in (family["a"] / "ledger_marks.json", shared):
        lost.unlink()
    cut(path, 2)
    for member in family.values():
        with pytest.raises(PrivacyError, match=r"of an older version.*from a backup"):
            restore_marks(member)
        refused(member, plan)
    shared.write_bytes(kept[0])
    path.write_bytes(kept[1])
    restore_marks(family["a"])
    charge(family["b"], plan, 1, "another")  # from here on all files have every charge
    shared.unlink()
    (family["b"] / "ledger_marks.json").unlink()
    cut(path, 2)
    with pytest.raises(PrivacyError, match="shortened"):
        restore_marks(family["all"])


def test_another_store_of_the_id_does_not_give_marks_to_one_that_lost_them(
    imported: Path, plan: DPPlan
) -> None:
    """A copy whose store.json does not speak of marks was accepted beside the ledger without steps,
    got marks, and restored the others.
    """
    path = charge(imported, plan, 8)
    copy = imported.with_name("copy")
    shutil.copytree(imported, copy)
    (copy / "store.json").write_text(
        json.dumps(json.loads((copy / "store.json").read_text()) | {"ledger_marks": False})
    )
    for lost in (
        imported / "ledger_marks.json",
        copy / "ledger_marks.json",
        path.parent / "marks.json",
    ):
        lost.unlink()
    cut(path, 2)
    for attempt in (
        store_account,
        lambda store: set_cap(store, 100.0, 1e-3),
        lambda store: charge(store, plan, 0, "new"),
        restore_marks,
    ):
        for store in (copy, imported):
            with pytest.raises(PrivacyError, match="both missing"):
                print("accepted:", attempt(store))


def test_every_file_of_marks_has_every_charge_of_a_run_that_goes_on(
    family: dict[str, Path], plan: DPPlan
) -> None:
    with Ledger.open(family["a"], "run", plan, resume=False) as opened:
        for steps in range(1, 4):
            opened.append()
            files = [
                *family["a"].parent.glob("*/ledger_marks.json"),
                opened.path.parent / "marks.json",
            ]
            assert len(files) == 4 and {
                json.loads(file.read_text())["runs"]["run"]["steps"] for file in files
            } == {steps}


def test_a_declared_move_of_a_store_that_must_have_marks_works(
    imported: Path, plan: DPPlan
) -> None:
    charge(imported, plan, 3)
    before = store_account(imported)
    there = copied(imported)
    shutil.rmtree(imported.parent)
    declare_moved(there)
    assert store_account(there) == dataclasses.replace(before, moves=1)
    charge(there, plan, 1, resume=True)
    (there / "ledger_marks.json").unlink()
    restore_marks(there)
    assert store_account(there).runs[0].steps == 4, "the new place is in the shared marks too"


def test_an_older_store_keeps_opening_and_must_have_marks_from_its_next_charge_on(
    family: dict[str, Path], plan: DPPlan
) -> None:
    """Stores made before store.json said so; with and without marks, because the oldest have none
    before their first run.
    """
    (family["b"] / "ledger_marks.json").unlink()
    for member in family.values():
        assert store_account(member).epsilon == 0.0 and has_marks(member) is None
    about = json.loads((family["a"] / "store.json").read_text())
    charge(family["a"], plan, 0)
    assert json.loads((family["a"] / "store.json").read_text()) == about | {"ledger_marks": True}
    assert has_marks(family["all"]) is True, "every member that has marks"
    charge(family["b"], plan, 1, "another")
    for member in family.values():
        assert has_marks(member) is True
        refused(cleaned(member), plan)


def test_a_public_store_does_not_need_marks(tmp_path: Path, plan: DPPlan) -> None:
    write_scenes(tmp_path / "data" / "all", 12, 16, public=True)
    store = cleaned(tmp_path / "data" / "all")
    assert has_marks(store) is None and store_account(store).epsilon == 0.0
    charge(store, plan, 1)
    assert has_marks(store) is None
