"""``dpvision audit``: of a run, of a recipe, of what cannot be audited."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dpvision.audit import acceptance, bound
from dpvision.cli import main
from dpvision.privacy.mechanism import IndependentGaussian
from dpvision.statement.statement import make_statement

from ..statement.runs import PRIVACY, make_run, make_store


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(acceptance, "_STEPS", 8)
    monkeypatch.setattr(bound, "_MOST", 1000)
    monkeypatch.setattr(bound, "_LEAST", 1000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    make_store(tmp_path / "store")
    return make_run(tmp_path / "run", tmp_path / "store", privacy=PRIVACY)


def test_a_finished_run_is_audited_and_its_statement_names_the_audit(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(run), "--white-box"]) == 0
    said = capsys.readouterr().out
    assert "Passed. The bound is model-based" in said and f"Result: {run / 'audit.json'}" in said
    made = json.loads((run / "audit.json").read_text())
    assert made["passed"] and made["bound"]["steps"] == made["plan"]["steps"] == 60
    (stated,) = make_statement(run)["history"]["audits"]["runs"]
    assert stated["noise"] == made["mechanism"]["noise"]["value"]


def test_a_fault_ends_with_status_1(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = IndependentGaussian.terms
    monkeypatch.setattr(
        IndependentGaussian,
        "terms",
        lambda self, step: tuple((of, 0.5 * std) for of, std in terms(self, step)),
    )
    with pytest.raises(SystemExit) as stopped:
        main(["audit", str(run), "--white-box"])
    assert stopped.value.code == 1
    said = capsys.readouterr().out
    assert "FAILED: what runs is not the mechanism of the plan. Do not train with it." in said
    assert "fails at most one audit in 188: audit again" in said
    made = json.loads((run / "audit.json").read_text())
    checks = [made["bound"], *made["bound"]["checks"].values()]
    checks += [made["mechanism"][name] for name in ("noise", "shift", "parameter")]
    assert made["false_alarm"] == pytest.approx(sum(check["false_alarm"] for check in checks))
    # Of full batches six checks, three of them of all steps, and the two sides of the bound.
    assert made["false_alarm"] == pytest.approx(5 * 1e-3 + 3 * 1e-4)


def test_a_recipe_is_audited_at_another_epsilon(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["audit", "--recipe", "vip.micro_finetune", "--white-box", "--epsilon", "4", "--steps"]
    assert main([*argv, "5", "--json", "--out", "of_recipe.json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(Path("of_recipe.json").read_text())
    assert printed["plan"]["steps"] == 5
    assert 3.99 < printed["bound"]["epsilon"] <= 4


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--recipe", "vip.micro", "--out", "a.json"], "Add --white-box"),
        (["--white-box"], "Give a run's folder, or --recipe NAME"),
        (["run", "--recipe", "vip.micro", "--white-box"], "expected one of the two"),
        (["run", "--white-box", "--epsilon", "1"], "Drop them, or use --recipe"),
        (["--recipe", "vip.mirco", "--white-box"], "Did you mean vip.micro"),
        (["--recipe", "transfer.many_steps", "--white-box"], "head on frozen features"),
        (["--recipe", "vip.micro_non_private", "--white-box"], "Choose a private recipe or run"),
        (["--recipe", "vip.micro", "--white-box", "--epsilon", "0"], "Use 1 to 8"),
        (["--recipe", "vip.micro", "--white-box", "--steps", "0"], "Plan one step or more"),
        (["none", "--white-box"], "no such folder"),
        ([".", "--white-box"], "holds no run"),
    ],
)
def test_what_cannot_be_audited_is_refused(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", *argv]) == 2
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def test_a_run_without_a_guarantee_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_store(tmp_path / "store")
    plain = replace(PRIVACY, guarantee="none", noise_multiplier=None, max_grad_norm=None)
    run = make_run(tmp_path / "run", tmp_path / "store", privacy=plain)
    assert main(["audit", str(run), "--white-box"]) == 2
    assert "expected guarantee=dp" in capsys.readouterr().err
