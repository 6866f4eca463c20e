import dataclasses
import hashlib
import itertools
import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import get_epsilon_gaussian

from dpvision.config import PrivacyConfig
from dpvision.errors import CheckpointError, ConfigError, DataError, PrivacyError
from dpvision.privacy import ledger as ledger_module
from dpvision.privacy.account import filter_epsilon
from dpvision.privacy.events import Gaussian
from dpvision.privacy.ledger import Ledger, read_ledger, set_cap, store_account
from dpvision.privacy.plan import DPPlan, make_plan
from dpvision.privacy.store_marks import StoreLedgers

FULL = PrivacyConfig(
    dataset_size=100,
    expected_batch_size=100,
    sampling="full_batch",
    noise_multiplier=20.0,
    steps=50,
    delta=1e-3,
)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    (folder / "store.json").write_text(
        json.dumps({"store_id": "5701e5701e", "visibility": "private"})
    )
    return folder


@pytest.fixture(scope="module")
def plan() -> DPPlan:
    return make_plan(FULL)


def run(store: Path, plan: DPPlan, steps: int, run_id: str = "a", resume: bool = False) -> Path:
    with Ledger.open(store, run_id, plan, resume=resume) as ledger:
        for _ in range(steps):
            ledger.append()
        return ledger.path


def marks_of(store: Path) -> dict[Path, bytes]:
    """Both files of marks as they are now, to be put back."""
    return {
        path: path.read_bytes()
        for path in (
            store / "ledger_marks.json",
            store.parent / "LEDGERS" / "5701e5701e" / "marks.json",
        )
    }


def put_back(marks: dict[Path, bytes]) -> None:
    for path, data in marks.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def test_steps_are_numbered_from_zero_and_the_plan_is_the_only_budget(
    store: Path, plan: DPPlan
) -> None:
    short = dataclasses.replace(plan, steps=3)
    with Ledger.open(store, "a", short, resume=False) as ledger:
        assert [ledger.append() for _ in range(3)] == [0, 1, 2]
        with pytest.raises(PrivacyError, match="used up"):
            ledger.append()
        assert ledger.steps == 3
    with (
        Ledger.open(store, "a", short, resume=True) as ledger,
        pytest.raises(PrivacyError, match="used up"),
    ):
        ledger.append()


def test_the_ledger_lies_beside_the_store_and_chains_raw_lines(store: Path, plan: DPPlan) -> None:
    path = run(store, plan, 2)
    assert path == store.parent / "LEDGERS" / "5701e5701e" / "a.jsonl"
    lines = path.read_bytes().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["header", "start", "step", "step"]
    for before, line in zip([b"", *lines][:-1], lines, strict=True):
        assert json.loads(line)["prev"] == (hashlib.sha256(before).hexdigest() if before else "")
    contents = read_ledger(path)
    assert (contents.run_id, contents.steps, contents.restarts, contents.plan) == ("a", 2, 0, plan)
    assert contents.digest == hashlib.sha256(lines[-1]).hexdigest()


def test_a_charge_is_on_the_disk_before_append_returns(
    store: Path, plan: DPPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_size), real(fd)))
    with Ledger.open(store, "a", plan, resume=False) as ledger:
        for _ in range(3):
            synced.clear()
            ledger.append()
            assert (
                synced[0] == ledger.path.stat().st_size
            )  # the ledger first, whole; then the marks
            assert (
                len(synced) == 5
            )  # ledger; the store's marks and the shared ones, each a file and its folder
        assert ledger_module.read_ledger(ledger.path).steps == 3


def test_resume_counts_on_and_says_so(store: Path, plan: DPPlan) -> None:
    run(store, plan, 3)
    run(store, plan, 2, resume=True)
    with Ledger.open(store, "a", plan, resume=True) as ledger:
        assert (ledger.steps, ledger.restarts, ledger.append()) == (5, 2, 5)
        assert ledger.digest == read_ledger(ledger.path).digest


