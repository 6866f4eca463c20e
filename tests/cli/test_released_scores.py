"""``dpvision evaluate --release`` as its user has it: the command, the statement, the report, and
what is refused.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from dpvision.cli import main
from dpvision.data.split import split_store
from dpvision.data.store import Store
from dpvision.errors import OPERATOR_ONLY
from dpvision.eval.probes.release_scores import release_plan
from dpvision.eval.score_file import RELEASED
from dpvision.files import write_json
from dpvision.statement.check_releases import check_charges, check_releases
from dpvision.statement.schema import problems, statement_schema
from dpvision.statement.statement import make_statement

from ..adapt.runs_of_heads import head_config, run_head, write_digits

DECLARED = ("--release", "4", "--privacy.dataset-size", "200")


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
    return evaluate(run, store.path, *DECLARED, *more)


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
    assert "Scores on private test images, released with noise, are above." in page
    assert "public and released scores" in page and "of the same import" not in page
    assert private.path.name not in page
    capsys.readouterr()
    file = run / "statement.json"
    assert main(["verify", str(file), "--run", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "Nothing failed" in printed and "not checked  charge of the released table" in printed

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


def test_the_report_tells_a_release_on_the_other_half_from_other_training(tmp_path: Path) -> None:
    whole = write_digits(tmp_path / "whole", 0, 400)
    train, held = split_store(whole.path, tmp_path / "train", tmp_path / "held", 0.5)
    made = run_head(head_config(train, "one_step"), tmp_path / "run")
    size = str(held.num_records)
    assert evaluate(made, held.path, "--release", "4", "--privacy.dataset-size", size) == 0
    assert main(["report", str(made), "--tuning", "none"]) == 0
    page = " ".join((made / "report.html").read_text().split())
    assert "1 other run charged to the same store, whose parts (dpvision data split)" in page
    assert "(this run): ε" in page and "(scores released below): ε 4.00" in page
    assert "The test images are of the same import as the training images" in page


def test_verify_finds_altered_tables_and_releases_that_are_left_out(
    run: Path, private: Store, tmp_path: Path
) -> None:
    (run / RELEASED).unlink(missing_ok=True)
    assert release(run, private) == 0
    statement, whole = make_statement(run), (run / RELEASED).read_text()

    def checks(said: dict[str, Any]) -> str:
        found = check_releases(json.loads(json.dumps(said)), run)
        return "; ".join(f"{one.status} {one.detail}" for one in found)

    def altered(entry: dict[str, Any], where: str) -> None:
        if where == "table":
            entry["tables"][0]["counts"][0][0][0][0] += 1
        elif where == "figure":
            entry["rows"][0]["figures"]["accuracy"]["value"] = 0.99
        elif where == "curve":
            entry["roc"] = {"0": [[0.0, 1.0], [1.0, 1.0]]}
        elif where == "noise":
            entry["tables"][0]["noise_std"] /= 2
        elif where == "plan":
            entry["plan"] = release_plan(0.5, 200).to_dict()
        else:
            del entry["tables"]

    assert checks(statement).startswith("ok ")
    for where, again in (
        ("table", "not what its table gives: "),
        ("figure", "not what its table gives: rows[0].figures.accuracy.value"),
        ("curve", "not what its table gives: roc"),
        ("noise", "noise_std of all is not the plan's"),
        ("plan", "noise_std of all is not the plan's"),
        ("nothing", "cannot be computed from its table (KeyError"),
    ):
        found = json.loads(whole)
        altered(found["releases"][0], where)
        write_json(run / RELEASED, found)
        assert f"not in {RELEASED} of the run" in checks(statement), where
        # A statement that is written again has the altered entry's hash.
        assert again in checks(make_statement(run)), where
    (run / RELEASED).write_text(whole)
    without = {name: value for name, value in statement.items() if name != "released_scores"}
    assert "write the statement again" in checks(without)

    (one,) = check_charges(statement, private.path)
    assert one.status == "ok" and [c.status for c in check_charges(statement, None)] == [
        "not checked"
    ]
    statement["released_scores"][0]["plan"] = release_plan(0.5, 200).to_dict()
    (one,) = check_charges(json.loads(json.dumps(statement)), private.path)
    assert one.status == "failed" and "not charged with its plan" in one.detail


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
        (("--release", "1", "--by", "sex=F,sex=M", "--groups", "g.csv"), "sex twice"),
        ((*DECLARED, "--by", "all=x:y", "--groups", "g.csv"), "--by all=x:y; expected neither"),
        ((*DECLARED, "--by", "sex=F:(other)", "--groups", "g.csv"), "the value '(other)'"),
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


def test_a_table_of_unknown_names_is_refused_before_the_charge(
    run: Path, private: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "groups.csv"
    table.write_text("file_name,sex\nP1/scan.dcm,F\nP2/scan.dcm,M\n")

    def ledgers() -> list[Path]:
        return sorted((private.path.parent / "LEDGERS" / private.store_id).glob("*.jsonl"))

    before = ledgers()
    assert release(run, private, "--by", "sex=F:M", "--groups", str(table)) == 2
    said = capsys.readouterr().err
    assert f"{OPERATOR_ONLY}--groups" in said and "no row for 200 of 200 images" in said
    assert ledgers() == before
    assert release(run, private) == 0 and len(ledgers()) == len(before) + 1


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
