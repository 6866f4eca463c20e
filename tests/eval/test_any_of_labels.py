"""Accuracy by several labels: against counting by hand, in each form of file, through each protocol
that predicts a class.
"""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dpvision.data.importer import import_samples
from dpvision.data.sources import Sample
from dpvision.data.store import Store
from dpvision.errors import DataError
from dpvision.eval.any_of_labels import AnyOfLabels, load_any_of_labels
from dpvision.eval.metric import Scoring, chance_level, measure
from dpvision.eval.probes.few_shot_probe import FewShotProbe
from dpvision.eval.probes.knn import KNN
from dpvision.eval.probes.linear_probe import Linear
from dpvision.eval.probes.protocol import score_features
from dpvision.eval.probes.records import LabelledFeatures
from dpvision.eval.probes.ridge import Ridge
from dpvision.eval.probes.suite import evaluate

from .labelled import write_colours, write_store


def sets(*labels: set[int]) -> AnyOfLabels:
    return AnyOfLabels("real.json", tuple(map(frozenset, labels)))


def test_any_of_the_labels_is_right_and_images_without_one_do_not_count() -> None:
    several = sets({0, 2}, {1}, set(), {3}, {0})
    value, low, high, n = several.measure(np.array([2, 1, 0, 0, 1]), np.arange(5))
    assert (value, n) == (0.5, 4) and low < 0.5 < high
    assert several.measure(np.array([0, 2]), np.array([4, 1]))[0] == 0.5  # rows in any order
    assert several.chance(np.arange(5)) == 0.5
    with pytest.raises(DataError, match="any of 1 records"):
        several.measure(np.array([1]), np.array([2]))


def test_with_one_label_each_it_is_accuracy() -> None:
    rng = np.random.default_rng(0)
    truth, predicted = rng.integers(0, 5, 300), rng.integers(0, 5, 300)
    several = sets(*({int(label)} for label in truth))
    assert several.measure(predicted, np.arange(300))[:3] == measure(predicted, truth)
    assert several.chance(np.arange(300)) == chance_level(truth)


def test_more_labels_never_make_a_score_lower() -> None:
    rng = np.random.default_rng(1)
    truth, predicted = rng.integers(0, 5, 200), rng.integers(0, 5, 200)
    one = sets(*({int(label)} for label in truth))
    two = sets(
        *(
            {int(label), int(other)}
            for label, other in zip(truth, rng.integers(0, 5, 200), strict=True)
        )
    )
    assert two.measure(predicted, np.arange(200))[0] > one.measure(predicted, np.arange(200))[0]


def test_several_draws_have_students_interval_over_them() -> None:
    several = sets({0}, {1}, {0, 1}, {1})
    draws = [np.array([0, 1, 0, 1]), np.array([0, 0, 0, 0])]
    score = Scoring(any_of=several).score(
        "encoder", "few-shot", "2 draws", draws, np.zeros(4), np.arange(4)
    )
    assert (
        score.value == 0.75
        and score.n == 4
        and score.protocol == "few-shot, 2 draws, any label of real.json"
    )
    assert score.low < 0.5 and score.high == 1.0, "two draws leave everything open"


def named_store(path: Path, keys: list[str]) -> Store:
    samples = []
    for i, key in enumerate(keys):
        file = io.BytesIO()
        Image.fromarray(np.full((8, 8, 3), 10 * i, dtype=np.uint8)).save(file, "PNG")
        samples.append(Sample(key, file.getvalue(), {}))
    return import_samples(samples, path)


def write(path: Path, value: object) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_reals_file_goes_by_the_numbers_of_the_validation_images(tmp_path: Path) -> None:
    """Also where a store has some of them only, in another order, in class folders."""
    keys = [f"n0144/ILSVRC2012_val_{i:08d}.JPEG" for i in (5, 1, 3)]
    store = named_store(tmp_path / "store", keys)
    real = write(tmp_path / "real.json", [[10], [20], [], [40], [50, 51]])
    found = load_any_of_labels(real, store)
    by_key = {store.record(row).key: found.accepted_N[row] for row in range(3)}
    assert (
        by_key == {keys[0]: {50, 51}, keys[1]: {10}, keys[2]: set()}
        and sum(map(bool, found.accepted_N)) == 2
    )
    with pytest.raises(DataError, match="has 4 lists"):
        load_any_of_labels(write(tmp_path / "short.json", [[1]] * 4), store)


def test_other_lists_go_by_the_sorted_names(tmp_path: Path) -> None:
    store = named_store(tmp_path / "store", ["c", "a", "b"])
    found = load_any_of_labels(write(tmp_path / "lists.json", [[0], [1], [2]]), store)
    assert {store.record(row).key: set(found.accepted_N[row]) for row in range(3)} == {
        "a": {0},
        "b": {1},
        "c": {2},
    }
    with pytest.raises(DataError, match="has 2 lists; expected 3"):
        load_any_of_labels(write(tmp_path / "two.json", [[0], [1]]), store)