@pytest.mark.parametrize("kill_after", [1, 4, 9])
def test_a_killed_process_never_under_counts(store: Path, plan: DPPlan, kill_after: int) -> None:
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with Ledger.open(store, "a", plan, resume=False) as ledger:
                while True:
                    os.write(write_end, bytes([ledger.append()]))
        finally:
            os._exit(1)  # never back into pytest
    seen = -1
    while seen < kill_after:
        seen = os.read(read_end, 1)[0]
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(write_end)
    while rest := os.read(read_end, 1):
        seen = rest[0]
    os.close(read_end)
    with Ledger.open(store, "a", plan, resume=True) as ledger:
        assert ledger.steps >= seen + 1
        assert ledger.append() >= seen + 1


def test_a_closed_ledger_is_closed_once_and_appends_nothing(store: Path, plan: DPPlan) -> None:
    ledger = Ledger.open(store, "a", plan, resume=False)
    ledger.close()
    for _ in range(2):
        ledger.close()
        os.fstat(1)  # is another file's, and open
        with pytest.raises(CheckpointError, match="closed"):
            ledger.append()
    assert read_ledger(ledger.path).steps == 0


def test_the_bytes_of_a_line_are_the_shortest_and_do_not_depend_on_the_order_of_its_names() -> None:
    for line in ({"a": 1, "b": [2, "x"]}, {"b": [2, "x"], "a": 1}):
        assert ledger_module.encode(line) == b'{"a":1,"b":[2,"x"]}'
    with pytest.raises(ValueError):
        ledger_module.encode({"a": math.nan})


def test_a_crash_at_any_byte_of_the_last_line_charges_it(
    store: Path, plan: DPPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)  # speed only: the crash is made by hand
    path = run(store, plan, 3)
    marks = marks_of(store)
    run(store, plan, 0, resume=True)
    before = path.read_bytes()
    run_bytes = (
        before + ledger_module.encode(ledger_module.step_line(read_ledger(path).digest, 3)) + b"\n"
    )
    for cut in range(len(before) + 1, len(run_bytes)):
        path.write_bytes(run_bytes[:cut])
        put_back(marks)
        assert read_ledger(path).steps == 4 and read_ledger(path).torn
        with Ledger.open(store, "a", plan, resume=True) as ledger:
            assert ledger.append() == 4
        sealed = read_ledger(path)
        assert sealed.steps == 5 and not sealed.torn
        assert path.read_bytes().startswith(run_bytes[:cut] + b"\n")


