"""Means over seeds, against SciPy."""

import numpy as np
import pytest
from scipy import stats

from dpvision.errors import ConfigError
from dpvision.eval.probes.records import draws_of
from dpvision.eval.score import Score, check_seeds
from dpvision.eval.seeds import over_seeds

VALUES = (0.81, 0.83, 0.80, 0.84, 0.82)


def _scores(values: tuple[float, ...], visibility: str = "public") -> list[list[Score]]:
    return [
        [Score("encoder", value, 0.0, 1.0, 100, 0.1, "ridge probe", visibility)]  # type: ignore[arg-type]
        for value in values
    ]


def test_mean_deviation_and_interval_are_those_of_scipy() -> None:
    (score,) = over_seeds(_scores(VALUES))
    assert score.value == pytest.approx(np.mean(VALUES))
    assert score.std == pytest.approx(stats.tstd(VALUES))
    assert (score.low, score.high) == pytest.approx(
        stats.t.interval(0.95, 4, np.mean(VALUES), stats.sem(VALUES))
    )
    assert score.protocol == "ridge probe, mean over 5 seeds" and score.visibility == "public"


def test_a_mean_of_which_one_seed_is_private_is_private() -> None:
    mixed = _scores(VALUES[:1], "private") + _scores(VALUES[1:])
    assert over_seeds(mixed)[0].visibility == "private"
    assert over_seeds(mixed[::-1])[0].visibility == "private"


def test_a_score_returns_from_its_dict_with_and_without_a_deviation() -> None:
    (mean,), (one,) = over_seeds(_scores(VALUES)), _scores(VALUES)[0]
    assert Score.from_dict(mean.to_dict()) == mean
    assert Score.from_dict(one.to_dict()) == one and "std" not in one.to_dict()


def test_seeds_share_no_draw_and_the_first_has_the_draws_of_one_seed() -> None:
    drawn = [draw for seed in range(5) for draw in draws_of(seed, 20)]
    assert drawn == list(range(100)) and [*draws_of(0, 20)] == drawn[:20]


@pytest.mark.parametrize("seeds", [1, 0, -3])
def test_fewer_than_two_seeds_are_refused(seeds: int) -> None:
    with pytest.raises(ConfigError, match="expected 2 or more"):
        check_seeds("evaluate", seeds)
