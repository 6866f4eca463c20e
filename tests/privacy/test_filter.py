"""The Renyi filter of a budget fixed beforehand: it admits exactly what the sum at its one order
allows, and the ledgers never say more.
"""

import math

import pytest
from dp_accounting import gaussian_mechanism
from hypothesis import given, settings
from hypothesis import strategies as st

from dpvision.config.unit import Unit
from dpvision.errors import ConfigError, PrivacyError
from dpvision.privacy.account import RenyiFilter, filter_bound
from dpvision.privacy.events import Gaussian
from dpvision.privacy.sampling import LAWS, TruncatedPoisson


def _conversion(order: float, delta: float) -> float:
    """Balle et al., arXiv 1905.09982, by hand."""
    return math.log1p(-1 / order) - math.log(order * delta) / (order - 1)


@settings(max_examples=60, deadline=None)
@given(
    budget=st.floats(0.2, 30.0),
    delta=st.sampled_from([1e-7, 1e-5, 1e-3]),
    noises=st.lists(st.floats(0.8, 40.0), min_size=1, max_size=12),
)
def test_it_admits_exactly_while_the_sum_at_the_fixed_order_fits(
    budget: float, delta: float, noises: list[float]
) -> None:
    made = RenyiFilter.of(budget, delta)
    assert made.epsilon <= budget < 1.0024 * made.epsilon, (
        "rounded down, by less than a step of the grid"
    )
    limit = made.epsilon - _conversion(made.order, delta)
    for count in range(1, len(noises) + 1):
        spent = math.fsum(made.order / (2 * noise**2) for noise in noises[:count])
        if abs(spent - limit) > 1e-9:
            assert made.admits([Gaussian(noise) for noise in noises[:count]]) == (spent < limit)


@settings(max_examples=60, deadline=None)
@given(
    budget=st.floats(0.2, 30.0),
    noise=st.floats(1.0, 40.0),
    rate=st.sampled_from([0.01, 0.1, 1.0]),
    steps=st.integers(1, 50),
    count=st.integers(1, 30),
)
def test_what_it_admitted_the_ledgers_total_never_exceeds(
    budget: float, noise: float, rate: float, steps: int, count: int
) -> None:
    delta, sampling = 1e-5, "full_batch" if rate == 1 else "poisson"
    made = RenyiFilter.of(budget, delta)
    events = [LAWS[sampling](Unit(1), rate).event(noise, steps)] * count
    said = filter_bound(events, delta)
    assert said is not None
    if made.admits(events):
        assert said[0] <= made.epsilon
    again = RenyiFilter.of(said[0], delta) if 1e-3 <= said[0] < math.inf else None
    if again is not None:
        assert again.epsilon == said[0] and again.order == said[1] and again.admits(events), (
            "the smallest budget that admits them does"
        )
    if rate == 1:  # what it really costs if all settings had been fixed
        assert said[0] >= gaussian_mechanism.get_epsilon_gaussian(
            noise / math.sqrt(steps * count), delta
        )


def test_the_order_follows_from_the_budget_alone_and_bad_budgets_are_refused() -> None:
    assert (
        RenyiFilter.of(4.0, 1e-5) == RenyiFilter.of(4.0, 1e-5)
        and RenyiFilter.of(4.0, 1e-5).order != RenyiFilter.of(1.0, 1e-5).order
    )
    for bad in (0.0, -1.0, math.nan, math.inf, 1e-4):
        with pytest.raises(ConfigError, match="expected a number from"):
            RenyiFilter.of(bad, 1e-5)
    truncated = TruncatedPoisson(Unit(1000), 1000 * 0.01, max_batch_size=60).event(1.0, 5)
    with pytest.raises(PrivacyError, match="Renyi"):
        RenyiFilter.of(4.0, 1e-5).admits([truncated])
    assert RenyiFilter.of(4.0, 1e-5).admits([])