@pytest.mark.parametrize(
    "names", [("x/a.png", "y/b.png"), ("a.png", "b.png"), ("a", "b"), ("other/a.jpg", "b.jpg")]
)
def test_names_may_lack_folders_and_endings(tmp_path: Path, names: tuple[str, str]) -> None:
    store = named_store(tmp_path / "store", ["x/a.png", "y/b.png", "z/c.png"])
    wanted = {"x/a.png": {0, 3}, "y/b.png": {1}, "z/c.png": set()}
    as_json = write(tmp_path / "labels.json", {names[0]: [0, 3], names[1]: [1]})
    as_csv = write(tmp_path / "labels.csv", f"labels,key\n0 3,{names[0]}\n1,{names[1]}\n")
    for path in (as_json, as_csv):
        found = load_any_of_labels(path, store)
        assert {store.record(row).key: set(found.accepted_N[row]) for row in range(3)} == wanted


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("missing.json", None, "No such file"),
        ("broken.json", "[[1]", "expected a JSON"),
        ("number.json", 3, "neither a list"),
        ("empty.json", [], "neither a list"),
        ("text.json", {"a": ["dog"]}, "class numbers"),
        ("minus.json", {"a": [-1]}, "class numbers"),
        ("flags.json", {"a": [True]}, "class numbers"),
        ("none.json", {"a": []}, "no record"),
        ("strangers.json", {"k": [0]}, "match no record"),
        ("columns.csv", "name,labels\na,0\n", "expected key and labels"),
        ("twice.csv", "key,labels\na,0\na,1\n", "occurs twice"),
        ("commas.csv", "key,labels\nb,0\na,0,1\n", "line 3: cells=3; expected 2"),
        ("quote.csv", 'key,labels\na,"0\nb,1\n', "line 2: unexpected end of data"),
        ("words.csv", "key,labels\na,dog\n", "class numbers"),
    ],
)
def test_files_that_will_not_do_are_refused_by_what_is_wrong(
    tmp_path: Path, name: str, content: object, problem: str
) -> None:
    store = named_store(tmp_path / "store", ["a", "b"])
    if content is not None:
        write(tmp_path / name, content)
    with pytest.raises(DataError, match=problem):
        load_any_of_labels(tmp_path / name, store)


def test_every_protocol_on_features_scores_by_them() -> None:
    """Features that say the own label outright: by a file with the next class for every other
    image, half are right.
    """
    label = np.arange(400) % 4
    features = torch.nn.functional.one_hot(torch.from_numpy(label)).float()

    def part() -> LabelledFeatures:
        return LabelledFeatures(
            {("oracle", "x"): features},
            torch.from_numpy(label),
            np.arange(400),
            np.arange(400)[::-1].copy(),
        )

    accepted = [
        {int(label[399 - row])} if row % 8 < 4 else {int(label[399 - row] + 1) % 4}
        for row in range(400)
    ]
    scores = score_features(
        part(), part(), (KNN(5), Linear(), Ridge(), FewShotProbe()), Scoring(any_of=sets(*accepted))
    )
    assert [score.value for score in scores] == [0.5] * 4 and all(
        "any label of real.json" in score.protocol for score in scores
    )


@pytest.mark.slow
def test_a_suite_scores_by_the_file_and_does_not_mix_up_its_cache(tmp_path: Path) -> None:
    train, test = write_colours(tmp_path / "train", 30, 0), write_colours(tmp_path / "test", 10, 1)
    every = AnyOfLabels("every.json", (frozenset({0, 1, 2}),) * test.num_records)
    none_right = AnyOfLabels("wrong.json", (frozenset({9}),) * test.num_records)
    plain = evaluate(
        "pixels", train, test, protocols=(KNN(), FewShotProbe()), against=(), cache=True, workers=1
    )
    found = {
        s.name: [
            score.value
            for score in evaluate(
                "pixels",
                train,
                test,
                protocols=(KNN(), FewShotProbe()),
                against=(),
                cache=True,
                workers=1,
                metric=s,
            )
        ]
        for s in (every, none_right)
    }
    assert found == {"every.json": [1.0, 1.0], "wrong.json": [0.0, 0.0]}
    again = evaluate(
        "pixels", train, test, protocols=(KNN(), FewShotProbe()), against=(), cache=True, workers=1
    )
    assert [s.value for s in again] == [s.value for s in plain] and "any label" not in again[
        0
    ].protocol


def test_labels_beyond_the_declared_classes_are_refused(tmp_path: Path) -> None:
    store = write_store(
        tmp_path / "s",
        [np.full((8, 8, 3), i * 40, dtype=np.uint8) for i in range(3)],
        ["a", "b", "c"],
    )
    path = write(tmp_path / "l.json", {"k0": [3], "k1": [0]})
    assert sum(map(bool, load_any_of_labels(path, store, num_classes=5).accepted_N)) == 2
    with pytest.raises(DataError, match="0 to 2"):
        load_any_of_labels(path, store)
