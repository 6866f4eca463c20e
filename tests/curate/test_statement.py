"""What statements say of a curated store, and that ``verify`` finds what was taken out of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from dpvision.cli import main

from ..data.image_files import encode, js, noise, write_tar


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("curated")
    members = {}
    for i in range(80):
        image = encode(noise(i, 30, 30) // 2 + i % 2 * 100)
        members |= {f"{i}.png": image, f"{i}.json": js(label=i % 2, caption="a word or two")}
    write_tar(root / "s.tar", members)
    made = root / "store"
    run("data", "curate", root / "s.tar", made, "--steps", "caption,size", "--size.min-side-px", 10)
    return made


def run(*words: Any) -> None:
    main([str(word) for word in words])


def statement(store: Path, name: str, stability: int | None, monkeypatch) -> Path:
    """The statement of a head on the store, which says this stability."""
    monkeypatch.chdir(store.parent)
    meta = json.loads((store / "store.json").read_text())
    meta["curation"]["stability"] = stability
    (store / "store.json").write_text(json.dumps(meta))
    given = ("--encoder", "pixels", "--num-classes", 2, "--dataset-size", 80, "--epsilon", 8)
    run("adapt", "--data", store, *given, "--name", name)
    run("report", f"runs/{name}")
    return store.parent / "runs" / name / "statement.json"


def verified(path: Path, made: Path, store: Path) -> bool:
    try:
        run("verify", path, "--run", made.parent, "--store", store)
    except SystemExit as end:
        return end.code in (None, 0)
    return True


def test_steps_of_one_image_leave_the_guarantee_as_it_is(store, monkeypatch):
    path = statement(store, "alone", 1, monkeypatch)
    made = json.loads(path.read_text())
    said = made["history"]["lineage"][-1]["curation"]
    assert [step["name"] for step in said["steps"]] == ["caption", "size"]
    assert said["steps"][1]["min_side_px"] == 10
    assert "the guarantee holds for images of the source too" in said["text"]
    assert not any("curated" in text for text in made["scope"]["not_covered"])
    assert verified(path, path, store)
    assert "caption, size" in (path.parent / "report.html").read_text()


@pytest.mark.parametrize(
    ("stability", "words"),
    [(2, "changes at most 2 images of the store"), (None, "can change any number of images")],
)
def test_steps_that_compare_images_are_not_covered(store, monkeypatch, tmp_path, stability, words):
    path = statement(store, f"compared-{stability}", stability, monkeypatch)
    made = json.loads(path.read_text())
    (said,) = (text for text in made["scope"]["not_covered"] if "was curated" in text)
    assert words in said and words in made["history"]["lineage"][-1]["curation"]["text"]
    assert verified(path, path, store)
    without = json.loads(json.dumps(made))
    without["scope"]["not_covered"].remove(said)
    softened = json.loads(json.dumps(made))
    softened["history"]["lineage"][-1]["curation"]["stability"] = 1
    silent = json.loads(json.dumps(without))
    del silent["history"]["lineage"][-1]["curation"]
    for number, wrong in enumerate((without, softened, silent)):
        (tmp_path / f"{number}.json").write_text(json.dumps(wrong))
        assert not verified(tmp_path / f"{number}.json", path, store)
