"""``dpvision verify``: a true statement passes, every altered figure is found, and what cannot be checked is said."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
import runs
from runs import POISSON, PRIVACY, make_run, make_store

from dpvision.cli import main
from dpvision.files import write_json
from dpvision.privacy import accountant, mechanism
from dpvision.privacy.ledger import Ledger
from dpvision.privacy.plan import make_plan
from dpvision.report import verify as verify_module
from dpvision.report.recompute import Check
from dpvision.report.statement import write_statement
from dpvision.report.verify import verify_statement

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


def test_a_true_statement_passes_every_check(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, run, store = (str(finished / name) for name in ("run/statement.json", "run", "store"))
    assert main(["verify", path, "--run", run, "--store", store]) == 0
    printed = capsys.readouterr().out
    assert "\nfailed" not in printed and printed.endswith("Nothing failed. 1 could not be checked.\n")  # RDP and the attack terms
    assert main(["verify", path, "--run", run, "--store", store, "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)
    assert checks["failed"] == 0 and {c["name"] for c in checks["checks"]} >= {"schema", "epsilon", "weights", "ledger", "lineage", "store"}


def test_without_run_and_store_it_checks_the_figures_and_says_what_it_could_not(finished: Path) -> None:
    checks = by_name(verify_statement(finished / "run" / "statement.json"))
    assert checks["schema"] == checks["epsilon"] == checks["figures"] == checks["privacy profile"] == "ok"
    unknown = [name for name, status in checks.items() if status == "not checked"]
    assert unknown == ["RDP, attacks", "run, weights, config, code, ledger, lineage, scores", "store, other runs"]


def leaves(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not isinstance(value, dict | list):
        yield where, value
    for key, inner in items:
        yield from leaves(inner, (*where, key))


def test_no_leaf_of_the_statement_can_be_altered_unnoticed(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statement = json.loads((finished / "run" / "statement.json").read_text())
    evidence = verify_module.read_evidence(finished / "run", finished / "store")
    again, account = verify_module.statement_of(evidence, "not_covered"), verify_module.store_account(finished / "store")
    for name, value in {"statement_of": again, "read_evidence": evidence, "store_account": account}.items():
        monkeypatch.setattr(verify_module, name, lambda *args, value=value: value)  # speed: they are the same each time
    monkeypatch.setattr(verify_module, "check_epsilons", lambda statement: [])  # tested below, without the help of the other accountant
    for number, (where, value) in enumerate(leaves(statement)):
        if where[:2] in (("guarantee", "privacy_profile"), ("settings", "model")) and number % 10:
            continue  # one in ten of the many
        altered = json.loads(json.dumps(statement))
        inner = altered
        for key in where[:-1]:
            inner = inner[key]
        inner[where[-1]] = not value if isinstance(value, bool) else value * 0.9 + 1 if isinstance(value, int | float) else f"{value}x"
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
def test_an_epsilon_made_smaller_is_found_without_any_file(finished: Path, tmp_path: Path, where: tuple[str, ...], check: str) -> None:
    def smaller(statement: dict[str, Any]) -> None:
        inner = statement
        for key in where[:-1]:
            inner = inner[key]
        inner[where[-1]] *= 0.97

    assert by_name(verify_statement(edited(finished, tmp_path, smaller)))[check] == "failed"


def test_noise_steps_and_delta_made_to_fit_a_smaller_epsilon_are_found_with_the_run(finished: Path, tmp_path: Path) -> None:
    plan = make_plan(replace(POISSON, noise_multiplier=9.0))

    def consistent(statement: dict[str, Any]) -> None:
        """A statement that agrees with itself in everything, for ten times the noise."""
        store = tmp_path / "other" / "store"
        make_store(store)
        run = make_run(tmp_path / "other" / "run", store, privacy=replace(POISSON, noise_multiplier=9.0), charged=12)
        made = json.loads(write_statement(run).read_text())
        for key in ("store_id",):
            made["history"]["lineage"][-1][key] = statement["history"]["lineage"][-1][key]
        statement |= made | {"hashes": statement["hashes"]}

    path = edited(finished, tmp_path, consistent)
    assert plan.epsilon is not None
    assert "failed" not in by_name(verify_statement(path)).values()  # nothing in it contradicts itself
    found = by_name(verify_statement(path, finished / "run"))
    assert found["ledger"] == "failed" and found["lineage"] == "ok"
    assert by_name(verify_statement(path, None, finished / "store"))["store"] == "failed"


def test_a_statement_of_one_run_with_the_files_of_another_fails(finished: Path, tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    other = make_run(tmp_path / "run", tmp_path / "store", privacy=SMALL, charged=4, run_id="0ther5eed0ther5eed"[:16])
    found = by_name(verify_statement(finished / "run" / "statement.json", other, tmp_path / "store"))
    for name in ("run", "weights", "checkpoint", "ledger", "store"):
        assert found[name] == "failed", name
    # The other run's files under this run's name.
    mixed = tmp_path / "mixed"
    shutil.copytree(finished / "run", mixed)
    shutil.copy(other / "ledger.jsonl", mixed / "ledger.jsonl")
    assert by_name(verify_statement(finished / "run" / "statement.json", mixed))["ledger"] == "failed"


def test_altered_weights_a_broken_chain_and_a_missing_run_fail(finished: Path, tmp_path: Path) -> None:
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


def test_steps_charged_after_the_statement_are_said_and_steps_before_it_are_missed(finished: Path, tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    run = make_run(tmp_path / "run", tmp_path / "store", privacy=replace(SMALL, steps=8), charged=4)
    path = write_statement(run)
    run_id = json.loads(path.read_text())["run_id"]
    kept = (tmp_path / "LEDGERS", tmp_path / "store")
    for folder in kept:
        shutil.copytree(folder, tmp_path / "kept" / folder.name)
    with Ledger.open(tmp_path / "store", run_id, make_plan(replace(SMALL, steps=8)), resume=True) as ledger:
        ledger.append()
    checks = {check.name: check for check in verify_statement(path, run, tmp_path / "store")}
    assert checks["store, last line"].status == "ok" and "charged since: 1" in checks["store, last line"].detail
    later = write_statement(run)
    for folder in kept:
        shutil.rmtree(folder)
        (tmp_path / "kept" / folder.name).rename(folder)
    assert by_name(verify_statement(later, run, tmp_path / "store"))["store, last line"] == "failed"


def test_another_run_on_the_store_is_said(finished: Path, tmp_path: Path) -> None:
    make_store(tmp_path / "store")
    run = make_run(tmp_path / "run", tmp_path / "store", privacy=SMALL, charged=4)
    path = write_statement(run)
    with Ledger.open(tmp_path / "store", "another", make_plan(SMALL), resume=False) as ledger:
        ledger.append()
    check = next(c for c in verify_statement(path, run, tmp_path / "store") if c.name == "other runs")
    assert check.status == "not checked" and "made since, or left out" in check.detail


def test_a_run_without_a_guarantee_on_a_public_store_has_no_epsilon_to_check(tmp_path: Path) -> None:
    make_store(tmp_path / "store", "public")
    bare = replace(SMALL, guarantee="none", noise_multiplier=None, max_grad_norm=None)
    path = write_statement(make_run(tmp_path / "run", tmp_path / "store", privacy=bare, charged=2))
    checks = by_name(verify_statement(path, tmp_path / "run", tmp_path / "store"))
    assert "failed" not in checks.values() and checks["epsilon"] == "not checked"


def test_the_epsilon_of_a_person_of_several_records_is_recomputed(finished: Path, tmp_path: Path) -> None:
    event = mechanism.unit_event("poisson", 0.1, 0.9, 12, 3)
    exact = accountant.epsilon(event, 1e-5, 1e-3)
    for factor, status in ((1.0, "ok"), (0.97, "failed")):

        def person(statement: dict[str, Any], stated: float = factor * exact) -> None:
            statement["guarantee"] |= {"unit_epsilon": stated}
            statement["guarantee"]["composition"]["methods"]["unit_epsilon"] = "one run"
            statement["history"]["lineage"][-1]["guarantee"]["plan"]["max_records_per_unit"] = 3

        assert by_name(verify_statement(edited(finished, tmp_path, person)))["epsilon of a person"] == status


def test_exit_status_is_1_for_a_failed_check_and_2_for_bad_input(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = edited(finished, tmp_path, lambda statement: statement["guarantee"].update(epsilon=0.5))
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(path)])
    assert stop.value.code == 1
    assert "checks FAILED: do not rely on this statement." in capsys.readouterr().out
    (tmp_path / "no.json").write_text("{")
    for arguments in ([str(tmp_path / "no.json")], [str(tmp_path / "missing.json")], [str(path), "--run", str(tmp_path / "none")]):
        assert main(["verify", *arguments]) == 2
        assert "error: verify:" in capsys.readouterr().err
    (tmp_path / "no.json").write_text('{"format": "dpvision-statement-1"}')
    with pytest.raises(SystemExit):
        main(["verify", str(tmp_path / "no.json")])
    assert "does not fit its schema" in capsys.readouterr().out


def lineage_of(plan_of: Any, steps: int, store_id: str, visibility: str = "private") -> dict[str, Any]:
    plan = make_plan(plan_of)
    spent = plan.spent(steps)
    guarantee = {"epsilon": spent.epsilon, "epsilon_rdp": spent.epsilon_rdp, "delta": plan.delta, "steps": steps, "plan": plan.to_dict()}
    return {"store_id": store_id, "visibility": visibility, "licence": None, "run_id": "parent", "guarantee": guarantee}


@pytest.mark.parametrize("tuning", ["none", "not_covered"])
def test_parents_are_composed_and_one_left_out_is_found(tmp_path: Path, tuning: str) -> None:
    store_id = make_store(tmp_path / "store")
    parents = (lineage_of(replace(SMALL, steps=9), 9, store_id), lineage_of(replace(SMALL, noise_multiplier=5.0), 4, "another5706e"))
    with Ledger.open(tmp_path / "store", "parent", make_plan(replace(SMALL, steps=9)), resume=False, lineage=[]) as ledger:
        for _ in range(9):
            ledger.append()
    run = make_run(tmp_path / "run", tmp_path / "store", privacy=SMALL, charged=4, parents=parents)
    path = write_statement(run, tuning=tuning)
    checks = by_name(verify_statement(path, run, tmp_path / "store"))
    assert "failed" not in checks.values() and checks["epsilon"] == checks["epsilon on store another5"] == "ok"

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
