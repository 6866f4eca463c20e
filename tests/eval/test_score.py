import pytest
from scipy.stats import binomtest

from dpvision.errors import DataError
from dpvision.eval.score import Score, wilson_interval


@pytest.mark.parametrize(
    ("correct", "n"), [(0, 10), (10, 10), (1, 1), (3, 7), (4500, 10_000), (9_999, 10_000)]
)
def test_interval_is_that_of_scipy(correct: int, n: int) -> None:
    expected = binomtest(correct, n).proportion_ci(0.95, method="wilson")
    assert wilson_interval(correct, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_score_survives_its_dict() -> None:
    score = Score("encoder", 0.5, 0.4, 0.6, 100, 0.1, "linear probe, mean", "public")
    assert Score.from_dict(score.to_dict() | {"train_data": "a"}) == score


def test_incomplete_entry_is_refused() -> None:
    with pytest.raises(DataError, match="lacks 'value'"):
        Score.from_dict({"name": "encoder"})
