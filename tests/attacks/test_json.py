"""Files in which a name is twice, or a number is none: two readers see different values, and a
person another one than ``verify``.
"""

import ast
import json
import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

import dpvision
from dpvision.checkpoint import load_checkpoint, read_manifest
from dpvision.cli import main
from dpvision.data.importer import import_source
from dpvision.data.open import open_store
from dpvision.data.person_names import PersonRule
from dpvision.data.synthetic_store import write_scenes
from dpvision.errors import DataError, DPVisionError
from dpvision.eval.score_file import read_scores
from dpvision.files import write_json
from dpvision.privacy.ledger import read_ledger, store_account
from dpvision.runs.folder import read_run
from dpvision.runs.run import read_object
from dpvision.statement.statement import make_statement, write_statement
from dpvision.statement.verify import verify_statement
from dpvision.strict_json import parse_json
from dpvision.weights import METADATA, pack, unpack

from ..data.image_files import js, png, write_folder, write_tar

sys.path.insert(0, str(Path(__file__).parents[1] / "statement"))
from runs import PRIVACY, PUBLIC_SCORES, make_run, make_store

SOURCE = Path(dpvision.__file__).parent
BAD = [
    '{"a": 1, "a": 1}',
    '[{"b": {"a": 1, "c": 2, "a": 3}}]',
    '{"a": 1, "\\u0061": 2}',
    "NaN",
    '{"a": [Infinity]}',
    "[-Infinity]",
    "[1e999]",
    "[" * 100_000,
    '{"a": 1',
    "",
]


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_what_two_readers_could_read_otherwise_is_refused(text: str) -> None:
    for data in (text, text.encode()):
        with pytest.raises(ValueError):
            parse_json(data)


def test_all_other_json_is_read_as_pythons_reader_reads_it() -> None:
    rng = random.Random(0)

    def value(depth: int) -> Any:
        if depth and rng.random() < 0.7:
            inner = [value(depth - 1) for _ in range(rng.randrange(4))]
            return inner if rng.random() < 0.5 else {f"k{i}": v for i, v in enumerate(inner)}
        return rng.choice(
            [
                None,
                True,
                "x\u00fc",
                10 ** rng.randrange(30),
                -(10.0 ** rng.randrange(-300, 300)),
                rng.random(),
            ]
        )

    for _ in range(200):
        text = json.dumps(value(4))
        assert parse_json(text) == json.loads(text)
    assert math.isnan(parse_json('{"a": NaN}', nan=True)["a"])
    with pytest.raises(ValueError, match="'a' is twice"):
        parse_json('{"a": NaN, "a": 1}', nan=True)


def twice(text: str, name: str, value: Any) -> str:
    """An object with another value under one of its names, before the true one."""
    assert name in json.loads(text)
    return f"{{{json.dumps(name)}: {json.dumps(value)}, {text.lstrip()[1:]}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store, a run and its statement; not to be changed."""
    root = tmp_path_factory.mktemp("twice")
    make_store(root / "store")
    run = make_run(root / "run", root / "store", privacy=replace(PRIVACY, steps=4), charged=4)
    write_json(run / "scores.json", PUBLIC_SCORES)
    write_statement(run)
    return root


