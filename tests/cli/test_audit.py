"""``dpvision audit``: of a run, of a recipe, of what cannot be audited."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dpvision.audit
from dpvision.audit import Parts, acceptance, black_box, bound, finished_run
from dpvision.audit.time_given import NotInTime
from dpvision.cli import main
from dpvision.errors import ConfigError, RunStopped
from dpvision.files import write_json
from dpvision.privacy.mechanism import IndependentGaussian
from dpvision.statement.statement import make_statement

from ..statement.runs import PRIVACY, make_run, make_store

pytestmark = pytest.mark.usefixtures("gates_once")


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
    assert "fails at most one audit in 178: audit again" in said
    made = json.loads((run / "audit.json").read_text())
    checks = [made["bound"], *made["bound"]["checks"].values()]
    checks += [made["mechanism"][name] for name in ("noise", "shift", "parameter")]
    assert made["false_alarm"] == pytest.approx(sum(check["false_alarm"] for check in checks))
    # Of full batches nine checks, six of them of all steps, and the two sides of the bound.
    assert made["false_alarm"] == pytest.approx(5 * 1e-3 + 6 * 1e-4)


def test_a_result_is_not_made_again_unless_asked_and_then_all_are_stated(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A correct mechanism fails now and then: neither that nor a pass is chosen from several."""
    terms = IndependentGaussian.terms
    with monkeypatch.context() as faulty:
        faulty.setattr(
            IndependentGaussian,
            "terms",
            lambda self, step: tuple((of, 0.5 * std) for of, std in terms(self, step)),
        )
        with pytest.raises(SystemExit):
            main(["audit", str(run), "--white-box"])
    failed = (run / "audit.json").read_bytes()
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main(["audit", str(run), "--white-box"])
    assert stopped.value.code == 1 and (run / "audit.json").read_bytes() == failed
    said = capsys.readouterr().out
    assert "FAILED: what runs" in said and "Made before, not again" in said
    for times in (1, 2):
        assert main(["audit", str(run), "--white-box", "--again"]) == 0
        made = json.loads((run / "audit.json").read_text())
        assert made["passed"] and len(made["earlier"]) == times
        assert [one["passed"] for one in made["earlier"]] == [False, True][:times]
        text = make_statement(run)["history"]["audits"]["text"]
        assert (
            "it passed" in text
            and f"Earlier audits of this kind: {times}, of which 1 FAILED." in text
        )


def test_a_result_of_other_code_or_ranks_is_made_again_and_kept(run: Path) -> None:
    assert main(["audit", str(run), "--white-box"]) == 0
    made = json.loads((run / "audit.json").read_text())
    for change in ({"code_sha256": "0" * 64}, {"ranks": 2}):
        write_json(run / "audit.json", made | change)
        assert main(["audit", str(run), "--white-box"]) == 0
        again = json.loads((run / "audit.json").read_text())
        assert again["code_sha256"] == made["code_sha256"] and again["ranks"] == 1
        (earlier,) = again["earlier"]
        assert earlier["code_sha256"] == (made | change)["code_sha256"]


def test_a_damaged_result_is_written_anew(run: Path) -> None:
    (run / "audit.json").write_text('{"format": "dpvision-audit-1"}')
    assert main(["audit", str(run), "--white-box"]) == 0
    assert "earlier" not in json.loads((run / "audit.json").read_text())


def test_what_does_not_fit_the_time_is_left_out_with_the_time_that_it_needs(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dpvision.audit.parts, "black_box", late)
    assert main(["audit", str(run), "--minutes", "30"]) == 0
    said = capsys.readouterr().out
    assert "Passed. The bound is model-based" in said
    assert "needs 1.6 h more by the speed of its steps, and 30 min were left" in said
    assert "Repeat the command with --black-box --minutes 105, or without" in said
    assert "It goes on from there." in said and not (run / "audit_black_box.json").exists()
    with pytest.raises(SystemExit) as stopped:
        main(["audit", str(run), "--black-box", "--minutes", "30", "--json"])
    assert stopped.value.code == 75
    (left_out,) = json.loads(capsys.readouterr().out)["left_out"]
    assert left_out["kind"] == "black-box" and left_out["needed_s"] == 5700
    assert 1790 < left_out["left_s"] <= 1800


