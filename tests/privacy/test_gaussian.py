"""The closed form of one Gaussian release: dp-accounting's figures, from the private side, and its
laws.
"""

import math
from itertools import pairwise

import mpmath
import numpy as np
import pytest
from dp_accounting import gaussian_mechanism

from dpvision.privacy import gaussian

NOISES = (0.05, 0.3, 1.0, 4.0, 50.0, 3e3)
DELTAS = (1e-14, 1e-9, 1e-5, 1e-3, 0.3)


def delta_of(noise: float, epsilon: float) -> mpmath.mpf:
    """Theorem 8 of Balle and Wang in sixty digits."""
    mp = mpmath.mp.clone()
    mp.dps = 60
    s, e = mp.mpf(noise), mp.mpf(epsilon)
    return mp.ncdf(1 / (2 * s) - e * s) - mp.exp(e) * mp.ncdf(-1 / (2 * s) - e * s)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("delta", DELTAS)
def test_epsilon_is_dp_accountings_and_keeps_delta(noise: float, delta: float) -> None:
    epsilon = gaussian.epsilon_at(noise, delta)
    assert epsilon == pytest.approx(
        gaussian_mechanism.get_epsilon_gaussian(noise, delta), rel=1e-9, abs=1e-11
    )
    assert delta_of(noise, epsilon) <= delta * (1 + 1e-9)
    if epsilon > 0:
        assert delta_of(noise, epsilon) == pytest.approx(delta, rel=1e-6)


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 1.0, 8.0, 300.0])
@pytest.mark.parametrize("delta", DELTAS)
def test_noise_is_dp_accountings_and_keeps_delta(epsilon: float, delta: float) -> None:
    noise = gaussian.noise_for(epsilon, delta)
    assert noise == pytest.approx(gaussian_mechanism.get_sigma_gaussian(epsilon, delta), rel=1e-9)
    assert delta_of(noise, epsilon) == pytest.approx(delta, rel=1e-6)
    assert gaussian.epsilon_at(noise, delta) == pytest.approx(epsilon, rel=1e-9)


def test_more_noise_costs_less_and_the_ends_are_exact() -> None:
    costs = [gaussian.epsilon_at(noise, 1e-5) for noise in NOISES]
    assert all(a > b for a, b in pairwise(costs))
    assert gaussian.epsilon_at(0.0, 1e-5) == math.inf and gaussian.epsilon_at(math.inf, 1e-5) == 0.0
    assert gaussian.epsilon_at(1e6, 1e-5) == 0.0, "delta alone covers it"
    log = gaussian.log_delta(1.0, np.linspace(0, 40, 200))
    assert (np.diff(log[np.isfinite(log)]) < 0).all() and log[0] == pytest.approx(
        math.log(delta_of(1.0, 0.0))
    )


def test_nan_ends_without_a_guarantee() -> None:
    assert gaussian.epsilon_at(math.nan, 1e-5) == math.inf
    for epsilon, delta in ((math.nan, 1e-5), (1.0, math.nan)):
        assert gaussian.noise_for(epsilon, delta) == math.inf
    assert gaussian.epsilon_at(1.0, math.nan) == math.inf
