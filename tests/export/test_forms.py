"""Forms of a statement: against the registry's schema and CycloneDX's own validator."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dpvision.cli import main
from dpvision.errors import ConfigError
from dpvision.export.forms import cyclonedx_bom, opendp_entry, write_form
from dpvision.files import write_json
from dpvision.statement.declarations import Declared, read_declared
from dpvision.statement.statement import make_statement

from ..statement.runs import PRIVACY, PUBLIC_SCORES, make_run, make_store

SCHEMA = Path(__file__).resolve().parents[3] / "shared" / "reference" / "opendp_schema.yaml"
SMALL = replace(PRIVACY, steps=4, noise_multiplier=3.0)
DECLARED = Declared(
    "Sorter", ["A hospital"], "sorting scans", "EU", "2026-11-26", "Healthcare", "the board's"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("forms")
    make_store(root / "store")
    made = make_run(root / "run", root / "store", privacy=SMALL, charged=4)
    write_json(made / "scores.json", PUBLIC_SCORES)
    return made


@pytest.fixture(scope="module")
def of_people(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("people")
    make_store(root / "store")
    privacy = replace(SMALL, num_units=25_000, max_records_per_unit=2)
    return make_run(root / "run", root / "store", privacy=privacy, charged=4)


@pytest.fixture(scope="module")
def open_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("open")
    make_store(root / "store", "public")
    privacy = replace(SMALL, guarantee="none", noise_multiplier=None, max_grad_norm=None)
    return make_run(root / "run", root / "store", privacy=privacy, charged=4)


def texts(value: Any) -> str:
    if isinstance(value, dict | list):
        parts = value.values() if isinstance(value, dict) else value
        return "\n".join(map(texts, parts))
    return str(value)


@pytest.mark.parametrize("which", ["run", "of_people"])
def test_an_entry_fits_the_registrys_schema(which: str, request: pytest.FixtureRequest) -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is a development package")
    yaml = pytest.importorskip("yaml", reason="PyYAML comes with the extra hf")
    if not SCHEMA.exists():
        pytest.skip(f"no {SCHEMA}, the registry's schema")
    entry = opendp_entry(make_statement(request.getfixturevalue(which)), DECLARED)
    jsonschema.validate(yaml.safe_load(json.dumps(entry)), yaml.safe_load(SCHEMA.read_text()))


def test_figures_and_sentences_are_the_statements(run: Path, of_people: Path) -> None:
    for one, of_person in ((run, False), (of_people, True)):
        statement = make_statement(one)
        guarantee = statement["guarantee"]
        epsilon = guarantee["unit_epsilon" if of_person else "epsilon"]
        deployment = opendp_entry(statement, DECLARED)["deployment"]
        loss = deployment["privacy_loss"]
        assert ("person" in loss["privacy_unit"]) == of_person
        assert epsilon <= loss["privacy_parameters"]["epsilon"] < epsilon + 1e-4  # rounded up
        assert loss["privacy_parameters"]["delta"] == guarantee["delta"]
        bom = cyclonedx_bom(statement, DECLARED)
        shown = {p["name"]: p["value"] for p in model(bom)["modelCard"]["properties"]}
        assert float(shown["dpvision:epsilon"]) == loss["privacy_parameters"]["epsilon"]
        for made in (texts(deployment), texts(bom)):
            for said in (statement["headline"], *statement["scope"]["not_covered"]):
                assert said in made
            assert DECLARED.name in made and DECLARED.intended_use in made


def model(bom: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = bom["metadata"]["component"]
    return found


@pytest.mark.parametrize("which", ["run", "of_people", "open_run"])
def test_a_bill_of_materials_is_valid_and_names_weights_scores_and_stores(
    which: str, request: pytest.FixtureRequest
) -> None:
    statement = make_statement(request.getfixturevalue(which))
    bom = cyclonedx_bom(statement, DECLARED)
    digests = {one["name"]: one["hashes"][0]["content"] for one in model(bom)["components"]}
    assert digests == statement["hashes"]["weights"]
    card = model(bom)["modelCard"]
    stores = [one["name"] for one in card["modelParameters"]["datasets"]]
    assert stores == [entry["store_id"] for entry in statement["history"]["lineage"]]
    measured = card["quantitativeAnalysis"]["performanceMetrics"]
    assert [float(one["value"]) for one in measured] == [
        pytest.approx(score["value"], abs=5e-5) for score in statement["scores"]
    ]
    if which == "open_run":
        assert "dpvision:epsilon" not in texts(bom)
    validation = pytest.importorskip(
        "cyclonedx.validation.json", reason="cyclonedx-python-lib is a development package"
    )
    schema = pytest.importorskip("cyclonedx.schema")
    validator = validation.JsonStrictValidator(schema.SchemaVersion.V1_7)
    try:
        problem = validator.validate_str(json.dumps(bom))
    except Exception as error:  # the library's own, where jsonschema is missing
        pytest.skip(f"no validator: {error}")
    assert problem is None
    broken = {**bom, "serialNumber": "none"}
    assert validator.validate_str(json.dumps(broken)) is not None


def test_the_serial_number_is_that_of_the_weights(run: Path) -> None:
    statement = make_statement(run)
    first, again = (cyclonedx_bom(statement, DECLARED)["serialNumber"] for _ in range(2))
    other = {**statement, "hashes": {**statement["hashes"], "weights": {"a": "b"}}}
    assert first == again != cyclonedx_bom(other, DECLARED)["serialNumber"]


def test_a_run_without_a_guarantee_is_no_entry_of_the_registry(open_run: Path) -> None:
    with pytest.raises(ConfigError, match=r"without a guarantee; expected a private run"):
        opendp_entry(make_statement(open_run), DECLARED)


def test_the_command_writes_the_form_with_its_statement(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    declared = tmp_path / "declared.json"
    declared.write_text(json.dumps(vars(DECLARED)))
    for to, name in (("opendp", "entry.yaml"), ("cyclonedx", "bom.cdx.json")):
        line = ["export", str(run), str(tmp_path / to), "--to", to]
        assert main(line) == 2
        assert "without --declared; expected" in capsys.readouterr().err
        assert main([*line, "--declared", str(declared)]) == 0
        assert name in capsys.readouterr().out
        assert {one.name for one in (tmp_path / to).iterdir()} == {name, "statement.json"}
        assert main([*line, "--declared", str(declared)]) == 2
        assert "is not empty; expected a new folder" in capsys.readouterr().err
    line = ["export", str(run), str(tmp_path / "onnx"), "--to", "onnx"]
    assert main([*line, "--declared", str(declared)]) == 2
    assert "expected it with opendp or cyclonedx alone" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="is not empty"):
        write_form(run, "opendp", tmp_path / "opendp", read_declared(declared, "export"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"name": None}, "name=None; expected a text"),
        ({"name": "  "}, "expected a text"),
        ({"curators": []}, "curators=.*expected a list of names"),
        ({"curators": "A hospital"}, "curators=.*expected a list of names"),
        ({"publication_date": "26.11.2026"}, "expected YYYY-MM-DD"),
        ({"publication_date": "20261126"}, "expected YYYY-MM-DD"),
        ({"sector": "Hospital"}, "expected one of Technology, Healthcare"),
        ({"more": "x"}, "more; expected each field once"),
        ({"organisation": " "}, "organisation=' '; expected a text. Fill it in, or leave"),
        ("region", "region; expected each field once"),
        ("all", "expected a JSON object"),
        ("list", "expected each field once"),
        ("missing", "No such file"),
    ],
)
def test_a_wrong_declaration_is_one_clear_error(
    change: Any, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "declared.json"
    value: Any = dict(vars(DECLARED))
    if isinstance(change, dict):
        value |= change
    value.pop(change, None) if change == "region" else None
    value = [] if change == "list" else value
    if change != "missing":
        file.write_text("{" if change == "all" else json.dumps(value))
    with pytest.raises(ConfigError, match=problem):
        read_declared(file, "export")
    assert main(["report", str(tmp_path), "--declared", str(file)]) == 2
    assert "error: report: --declared" in capsys.readouterr().err
