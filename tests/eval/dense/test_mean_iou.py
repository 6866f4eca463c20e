"""mIoU and its companions are scikit-learn's on all pixels together; the interval is that of images
drawn again.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, balanced_accuracy_score, jaccard_score

from dpvision.errors import DataError
from dpvision.eval.dense.mean_iou import (
    RIGHT,
    SAID,
    TRUE,
    class_iou,
    count_pixels,
    mean_iou,
    measures,
)
from dpvision.eval.dense.semantic_data import IGNORED


def masks(
    seed: int, num: int = 5, num_classes: int = 7, ignored: float = 0.2
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Random truths and answers of several sizes; classes are unequally frequent."""
    rng = np.random.default_rng(seed)
    share = rng.dirichlet(np.full(num_classes, 0.5))
    truths, answers = [], []
    for _ in range(num):
        size = tuple(rng.integers(3, 20, size=2))
        truth = rng.choice(num_classes, size=size, p=share).astype(np.uint8)
        said = np.where(
            rng.random(size) < 0.6, truth, rng.choice(num_classes, size=size, p=share)
        ).astype(np.uint8)
        truth[rng.random(size) < ignored] = IGNORED
        truths.append(truth)
        answers.append(said)
    return truths, answers


def counts(truths: list[np.ndarray], answers: list[np.ndarray], num_classes: int) -> np.ndarray:
    return np.stack([count_pixels(t, s, num_classes) for t, s in zip(truths, answers, strict=True)])


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), num_classes=st.integers(2, 12))
def test_the_three_measures_are_those_of_scikit_learn_over_all_counted_pixels(
    seed: int, num_classes: int
) -> None:
    truths, answers = masks(seed, num_classes=num_classes)
    t, s = np.concatenate([t.ravel() for t in truths]), np.concatenate([s.ravel() for s in answers])
    t, s = t[t != IGNORED], s[t != IGNORED]
    found = {m.name: m.value for m in measures(counts(truths, answers, num_classes))}
    assert found["mIoU"] == pytest.approx(
        jaccard_score(t, s, average="macro", labels=np.union1d(t, s))
    )
    assert found["pixel accuracy"] == pytest.approx(accuracy_score(t, s))
    in_truth = np.isin(
        s, t
    )  # scikit-learn warns about answers that are no class of the truth; they are wrong in any case
    assert found["mean class accuracy"] == pytest.approx(
        balanced_accuracy_score(t, np.where(in_truth, s, t.max() + 1))
    )


def test_chance_is_the_best_constant_answer() -> None:
    truths, _ = masks(3)
    best: dict[str, float] = {}
    for k in range(7):
        for m in measures(counts(truths, [np.full_like(t, k) for t in truths], 7)):
            best[m.name] = max(best.get(m.name, 0), m.value)
    for m in measures(counts(*masks(3), 7)):
        assert m.chance == pytest.approx(best[m.name])


def test_classes_that_occur_nowhere_are_left_out_and_those_only_answered_are_not() -> None:
    truth = np.array([[0, 0, 1, 1, IGNORED]])
    count = count_pixels(truth, np.array([[0, 0, 1, 1, 3]]), 5)
    assert np.isnan(class_iou(count)[[2, 3, 4]]).all() and mean_iou(count) == 1
    assert mean_iou(count_pixels(truth, np.array([[0, 0, 1, 3, 3]]), 5)) == pytest.approx(
        (1 + 0.5 + 0) / 3
    )
    assert count[TRUE].sum() == count[SAID].sum() == count[RIGHT].sum() == 4


def test_pixels_of_all_images_count_alike_and_images_do_not() -> None:
    large, small = np.zeros((10, 10), np.uint8), np.ones((2, 2), np.uint8)
    found = {m.name: m.value for m in measures(counts([large, small], [large, large[:2, :2]], 2))}
    assert found["pixel accuracy"] == pytest.approx(100 / 104) and found["mIoU"] == pytest.approx(
        (100 / 104 + 0) / 2
    )


def test_the_interval_covers_the_whole_from_samples_of_images() -> None:
    truths, answers = masks(11, num=3000, num_classes=4)
    every = counts(truths, answers, 4)
    whole = measures(every)[0].value
    rng, inside = np.random.default_rng(0), 0
    for draw in range(100):
        low, high = (lambda m: (m.low, m.high))(
            measures(every[rng.choice(3000, 60, replace=False)], seed=draw)[0]
        )
        inside += low <= whole <= high
    assert 85 <= inside <= 99
    one = measures(every[:1])[0]
    assert (one.low, one.high) == (0, 1), "a single image says nothing about others"


def test_no_pixel_that_counts_is_an_error() -> None:
    empty = np.full((3, 3), IGNORED, np.uint8)
    with pytest.raises(DataError, match="no test pixel counts"):
        measures(counts([empty], [np.zeros((3, 3), np.uint8)], 4))
