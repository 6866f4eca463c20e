"""The demo from Python: its results are values, and its verdict is that of the intervals."""

from pathlib import Path

import pytest
from PIL import Image

from dpvision import demo
from dpvision.eval.score import Score
from dpvision.synthetic.scenes import make_scene


def _score(value: float, low: float, high: float) -> Score:
    return Score("captioner", value, low, high, 100, 0.1, "zero-shot", "public")


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ((0.2, 0.1, 0.29), "ahead of"),
        ((0.2, 0.1, 0.31), "not to be told from"),
        ((0.6, 0.51, 0.7), "behind"),
    ],
)
def test_the_verdict_is_that_of_the_intervals(
    before: tuple[float, float, float], words: str
) -> None:
    assert words in demo._compared(_score(0.4, 0.3, 0.5), _score(*before))


@pytest.mark.slow
def test_on_images_returns_the_private_scores_and_prints_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(120):
        scene = make_scene(i, 32)
        if scene.main.shape in ("disc", "square"):
            (tmp_path / "mine" / scene.main.shape).mkdir(parents=True, exist_ok=True)
            Image.fromarray(scene.image).save(tmp_path / "mine" / scene.main.shape / f"{i}.png")
    (tmp_path / "classes.txt").write_text("square\ndisc\n")
    lines: list[str] = []
    place = demo.Place(tmp_path / "stores", tmp_path / "runs", lines.append)
    found = demo.on_images(tmp_path / "mine", tmp_path / "classes.txt", place)
    assert found.run == tmp_path / "runs" / "demo-classifier" and found.report.is_file()
    assert {score.visibility for score in found.scores} == {"private"}
    assert found.to_dict()["scores"] == []
    assert found.operator_page.parent.name == "confidential"
    assert lines[0] == "1/2  Images" and any("epsilon 2 at delta" in line for line in lines)
    assert not capsys.readouterr().out
