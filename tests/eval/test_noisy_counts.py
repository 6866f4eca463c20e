"""Figures from noisy counts: against scikit-learn where there is no noise, and the share of
releases whose intervals have the true figures.
"""

import re
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import brier_score_loss, confusion_matrix, roc_auc_score, roc_curve

from dpvision.eval.class_scores import ALL, calibration_error
from dpvision.eval.noisy_counts import (
    FEWEST,
    NUM_BINS,
    NoisyCounts,
    NoisyRow,
    bin_edges,
    figures_of,
    roc_of,
    rows_of,
)
from dpvision.eval.probes.release_scores import release_plan

Images = tuple[np.ndarray, np.ndarray, np.ndarray]


def drawn(num_classes: int, num: int, seed: int = 0) -> Images:
    """Declared class, predicted class and its bin, of a classifier that tells something."""
    rng = np.random.default_rng(seed)
    label_N = rng.integers(0, num_classes, num)
    logit_NK = 2 * (rng.normal(0, 1, (num, num_classes)) + 2 * np.eye(num_classes)[label_N])
    probability_NK = np.exp(logit_NK) / np.exp(logit_NK).sum(axis=1, keepdims=True)
    best_N, top_N = probability_NK.argmax(axis=1), probability_NK.max(axis=1)
    bin_N = np.searchsorted(bin_edges(num_classes)[1:-1], top_N, side="right")
    return label_N, best_N, bin_N


def table(images: Images, num_classes: int) -> np.ndarray:
    count_KKJ = np.zeros((num_classes, num_classes, NUM_BINS))
    np.add.at(count_KKJ, images, 1)
    return count_KKJ


def rows(*tables: np.ndarray, std: float = 0.0, num_classes: int) -> list[NoisyRow]:
    names = [str(k) for k in range(num_classes)]
    return rows_of([NoisyCounts(ALL, (ALL,), one[None], std) for one in tables], names)


def figure(row: NoisyRow, name: str) -> float:
    value = row.figures[name]
    assert value is not None
    return value.value


@pytest.mark.parametrize("num_classes", [2, 4])
def test_without_noise_areas_and_curves_are_sklearns_of_the_binned_scores(num_classes: int) -> None:
    label_N, best_N, bin_N = images = drawn(num_classes, 500)
    count_KKJ = table(images, num_classes)
    whole, *classes = rows(count_KKJ, num_classes=num_classes)
    for k, row in enumerate(classes):
        score_N, on_N = np.where(best_N == k, bin_N + 1, -bin_N - 1), label_N == k
        assert figure(row, "AUROC") == pytest.approx(roc_auc_score(on_N, score_N), abs=1e-12)
        false, true = roc_of(count_KKJ, k)
        places = np.unique(np.stack([false, true], axis=1), axis=0)
        expected = np.stack(roc_curve(on_N, score_N, drop_intermediate=False)[:2], axis=1)
        np.testing.assert_allclose(places, np.unique(expected, axis=0), atol=1e-12)
        assert (row.count, row.count_std) == (on_N.sum(), 0)
    areas = [figure(row, "AUROC") for row in classes]
    assert figure(whole, "AUROC") == pytest.approx(np.mean(areas))


def test_without_noise_the_other_figures_are_those_of_the_binned_probabilities() -> None:
    label_N, best_N, bin_N = images = drawn(3, 400)
    edges = bin_edges(3)
    top_N, right_N = ((edges[:-1] + edges[1:]) / 2)[bin_N], (label_N == best_N).astype(float)
    whole, *classes = rows(table(images, 3), num_classes=3)
    confusion = confusion_matrix(label_N, best_N)
    assert figure(whole, "accuracy") == pytest.approx(confusion.trace() / 400)
    assert figure(whole, "Brier score") == pytest.approx(brier_score_loss(right_N, top_N))
    expected = calibration_error(top_N, right_N, np.ones((1, 400)))[0]
    assert figure(whole, "calibration error") == pytest.approx(expected)
    for k, row in enumerate(classes):
        assert figure(row, "sensitivity") == pytest.approx(confusion[k, k] / confusion[k].sum())
        other = np.delete(confusion, k, axis=0)
        assert figure(row, "specificity") == pytest.approx(1 - other[:, k].sum() / other.sum())


def test_for_two_classes_the_order_is_that_of_the_class_probability() -> None:
    rng = np.random.default_rng(0)
    probability_N, on_N = rng.random(300), rng.integers(0, 2, 300)
    best_N = (probability_N > 0.5).astype(int)
    top_N = np.maximum(probability_N, 1 - probability_N)
    bin_N = np.searchsorted(bin_edges(2)[1:-1], top_N, side="right")
    _, _, second = rows(table((on_N, best_N, bin_N), 2), num_classes=2)
    binned_N = np.floor(10 * probability_N)
    assert figure(second, "AUROC") == pytest.approx(roc_auc_score(on_N, binned_N))


