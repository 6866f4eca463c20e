"""The demo goes the whole way, says only what its intervals carry, and keeps what depends on a
user's images under confidential/.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from dpvision import demo
from dpvision.cli import main
from dpvision.data.open import open_store
from dpvision.recipes import RECIPES
from dpvision.synthetic.scenes import make_scene

SHAPES = {"disc": "a", "square": "b"}
"""The user's folders; the names are declared in the other order."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The demo on a few scenes, in a few steps."""
    for name, num in (("_NUM_LABELLED", 60), ("_NUM_PUBLIC", 80), ("_NUM_TEST", 40)):
        monkeypatch.setattr(demo, name, num)
    for name, privacy in (
        ("demo", {"dataset_size": 80, "expected_batch_size": 20, "steps": 2}),
        ("demo.start", {"dataset_size": 40, "expected_batch_size": 20, "steps": 2}),
    ):
        config = RECIPES[name]()
        made = replace(
            config,
            privacy=replace(config.privacy, **privacy),
            optim=replace(config.optim, warmup_steps=1),
        )
        monkeypatch.setitem(RECIPES, name, lambda made=made: made)
    yield


@pytest.mark.slow
def test_scenes_go_all_the_way(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        "demo",
        "--stores",
        str(tmp_path / "stores"),
        "--runs",
        str(tmp_path / "runs"),
        "--json",
    ]
    assert main(argv) == 0
    result = json.loads(capsys.readouterr().out)
    for part, epsilon in (("classifier", 2.0), ("captioner", 4.0)):
        run = Path(result[part]["run"])
        assert (
            result[part]["epsilon"] <= epsilon
            and "What it learned" in (run / "report.html").read_text()
        )
        assert all(score["visibility"] == "public" for score in result[part]["scores"])
    public = open_store(tmp_path / "stores/demo-public")
    assert {public.label_names[k] for k in public.labels.tolist()} <= set(demo.PUBLIC_COLOURS)
    unnamed = open_store(tmp_path / "stores/demo-test-new-colours")
    assert not {unnamed.label_names[k] for k in unnamed.labels.tolist()} & set(demo.PUBLIC_COLOURS)
    assert main(argv) == 0  # the stores are used again, and both runs are charged to them
    assert json.loads(capsys.readouterr().out)["classifier"]["run"].endswith("demo-classifier-2")


def _on_own_images(folder: Path, num: int) -> list[str]:
    """Write ``num`` scenes, those of two shapes into folders by shape, and the list of classes;
    return the command.
    """
    for i in range(num):
        scene = make_scene(i, 32)
        if (name := SHAPES.get(scene.main.shape)) is not None:
            (folder / "mine" / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(scene.image).save(folder / "mine" / name / f"{i}.png")
    (folder / "classes.txt").write_text("b\na\n")
    argv = ["demo", "--data", str(folder / "mine"), "--classes", str(folder / "classes.txt")]
    return [*argv, "--stores", str(folder / "stores"), "--runs", str(folder / "runs")]


def test_images_without_declared_classes_are_refused_before_the_import(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = _on_own_images(tmp_path, 40)
    at = argv.index("--classes")
    assert main(argv[:at] + argv[at + 2 :]) == 2
    assert (
        "--data without --classes" in capsys.readouterr().err and not (tmp_path / "stores").exists()
    )


def test_epsilon_and_the_repeated_charge_are_printed_before_the_charge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(session: object) -> None:
        raise KeyboardInterrupt  # in place of the head's first release

    monkeypatch.setattr(demo, "adapt", stop)
    assert main(_on_own_images(tmp_path, 320)) == 130
    said = capsys.readouterr().out
    assert "epsilon 2 at delta" in said and "Each repetition of this command is charged" in said
    assert main(["ledger", str(tmp_path / "stores/demo-mine"), "--json"]) == 0
    assert [run["spent"]["steps"] for run in json.loads(capsys.readouterr().out)["runs"]] in (
        [],
        [0],
    )


@pytest.mark.slow
def test_a_users_scores_and_images_stay_confidential_and_only_the_classifier_is_charged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(_on_own_images(tmp_path, 160)) == 0
    assert "own head" not in capsys.readouterr().out  # this output is no terminal
    run = tmp_path / "runs/demo-classifier"
    assert not (run / "scores.json").exists() and (run / "confidential/scores.json").exists()
    for_operator, public = (
        (run / name).read_text() for name in ("confidential/operator.html", "report.html")
    )
    for shown in ("predicted as", 'src="data:image'):
        assert shown in for_operator and shown not in public
    assert main(["ledger", str(tmp_path / "stores/demo-mine"), "--json"]) == 0
    charged = json.loads(capsys.readouterr().out)
    assert len(charged["runs"]) == 1 and charged["runs"][0]["spent"]["epsilon"] <= 2.0
