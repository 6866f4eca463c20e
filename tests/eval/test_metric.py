import numpy as np
import pytest
from scipy.stats import ttest_1samp
from sklearn.metrics import accuracy_score, balanced_accuracy_score

from dpvision.errors import ConfigError
from dpvision.eval.metric import chance_level, checked_metric, measure, t_interval, titled


def _answers(
    rng: np.random.Generator, sizes: list[int], shares: list[float]
) -> tuple[np.ndarray, np.ndarray]:
    truth = np.repeat(np.arange(len(sizes)), sizes)
    right = rng.random(len(truth)) < np.array(shares)[truth]
    return np.where(right, truth, (truth + 1) % len(sizes)), truth


def test_figures_are_those_of_scikit_learn() -> None:
    predicted, truth = _answers(
        np.random.Generator(np.random.PCG64(0)), [5, 60, 200], [0.2, 0.9, 0.5]
    )
    assert measure(predicted, truth)[0] == pytest.approx(accuracy_score(truth, predicted))
    assert measure(predicted, truth, "mean_per_class")[0] == pytest.approx(
        balanced_accuracy_score(truth, predicted)
    )
    assert abs(measure(predicted, truth)[0] - measure(predicted, truth, "mean_per_class")[0]) > 0.02


@pytest.mark.parametrize(
    ("sizes", "shares"),
    [([10, 40, 100, 10], [0.9, 0.6, 0.3, 1.0]), ([3] * 30, [0.8, 0.9, 1.0] * 10)],
)
def test_intervals_hold_the_truth_nineteen_times_in_twenty(
    sizes: list[int], shares: list[float]
) -> None:
    rng = np.random.Generator(np.random.PCG64(1))
    truths = {"accuracy": np.average(shares, weights=sizes), "mean_per_class": np.mean(shares)}
    for metric, truth in truths.items():
        found = [measure(*_answers(rng, sizes, shares), metric)[1:] for _ in range(1000)]  # type: ignore[arg-type]
        assert np.mean([low <= truth <= high for low, high in found]) > 0.93, metric
        assert np.mean([high - low for low, high in found]) < 0.3, metric


def test_the_interval_over_draws_is_students() -> None:
    values = [0.5, 0.55, 0.47, 0.61]
    expected = ttest_1samp(values, 0).confidence_interval(0.95)
    assert t_interval(values) == pytest.approx((expected.low, expected.high))
    assert t_interval([0.01, 0.99]) == (0, 1)


def test_chance_is_the_best_constant_answer() -> None:
    truth = np.array([0, 0, 0, 2])
    for metric in ("accuracy", "mean_per_class"):
        assert chance_level(truth, metric) == max(
            measure(np.full(4, c), truth, metric)[0] for c in range(3)
        )


def test_another_measure_is_another_protocol_and_unknown_ones_are_refused() -> None:
    assert titled("k-NN", checked_metric("accuracy")) != titled(
        "k-NN", checked_metric("mean_per_class")
    )
    with pytest.raises(
        ConfigError, match="metric='top5'; expected one of accuracy, mean_per_class"
    ):
        checked_metric("top5")
