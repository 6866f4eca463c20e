"""The tables of docs/audits.md are those of the newest results of the benchmarks."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import audits  # noqa: E402
import lira  # noqa: E402
import memorisation  # noqa: E402


def test_the_page_has_the_tables_of_the_newest_result() -> None:
    newest = sorted((ROOT / "benchmarks" / "results").glob("*-audits.json"))[-1]
    tables = audits.tables(json.loads(newest.read_text())["rows"])
    page = (ROOT / "docs" / "audits.md").read_text()
    assert [name for name, table in tables.items() if table not in page] == []
    assert "NO" not in tables["audits"], "an audit failed"
    refused = {line.split(" | ")[0]: line for line in tables["faults"].splitlines()[2:]}
    assert [fault for fault, line in refused.items() if "nothing" in line] == ["| none"]


def test_the_page_has_the_black_boxes_of_the_newest_result() -> None:
    newest = sorted((ROOT / "benchmarks" / "results").glob("*-audits_black_box.json"))[-1]
    table = audits.tables(json.loads(newest.read_text())["rows"])["black box"]
    assert table in (ROOT / "docs" / "audits.md").read_text()
    lines = table.splitlines()[2:]
    failed = [line for line in lines if "| NO |" in line]
    assert all(audits.NO_NOISE in line for line in failed), "an audit of what runs failed"
    assert any("| head |" in line for line in failed), "a head without noise passed"


def test_the_page_has_the_memorisation_of_the_results() -> None:
    newest = max((ROOT / "benchmarks" / "results").glob("*-memorisation.json"))
    found = memorisation.found_in([newest])
    assert memorisation.table(found) in (ROOT / "docs" / "audits.md").read_text()


def test_the_page_has_the_attack_with_shadow_models_of_the_results() -> None:
    results = sorted((ROOT / "benchmarks" / "results").glob("*-lira*.json"))
    found = lira.by_case([r for path in results for r in json.loads(path.read_text())["rows"]])
    assert {case for case, _ in found} == set(lira.CASES)
    assert lira.table(found) in (ROOT / "docs" / "audits.md").read_text()
    failed = {key for key, figures in found.items() if not figures["passed"]}
    assert {variant for _, variant in failed} == {audits.NO_NOISE}, "an audit of what runs failed"
