"""The step that leaves out unsafe images: probabilities of ``dpvision.predict``, image by image."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import dpvision
from dpvision.checkpoint import load_checkpoint
from dpvision.cli import main
from dpvision.curate.passes import curate
from dpvision.curate.pipeline import Pipeline
from dpvision.curate.record import Record, about
from dpvision.curate.safety import Safety
from dpvision.data.sample import Sample
from dpvision.encoders.calibration import Calibration, save_calibration, weights_of
from dpvision.errors import CheckpointError, ConfigError

from ..data.image_files import encode, noise, write_folder, write_tar


def image(i: int) -> bytes:
    """Dark ones are safe, bright ones are not; some are between."""
    return encode(noise(i, 24, 24) // 2 + i % 5 * 30)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A classifier trained on public images."""
    return trained(tmp_path_factory.mktemp("public"), "--public")


def trained(root: Path, *more: str) -> Path:
    files = {f"{'unsafe' if i % 5 > 2 else 'safe'}/{i}.png": image(i) for i in range(100)}
    write_folder(root / "images", files)
    (root / "classes.txt").write_text("safe\nunsafe\n")
    given = ["--classes", str(root / "classes.txt"), *more]
    main(["data", "import", str(root / "images"), str(root / "store"), *given])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        words = "adapt --data store --encoder pixels --num-classes 2 --dataset-size 100 --epsilon 8"
        main([*words.split(), "--name", "safety"])
    return root / "runs" / "safety"


def records(numbers) -> list[Record]:
    return [Record(Sample(str(i), image(i), {})) for i in numbers]


def left_out(step: Safety, numbers, each: int) -> list[str | None]:
    apply, made = step.opened(), records(numbers)
    for start in range(0, len(made), each):
        apply(made[start : start + each])
    return [record.reason for record in made]


def test_images_above_the_probability_are_left_out_alone_as_in_company(run, tmp_path):
    numbers = range(200, 275)
    files = write_folder(tmp_path, {f"{i}.png": image(i) for i in numbers})
    found = dpvision.predict(run, files)
    unsafe = np.array([one.probabilities[1] for one in found])
    for limit in (0.5, float(np.median(unsafe))):
        step = Safety(run, ("unsafe",), limit)
        expected = ["unsafe" if p > limit else None for p in unsafe.tolist()]
        assert 0 < expected.count(None) < len(expected)
        for each in (1, 7, 64):
            assert left_out(step, numbers, each) == expected


def test_the_store_has_what_is_left_and_says_no_path(run, tmp_path):
    members = {f"{i}.png": image(i) for i in range(300, 330)}
    source = write_tar(tmp_path / "a.tar", members)
    step = Safety(run)
    store = curate(source, tmp_path / "store", Pipeline((step,)))
    kept = {store.record(row).key for row in range(store.num_records)}
    reasons = left_out(step, range(300, 330), 30)
    assert kept == {str(i) for i, r in zip(range(300, 330), reasons, strict=True) if r is None}
    about = json.loads((store.path / "store.json").read_text())["curation"]
    assert about["stability"] == 1 and str(tmp_path) not in json.dumps(about)
    assert about["steps"][0]["run"].startswith("sha256 ")


def test_another_calibration_is_another_classifier(run, tmp_path):
    copy = tmp_path / "runs" / "safety"
    shutil.copytree(run, copy)
    before = about(Safety(copy))
    assert before == about(Safety(run))
    checkpoint = load_checkpoint(copy)
    made = Calibration(weights_of(checkpoint, False), 9.0, 0.0, None, None, {}, 1.0, 0.5)
    save_calibration(checkpoint, made)
    assert about(Safety(copy)) != before


def test_classifiers_that_are_refused(run, tmp_path):
    private = trained(tmp_path)
    for step, words in (
        (Safety(), "no classifier"),
        (Safety(run, ("nsfw",)), "classes=nsfw; expected some of safe, unsafe"),
        (Safety(run, ()), "classes=none"),
        (Safety(private), "have seen images that are not public"),
    ):
        with pytest.raises(ConfigError, match=words):
            step.opened()
    with pytest.raises(CheckpointError):
        Safety(tmp_path / "nothing").opened()
    for wrong in (1.0, -0.1, float("nan")):
        with pytest.raises(ConfigError, match="max_probability"):
            Safety(run, max_probability=wrong)
