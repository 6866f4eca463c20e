"""The recommendation: from public numbers, monotone in them, with its reason."""

import math

import pytest

from dpvision.adapt.defaults import noise_of_a_mean, recommend_head
from dpvision.errors import ConfigError

ORDER = ["prototypes", "many_steps"]


def rank(*numbers: float) -> int:
    return ORDER.index(recommend_head(*numbers)[0])  # type: ignore[arg-type]


def test_more_records_and_more_budget_never_lead_to_a_coarser_head() -> None:
    epsilons, sizes = (0.05, 0.1, 0.3, 1, 3, 8, 30), (40, 100, 1000, 10_000, 100_000, 1_000_000)
    table = [[rank(n, 10, e, 512) for n in sizes] for e in epsilons]
    assert all(row == sorted(row) for row in table)
    assert all(list(column) == sorted(column) for column in zip(*table, strict=True))
    assert {0, 1} == {r for row in table for r in row}


def test_few_records_of_a_class_get_prototypes_whatever_the_budget() -> None:
    name, reason = recommend_head(4000, 1000, math.inf, 256)
    assert name == "prototypes" and "4 records" in reason


def test_features_too_wide_for_a_covariance_get_gradient_steps() -> None:
    name, reason = recommend_head(1_000_000, 1000, 8.0, 20_000)
    assert name == "many_steps" and "20,000" in reason


def test_noise_alone_never_leads_to_prototypes() -> None:
    """They were ahead only while the steps' rate stopped short (docs/heads.md)."""
    assert {
        recommend_head(n, 10, e, width)[0]
        for n in (50, 300, 10**4)
        for e in (0.01, 0.1, 1.0)
        for width in (512, 20_000)
    } == {"many_steps"}


def test_without_a_guarantee_there_is_no_noise_and_the_same_head() -> None:
    assert (
        noise_of_a_mean(10_000, math.inf) == 0
        and recommend_head(10_000, 10, math.inf, 512)[0] == "many_steps"
    )


@pytest.mark.parametrize(
    "numbers",
    [(0, 10, 1.0, 5), (10, 1, 1.0, 5), (10, 10, 0.0, 5), (10, 10, math.nan, 5), (10, 10, 1.0, 0)],
)
def test_numbers_out_of_range_are_refused(numbers: tuple[int, int, float, int]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        recommend_head(*numbers)
