"""Epsilon for data sets several records apart: above the exact figure of a Gaussian, and a bound
that the profile gives.
"""

import math

import numpy as np
import pytest

from dpvision.errors import PrivacyError
from dpvision.privacy import gaussian
from dpvision.privacy.accountant import deltas, epsilon
from dpvision.privacy.distance import epsilon_at_distance
from dpvision.privacy.events import Gaussian, NonPrivate
from dpvision.privacy.plan import make_plan
from dpvision.recipes import RECIPES


@pytest.mark.parametrize("noise", [1.0, 4.0, 20.0])
@pytest.mark.parametrize("distance", [1, 2, 5])
def test_it_is_above_the_epsilon_of_a_sum_that_moves_as_far(noise: float, distance: int) -> None:
    """k records move a sum by at most k C: a Gaussian of noise / k, whose epsilon is exact."""
    exact = gaussian.epsilon_at(noise / distance, 1e-6)
    bound = epsilon_at_distance(Gaussian(noise), 1e-6, distance)
    assert bound >= exact * (1 - 1e-9)
    if distance == 1:
        assert bound == exact
    if noise == 20.0:
        assert bound < 1.5 * exact


def test_it_satisfies_the_bound_and_a_little_less_does_not() -> None:
    plan = make_plan(RECIPES["dpcap.base_eps1"]().privacy)
    event = plan.event(plan.steps)
    for distance in (2, 3):
        each = epsilon_at_distance(event, plan.delta, distance) / distance

        def group(x: float, distance: int = distance) -> float:
            return float(deltas(event, np.array([x]))[0]) * sum(
                math.exp(i * x) for i in range(distance)
            )

        assert group(each) <= plan.delta < group(each - 1e-3)


def test_the_figures_of_the_docs() -> None:
    for name, wanted in (
        ("dpcap.base_eps1", (0.8771, 1.843)),
        ("vip.base_eps2", (0.7105, 1.702)),
        ("vip.base", (6.837, 22.44)),
    ):
        plan = make_plan(RECIPES[name]().privacy)
        event = plan.event(plan.steps)
        found = epsilon(event, plan.delta), epsilon_at_distance(event, plan.delta, 2)
        assert found == pytest.approx(wanted, rel=1e-3)


def test_no_bound_within_what_delta_resolves_is_infinite() -> None:
    assert epsilon_at_distance(NonPrivate(), 1e-6, 2) == math.inf
    assert epsilon_at_distance(Gaussian(0.3), 1e-6, 3) == math.inf
    with pytest.raises(PrivacyError, match="distance=0"):
        epsilon_at_distance(Gaussian(1.0), 1e-6, 0)
