"""The pages begin with what was learned: the run's own scores and no control's, and predictions
that the classifier makes.
"""

import base64
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dpvision.adapt.session import adapt, new_head_session
from dpvision.config import FrozenEncoderConfig, HeadConfig
from dpvision.data.decode import decode
from dpvision.data.store import Store
from dpvision.data.synthetic_store import write_scenes
from dpvision.encoders.classifier import load_classifier
from dpvision.files import write_json
from dpvision.recipes import RECIPES
from dpvision.report.learned import PARENT, learned_of, predict_some
from dpvision.report.operator_page import make_operator_page
from dpvision.report.page import make_report

from ..statement.runs import PUBLIC_SCORES, score_entry

OWN = "own head, 10 classes, centre crop"
TRIE = "zero-shot, walk through the label tree"


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Store]:
    folder = tmp_path_factory.mktemp("learned")
    private = write_scenes(folder / "mine", 60, 16, label="colour", public=False)
    config = RECIPES["transfer.prototypes"]()
    assert isinstance(config.model, HeadConfig)
    config = replace(
        config,
        model=replace(
            config.model, encoder=FrozenEncoderConfig(spec="pixels", image_size=16), num_classes=10
        ),
        data=replace(config.data, store=str(private.path)),
        privacy=replace(
            config.privacy, dataset_size=60, expected_batch_size=60, target_epsilon=4.0
        ),
    )
    with new_head_session(config, folder / "run") as session:
        adapt(session)
    return folder / "run", write_scenes(folder / "test", 30, 16, first=100, label="colour")


def test_predictions_are_those_of_the_classifier_beside_the_true_classes(
    classifier: tuple[Path, Store],
) -> None:
    run, test = classifier
    shown, names = predict_some(run, test, 8), test.label_names
    assert shown is not None and names is not None and len(shown.examples) == 8
    rows = {decode(test.read(row)).tobytes(): row for row in range(30)}
    ready = load_classifier(run)
    for example in shown.examples:
        pixels = np.asarray(
            Image.open(io.BytesIO(base64.b64decode(example.image.partition(",")[2])))
        )
        row = rows[pixels.tobytes()]
        assert example.true == names[test.labels[row]]
        assert (
            example.predicted
            == names[int(ready(torch.from_numpy(ready.preprocess(pixels))[None]).argmax())]
        )
    assert shown == predict_some(run, test, 8)


def test_the_page_opens_with_predictions_before_the_guarantee(
    classifier: tuple[Path, Store],
) -> None:
    run, test = classifier
    write_json(run / "scores.json", [score_entry("own head", 0.531, OWN) | {"chance": 0.121}])
    page = make_report(run, test.path).read_text()
    places = [
        page.index(text)
        for text in (
            "What it learned",
            "53%",
            "predicted as",
            "What is promised",
            "strongest attacker",
        )
    ]
    assert places == sorted(places) and page.count("predicted as") == 12
    assert "What it learned" in make_operator_page(run, test_store=test.path).read_text()


def test_a_run_without_a_head_predicts_nothing_and_its_page_opens_with_the_guarantee(
    copy_of: Callable[[], Path], classifier: tuple[Path, Store]
) -> None:
    run = copy_of()
    assert predict_some(run, classifier[1]) is None
    assert learned_of(PUBLIC_SCORES) == []
    assert "What it learned" not in make_report(run).read_text()


def test_what_was_learned_is_said_of_the_run_and_never_of_a_control() -> None:
    controls = [
        score_entry(name, 0.9, TRIE)
        for name in ("random weights", "captioner, other images", PARENT)
    ]
    assert learned_of(controls) == []
    (fact,) = learned_of(
        [score_entry("captioner", 0.5, TRIE) | {"low": 0.4, "high": 0.6, "chance": 0.2}, *controls]
    )
    assert (
        fact.value == "50%"
        and "40.0 to 60.0%" in fact.text
        and "Before this run: 90.0%" in fact.text
        and "20.0%" in fact.text
    )
    assert [bar[1:] for bar in fact.bars] == [(0.5, True), (0.9, False), (0.2, False)]


def test_bars_of_a_measure_that_is_no_share_are_no_longer_than_the_page() -> None:
    (fact,) = learned_of(
        [
            score_entry("captioner", 1.7, "CIDEr-D, greedy captions"),
            score_entry(PARENT, 3.4, "CIDEr-D, greedy captions"),
        ]
    )
    assert (
        fact.value == "170.0" and max(bar[1] for bar in fact.bars) == 1 and fact.bars[0][1] == 0.5
    )


def test_captions_that_score_nothing_have_bars_of_no_length() -> None:
    (fact,) = learned_of(
        [
            score_entry("captioner", 0.0, "CIDEr-D, greedy captions")
            | {"low": 0.0, "high": 0.0, "chance": 0.0}
        ]
    )
    assert fact.value == "0.0" and [bar[1] for bar in fact.bars] == [0, 0]
