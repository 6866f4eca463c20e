"""Mistakes with what was executed: planted, and caught. The ids are those of docs/pitfalls.md,
section "Ledger and epsilon".
"""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path

import dp_accounting
import pytest
import runs

from dpvision.config import PrivacyConfig, from_dict
from dpvision.data import merge
from dpvision.data.merge import merge_stores
from dpvision.data.synthetic_store import write_scenes
from dpvision.privacy import ledger_format
from dpvision.privacy.account import restore_marks
from dpvision.privacy.ledger import Ledger, read_ledger, store_account
from dpvision.privacy.ledger_format import (
    digest,
    encode,
    header_line,
    recovery_line,
    start_line,
    step_line,
)
from dpvision.privacy.marks import read_marks, write_marks
from dpvision.privacy.mechanism import IndependentGaussian
from dpvision.privacy.plan import DPPlan, make_plan
from dpvision.privacy.store_marks import StoreLedgers
from dpvision.statement import again, guarantee, history_phrases, verify
from dpvision.statement.check import ok
from dpvision.statement.statement import Evidence, make_statement
from dpvision.train import loop
from dpvision.train.loop import fit, save

from .conftest import NewRun
from .planting import assert_refused, planted

pytestmark = pytest.mark.usefixtures("gates_once")


@pytest.fixture
def new_store(tmp_path: Path):
    """Makes the part of a store that ledgers need, in a folder of its own for every call."""

    def make() -> Path:
        folder = tmp_path / f"data{len(list(tmp_path.iterdir()))}" / "store"
        runs.make_store(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def long_plan() -> DPPlan:
    return make_plan(
        PrivacyConfig(
            dataset_size=100,
            expected_batch_size=100,
            sampling="full_batch",
            noise_multiplier=20.0,
            steps=50,
            delta=1e-3,
        )
    )


def charge(store: Path, plan: DPPlan, steps: int, *, resume: bool = False) -> Path:
    with Ledger.open(store, "a", plan, resume=resume) as ledger:
        for _ in range(steps):
            ledger.append()
        return ledger.path


def test_ledger_crash_loses_step(new_store, long_plan: DPPlan, new_run: NewRun) -> None:
    def check_torn() -> None:
        path = charge(new_store(), long_plan, 3)
        whole = path.read_bytes()
        last = whole.rstrip(b"\n").rfind(b"\n") + 1
        for cut in (last + 1, (last + len(whole)) // 2, len(whole) - 1):
            path.write_bytes(whole[:cut])
            assert read_ledger(path).steps == 3, "a torn line does not count"

    def check_order() -> None:
        """When the first thing of a step is computed, the charge is in the file."""

        def watch(number, *args, **more):
            assert read_ledger(session.run.ledger.path).steps == number + 1, (
                "the step runs before it is charged"
            )
            return step_sum(number, *args, **more)

        step_sum = loop.step_sum
        with new_run() as session, pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "step_sum", watch)
            fit(session, quiet=True)

    def append_late(ledger):
        """Counts in memory, writes when the next step begins: as an accountant that is saved after
        the step.
        """
        if getattr(ledger, "late", False):
            ledger._steps -= 1
            append(ledger)
        ledger.late = True
        ledger._steps += 1
        return ledger._steps - 1

    append = Ledger.append
    check_torn()
    with planted(
        ledger_format, "charge_torn", lambda steps, plan: steps, "a torn line does not count"
    ):
        check_torn()
    check_order()
    with planted(Ledger, "append", append_late, "runs before it is charged"):
        check_order()


def test_ledger_tail_cut(new_store, long_plan: DPPlan) -> None:
    def check() -> None:
        store = new_store()
        path = charge(store, long_plan, 5)
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
        assert read_ledger(path).steps == 3  # a valid ledger by itself
        assert_refused(
            lambda: charge(store, long_plan, 0, resume=True), "a ledger without its last lines"
        )

    check()
    with planted(
        StoreLedgers, "_check", lambda *args: None, "a ledger without its last lines was accepted"
    ):
        check()


def test_ledger_copied_folder(new_store, long_plan: DPPlan) -> None:
    def check() -> None:
        store = new_store()
        ledgers = charge(store, long_plan, 2).parent
        shutil.copytree(ledgers, store.parent / "old")
        charge(store, long_plan, 3, resume=True)
        shutil.rmtree(ledgers)
        shutil.copytree(store.parent / "old", ledgers)
        assert_refused(
            lambda: charge(store, long_plan, 0, resume=True), "an older copy of the ledgers"
        )
        another = replace(long_plan, steps=7)
        assert_refused(
            lambda: Ledger.open(store, "b", another, resume=False).close(),
            "an older copy, by another run,",
        )

    check()
    beside = property(lambda ledgers: ledgers.folder / "own.json")
    with planted(StoreLedgers, "own_path", beside, "an older copy of the ledgers was accepted"):
        check()


def test_ledger_cleaned(tmp_path: Path, long_plan: DPPlan) -> None:
    numbers = itertools.count()

    def check() -> None:
        store = write_scenes(tmp_path / f"data{next(numbers)}" / "store", 4, 16, public=False).path
        shutil.rmtree(charge(store, long_plan, 5).parent)
        (store / "ledger_marks.json").unlink()
        assert_refused(lambda: store_account(store), "a store whose ledgers and marks are gone")

    check()
    with planted(
        StoreLedgers,
        "_check_complete",
        lambda *args: None,
        "a store whose ledgers and marks are gone was accepted",
    ):
        check()


def test_ledger_torn_excuses_all(new_store, long_plan: DPPlan) -> None:
    def check() -> None:
        store = new_store()
        path = charge(store, long_plan, 3)
        last = path.read_bytes().splitlines()[-1]
        lines = [
            encode(
                header_line(
                    "a",
                    json.loads((store / "store.json").read_text())["store_id"],
                    replace(long_plan, noise=IndependentGaussian(1e3, long_plan.max_grad_norm)),
                    [],
                )
            )
        ]
        lines.append(encode(start_line(digest(lines[-1]), resume=False)))
        for step in range(2):
            lines.append(encode(step_line(digest(lines[-1]), step)))
        for tail in (b"{", last + b"\n" + encode(recovery_line(digest(last), 3)) + b"\n"):
            path.write_bytes(b"\n".join(lines) + b"\n" + tail)
            assert_refused(
                lambda: charge(store, long_plan, 0, resume=True),
                "a ledger of another plan with a torn line",
            )
            assert_refused(
                lambda: store_account(store),
                "a ledger of another plan with a torn line, by the account,",
            )

    def by_count_alone(ledgers, run_id, contents, marks):
        assert all(contents.steps >= mark.steps for mark in marks)

    check()
    with planted(
        StoreLedgers, "_check", by_count_alone, "with a torn line, by the account, was accepted"
    ):
        check()


def test_marks_of_one_half(tmp_path: Path, long_plan: DPPlan) -> None:
    def check() -> None:
        data = tmp_path / f"family{len(list(tmp_path.iterdir()))}"
        for name in ("all", "a", "b"):
            runs.make_store(data / name)
            (data / name / "store.json").write_text(
                json.dumps({"store_id": "5701e5701e", "visibility": "private"})
            )
            StoreLedgers.of(data / name).register()
        shutil.rmtree(charge(data / "a", long_plan, 2).parent)
        for name in ("a", "b", "all"):
            assert_refused(
                lambda name=name: store_account(data / name),
                f"the loss of the ledgers of a half, by {name},",
            )

    def alone(ledgers):
        return {
            path: marks
            for path, marks in family_marks(ledgers).items()
            if path in (ledgers.own_path, ledgers.shared_path)
        }

    family_marks = StoreLedgers.family_marks
    check()
    with planted(
        StoreLedgers, "family_marks", alone, "the loss of the ledgers of a half, by b, was accepted"
    ):
        check()


def test_marks_of_the_start(tmp_path: Path, long_plan: DPPlan) -> None:
    def check() -> None:
        data = tmp_path / f"family{len(list(tmp_path.iterdir()))}"
        for name in ("a", "b"):
            runs.make_store(data / name)
            (data / name / "store.json").write_text(
                json.dumps({"store_id": "5701e5701e", "visibility": "private"})
            )
            StoreLedgers.of(data / name).register()
        path = charge(data / "a", long_plan, 5)
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
        for lost in (data / "a" / "ledger_marks.json", path.parent / "marks.json"):
            lost.unlink()
        assert_refused(
            lambda: restore_marks(data / "b"),
            "a ledger without its steps, by marks of the run's start,",
        )

    def own_and_shared(ledgers, marks, *, of_all=False):
        """Every charge goes to two files; the others have the run's start."""
        family = (
            ledgers.family_marks()
            if of_all
            else {p: read_marks(p) for p in (ledgers.own_path, ledgers.shared_path)}
        )
        for path, found in family.items():
            write_marks(path, replace(found.with_runs(marks), every_charge=True))

    check()
    with planted(
        StoreLedgers, "set_marks", own_and_shared, "by marks of the run's start, was accepted"
    ):
        check()


def _closed_form(plan: DPPlan, steps: int) -> float:
    """Of t full batches, a Gaussian of noise_multiplier / sqrt(t), computed by dp-accounting."""
    return dp_accounting.get_epsilon_gaussian(plan.noise.multiplier / steps**0.5, plan.delta)


def test_charges_lost_in_a_merge(tmp_path: Path, long_plan: DPPlan) -> None:
    stores = [
        write_scenes(tmp_path / name, 4, 16, first=10 * k, public=False).path
        for k, name in enumerate("ab")
    ]
    charge(stores[1], long_plan, 3)
    folders = map(str, itertools.count())

    def check() -> None:
        assert_refused(
            lambda: merge_stores(stores, tmp_path / next(folders), workers=1),
            "a store with charged steps",
        )

    check()
    with planted(merge, "_check_unspent", lambda stores: None, "charged steps was accepted"):
        check()


def test_epsilon_from_config(tmp_path: Path) -> None:
    privacy = replace(runs.PRIVACY, steps=8, noise_multiplier=6.0)

    def check() -> None:
        folder = tmp_path / f"case{len(list(tmp_path.iterdir()))}"
        runs.make_store(folder / "store")
        run = runs.make_run(folder / "run", folder / "store", privacy=privacy, charged=8)
        manifest = next(run.glob("checkpoints/*/manifest.json"))
        values = json.loads(manifest.read_text())
        values["config"]["privacy"]["noise_multiplier"] = 60.0
        manifest.write_text(json.dumps(values))
        said = make_statement(run)["guarantee"]["epsilon"]
        assert said == pytest.approx(_closed_form(make_plan(privacy), 8)), (
            "the statement's epsilon is not that of the plan in the ledger"
        )

    def of_config(evidence: Evidence) -> DPPlan:
        return make_plan(from_dict(PrivacyConfig, evidence.manifest["config"]["privacy"]))

    check()
    with planted(
        Evidence, "plan", property(of_config), "epsilon is not that of the plan in the ledger"
    ):
        check()


def test_statement_of_an_early_line(tmp_path: Path) -> None:
    def check() -> None:
        folder = tmp_path / f"case{len(list(tmp_path.iterdir()))}"
        runs.make_store(folder / "store")
        run = runs.make_run(
            folder / "run", folder / "store", privacy=replace(runs.PRIVACY, steps=4), charged=4
        )
        first = digest((run / "ledger.jsonl").read_bytes().splitlines()[1])
        facts = again._facts(json.loads(json.dumps(make_statement(run))))
        unknown = {"known": False, "text": history_phrases.OTHER_RUNS_UNKNOWN}
        hashes = {**facts.hashes, "ledger": first}
        made = again.compose(
            replace(facts, steps=0, updates=0, other_runs=unknown, from_store=False, hashes=hashes)
        )
        (folder / "statement.json").write_text(json.dumps(made))
        checks = verify.verify_statement(folder / "statement.json", None, folder / "store")
        assert any(check.status == "failed" for check in checks), (
            "a statement of no step passes for a run of four"
        )

    check()
    with planted(
        verify,
        "check_line",
        lambda name, *rest: ok(name, "a line of the ledger"),
        "a statement of no step passes",
    ):
        check()


def test_delta_rounded_down() -> None:
    def check() -> None:
        for delta in (1 / 120_000, 1e-5, 1 / 30_000, 2.1385e-9):
            words = guarantee.headline(
                {"epsilon": 1.0, "unit_epsilon": None, "delta": delta}, "record", []
            )
            said = words.split(" delta ")[1].split(" ")[0]
            assert float(said) >= delta * (1 - 1e-15), "the headline states a smaller delta"

    check()
    with planted(
        history_phrases, "up_delta", lambda delta: f"{delta:.3g}", "states a smaller delta"
    ):
        check()


def test_name_twice_in_a_statement(tmp_path: Path) -> None:
    runs.make_store(tmp_path / "store")
    run = runs.make_run(
        tmp_path / "run", tmp_path / "store", privacy=replace(runs.PRIVACY, steps=2), charged=2
    )
    text = json.dumps(make_statement(run))

    def check() -> None:
        (tmp_path / "statement.json").write_text(f'{{"headline": "epsilon 0.01", {text[1:]}')
        assert_refused(
            lambda: verify.verify_statement(tmp_path / "statement.json", run),
            "a statement with two headlines",
        )

    check()
    with planted(verify, "parse_json", json.loads, "a statement with two headlines was accepted"):
        check()


def test_stop_stated_as_prefix(tmp_path: Path, new_run: NewRun) -> None:
    privacy = replace(runs.PRIVACY, steps=8, noise_multiplier=6.0)

    def check_statement_and_total() -> None:
        folder = tmp_path / f"case{len(list(tmp_path.iterdir()))}"
        runs.make_store(folder / "store")
        run = runs.make_run(folder / "run", folder / "store", privacy=privacy, charged=3, saved=2)
        whole = pytest.approx(_closed_form(make_plan(privacy), 8))
        assert make_statement(run)["guarantee"]["epsilon"] == whole, (
            "the epsilon of a stopped run is not its plan's"
        )
        assert store_account(folder / "store").epsilon == whole, (
            "the epsilon of a stopped run is not its plan's"
        )

    def check_manifest() -> None:
        with new_run() as session:
            session.run.ledger.append()
            said = json.loads((save(session) / "manifest.json").read_text())["lineage"][-1][
                "guarantee"
            ]["epsilon"]
            assert said == pytest.approx(_closed_form(session.plan, session.plan.steps)), (
                "the epsilon of a stopped run is not its plan's"
            )

    for check in (check_statement_and_total, check_manifest):
        check()
        with planted(
            DPPlan,
            "stated_steps",
            lambda plan, charged: charged,
            "the epsilon of a stopped run is not its plan's",
        ):
            check()