def test_a_statement_with_two_headlines_is_not_read(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last one was verified; a person reads the first."""
    path, text = tmp_path / "statement.json", (folder / "run" / "statement.json").read_text()
    claim = "Differential privacy with epsilon 0.01 and delta 1e-5 for each single image."
    for altered in (
        twice(text, "headline", claim),
        text.replace('"epsilon":', '"epsilon": 0.01, "epsilon":', 1),
    ):
        path.write_text(altered)
        with pytest.raises(DataError, match=r"is twice in an object; expected a statement\.json"):
            verify_statement(path, folder / "run", folder / "store")
    assert main(["verify", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_a_statement_with_a_number_that_is_none_is_not_read(
    folder: Path, tmp_path: Path, number: str
) -> None:
    statement = json.loads((folder / "run" / "statement.json").read_text())
    statement["guarantee"]["delta"] = "HERE"
    (tmp_path / "s.json").write_text(json.dumps(statement).replace('"HERE"', number))
    with pytest.raises(DataError, match="is not finite"):
        verify_statement(tmp_path / "s.json")


READERS: dict[str, tuple[str, str, Callable[[Path], Any]]] = {
    "store": ("store/store.json", "visibility", lambda root: store_account(root / "store")),
    "marks of the store": (
        "store/ledger_marks.json",
        "cap",
        lambda root: store_account(root / "store"),
    ),
    "shared marks": ("LEDGERS/*/marks.json", "runs", lambda root: store_account(root / "store")),
    "ledger": ("LEDGERS/*/*.jsonl", "plan", lambda root: store_account(root / "store")),
    "copy of the ledger": (
        "run/ledger.jsonl",
        "lineage",
        lambda root: read_ledger(root / "run" / "ledger.jsonl"),
    ),
    "manifest": (
        "run/checkpoints/*/manifest.json",
        "ledger_steps",
        lambda root: load_checkpoint(root / "run"),
    ),
    "manifest, alone": (
        "run/checkpoints/*/manifest.json",
        "updates",
        lambda root: read_manifest(next(root.glob("run/checkpoints/*"))),
    ),
    "run": ("run/run.json", "guarantee", lambda root: read_run(root / "run")),
    "config": ("run/config.json", "privacy", lambda root: make_statement(root / "run")),
    "plan": ("run/plan.json", "epsilon", lambda root: read_object(root / "run" / "plan.json")),
}


@pytest.mark.parametrize("name", READERS)
def test_no_file_of_a_run_or_a_store_is_read_with_a_name_twice(tmp_path: Path, name: str) -> None:
    make_store(tmp_path / "store")
    make_run(tmp_path / "run", tmp_path / "store", privacy=replace(PRIVACY, steps=2), charged=2)
    pattern, field, read = READERS[name]
    (path,) = tmp_path.glob(pattern)
    text = path.read_text()
    first, _, rest = text.partition("\n") if path.suffix == ".jsonl" else (text, "", "")
    read(tmp_path)
    path.write_text("\n".join(filter(None, [twice(first, field, None), rest])))
    with pytest.raises(DPVisionError):
        print("accepted:", read(tmp_path))


def test_scores_and_the_description_of_a_whole_store_are_not_read_with_a_name_twice(
    tmp_path: Path,
) -> None:
    (tmp_path / "scores.json").write_text(
        json.dumps(PUBLIC_SCORES).replace('"value":', '"value": 0.99, "value":', 1)
    )
    with pytest.raises(DPVisionError, match="twice"):
        read_scores(tmp_path / "scores.json")
    store = write_scenes(tmp_path / "store", 4, 16, public=False).path
    text = (store / "store.json").read_text()
    (store / "store.json").write_text(twice(text, "visibility", "public"))
    with pytest.raises(DataError):
        open_store(store)


def test_weights_do_not_carry_two_lineages(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(4.0)}
    path = tmp_path / "model.safetensors"
    path.write_bytes(pack(tensors, [{"store_id": "a"}]))
    assert unpack(path)[1] == [{"store_id": "a"}]
    record = json.dumps(
        {"format": "dpvision-lineage-1", "lineage": [{"store_id": "a"}], "digest": "0" * 64}
    )
    path.write_bytes(save(tensors, {METADATA: twice(record, "lineage", [])}))
    with pytest.raises(DPVisionError, match="twice"):
        unpack(path)


def test_a_record_of_two_persons_in_one_json_object_belongs_to_neither(tmp_path: Path) -> None:
    """The last person was kept: the other could be removed without this image."""
    both = b'{"patient": "p1", "patient": "p2"}'
    tar = write_tar(
        tmp_path / "a.tar",
        {"0.png": png(0), "0.json": both, "1.png": png(1), "1.json": js(patient="p1")},
    )
    store = import_source(tar, tmp_path / "s", people=PersonRule("patient"))
    assert store.num_records == 1 and store.import_summary()["left_out"] == {"damaged text": 1}
    lines = (
        '{"file_name": "0.png", "patient": "p1", "patient": "p2"}\n'
        '{"file_name": "1.png", "patient": NaN}\n'
    )
    folder = write_folder(
        tmp_path / "f", {"0.png": png(0), "1.png": png(1), "metadata.jsonl": lines.encode()}
    )
    with pytest.raises(DataError, match="'patient' is twice"):
        import_source(folder, tmp_path / "t", people=PersonRule("patient"))
    (folder / "metadata.jsonl").write_text(lines.replace(', "patient": "p2"', ""))
    assert (
        import_source(
            folder, tmp_path / "u", people=PersonRule("patient", unmatched="drop")
        ).num_records
        == 1
    ), "NaN is a missing cell"


FOREIGN = {
    "strict_json.py": "the reader itself",
    "config/resolve.py": "an option of the command line",
    "config/models.py": "an option of the command line",
    "tune/space.py": "an option of the command line",
    "encoders/unpickle_worker.py": "an argument of our own",
    "statement/schema.py": "a file of the package",
    "export/modelling.py": "an export's own settings, read without dpvision",
    "train/same.py": "facts of other ranks",
    "tune/trials.py": "losses",
    "data/store.py": "captions",
    "data/record_lines.py": "captions",
    "data/caption_files.py": "captions",
    "data/sources.py": "captions",
    "data/tokenizer.py": "words",
    "data/datasets.py": "published lists",
    "eval/dense/semantic_data.py": "published classes",
    "eval/dense/training_state.py": "a loss scale without privacy",
    "eval/captions/label_sets.py": "labels for a score",
    "eval/benchmark_files.py": "published questions",
    "encoders/feature_cache.py": "features",
}
"""Modules with a reader of their own, of what no guarantee depends on."""


def test_whatever_a_guarantee_depends_on_has_one_reader() -> None:
    found = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id="json"), attr="loads" | "load"),
                    args=[argument, *_],
                ):
                    if not ast.unparse(argument).startswith("json.dumps("):
                        found.add(path.relative_to(SOURCE).as_posix())
    assert found == set(FOREIGN)
