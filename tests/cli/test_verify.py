"""``dpvision verify``: a true statement passes, every altered figure is found, and what cannot be
checked is said.
"""

import json
import math
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "statement"))
import runs
from runs import POISSON, PRIVACY, make_run, make_store

from dpvision.cli import main
from dpvision.config.unit import Unit
from dpvision.errors import DataError
from dpvision.files import write_json
from dpvision.privacy import accountant
from dpvision.privacy.ledger import Ledger, set_cap, store_account
from dpvision.privacy.plan import make_plan
from dpvision.privacy.sampling import Poisson
from dpvision.statement import other_runs as other_runs_module
from dpvision.statement import verify as verify_module
from dpvision.statement.check import Check
from dpvision.statement.statement import make_statement, write_statement
from dpvision.statement.verify import verify_statement

pytestmark = pytest.mark.usefixtures("gates_once")

SMALL = replace(PRIVACY, steps=4, noise_multiplier=3.0)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a store, a run on it, and its statement; not to be changed."""
    folder = tmp_path_factory.mktemp("verify")
    make_store(folder / "store")
    run = make_run(folder / "run", folder / "store", privacy=POISSON, charged=12)
    write_json(run / "scores.json", runs.PUBLIC_SCORES)
    write_statement(run)
    return folder


def by_name(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.status for check in checks}


def edited(folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of the statement, altered."""
    statement = json.loads((folder / "run" / "statement.json").read_text())
    change(statement)
    path = tmp_path / "statement.json"
    path.write_text(json.dumps(statement))
    return path


