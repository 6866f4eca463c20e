"""``dpvision evaluate --release`` as its user has it: the command, the statement, the report, and
what is refused.
"""

import json
from pathlib import Path

import pytest

from dpvision.cli import main
from dpvision.data.store import Store
from dpvision.eval.score_file import RELEASED
from dpvision.statement.schema import problems, statement_schema
from dpvision.statement.statement import make_statement

from ..adapt.runs_of_heads import head_config, run_head, write_digits


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return write_digits(tmp_path_factory.mktemp("stores") / "private-test", 1000, 1200)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    return run_head(head_config(write_digits(root / "train", 0, 300), "one_step"), root / "first")


def evaluate(run: Path, store: Path, *more: str) -> int:
    return main(["evaluate", str(run), "--test", str(store), "--workers", "1", *more])


def release(run: Path, store: Store, *more: str) -> int:
    declared = ("--release", "4", "--privacy.dataset-size", "200")
    return evaluate(run, store.path, *declared, *more)


def test_a_release_is_printed_where_private_scores_are_not(
    run: Path, private: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert release(run, private) == 0
    printed = capsys.readouterr()
    assert "epsilon 4 and delta 0.001 for each single image" in printed.out
    assert "by class; in percent" in printed.out and "operator only" not in printed.out
    assert str(run / RELEASED) in printed.out
    assert not (run / "confidential" / "scores.json").exists()
    assert release(run, private, "--json") == 0
    entry = json.loads(capsys.readouterr().out)
    assert entry == json.loads((run / RELEASED).read_text())["releases"][-1]
    assert entry["charged"]["runs"] >= 1


def test_the_statement_the_report_and_verify_have_the_release(
    run: Path, private: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / RELEASED).unlink(missing_ok=True)
    assert "released_scores" not in make_statement(run)
    assert release(run, private) == 0
    statement = make_statement(run)
    assert problems(statement, statement_schema()) == []
    (stated,) = statement["released_scores"]
    assert stated["store_id"] == private.store_id and "200 images" in stated["text"]
    said = [text for text in statement["scope"]["not_covered"] if "choice to release" in text]
    assert said == [] and stated["confidential_scores_first"] is False

    # Confidential scores are seen, then a second table is released.
    assert evaluate(run, private.path) == 0
    assert release(run, private) == 0
    statement = make_statement(run)
    (said,) = [text for text in statement["scope"]["not_covered"] if "choice to release" in text]
    assert private.store_id[:12] in said
    first, second = statement["released_scores"]
    assert second["charged"]["runs"] == first["charged"]["runs"] + 1
    assert "in total" in second["text"]

    assert main(["report", str(run), "--tuning", "none"]) == 0
    page = (run / "report.html").read_text()
    assert "Released scores of private images" in page and second["text"] in page
    assert private.path.name not in page
    # What is released later does not change what was stated.
    assert release(run, private) == 0
    capsys.readouterr()
    file = run / "statement.json"
    assert main(["verify", str(file), "--run", str(run)]) == 0
    assert "Nothing failed" in capsys.readouterr().out

    altered = tmp_path / "altered.json"
    for name, value, failed in (
        ("plan", first["plan"] | {"epsilon": 2.0}, "figures"),
        ("text", "Nothing was released.", "sentences"),
    ):
        wrong = json.loads(file.read_text())
        wrong["released_scores"][0][name] = value
        altered.write_text(json.dumps(wrong))
        with pytest.raises(SystemExit):
            main(["verify", str(altered), "--run", str(run)])
        lines = [s for s in capsys.readouterr().out.splitlines() if s.startswith("failed")]
        assert any(failed in line and "released_scores[0]" in line for line in lines)
        assert any("not in released_scores.json of the run" in line for line in lines)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--release", "1"), "give --privacy.dataset-size 200."),
        (("--release", "nan", "--privacy.dataset-size", "200"), "--release nan; expected"),
        (("--release", "0", "--privacy.dataset-size", "200"), "--release 0.0; expected"),
        (("--privacy.dataset-size", "200"), "--privacy.* without --release"),
        (("--release", "1", "--privacy.num-units", "9"), "not declared"),
        (
            ("--release", "1", "--privacy.dataset-size", "200", "--privacy.num-units", "9"),
            "has no units",
        ),
        (("--release", "1", "--seeds", "3"), "expected one run and --test STORE alone"),
        (("--release", "1", "--metric", "accuracy"), "expected one run and --test STORE alone"),
        (("--release", "1", "--specificity", "0.8"), "the released ROC curve has all thresholds"),
        (("--release", "1", "--by", "sex"), "one of --by and --groups"),
        (("--release", "1", "--by", "sex", "--groups", "g.csv"), "For example --by sex=A:B."),
        (("--release", "1", "--by", "sex=F:F", "--groups", "g.csv"), "each once"),
        (("--per-class", "--by", "sex=F:M", "--groups", "g.csv"), "without --release"),
        (("--release", "1", "--train", "other"), "--release with --train"),
    ],
)
def test_wrong_input_gets_one_clear_error(
    run: Path,
    private: Store,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
    words: str,
) -> None:
    assert evaluate(run, private.path, *more) == 2
    error = capsys.readouterr().err
    assert words in error and "Traceback" not in error


def test_several_runs_and_other_encoders_are_refused(
    run: Path, private: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--test", str(private.path), "--release", "1", "--privacy.dataset-size", "200"]
    for specs, words in (
        ([str(run), str(run)], "2 encoders"),
        (["pixels"], "no such folder"),
        ([str(run / "checkpoints" / "step-00000001")], "not the folder of a run"),
    ):
        assert main(["evaluate", *specs, *asked]) == 2
        assert words in capsys.readouterr().err