def test_a_signal_in_the_second_part_leaves_the_result_of_the_first(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise RunStopped("a signal")

    monkeypatch.setattr(dpvision.audit.parts, "black_box", stopped)
    with pytest.raises(SystemExit) as status:
        main(["audit", str(run)])
    assert status.value.code == 75
    said = capsys.readouterr()
    assert "Passed. The bound is model-based" in said.out
    assert "Stopped by a signal. The same command goes on." in said.err
    made = json.loads((run / "audit.json").read_text())
    made["mechanism"]["noise"]["high"] = 0.5
    write_json(run / "audit.json", made | {"passed": False})
    with pytest.raises(SystemExit) as status:
        main(["audit", str(run)])
    assert status.value.code == 1, "a part failed, whatever came after it"


def test_what_is_asked_in_vain_is_refused_before_anything_is_made(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And no recipe's result is taken for a run's, nor a run's kept elsewhere."""
    of_recipe = ["audit", "--recipe", "vip.micro", "--white-box", "--out"]
    for argv, said in (
        (["audit", str(run), "--white-box", "--out", "o.json"], "kept in its folder"),
        (["audit", str(run), "--canaries", "5"], "canaries=5"),
        (["audit", str(run), "--shadows", "3"], "shadows=3; expected 0, or 4 to 99"),
        (["audit", str(run), "--white-box", "--shadows", "16"], "the white box alone"),
        ([*of_recipe, str(run / "audit.json")], "lies in the folder of a run"),
        ([*of_recipe, "nowhere/a.json"], "a folder that exists"),
        ([*of_recipe, str(tmp_path)], "expected a file"),
    ):
        assert main(argv) == 2
        assert said in capsys.readouterr().err
    assert not list(run.glob("audit*")) and not list(Path().glob("*.json"))


@pytest.mark.parametrize("hostile", ["{", "[]", '{"inside": [1], "loss_before": [0]}'])
def test_a_damaged_audit_in_progress_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], hostile: str
) -> None:
    make_store(tmp_path / "store")
    privacy = replace(PRIVACY, steps=3, noise_multiplier=3.0)
    run = make_run(tmp_path / "run", tmp_path / "store", privacy=privacy, charged=3)
    config, plan = finished_run(run)
    with pytest.raises(NotInTime):
        black_box(config, plan, 20, say=late, keep=run / "audit_black_box")
    for name in ("model-00/canaries.json", "about.json"):
        (run / "audit_black_box" / name).write_text(hostile)
        assert main(["audit", str(run), "--black-box", "--canaries", "20"]) == 2
        said = capsys.readouterr().err
        assert f"older {run / 'audit_black_box'} to" in said.replace("\n", " ") or name[0] == "a"
        assert str(run / "audit_black_box") in said and "Traceback" not in said


def test_results_of_a_run_are_kept_nowhere_else(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kept in its folder"):
        Parts(*finished_run(run), run=run, out=tmp_path / "nicest.json")


def test_without_time_nothing_begins(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["audit", str(run), "--minutes", "1e-9"])
    assert stopped.value.code == 75
    said = capsys.readouterr().out
    assert said.count("left out, no time is left") == 2
    assert not list(run.glob("audit*"))


def late(*_: object, **__: object) -> None:
    raise NotInTime(5700.0)


def test_an_audit_that_was_begun_after_a_result_is_finished_before_it_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or its start would be a look that can be taken back."""
    make_store(tmp_path / "store")
    privacy = replace(PRIVACY, steps=3, noise_multiplier=3.0)
    run = make_run(tmp_path / "run", tmp_path / "store", privacy=privacy, charged=3)
    asked = ["audit", str(run), "--black-box", "--canaries", "20"]
    assert main(asked) == 0
    first = json.loads((run / "audit_black_box.json").read_text())
    assert main(asked) == 0 and "Made before" in capsys.readouterr().out
    config, plan = finished_run(run)
    with pytest.raises(NotInTime):
        black_box(config, plan, 20, say=late, keep=run / "audit_black_box")
    assert main([*asked[:-1], "24"]) == 2
    assert "in progress with other settings" in capsys.readouterr().err
    assert main(asked) == 0
    second = json.loads((run / "audit_black_box.json").read_text())
    assert second["audit_id"] != first["audit_id"] and len(second["earlier"]) == 1
    # A crash between writing the result and removing the folder is no second audit.
    (run / "audit_black_box").mkdir()
    about = {"audit_id": second["audit_id"], "of": {}}
    write_json(run / "audit_black_box" / "about.json", about)
    assert main(asked) == 0
    assert json.loads((run / "audit_black_box.json").read_text()) == second
    assert not (run / "audit_black_box").exists()
    (run / "audit_black_box").mkdir()
    write_json(run / "audit_black_box" / "about.json", about)
    assert main([*asked, "--again"]) == 0
    third = json.loads((run / "audit_black_box.json").read_text())
    assert third["audit_id"] != second["audit_id"] and len(third["earlier"]) == 2


def test_under_torchrun_one_process_is_asked_for(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["audit", str(run)]) == 2
    assert "Add --white-box, which audits the ranks together" in capsys.readouterr().err
    assert main(["audit", str(run), "--white-box", "--minutes", "5"]) == 2
    assert "Drop --minutes, or start it without torchrun" in capsys.readouterr().err


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
        (["run", "--minutes", "0"], "minutes=0.0; expected a number above 0"),
        (["run", "--minutes", "nan"], "expected a number above 0"),
        (["--recipe", "vip.micro", "--again"], "Drop --again"),
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