def test_a_true_statement_passes_every_check(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, run, store = (str(finished / name) for name in ("run/statement.json", "run", "store"))
    assert main(["verify", path, "--run", run, "--store", store]) == 0
    printed = capsys.readouterr().out
    assert "\nfailed" not in printed and printed.endswith("\n\nNothing failed.\n")
    assert main(["verify", path, "--run", run, "--store", store, "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)
    assert checks["failed"] == 0 and {c["name"] for c in checks["checks"]} >= {
        "schema",
        "epsilon",
        "weights",
        "ledger",
        "lineage",
        "store",
    }


def test_without_run_and_store_it_checks_the_figures_and_says_what_it_could_not(
    finished: Path,
) -> None:
    checks = by_name(verify_statement(finished / "run" / "statement.json"))
    assert (
        checks["schema"]
        == checks["epsilon"]
        == checks["figures"]
        == checks["privacy profile"]
        == "ok"
    )
    unknown = [name for name, status in checks.items() if status == "not checked"]
    assert unknown == ["run, weights, config, code, ledger, lineage, scores", "store, other runs"]


def leaves(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    if not isinstance(value, dict | list):
        yield where, value
    for key, inner in items:
        yield from leaves(inner, (*where, key))


def test_no_leaf_of_the_statement_can_be_altered_unnoticed(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statement = json.loads((finished / "run" / "statement.json").read_text())
    evidence = verify_module.read_evidence(finished / "run", finished / "store")
    again, account = (
        verify_module.statement_of(evidence, "not_covered"),
        store_account(finished / "store"),
    )
    for module, name, made in (
        (verify_module, "statement_of", again),
        (verify_module, "read_evidence", evidence),
        (other_runs_module, "store_account", account),
    ):
        monkeypatch.setattr(
            module, name, lambda *args, made=made: made
        )  # speed: they are the same each time
    monkeypatch.setattr(
        verify_module, "check_epsilons", lambda statement: []
    )  # tested below, without the help of the other accountant
    for number, (where, value) in enumerate(leaves(statement)):
        if where[:2] in (("guarantee", "privacy_profile"), ("settings", "model")) and number % 10:
            continue  # one in ten of the many
        altered = json.loads(json.dumps(statement))
        inner = altered
        for key in where[:-1]:
            inner = inner[key]
        inner[where[-1]] = (
            not value
            if isinstance(value, bool)
            else value * 0.9 + 1
            if isinstance(value, int | float)
            else f"{value}x"
        )
        path = tmp_path / "altered.json"
        path.write_text(json.dumps(altered))
        checks = verify_statement(path, finished / "run", finished / "store")
        assert any(check.status == "failed" for check in checks), where


@pytest.mark.parametrize(
    ("where", "check"),
    [
        (("guarantee", "epsilon"), "epsilon"),
        (("guarantee", "this_run", "epsilon"), "epsilon of this run"),
        (("guarantee", "epsilon_unamplified"), "without amplification"),
    ],
)
def test_an_epsilon_made_smaller_is_found_without_any_file(
    finished: Path, tmp_path: Path, where: tuple[str, ...], check: str
) -> None:
    def smaller(statement: dict[str, Any]) -> None:
        inner = statement
        for key in where[:-1]:
            inner = inner[key]
        inner[where[-1]] *= 0.97

    assert by_name(verify_statement(edited(finished, tmp_path, smaller)))[check] == "failed"


def test_noise_steps_and_delta_made_to_fit_a_smaller_epsilon_are_found_with_the_run(
    finished: Path, tmp_path: Path
) -> None:
    plan = make_plan(replace(POISSON, noise_multiplier=9.0))

    def consistent(statement: dict[str, Any]) -> None:
        """A statement that agrees with itself in everything, for ten times the noise."""
        store = tmp_path / "other" / "store"
        make_store(store)
        run = make_run(
            tmp_path / "other" / "run",
            store,
            privacy=replace(POISSON, noise_multiplier=9.0),
            charged=12,
        )
        made = write_statement(run).read_text()
        theirs, ours = (
            s["history"]["lineage"][-1]["store_id"] for s in (json.loads(made), statement)
        )
        made = json.loads(made.replace(theirs, ours).replace(theirs[:12], ours[:12]))
        statement |= made | {"hashes": statement["hashes"]}

    path = edited(finished, tmp_path, consistent)
    assert plan.epsilon is not None
    assert (
        "failed" not in by_name(verify_statement(path)).values()
    )  # nothing in it contradicts itself
    found = by_name(verify_statement(path, finished / "run"))
    assert found["ledger"] == "failed" and found["lineage"] == "ok"
    assert by_name(verify_statement(path, None, finished / "store"))["store"] == "failed"


def test_a_statement_of_one_run_with_the_files_of_another_fails(
    finished: Path, tmp_path: Path
) -> None:
    make_store(tmp_path / "store")
    other = make_run(
        tmp_path / "run",
        tmp_path / "store",
        privacy=SMALL,
        charged=4,
        run_id="0ther5eed0ther5eed"[:16],
    )
    found = by_name(
        verify_statement(finished / "run" / "statement.json", other, tmp_path / "store")
    )
    for name in ("run", "weights", "checkpoint", "ledger", "store"):
        assert found[name] == "failed", name
    # The other run's files under this run's name.
    mixed = tmp_path / "mixed"
    shutil.copytree(finished / "run", mixed)
    shutil.copy(other / "ledger.jsonl", mixed / "ledger.jsonl")
    assert (
        by_name(verify_statement(finished / "run" / "statement.json", mixed))["ledger"] == "failed"
    )


def test_the_released_run_folder_is_all_that_verify_needs_and_less_is_named(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished / "run", tmp_path / "run", ignore=lambda *_: ["confidential"])
    statement = str(tmp_path / "run" / "statement.json")
    assert main(["verify", statement, "--run", str(tmp_path / "run")]) == 0
    assert "Nothing failed" in capsys.readouterr().out
    for name in ("report.html", "config.json"):
        (tmp_path / "run" / name).unlink(missing_ok=True)
    with pytest.raises(SystemExit):
        main(["verify", statement, "--run", str(tmp_path / "run")])
    said = capsys.readouterr().out
    assert f"{tmp_path / 'run'}: no config.json or no run.json; expected all of the run's" in said
    assert "folder but confidential/. Ask whoever released" in said and "--resume" not in said


def test_an_export_is_not_taken_for_a_run_that_was_altered(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """verify sent its receiver to a check that ended with "do not rely on this statement"."""
    folder = tmp_path / "exported"
    main(["export", str(finished / "run"), str(folder), "--to", "safetensors"])
    assert main(["verify", str(folder)]) == 2
    statement = str(folder / "statement.json")
    assert f"Use dpvision verify {statement}" in (said := capsys.readouterr().err)
    assert "--run" not in said
    assert main(["verify", statement, "--run", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "Nothing failed" in said and "an export: its statement has the hashes" in said


def test_altered_weights_a_broken_chain_and_a_missing_run_fail(
    finished: Path, tmp_path: Path
) -> None:
    statement = finished / "run" / "statement.json"
    run = tmp_path / "run"
    shutil.copytree(finished / "run", run)
    weights = next(run.glob("checkpoints/*/model.safetensors"))
    blob = bytearray(weights.read_bytes())
    blob[-1] ^= 1
    weights.write_bytes(bytes(blob))
    found = by_name(verify_statement(statement, run))
    assert found["weights"] == found["lineage"] == "failed"
    lines = (run / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (run / "ledger.jsonl").write_bytes(b"".join(lines[:5] + lines[6:]))
    assert by_name(verify_statement(statement, run))["ledger"] == "failed"
    (run / "run.json").unlink()
    assert by_name(verify_statement(statement, run))["run"] == "failed"


def test_steps_charged_after_the_statement_are_said_and_steps_before_it_are_missed(
    finished: Path, tmp_path: Path
) -> None:
    make_store(tmp_path / "store")
    run = make_run(tmp_path / "run", tmp_path / "store", privacy=replace(SMALL, steps=8), charged=4)
    path = write_statement(run)
    run_id = json.loads(path.read_text())["run_id"]
    kept = (tmp_path / "LEDGERS", tmp_path / "store")
    for folder in kept:
        shutil.copytree(folder, tmp_path / "kept" / folder.name)
    with Ledger.open(
        tmp_path / "store", run_id, make_plan(replace(SMALL, steps=8)), resume=True
    ) as ledger:
        ledger.append()
    checks = {check.name: check for check in verify_statement(path, run, tmp_path / "store")}
    assert (
        checks["store, last line"].status == "ok"
        and "charged since: 1" in checks["store, last line"].detail
    )
    later = write_statement(run)
    for folder in kept:
        shutil.rmtree(folder)
        (tmp_path / "kept" / folder.name).rename(folder)
    assert by_name(verify_statement(later, run, tmp_path / "store"))["store, last line"] == "failed"


def another_run(store: Path, steps: int = 1) -> None:
    with Ledger.open(store, "another", make_plan(SMALL), resume=False) as ledger:
        for _ in range(steps):
            ledger.append()


def failed_checks(path: Path, *where: Path) -> list[str]:
    return [check.name for check in verify_statement(path, *where) if check.status == "failed"]


def test_another_run_on_the_store_is_said(finished: Path, tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    run = make_run(tmp_path / "run", tmp_path / "store", privacy=SMALL, charged=4)
    path = write_statement(run)
    another_run(tmp_path / "store")
    checks = {check.name: check for check in verify_statement(path, run, tmp_path / "store")}
    assert (
        checks["other runs"].status == "unverified"
        and "made since, or left out" in checks["other runs"].detail
    )
    assert (
        "failed" not in {check.status for check in checks.values()}
        and checks["written again"].status == "ok"
    )
    assert "the same but for history.other_runs, which" in checks["written again"].detail


OTHER_RUNS_ALTERED: dict[str, Callable[[dict[str, Any]], object]] = {
    "total": lambda others: others.update(epsilon_total=0.9 * others["epsilon_total"]),
    "no total": lambda others: others.update(epsilon_total=None),
    "filter": lambda others: others.update(epsilon_filter=0.5 * others["epsilon_total"]),
    "no filter": lambda others: others.update(epsilon_filter=None),
    "delta": lambda others: others.update(delta=2 * others["delta"]),
    "epsilon of a run": lambda others: others["runs"][0].update(
        epsilon=0.9 * others["runs"][0]["epsilon"]
    ),
    "steps of a run": lambda others: others["runs"][0].update(
        steps=others["runs"][0]["steps"] + 1000
    ),
    "steps of this run": lambda others: [
        run.update(steps=run["steps"] - 1) for run in others["runs"] if run["run_id"] != "another"
    ],
    "guarantee of a run": lambda others: others["runs"][0].update(
        guarantee="none", epsilon=None, delta=None
    ),
    "a run named twice": lambda others: others["runs"].append(others["runs"][0]),
    "an unknown run": lambda others: others["runs"][0].update(run_id="unknown"),
    "text": lambda others: others.update(
        text=others["text"].replace("1 other run", "No other run")
    ),
    "totals left out": lambda others: others.pop("epsilon_total"),
    "person": lambda others: others.update(unit_epsilon_total=0.1),
}


@pytest.mark.parametrize("altered", OTHER_RUNS_ALTERED)
@pytest.mark.parametrize("later", [False, True])
def test_altered_figures_of_other_runs_are_found_also_after_a_later_run(
    two_runs: Path, tmp_path: Path, later: bool, altered: str
) -> None:
    folder = two_runs / ("later" if later else "now")
    path = edited(
        folder,
        tmp_path,
        lambda statement: OTHER_RUNS_ALTERED[altered](statement["history"]["other_runs"]),
    )
    assert "other runs" in failed_checks(path, folder / "run", folder / "store")


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stores with two runs and the statement of one; on "later" a third run was made since."""
    root = tmp_path_factory.mktemp("others")
    for folder in (root / "now", root / "later"):
        make_store(folder / "store")
        run = make_run(folder / "run", folder / "store", privacy=SMALL, charged=4)
        another_run(folder / "store", steps=2)
        write_statement(run)
    with Ledger.open(root / "later" / "store", "third", make_plan(SMALL), resume=False) as ledger:
        ledger.append()
    return root


@pytest.mark.parametrize("grown", [False, True])
def test_the_epsilon_of_a_person_of_every_run_is_checked(tmp_path: Path, grown: bool) -> None:
    store, run, people = tmp_path / "store", tmp_path / "run", {"num_units": 25_000}
    drawn = replace(SMALL, sampling_unit="person", expected_batch_size=25_000, **people)
    records = replace(SMALL, max_records_per_unit=2, **people)
    make_store(store)
    make_run(tmp_path / "first", store, privacy=records, charged=4, run_id="another")
    path = write_statement(make_run(run, store, privacy=drawn, charged=4))
    if grown:
        with Ledger.open(store, "third", make_plan(drawn), resume=False):
            pass
    said = "not checked" if grown else "ok"
    assert by_name(verify_statement(path, run, store))["other runs"] == said

    def with_another(change: Callable[[dict[str, Any]], object]) -> dict[str, str]:
        def change_it(statement: dict[str, Any]) -> None:
            for one in statement["history"]["other_runs"]["runs"]:
                change(one) if one["run_id"] == "another" else None

        return by_name(verify_statement(edited(tmp_path, tmp_path, change_it), run, store))

    altered = (lambda one: one["epsilon"], lambda one: None, lambda one: 1.5 * one["unit_epsilon"])
    for value in altered:
        made = with_another(lambda one, value=value: one.update(unit_epsilon=value(one)))
        assert made["other runs"] == "failed"
    older = with_another(lambda one: one.pop("unit_epsilon"))
    assert older["other runs"] == "not checked" and "failed" not in older.values()


@pytest.mark.parametrize("folder", ["now", "later"])
def test_a_true_statement_about_two_runs_passes(two_runs: Path, folder: str) -> None:
    assert (
        failed_checks(
            two_runs / folder / "run" / "statement.json",
            two_runs / folder / "run",
            two_runs / folder / "store",
        )
        == []
    )


def test_a_cap_set_later_and_a_store_given_later_are_no_failure(tmp_path: Path) -> None:
    store, run = tmp_path / "store", tmp_path / "run"
    make_store(store)
    make_run(run, store, privacy=SMALL, charged=4)
    store.rename(tmp_path / "away")
    path = write_statement(run)
    (tmp_path / "away").rename(store)
    assert json.loads(path.read_text())["history"]["other_runs"]["known"] is False
    checks = by_name(verify_statement(path, run, store))
    assert (
        "failed" not in checks.values()
        and checks["written again"] == "ok"
        and checks["other runs"] == "not checked"
    )
    path = write_statement(run)
    set_cap(store, 20.0, 1e-5)
    checks = by_name(verify_statement(path, run, store))
    assert (
        "failed" not in checks.values()
        and checks["written again"] == "ok"
        and checks["other runs"] == "not checked"
    )


def test_a_score_added_later_is_no_failure_and_an_altered_one_is(
    finished: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished / "run", run)
    write_json(
        run / "scores.json",
        [*runs.PUBLIC_SCORES, runs.score_entry("encoder", 0.6, "ridge probe, mean")],
    )
    assert failed_checks(run / "statement.json", run, finished / "store") == []

    def better(statement: dict[str, Any]) -> None:
        statement["scores"][0]["value"] += 0.1

    assert failed_checks(edited(finished, tmp_path, better), run, finished / "store") == ["scores"]


def test_what_the_model_answers_cannot_be_altered_beside_the_weights(
    finished: Path, tmp_path: Path
) -> None:
    run, path, name = tmp_path / "run", tmp_path / "run" / "statement.json", "manifest, calibration"
    shutil.copytree(finished / "run", run)

    def found(folder: Path = run) -> Check:
        return next(check for check in verify_statement(path, folder) if check.name == name)

    assert found().status == "ok" and "not calibrated" in found().detail
    write_json(run / "calibration.json", {"temperature": 1.5})
    assert found().status == "failed"
    assert "calibration.json: not in the statement: " in found().detail
    assert "calibrated since, the statement was written before: write it again" in found().detail
    write_json(path, make_statement(run, store_dir=finished / "store"))
    assert found() == Check(name, "ok", "files with the hashes of the statement")
    assert "failed" not in by_name(verify_statement(path, run)).values()
    write_json(run / "calibration.json", {"temperature": 40})
    assert "calibration.json: another hash" in found().detail and found().status == "failed"
    (run / "calibration.json").unlink()
    assert "calibration.json: missing" in found().detail and found().status == "failed"

    path.write_bytes((finished / "run" / "statement.json").read_bytes())
    manifest = next(run.glob("checkpoints/*/manifest.json"))
    write_json(manifest, json.loads(manifest.read_text()) | {"class_names": ["ill", "well"]})
    assert "manifest.json: another hash" in found().detail and found().status == "failed"
    older = json.loads(path.read_text())
    del older["hashes"]["manifest"], older["hashes"]["calibration"]
    write_json(path, older)
    assert found().status == "not checked" and "write it again" in found().detail


def test_a_run_without_a_guarantee_on_a_public_store_has_no_epsilon_to_check(
    tmp_path: Path,
) -> None:
    make_store(tmp_path / "store", "public")
    bare = replace(SMALL, guarantee="none", noise_multiplier=None, max_grad_norm=None)
    path = write_statement(make_run(tmp_path / "run", tmp_path / "store", privacy=bare, charged=2))
    checks = by_name(verify_statement(path, tmp_path / "run", tmp_path / "store"))
    assert "failed" not in checks.values() and checks["epsilon"] == "not checked"


def test_the_epsilon_of_a_person_of_several_records_is_recomputed(
    finished: Path, tmp_path: Path
) -> None:
    event = Poisson(Unit(1), 0.1).event(0.9, runs.STEPS, 3)
    exact = accountant.epsilon(event, 1e-5, 1e-3)
    for factor, status in ((1.0, "ok"), (0.97, "failed")):

        def person(statement: dict[str, Any], stated: float = factor * exact) -> None:
            statement["guarantee"] |= {"unit_epsilon": stated}
            statement["guarantee"]["composition"]["methods"]["unit_epsilon"] = "one run"
            statement["history"]["lineage"][-1]["guarantee"]["plan"]["max_records_per_unit"] = 3

        assert (
            by_name(verify_statement(edited(finished, tmp_path, person)))["epsilon of a person"]
            == status
        )


def altered_headline(statement: dict[str, Any], old: str, new: str) -> None:
    assert old in statement["headline"]
    statement["headline"] = statement["headline"].replace(old, new)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("delta 1e-5", "delta 1e-20"),
        ("each single image", "each person, with all their images"),
        ("for each", "now for each"),
    ],
)
def test_a_headline_of_another_delta_or_unit_is_found_without_any_file(
    finished: Path, tmp_path: Path, old: str, new: str
) -> None:
    path = edited(finished, tmp_path, lambda statement: altered_headline(statement, old, new))
    assert failed_checks(path) == ["figures"]


def test_an_epsilon_of_a_person_needs_declared_people(finished: Path, tmp_path: Path) -> None:
    def person(statement: dict[str, Any]) -> None:
        guarantee = statement["guarantee"]
        guarantee |= {"unit_epsilon": guarantee["epsilon"], "unit_attack": guarantee["attack"]}
        altered_headline(statement, "each single image", "each person, with all their images")

    assert failed_checks(edited(finished, tmp_path, person)) == ["figures"]


def own(statement: dict[str, Any]) -> dict[str, Any]:
    return statement["history"]["lineage"][-1]["guarantee"]


BAD_PLANS: dict[str, Callable[[dict[str, Any]], object]] = {
    "noise 0": lambda s: (
        own(s)["plan"].update(noise_multiplier=0),
        s["mechanism"].update(noise_multiplier=0, noise_std=0),
    ),
    "noise in words": lambda s: own(s)["plan"].update(noise_multiplier="a"),
    "rate 2": lambda s: own(s)["plan"].update(sample_rate=2.0),
    "another rate": lambda s: own(s)["plan"].update(expected_batch_size=100_000.0, sample_rate=2.0),
    "no images": lambda s: own(s)["plan"].update(dataset_size=0),
    "delta 0": lambda s: own(s)["plan"].update(delta=0.0),
    "no guarantee": lambda s: own(s)["plan"].update(guarantee="none", epsilon=None),
    "steps -1": lambda s: s["mechanism"].update(steps_executed=-1),
    "too many steps": lambda s: (
        s["mechanism"].update(steps_executed=1000),
        own(s).update(steps=1000),
    ),
    "no plan": lambda s: own(s).update(plan={}),
    "no guarantee of the run": lambda s: s["history"]["lineage"][-1].update(guarantee=None),
    "epsilon beyond floats": lambda s: s["guarantee"].update(epsilon=1e308),
    "people without a number": lambda s: s["scope"]["unit"].update(sampling_unit="person"),
}


@pytest.mark.parametrize("altered", BAD_PLANS)
def test_what_is_no_plan_fails_the_figures_and_raises_nothing(
    finished: Path, tmp_path: Path, altered: str
) -> None:
    assert "figures" in failed_checks(edited(finished, tmp_path, BAD_PLANS[altered]))


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_statement_with_a_number_that_is_not_finite_is_not_read(
    finished: Path, tmp_path: Path, number: float
) -> None:
    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda s: own(s)["plan"].update(noise_multiplier=number),
        lambda s: s["guarantee"].update(delta=number),
    ]
    for change in changes:
        path = edited(finished, tmp_path, change)
        with pytest.raises(DataError, match="not finite"):
            verify_statement(path)
        assert main(["verify", str(path)]) == 2


def test_every_field_of_a_plan_that_is_missing_is_found(finished: Path, tmp_path: Path) -> None:
    for field in own(json.loads((finished / "run" / "statement.json").read_text()))["plan"]:
        if field != "clipping":  # plans of older versions lack it
            assert "figures" in failed_checks(
                edited(finished, tmp_path, lambda s, field=field: own(s)["plan"].pop(field))
            ), field


def test_exit_status_is_1_for_a_failed_check_and_2_for_bad_input(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = edited(finished, tmp_path, lambda statement: statement["guarantee"].update(epsilon=0.5))
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(path)])
    assert stop.value.code == 1
    assert "checks FAILED: do not rely on this statement." in capsys.readouterr().out
    (tmp_path / "no.json").write_text("{")
    for arguments in (
        [str(tmp_path / "no.json")],
        [str(tmp_path / "missing.json")],
        [str(path), "--run", str(tmp_path / "none")],
    ):
        assert main(["verify", *arguments]) == 2
        assert "error: verify:" in capsys.readouterr().err
    (tmp_path / "no.json").write_text('{"format": "dpvision-statement-1"}')
    with pytest.raises(SystemExit):
        main(["verify", str(tmp_path / "no.json")])
    assert "does not fit its schema" in capsys.readouterr().out


def lineage_of(
    plan_of: Any, steps: int, store_id: str, visibility: str = "private"
) -> dict[str, Any]:
    plan = make_plan(plan_of)
    spent = plan.spent(steps)
    guarantee = {
        "epsilon": spent.epsilon,
        "epsilon_rdp": spent.epsilon_rdp,
        "delta": plan.delta,
        "steps": steps,
        "plan": plan.to_dict(),
    }
    return {
        "store_id": store_id,
        "visibility": visibility,
        "licence": None,
        "run_id": "parent",
        "guarantee": guarantee,
    }


@pytest.mark.parametrize("tuning", ["none", "not_covered"])
def test_parents_are_composed_and_one_left_out_is_found(tmp_path: Path, tuning: str) -> None:
    store_id = make_store(tmp_path / "store")
    parents = (
        lineage_of(replace(SMALL, steps=9), 9, store_id),
        lineage_of(replace(SMALL, noise_multiplier=5.0), 4, "another5706e"),
    )
    with Ledger.open(
        tmp_path / "store", "parent", make_plan(replace(SMALL, steps=9)), resume=False, lineage=[]
    ) as ledger:
        for _ in range(9):
            ledger.append()
    run = make_run(tmp_path / "run", tmp_path / "store", privacy=SMALL, charged=4, parents=parents)
    path = write_statement(run, tuning=tuning)
    checks = by_name(verify_statement(path, run, tmp_path / "store"))
    assert (
        "failed" not in checks.values()
        and checks["epsilon"] == checks["epsilon on store another5"] == "ok"
    )

    for change in (
        lambda statement: statement.update(other_stores=[]),
        lambda statement: statement["other_stores"].append(statement["other_stores"][0]),
        lambda statement: statement["other_stores"][0].update(store_id=store_id),
        lambda statement: statement["other_stores"][0].update(delta=1e-3),
    ):
        assert "figures" in failed_checks(edited(tmp_path, tmp_path, change))
    statement = json.loads(path.read_text())
    statement["guarantee"]["epsilon"] = statement["guarantee"]["this_run"]["epsilon"]
    (tmp_path / "alone.json").write_text(json.dumps(statement))
    assert by_name(verify_statement(tmp_path / "alone.json"))["epsilon"] == "failed"
    statement = json.loads(path.read_text())
    statement["history"]["lineage"].pop(0)
    (tmp_path / "fewer.json").write_text(json.dumps(statement))
    assert by_name(verify_statement(tmp_path / "fewer.json", run))["lineage"] == "failed"
    manifest = next(run.glob("checkpoints/*/manifest.json"))
    values = json.loads(manifest.read_text())
    values["lineage"].pop(0)
    manifest.write_text(json.dumps(values))
    assert by_name(verify_statement(path, run))["lineage"] == "failed"