def test_the_intervals_have_the_true_figures_as_often_as_they_say() -> None:
    """Accuracy and areas 95 of 100, as far as 150 releases tell; a calibration error of a few
    hundred units rather less, since the absolute values of noise do not average out.
    """
    truth = rows(table(drawn(2, 200_000, 1), 2), num_classes=2)
    std, hits = 2.8, {}
    rng = np.random.default_rng(2)
    for seed in range(150):
        noisy = table(drawn(2, 800, 10 + seed), 2) + std * rng.normal(size=(2, 2, NUM_BINS))
        for row, true in zip(rows(noisy, std=std, num_classes=2)[:2], truth[:2], strict=True):
            for name, value in row.figures.items():
                assert value is not None
                inside = value.low <= figure(true, name) <= value.high
                hits.setdefault((row.name, name), []).append(inside)
    for (_, name), inside in hits.items():
        assert np.mean(inside) >= (0.8 if name == "calibration error" else 0.89), name


def test_counts_of_few_deviations_of_noise_give_no_figure() -> None:
    count_KKJ = np.zeros((2, 2, NUM_BINS))
    std_of_class = 1.5 * np.sqrt(2 * NUM_BINS)
    for factor, known in ((0.99, False), (1.01, True)):
        count_KKJ[0, 0, -1] = factor * FEWEST * std_of_class
        count_KKJ[1, 1, -1] = 1000
        whole, *classes = rows(count_KKJ, std=1.5, num_classes=2)
        assert classes[0].count_std == pytest.approx(std_of_class)
        for row in classes:  # the second divides by the first's count too
            assert all((value is not None) == known for value in row.figures.values())
        assert (whole.figures["AUROC"] is not None) == known
        assert whole.figures["accuracy"] is not None
    nothing = rows(np.zeros((2, 2, NUM_BINS)), std=1.5, num_classes=2)
    assert all(value is None for row in nothing for value in row.figures.values())


def test_tables_of_several_attributes_are_averaged_by_their_precision() -> None:
    """The best unbiased mean of two sums, whose noise has the variances 3 and 5 of a count."""
    rng = np.random.default_rng(0)
    count_AGKKJ = [rng.normal(40, 2, (groups, 2, 2, NUM_BINS)) for groups in (3, 5)]
    tables = [
        NoisyCounts(name, tuple(map(str, range(len(one)))), one, 2.0)
        for name, one in zip(("sex", "site"), count_AGKKJ, strict=True)
    ]
    whole = rows_of(tables, ["0", "1"])[0]
    sums = [one.sum() for one in count_AGKKJ]
    assert whole.name == whole.group == ALL
    assert whole.count == pytest.approx((sums[0] / 3 + sums[1] / 5) / (1 / 3 + 1 / 5))
    assert whole.count_std == pytest.approx(2 * np.sqrt(4 * NUM_BINS / (1 / 3 + 1 / 5)))


def test_curve_and_confusion_matrix_are_of_all_tables_and_no_rate_falls() -> None:
    """The tables differ, and noise makes counts negative."""
    rng = np.random.default_rng(3)
    tables = [
        NoisyCounts(name, groups, rng.normal(9, 8, (len(groups), 3, 3, NUM_BINS)), 1.0)
        for name, groups in (("sex", ("F", "M")), ("site", ("n", "s", "w")))
    ]
    found = figures_of(tables, ["a", "b", "c"])
    size = {row["name"]: row["count"] for row in found["rows"] if row["group"] == ALL}
    np.testing.assert_allclose(np.sum(found["confusion"], axis=1), [size[k] for k in "abc"], 1e-4)
    for false, true in found["roc"].values():
        for rates in (false, true):
            assert rates[0] == 0 and rates[-1] == 1 and (np.diff(rates) >= 0).all()
    assert found["roc"]


def sizes_of_the_docs() -> list[tuple[int, float | None, int]]:
    """Classes, epsilon and persons of each cell of the table in docs/evaluation.md."""
    text = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    head, _, *rows = text.split("| classes | without noise |")[1].split("\n\n")[0].splitlines()
    epsilons = [None, *(float(e) for e in re.findall(r"epsilon (\d+)", head))]
    cells = [[int(cell.replace(",", "")) for cell in row.strip("| ").split(" | ")] for row in rows]
    return [
        (num_classes, epsilon, persons)
        for num_classes, *all_persons in cells
        for epsilon, persons in zip(epsilons, all_persons, strict=True)
    ]


@pytest.mark.parametrize(("num_classes", "epsilon", "persons"), sizes_of_the_docs())
def test_so_many_persons_give_two_points_as_the_docs_say(
    num_classes: int, epsilon: float | None, persons: int
) -> None:
    """The half-width of the interval of an accuracy of 90%, in closed form and on average over
    tables.
    """
    std = 0.0 if epsilon is None else release_plan(epsilon, persons).noise_std
    cells = num_classes * NUM_BINS * (0.1**2 + 0.9**2 * (num_classes - 1))
    half = 1.96 * np.sqrt(0.09 / persons + std**2 * cells / persons**2)
    assert 0.0197 < half <= 0.02
    rng = np.random.default_rng(0)
    share = (0.9 * np.eye(num_classes) + 0.1 / (num_classes - 1) * (1 - np.eye(num_classes))) / (
        num_classes * NUM_BINS
    )
    mean_KKJ = persons * np.repeat(share[:, :, None], NUM_BINS, axis=2)
    widths = []
    for _ in range(3):
        noisy = rng.poisson(mean_KKJ) + std * rng.normal(size=mean_KKJ.shape)
        value = rows(noisy, std=std, num_classes=num_classes)[0].figures["accuracy"]
        assert value is not None
        widths.append((value.high - value.low) / 2)
    assert np.mean(widths) == pytest.approx(0.02, rel=0.15)
