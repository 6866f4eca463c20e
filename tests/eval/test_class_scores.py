"""Figures per class: against scikit-learn and torchmetrics, and intervals over persons."""

import numpy as np
import pytest
import torch
from sklearn.metrics import brier_score_loss, confusion_matrix, roc_auc_score, roc_curve

from dpvision.errors import ConfigError
from dpvision.eval.class_scores import (
    ALL,
    NUM_BINS,
    ClassRow,
    ClassScores,
    auroc_of,
    calibration_error,
    class_scores,
    roc_of,
    sensitivity_of,
)
from dpvision.eval.metric import ranked

NAMES = ("a", "b", "c")


def made(num: int = 300, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities that tell something, rounded so that some are equal; targets; labels."""
    rng = np.random.default_rng(seed)
    label_N = rng.choice(3, num, p=[0.6, 0.3, 0.1])
    logit_NK = rng.normal(0, 1, (num, 3)) + 1.5 * np.eye(3)[label_N]
    probability_NK = np.exp(logit_NK) / np.exp(logit_NK).sum(axis=1, keepdims=True)
    return probability_NK.round(2), np.eye(3, dtype=np.uint8)[label_N], label_N


def row(found: ClassScores, name: str, group: str = ALL) -> ClassRow:
    (one,) = [r for r in found.rows if (r.name, r.group) == (name, group)]
    return one


def values(one: ClassRow) -> dict[str, float | None]:
    return {name: value and value.value for name, value in one.figures.items()}


def test_areas_and_sensitivities_are_sklearns_equal_scores_and_weights_included() -> None:
    probability, target, _ = made()
    weight = np.random.default_rng(1).integers(0, 3, (4, 300)).astype(float)
    weight[0] = 1
    for k in range(3):
        auroc, found = ranked(
            (auroc_of, lambda hits, taken: sensitivity_of(hits, taken, specificity=0.8)),
            probability[:, k],
            target[:, k],
            weight,
        )
        for r, w in enumerate(weight):
            on, score = target[:, k], probability[:, k]
            assert auroc[r] == pytest.approx(roc_auc_score(on, score, sample_weight=w), abs=1e-12)
            false, true, _ = roc_curve(on, score, sample_weight=w, drop_intermediate=False)
            assert found[r] == pytest.approx(true[false <= 0.2 + 1e-12].max(), abs=1e-12)


@pytest.mark.parametrize("only", [0, 1])
def test_one_kind_of_records_defines_neither(only: int) -> None:
    score, on = np.arange(5.0), np.full(5, only)
    auroc, found = ranked(
        (auroc_of, lambda hits, taken: sensitivity_of(hits, taken, specificity=0.9)),
        score,
        on,
        np.ones((1, 5)),
    )
    assert np.isnan(auroc).all() and np.isnan(found).all()


def test_a_specificity_of_almost_one_allows_no_false_alarm() -> None:
    score, on = np.array([0.9, 0.8, 0.7, 0.6]), np.array([1, 0, 1, 0])
    (found,) = ranked(
        (lambda hits, taken: sensitivity_of(hits, taken, specificity=0.99),),
        score,
        on,
        np.ones((1, 4)),
    )
    assert found == 0.5  # the first of two, above the highest of the others


def test_calibration_errors_are_those_of_a_loop_over_bins() -> None:
    probability, target, label = made(400)
    best = probability.argmax(1)
    total = 0.0
    for j in range(NUM_BINS):
        top = probability.max(1)
        inside = (top > j / NUM_BINS) & (top <= (j + 1) / NUM_BINS)
        if inside.any():
            gap = (best == label)[inside].mean() - top[inside].mean()
            total += inside.mean() * abs(gap)
    found = class_scores(probability, target, NAMES, np.arange(400))
    assert values(row(found, ALL))["calibration error"] == pytest.approx(total)


@pytest.mark.slow  # importing torchmetrics takes 20 s
def test_calibration_errors_are_torchmetrics() -> None:
    metrics = pytest.importorskip(
        "torchmetrics.functional.classification", reason="torchmetrics comes with Lightning"
    )
    label = made(400)[2]
    probability = np.random.default_rng(2).dirichlet((1, 1, 1), 400)  # none on a bin's edge
    whole = metrics.multiclass_calibration_error(
        torch.from_numpy(probability), torch.from_numpy(label), num_classes=3, n_bins=NUM_BINS
    )
    found = class_scores(probability, np.eye(3)[label], NAMES, np.arange(400))
    assert values(row(found, ALL))["calibration error"] == pytest.approx(float(whole), abs=1e-6)


def test_calibrated_probabilities_have_a_small_error_and_half_of_them_a_large_one() -> None:
    rng = np.random.default_rng(0)
    probability = rng.random(20_000)
    right = rng.random(20_000) < probability
    one = np.ones((1, 20_000))
    assert calibration_error(probability, right, one)[0] < 0.015
    assert calibration_error(probability / 2, right, one)[0] == pytest.approx(0.25, abs=0.01)


def test_rows_are_those_of_sklearn() -> None:
    probability, target, label = made()
    found = class_scores(probability, target, NAMES, np.arange(300))
    for k, name in enumerate(NAMES):
        got = values(row(found, name))
        assert got["AUROC"] == pytest.approx(roc_auc_score(target[:, k], probability[:, k]))
        assert got["Brier score"] == pytest.approx(
            brier_score_loss(target[:, k], probability[:, k])
        )
    whole = values(row(found, ALL))
    assert whole["AUROC"] == pytest.approx(
        np.mean([roc_auc_score(target[:, k], probability[:, k]) for k in range(3)])
    )
    brier = ((probability - target) ** 2).sum(axis=1).mean() / 2
    assert whole["Brier score"] == pytest.approx(brier)
    assert (np.array(found.confusion_KK) == confusion_matrix(label, probability.argmax(1))).all()
    num, mean, right = np.array(found.reliability).T
    assert num.sum() == 300
    assert (num * right).sum() == (probability.argmax(1) == label).sum()
    assert (num * mean).sum() == pytest.approx(probability.max(1).sum())


def test_groups_are_scored_apart_and_small_ones_have_no_figure() -> None:
    probability, target, label = made()
    site = np.where(np.arange(300) < 200, "A", "B")
    sex = np.where(label == 2, "F", "M")
    found = class_scores(
        probability, target, NAMES, np.arange(300), groups={"site": site, "sex": sex}
    )
    alone = class_scores(probability[:200], target[:200], NAMES, np.arange(200))
    assert row(found, "b", "site=A").figures == row(alone, "b").figures
    assert row(found, "c", "sex=F").figures["AUROC"] is None  # no others
    assert row(found, "a", "sex=F").figures["AUROC"] is None  # none
    assert row(found, ALL, "sex=F").figures["AUROC"] is None
    assert row(found, ALL, "sex=F").figures["Brier score"] is not None
    assert row(found, "c", "sex=F").images == (label == 2).sum()


def test_copies_of_a_persons_image_make_no_interval_narrower() -> None:
    probability, target, _ = made(100)
    once = class_scores(probability, target, NAMES, np.arange(100))
    four = np.repeat(np.arange(100), 4)
    same = class_scores(probability[four], target[four], NAMES, four)
    apart = class_scores(probability[four], target[four], NAMES, np.arange(400))

    def width(found: ClassScores) -> float:
        value = row(found, "a").figures["AUROC"]
        assert value is not None
        return value.high - value.low

    assert same.units == 100 and apart.units == 400
    assert width(same) == pytest.approx(width(once))
    assert width(apart) < 0.75 * width(same)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    rng = np.random.default_rng(3)
    truth = 0.7602  # of normal scores one deviation apart: Phi(1 / sqrt 2)
    held = 0
    for _ in range(100):
        on = (np.arange(120) % 3 == 0).astype(int)
        score = 1 / (1 + np.exp(-(rng.normal(0, 1, 120) + on)))
        pair, target = np.stack([1 - score, score], 1), np.stack([1 - on, on], 1)
        value = row(class_scores(pair, target, ("n", "y"), np.arange(120)), "y").figures["AUROC"]
        assert value is not None
        held += value.low <= truth <= value.high
    assert held >= 87  # 95 expected; fewer than 87 happens once in a thousand


def test_several_labels_have_no_confusion_matrix() -> None:
    rng = np.random.default_rng(0)
    target = (rng.random((80, 3)) < 0.3).astype(np.uint8)
    probability = np.clip(target * 0.5 + rng.random((80, 3)) / 2, 0, 1)
    found = class_scores(probability, target, NAMES, np.arange(80), multi_label=True)
    assert found.confusion_KK is None
    assert sum(num for num, _, _ in found.reliability) == 240
    brier = ((probability - target) ** 2).mean()
    assert values(row(found, ALL))["Brier score"] == pytest.approx(brier)


@pytest.mark.parametrize("multi_label", [False, True])
def test_roc_curves_are_the_corners_of_sklearns(multi_label: bool) -> None:
    probability, target, _ = made(200)
    target = target | (target[::-1] if multi_label else 0)
    found = class_scores(probability, target, NAMES, np.arange(200), multi_label=multi_label)
    for k, name in enumerate(NAMES):
        false, true = map(np.array, found.roc[name])
        every = roc_curve(target[:, k], probability[:, k], drop_intermediate=False)
        points = {(round(x, 9), round(y, 9)) for x, y in zip(*every[:2], strict=True)}
        assert {(round(x, 9), round(y, 9)) for x, y in zip(false, true, strict=True)} <= points
        assert (false[0], true[0], false[-1], true[-1]) == (0, 0, 1, 1)
        area = roc_auc_score(target[:, k], probability[:, k])
        assert np.trapezoid(true, false) == pytest.approx(area, abs=1e-12)
        slope = np.arctan2(np.diff(true), np.diff(false))
        assert (np.abs(np.diff(slope)) > 1e-9).all()  # no corner on a straight line


def test_a_perfect_order_has_a_curve_of_three_points() -> None:
    false, true = roc_of(np.array([0.1, 0.2, 0.7, 0.8]), np.array([0, 0, 1, 1]))
    assert (false.tolist(), true.tolist()) == ([0, 0, 1], [0, 1, 1])
    target = np.eye(3, dtype=np.uint8)[[0, 0, 1]]
    assert set(class_scores(np.full((3, 3), 0.3), target, NAMES, np.arange(3)).roc) == {"a", "b"}


@pytest.mark.parametrize("specificity", [0.0, 1.0, float("nan"), -0.1])
def test_a_specificity_outside_the_range_is_refused(specificity: float) -> None:
    probability, target, _ = made(20)
    with pytest.raises(ConfigError, match=r"specificity=.*expected above 0 and below 1"):
        class_scores(probability, target, NAMES, np.arange(20), specificity=specificity)


def test_the_json_has_every_figure() -> None:
    probability, target, _ = made(60)
    found = class_scores(probability, target, NAMES, np.arange(60)).to_dict()
    assert [r["name"] for r in found["rows"]] == [ALL, *NAMES]
    assert set(found["rows"][1]["figures"]["AUROC"]) == {"value", "low", "high"}
