"""Scores of several labels a record: against scikit-learn's average precision, and a slow
bootstrap.
"""

import numpy as np
import pytest
from sklearn.metrics import average_precision_score

from dpvision.errors import DataError
from dpvision.eval.metric import average_precision, multi_label_scores


def made(
    num: int, classes: int, seed: int = 0, levels: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Scores that tell something, and targets; ``levels`` rounds them, so that many are equal."""
    rng = np.random.default_rng(seed)
    target = (rng.random((num, classes)) < np.linspace(0.05, 0.7, classes)).astype(np.uint8)
    target[rng.integers(0, num, classes), np.arange(classes)] = 1
    score = (target + rng.normal(0, 1.5, target.shape)).astype(np.float32)
    return (score if levels is None else np.round(score * levels) / levels), target


@pytest.mark.parametrize("levels", [None, 1])
def test_average_precision_is_sklearns_equal_scores_and_weights_included(
    levels: int | None,
) -> None:
    score, target = made(60, 4, levels=levels)
    weight = np.random.default_rng(1).integers(0, 3, (5, 60)).astype(float)
    weight[0] = 1
    for k in range(4):
        ours = average_precision(score[:, k], target[:, k], weight)
        for r, w in enumerate(weight):
            repeated = np.repeat(np.arange(60), w.astype(int))
            assert ours[r] == pytest.approx(
                average_precision_score(target[:, k], score[:, k], sample_weight=w), abs=1e-12
            )
            assert ours[r] == pytest.approx(
                average_precision_score(target[repeated, k], score[repeated, k]), abs=1e-12
            )
    assert np.isnan(average_precision(score[:, 0], np.zeros(60), weight)).all()


def test_in_parts_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    score, target = made(50, 1)
    weight = np.random.default_rng(1).integers(0, 3, (7, 50)).astype(float)
    whole = average_precision(score[:, 0], target[:, 0], weight)
    monkeypatch.setattr("dpvision.eval.metric._AT_ONCE", 100)
    assert (average_precision(score[:, 0], target[:, 0], weight) == whole).all()


def test_the_mean_is_over_classes_that_somebody_has_and_chance_is_their_share() -> None:
    score, target = made(80, 5)
    target[:, 2] = 0
    (found,) = multi_label_scores("own head", score, target, None, "how", "public")
    present = [0, 1, 3, 4]
    assert found.value == pytest.approx(
        np.mean([average_precision_score(target[:, k], score[:, k]) for k in present])
    )
    assert found.chance == pytest.approx(target[:, present].mean()) and found.n == 80
    assert (
        found.protocol == "mean average precision of 4 of 5 classes, how"
        and found.low < found.value < found.high
    )
    noise = np.random.default_rng(3).normal(size=(20_000, 5))
    blind = multi_label_scores("x", noise, np.repeat(target, 250, axis=0), None, "how", "public")[0]
    assert blind.value == pytest.approx(blind.chance, abs=0.02), (
        "scores without meaning get the share of positives"
    )


def test_decisions_are_counted_over_all_classes_beside_the_best_constant_answer() -> None:
    score, target = made(80, 5)
    target[:, 2] = 0
    _, found = multi_label_scores("own head", score, target, score > 0.5, "how", "private")
    right = [
        [(s > 0.5) == bool(t) for s, t in zip(a, b, strict=True)]
        for a, b in zip(score, target, strict=True)
    ]
    assert found.value == pytest.approx(np.mean(right)) and found.visibility == "private"
    constants = [max((target[:, k] == answer).mean() for answer in (0, 1)) for k in range(5)]
    assert found.chance == pytest.approx(np.mean(constants))
    assert found.protocol == "share of decisions right, 5 classes, how"


def test_the_interval_is_as_wide_as_that_of_fresh_test_sets() -> None:
    """The spread of the figure over independent sets is what the interval of one set has to
    show.
    """
    sets = [made(200, 3, seed) for seed in range(60)]
    for which in (0, 1):
        scores = [
            multi_label_scores("x", score, target, score > 0.5, "how", "public")[which]
            for score, target in sets
        ]
        spread = 2 * 1.96 * np.std([s.value for s in scores])
        width = np.mean([s.high - s.low for s in scores])
        assert 0.75 * spread < width < 1.35 * spread
        truth = np.mean([s.value for s in scores])
        assert np.mean([s.low <= truth <= s.high for s in scores]) > 0.85


def test_labels_without_any_class_are_refused() -> None:
    score, target = made(20, 3)
    with pytest.raises(DataError, match="none of 20 records has any class"):
        multi_label_scores("x", score, 0 * target, None, "how", "public")
