"""What the bounded tails of the noise add to delta, which the accountant does not know of."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from dpvision.config import PrivacyConfig
from dpvision.dp.normals import normals
from dpvision.errors import PrivacyError
from dpvision.privacy.gaussian import DENSE_NORMAL, beyond_largest
from dpvision.privacy.plan import ask_selection, make_plan
from dpvision.privacy.refusal import seen_in_tails
from dpvision.privacy.stream import Key, subkey

NOISY = PrivacyConfig(
    1000,
    1000,
    1,
    noise_multiplier=0.6,
    delta=1e-6,
    sampling="full_batch",
    allow_weak_guarantee=True,
)


@pytest.mark.parametrize("shift", [0.1, 1.0, 2.8, 5.0, 9.5, 15.0])
def test_the_tail_is_that_of_a_noncentral_chi_square(shift: float) -> None:
    assert beyond_largest(shift) == pytest.approx(
        stats.ncx2.sf(DENSE_NORMAL**2, 2, shift**2), rel=1e-3
    )


def test_outputs_beyond_the_dense_normals_are_as_frequent_as_stated() -> None:
    """A record of 9 standard deviations, at epsilon 80."""
    drawn = normals(subkey(Key.for_tests(bytes(32)), "noise"), 0, 2**21).reshape(-1, 2)
    shown = int((np.hypot(drawn[:, 0] + 9.0, drawn[:, 1]) > DENSE_NORMAL).sum())
    expected = 2**20 * beyond_largest(9.0)
    assert abs(shown - expected) < 5 * expected**0.5 and shown > 500


def test_plans_whose_tails_add_more_than_a_hundredth_of_delta_are_refused() -> None:
    for epsilon, delta in ((60.0, 1e-6), (100.0, 1e-6)):
        with pytest.raises(PrivacyError, match=r"not all normals beyond 12\.12"):
            make_plan(replace(NOISY, noise_multiplier=None, target_epsilon=epsilon, delta=delta))
    for epsilon, delta in ((20.0, 1e-6), (8.0, 1e-12), (50.0, 1e-6), (20.0, 1e-12)):
        plan = make_plan(replace(NOISY, noise_multiplier=None, target_epsilon=epsilon, delta=delta))
        assert 0 < seen_in_tails(plan) <= 0.01 * delta


def test_steps_draws_people_and_runs_of_a_selection_count() -> None:
    one = seen_in_tails(make_plan(NOISY))
    assert one == pytest.approx(beyond_largest(1 / 0.6))
    assert seen_in_tails(make_plan(replace(NOISY, steps=7))) == pytest.approx(7 * one)
    drawn = replace(NOISY, sampling="poisson", expected_batch_size=100, steps=7)
    assert seen_in_tails(make_plan(drawn)) == pytest.approx(0.7 * one)
    of_two = replace(drawn, num_units=500, max_records_per_unit=2, steps=1)
    expected = 2 * 0.1 * 0.9 * one + 0.1**2 * beyond_largest(2 / 0.6)
    assert seen_in_tails(make_plan(of_two)) == pytest.approx(expected)
    several = replace(NOISY, noise_multiplier=1.2)
    plan = make_plan(several, ask_selection(several, mean_runs=10.0))
    assert plan.selection is not None
    score = beyond_largest(1 / (1.2 * plan.selection.score_noise_ratio))
    assert seen_in_tails(plan) == pytest.approx(10 * (beyond_largest(1 / 1.2) + score))