def test_cutting_the_file_anywhere_never_under_counts(
    store: Path, plan: DPPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    path = run(store, plan, 4)
    whole, marks = path.read_bytes(), marks_of(store)
    for cut in [*range(0, len(whole) - 300, 17), *range(len(whole) - 300, len(whole))]:
        path.write_bytes(whole[:cut])
        try:
            with Ledger.open(store, "a", plan, resume=True) as ledger:
                assert ledger.steps >= 4
        except PrivacyError:
            assert path.read_bytes() == whole[:cut]
        path.write_bytes(whole)
        put_back(marks)


def test_a_torn_last_step_of_the_plan_does_not_count_beyond_it(store: Path, plan: DPPlan) -> None:
    short = dataclasses.replace(plan, steps=2)
    path = run(store, short, 2)
    path.write_bytes(path.read_bytes() + b'{"kind":"res')
    assert read_ledger(path).steps == 2
    with Ledger.open(store, "a", short, resume=True) as ledger:
        assert ledger.steps == 2


def test_changing_any_byte_is_found(store: Path, plan: DPPlan) -> None:
    run(store, plan, 1)
    path = run(store, plan, 2, resume=True)
    whole = path.read_bytes()
    for place in range(len(whole) - 1):
        altered = bytearray(whole)
        altered[place] ^= 1
        path.write_bytes(bytes(altered))
        with pytest.raises((PrivacyError, CheckpointError)):
            store_account(store)
    path.write_bytes(whole)
    assert store_account(store).runs[0].steps == 3


def test_removing_or_doubling_a_line_is_found(store: Path, plan: DPPlan) -> None:
    path = run(store, plan, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    for i in range(len(lines)):
        for changed in (lines[:i] + lines[i + 1 :], lines[: i + 1] + lines[i:]):
            path.write_bytes(b"".join(changed))
            with pytest.raises(PrivacyError):
                store_account(store)


def test_a_rewritten_chain_with_the_same_count_is_found_by_the_mark(
    store: Path, plan: DPPlan
) -> None:
    about = (store / "store.json").read_bytes()
    path = run(store, plan, 2)
    marks = marks_of(store)
    for change, what in (({"noise_multiplier": 1000.0}, "another plan"), ({}, "other lines")):
        other = DPPlan.from_dict({**plan.to_dict(), **change})
        shutil.rmtree(path.parent)
        (store / "ledger_marks.json").unlink()
        (store / "store.json").write_bytes(about)  # as before the first charge
        run(store, other, 1)
        run(store, other, 1, resume=True)  # another line between the same two steps
        put_back(marks)
        with pytest.raises(PrivacyError, match=what):
            Ledger.open(store, "a", other, resume=True)


def test_a_copied_back_ledger_folder_is_refused(store: Path, plan: DPPlan) -> None:
    path = run(store, plan, 2)
    shutil.copytree(path.parent, store.parent / "backup")
    run(store, plan, 3, resume=True)
    shutil.rmtree(path.parent)
    shutil.copytree(store.parent / "backup", path.parent)
    for attempt in (
        lambda: Ledger.open(store, "a", plan, resume=True),
        lambda: Ledger.open(store, "b", plan, resume=False),
        lambda: store_account(store),
    ):
        with pytest.raises(PrivacyError, match="older copy"):
            attempt()


def test_a_deleted_ledger_is_refused(store: Path, plan: DPPlan) -> None:
    run(store, plan, 2).unlink()
    with pytest.raises(PrivacyError, match="the store saw its run"):
        Ledger.open(store, "a", plan, resume=True)
    for run_id in ("a", "b"):
        with pytest.raises(PrivacyError, match="the store saw its run"):
            Ledger.open(store, run_id, plan, resume=False)


def test_a_ledger_of_another_store_or_run_is_refused(store: Path, plan: DPPlan) -> None:
    path = run(store, plan, 2)
    shutil.copy(path, path.with_name("b.jsonl"))
    with pytest.raises(PrivacyError, match="expected this run"):
        Ledger.open(store, "b", plan, resume=True)


def test_start_and_resume_are_not_confused(store: Path, plan: DPPlan) -> None:
    with pytest.raises(CheckpointError, match="without resume"):
        Ledger.open(store, "a", plan, resume=True)
    run(store, plan, 1)
    with pytest.raises(CheckpointError, match="Resume it"):
        Ledger.open(store, "a", plan, resume=False)


def test_another_plan_cannot_resume(store: Path, plan: DPPlan) -> None:
    run(store, plan, 1)
    for change in ({"noise_multiplier": 19.0}, {"steps": 60}, {"max_grad_norm": 2.0}):
        with pytest.raises(PrivacyError, match="another plan"):
            other = DPPlan.from_dict({**plan.to_dict(), **change})
            Ledger.open(store, "a", other, resume=True)
    run(store, dataclasses.replace(plan, epsilon=plan.epsilon + 1e-12), 1, resume=True)  # type: ignore[operator]


def test_two_openers_do_not_share_a_ledger(store: Path, plan: DPPlan) -> None:
    with Ledger.open(store, "a", plan, resume=False) as ledger:
        with pytest.raises(CheckpointError, match="in use"):
            Ledger.open(store, "a", plan, resume=True)
        with Ledger.open(store, "b", plan, resume=False) as other:  # two runs side by side are fine
            assert (other.append(), ledger.append()) == (0, 0)
    run(store, plan, 1, resume=True)
    assert {r.run_id: r.steps for r in store_account(store).runs} == {"a": 2, "b": 1}


def test_a_full_disk_is_a_clear_error_and_the_ledger_survives(
    store: Path, plan: DPPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ledger.open(store, "a", plan, resume=False) as ledger:
        ledger.append()
        real = os.write

        def full(fd: int, data: bytes) -> int:
            if len(data) > 7:
                return real(fd, data[:7])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "write", full)
        # 7 bytes of each call go through until fewer are left: the line stays torn.
        with pytest.raises(CheckpointError, match="No space left"):
            ledger.append()
        monkeypatch.undo()
        with pytest.raises(CheckpointError, match="closed"):
            ledger.append()
    with Ledger.open(store, "a", plan, resume=True) as ledger:
        assert ledger.append() == 2


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("fails", ["write", "marks", "close"])
def test_what_fails_when_a_run_goes_on_closes_the_ledger_once(
    store: Path, plan: DPPlan, monkeypatch: pytest.MonkeyPatch, fails: str, torn: bool
) -> None:
    """Once: "Bad file descriptor" hid that the disk was full. And whole: the run goes on in the
    same process.
    """
    run(store, plan, 1, resume=False)
    path = StoreLedgers.of(store).ledger_path("a")
    if torn:
        with path.open("ab") as file:
            file.write(b'{"st')
    again, close = list[int](), os.close

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    def close_once(fd: int) -> None:
        try:
            close(fd)
        except OSError:
            again.append(fd)
            raise
        if fails == "close":
            full()

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close_once)
        if fails == "write":
            patch.setattr(ledger_module, "append", full)
        elif fails == "marks":
            patch.setattr(StoreLedgers, "set_marks", full)
        error = CheckpointError if fails == "write" else OSError
        with pytest.raises(error, match="No space left"):
            Ledger.open(store, "a", plan, resume=True).close()
    assert not again
    with Ledger.open(store, "a", plan, resume=True) as ledger:
        assert ledger.append() == 1 + torn


def test_bad_names_and_missing_stores_are_clear_errors(
    store: Path, plan: DPPlan, tmp_path: Path
) -> None:
    for name in ("", "../x", "a/b", ".hidden", "a" * 200):
        with pytest.raises(ConfigError, match="run_id"):
            Ledger.open(store, name, plan, resume=False)
    with pytest.raises(DataError, match=r"store\.json"):
        Ledger.open(tmp_path, "a", plan, resume=False)


def test_a_run_costs_nothing_before_its_first_step_and_its_whole_plan_from_then_on(
    store: Path, plan: DPPlan
) -> None:
    run(store, plan, 0)
    assert store_account(store).runs[0].spent == plan.spent(0)
    run(store, plan, 10, resume=True)
    account = store_account(store)
    assert account.runs[0].steps == 10 and account.runs[0].spent == plan.spent(plan.steps)
    assert account.epsilon == pytest.approx(plan.epsilon)


def test_runs_add_up_to_the_composition_and_the_filter_is_dearer(store: Path, plan: DPPlan) -> None:
    run(store, dataclasses.replace(plan, steps=20), 20, "a")
    run(store, dataclasses.replace(plan, steps=30), 30, "b")
    account = store_account(store)
    assert account.epsilon == pytest.approx(
        plan.spent(50).epsilon, rel=1e-9
    )  # 20 + 30 steps of one Gaussian
    assert account.epsilon < account.epsilon_filter < 1.3 * account.epsilon  # type: ignore[operator]
    assert account.cap is None and account.left is None and account.unprotected == ()


def test_an_empty_account_is_zero(store: Path) -> None:
    account = store_account(store)
    assert (account.runs, account.epsilon, account.epsilon_filter, account.delta) == (
        (),
        0.0,
        0.0,
        None,
    )


def test_the_filter_costs_a_gaussian_what_its_best_order_does() -> None:
    # The order is chosen for Gaussians, so for them nothing is lost but the grids of caps and
    # orders: RDP by hand over fine orders.
    for noise in (0.5, 1.0, 5.0):
        figure = filter_epsilon([Gaussian(noise * 2) for _ in range(4)], 1e-6)
        orders = np.linspace(1.01, 200, 400_000)
        best = np.min(
            orders / (2 * noise**2) + np.log1p(-1 / orders) - np.log(orders * 1e-6) / (orders - 1)
        )
        assert best <= figure <= best * 1.006  # type: ignore[operator]


def test_an_unprotected_run_leaves_no_total(store: Path, plan: DPPlan) -> None:
    unprotected = make_plan(
        PrivacyConfig(dataset_size=100, expected_batch_size=10, steps=5, guarantee="none")
    )
    run(store, plan, 2, "a")
    run(store, unprotected, 0, "idle")
    assert store_account(store).epsilon is not None  # it has not touched a record yet
    run(store, unprotected, 1, "bare")
    account = store_account(store)
    assert (
        account.unprotected == ("bare",)
        and account.epsilon is None
        and account.epsilon_filter is None
    )


def test_the_owners_cap_counts_the_planned_steps_of_every_run_that_began(
    store: Path, plan: DPPlan
) -> None:
    whole, half = plan.epsilon, dataclasses.replace(plan, steps=25)
    assert whole is not None
    set_cap(store, whole * 1.001, 1e-3)
    run(store, half, 10, "a")
    with pytest.raises(PrivacyError, match="expected at most"):
        Ledger.open(store, "b", plan, resume=False)
    run(store, half, 25, "b")
    account = store_account(store)
    assert account.left == pytest.approx(0.001 * whole, rel=1e-3)
    with pytest.raises(PrivacyError, match="expected at most"):
        Ledger.open(store, "c", dataclasses.replace(plan, steps=1), resume=False)
    run(store, half, 15, "a", resume=True)  # these steps were counted
    assert store_account(store).left == account.left
    assert not (store.parent / "LEDGERS" / "5701e5701e" / "c.jsonl").exists()


def test_where_people_are_declared_the_cap_is_on_a_persons_total(store: Path) -> None:
    """Against the closed form of the Gaussian mechanism: three records of a person have three times
    a record's sensitivity.
    """
    of_people = make_plan(
        PrivacyConfig(
            dataset_size=300,
            expected_batch_size=300,
            num_units=100,
            max_records_per_unit=3,
            sampling="full_batch",
            steps=1,
            noise_multiplier=6.0,
            delta=1e-3,
        )
    )
    for_two = get_epsilon_gaussian(6.0 / 3 / math.sqrt(2), 1e-3)
    run(store, of_people, 1, "a")
    set_cap(store, for_two * 1.01, 1e-3)
    run(store, of_people, 1, "b")
    account = store_account(store)
    assert account.unit_epsilon == pytest.approx(
        for_two, rel=1e-6
    ) and account.left == pytest.approx(0.01 * for_two, rel=1e-3)
    assert account.epsilon == pytest.approx(
        get_epsilon_gaussian(6.0 / math.sqrt(2), 1e-3), rel=1e-6
    )
    with pytest.raises(PrivacyError, match="per person with this run"):
        Ledger.open(store, "c", of_people, resume=False)


def test_a_cap_counts_the_plan_of_a_run_that_is_still_open(store: Path, plan: DPPlan) -> None:
    set_cap(store, plan.epsilon * 1.2, 1e-3)  # type: ignore[operator]
    with Ledger.open(store, "a", plan, resume=False) as ledger:
        ledger.append()
        with pytest.raises(PrivacyError, match="cap"):
            Ledger.open(store, "b", plan, resume=False)


def test_a_cap_refuses_unprotected_runs(store: Path) -> None:
    set_cap(store, 10.0, 1e-3)
    unprotected = make_plan(
        PrivacyConfig(dataset_size=100, expected_batch_size=10, steps=5, guarantee="none")
    )
    with pytest.raises(PrivacyError, match="without a guarantee"):
        Ledger.open(store, "a", unprotected, resume=False)


def test_a_caps_delta_makes_no_total_smaller(store: Path) -> None:
    """The total beside a cap at a large delta was that at the cap's delta: 3.29 at 2.5e-5 became
    0.00 at 0.4.
    """
    plan = make_plan(
        PrivacyConfig(dataset_size=60_000, expected_batch_size=100, steps=5, noise_multiplier=1.0)
    )
    for run_id in ("a", "b"):
        with Ledger.open(store, run_id, plan, resume=False) as ledger:
            ledger.append()
    before = store_account(store)
    set_cap(store, 20.0, 1e-3)
    after = store_account(store)
    assert (after.delta, after.epsilon, after.epsilon_filter) == (
        before.delta,
        before.epsilon,
        before.epsilon_filter,
    )
    assert (
        before.delta == plan.delta and after.left is not None and 20.0 - after.left < before.epsilon
    )  # type: ignore[operator]
    set_cap(store, 20.0, 1e-9)
    assert store_account(store).delta == 1e-9 and store_account(store).epsilon > before.epsilon  # type: ignore[operator]


@pytest.mark.parametrize(
    ("epsilon", "delta"),
    [
        (0.0, 1e-5),
        (float("nan"), 1e-5),
        (float("inf"), 1e-5),
        (1.0, 0.0),
        (1.0, 0.4),
        (1.0, float("nan")),
    ],
)
def test_a_senseless_cap_is_refused(store: Path, epsilon: float, delta: float) -> None:
    with pytest.raises(ConfigError, match="cap"):
        set_cap(store, epsilon, delta)


def test_every_line_says_what_is_charged_up_to_it(store: Path, plan: DPPlan) -> None:
    run(store, plan, 2)
    path = run(store, plan, 1, resume=True)
    lines, found = path.read_bytes().splitlines(), read_ledger(path)
    charged = [found.at(hashlib.sha256(line).hexdigest()) for line in lines]
    assert charged == [(0, 0), (0, 0), (1, 0), (2, 0), (2, 1), (3, 1)]
    assert found.at("0" * 64) is None
    with path.open("ab") as file:
        file.write(b"torn")
    torn = read_ledger(path)
    assert torn.at(torn.digest) == (torn.steps, 1) and torn.steps == 4
    assert torn.at(found.digest) == (3, 1)


def test_a_sealed_line_counts_once_whatever_follows_it(store: Path, plan: DPPlan) -> None:
    path = run(store, plan, 2)
    with path.open("ab") as file:
        file.write(b"torn")
    run(store, plan, 3, resume=True)
    run(store, plan, 1, resume=True)
    assert (read_ledger(path).steps, read_ledger(path).restarts) == (7, 2)
    lines = path.read_bytes().splitlines()
    for before, line in itertools.pairwise(lines):
        if line != b"torn":  # every other line has the digest of the one before it
            assert json.loads(line)["prev"] == hashlib.sha256(before).hexdigest()


@pytest.mark.parametrize("first", [b"", b"no JSON", b"[]", b"null"])
def test_a_file_that_does_not_begin_with_a_header_is_no_ledger(
    store: Path, plan: DPPlan, first: bytes
) -> None:
    path = run(store, plan, 1)
    path.write_bytes(b"\n".join([first, *path.read_bytes().split(b"\n")[1:]]))
    with pytest.raises(PrivacyError, match="line 1"):
        read_ledger(path)


def test_a_total_is_asked_of_new_runs_alone(store: Path, plan: DPPlan) -> None:
    assert plan.epsilon is not None
    total = 1.2 * plan.epsilon
    with Ledger.open(store, "a", plan, resume=False, total=total) as ledger:
        ledger.append()
    with pytest.raises(PrivacyError, match="total_epsilon="):
        Ledger.open(store, "b", plan, resume=False, total=total)
    with Ledger.open(store, "a", plan, resume=True, total=0.1) as ledger:
        assert ledger.steps == 1
