"""The lower bound: its areas against closed forms and simulated attacks, its confidence, and what
it makes of the real step.
"""

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from dpvision.audit import bound
from dpvision.audit.acceptance import FALSE_ALARM, Check
from dpvision.audit.bound import (
    AIM,
    FLOOR,
    area_above,
    area_allowed,
    epsilon_of_area,
    floor_of,
    log_ratio,
    lower_bound,
    num_scores,
    reuse_check,
    step_checks,
    wilson_low,
)
from dpvision.config import PrivacyConfig, RunConfig
from dpvision.privacy.mechanism import IndependentGaussian
from dpvision.privacy.plan import DPPlan, draft_plan
from dpvision.train.distributed import Group

ALONE = Group(0, 1, torch.device("cpu"))


def plan_of(rate: float, steps: int, epsilon: float) -> DPPlan:
    return draft_plan(
        PrivacyConfig(
            dataset_size=1000,
            expected_batch_size=1000 * rate,
            steps=steps,
            target_epsilon=epsilon,
            delta=1e-5,
            sampling="full_batch" if rate == 1 else "poisson",
        )
    )


def simulated(plan: DPPlan, num: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores of ``num`` canaries in the data and of as many outside, by numpy alone."""
    rng, noise = np.random.default_rng(seed), plan.noise.multiplier
    scores = np.zeros((2, num))
    for _ in range(plan.steps):
        value = noise * rng.standard_normal((2, num))
        value[0] += rng.random(num) < plan.sample_rate
        likelihood = 1 + plan.sample_rate * np.expm1((value - 0.5) / noise**2)
        scores += np.log(likelihood)
    return scores[0], scores[1]


@pytest.mark.parametrize(("steps", "noise"), [(1, 2.0), (9, 3.0), (4, 0.8)])
def test_the_area_allowed_to_full_batches_is_that_of_two_normal_laws(
    steps: int, noise: float
) -> None:
    allowed = area_allowed(plan_of(1.0, steps, 2.0), noise)
    exact = stats.norm.cdf(math.sqrt(steps / 2) / noise)
    assert exact <= allowed <= exact + 2e-3


@pytest.mark.parametrize(("rate", "steps", "epsilon"), [(0.3, 6, 8.0), (0.05, 40, 2.0)])
def test_the_area_allowed_is_that_of_the_best_attack_on_sampled_batches(
    rate: float, steps: int, epsilon: float
) -> None:
    """Four standard deviations of the simulated area, and 0.003 for the grids."""
    plan, num = plan_of(rate, steps, epsilon), 40_000
    area = area_above(*simulated(plan, num, 1))
    spread = math.sqrt(area * (1 - area) / num)
    allowed = area_allowed(plan, plan.noise.multiplier)
    assert -4 * spread <= allowed - area <= 4 * spread + 3e-3


def test_the_share_of_pairs_is_counted() -> None:
    rng = np.random.default_rng(0)
    inside, outside = rng.integers(0, 9, 40), rng.integers(0, 7, 40)
    pairs = np.sign(inside[:, None] - outside)
    assert area_above(inside, outside) == pytest.approx((pairs.mean() + 1) / 2)


def test_a_score_is_the_log_likelihood_ratio() -> None:
    plan, value = plan_of(0.3, 6, 8.0), np.linspace(-3, 4, 15)
    noise = plan.noise.multiplier
    with_it = 0.3 * stats.norm.pdf(value, 1, noise) + 0.7 * stats.norm.pdf(value, 0, noise)
    expected = np.log(with_it / stats.norm.pdf(value, 0, noise))
    np.testing.assert_allclose(log_ratio(value, plan, 0), expected, rtol=1e-9, atol=1e-12)
    full = plan_of(1.0, 2, 8.0)
    np.testing.assert_allclose(log_ratio(value, full, 0), (value - 0.5) / full.noise.multiplier**2)


@pytest.mark.parametrize(("rate", "steps", "epsilon"), [(0.3, 6, 8.0), (0.02, 60, 2.0)])
def test_the_bound_exceeds_epsilon_no_more_often_than_stated(
    rate: float, steps: int, epsilon: float
) -> None:
    """At confidence 0.999, more than 3 of 500 have a probability of 0.002."""
    plan = plan_of(rate, steps, epsilon)
    most = area_allowed(plan, plan.noise.multiplier)
    low = [wilson_low(area_above(*simulated(plan, 300, seed)), 300) for seed in range(500)]
    assert sum(area > most for area in low) <= 3
    assert np.median(low) == pytest.approx(wilson_low(most, 300), abs=0.01)


def test_the_epsilon_of_the_plans_own_area_is_its_epsilon() -> None:
    plan = plan_of(0.05, 40, 2.0)
    areas = [area_allowed(plan, noise * plan.noise.multiplier) for noise in (1.5, 1.0, 0.8)]
    low, own, high = (epsilon_of_area(plan, area) for area in areas)
    assert own == pytest.approx(2.0, rel=2e-3)
    assert low < 1.4 and high > 2.5
    assert epsilon_of_area(plan, 0.5) == epsilon_of_area(plan, 0.3) == 0.0


PLANS = [(0.1, 100, 1.0), (0.1, 100, 8.0), (0.01, 150, 2.0), (1.0, 5, 2.0)]
"""In the third a record is drawn 1.5 times in all."""


@pytest.mark.parametrize(("rate", "steps", "epsilon"), PLANS)
def test_the_scores_of_an_audit_are_the_fewest_that_suffice(
    rate: float, steps: int, epsilon: float
) -> None:
    """An estimate of the area that is as low as chance makes it once in a thousand audits still
    gives ``AIM`` of epsilon; of 15% fewer scores it does not.
    """
    plan = plan_of(rate, steps, epsilon)
    num = num_scores(plan) // 2
    area = area_allowed(plan, plan.noise.multiplier)

    def reached(num: int) -> float:
        low = area - stats.norm.isf(1e-3) * math.sqrt(area * (1 - area) / num)
        return epsilon_of_area(plan, wilson_low(low, num)) / epsilon

    assert reached(num) > AIM - 0.005 > reached(int(0.85 * num))
    assert floor_of(plan, num) == pytest.approx(FLOOR * epsilon, rel=1e-3)


def test_simulated_bounds_of_rare_draws_reach_the_floor() -> None:
    plan = plan_of(0.01, 150, 2.0)
    num = num_scores(plan) // 2
    low = [
        epsilon_of_area(plan, wilson_low(area_above(*simulated(plan, num, seed)), num))
        for seed in range(2)
    ]
    assert min(low) >= FLOOR * 2.0 and max(low) <= 2.0


@pytest.mark.parametrize(
    ("rate", "steps", "epsilon", "most"),
    [
        (0.001, 2, 0.01, 1_000_000),  # of any plan
        (0.001, 10_000, 0.1, 7e9 / 10_000 / 1.12),  # by steps
        (0.3, 10_000, 0.1, 40_000),  # whatever the steps
    ],
)
def test_where_enough_scores_take_too_long_the_floor_falls(
    rate: float, steps: int, epsilon: float, most: float
) -> None:
    plan = plan_of(rate, steps, epsilon)
    assert num_scores(plan) == pytest.approx(most, abs=2)
    assert floor_of(plan, num_scores(plan) // 2) < FLOOR * epsilon


def test_the_real_step_is_within_the_bound(config: RunConfig, plan: DPPlan) -> None:
    found = lower_bound(config, plan, ALONE, lambda *_: None)
    assert found["passed"] and found["scores"] == num_scores(plan)
    assert found["floor"] <= found["epsilon_low"] <= plan.epsilon
    assert all(check["passed"] for check in found["checks"].values())
    alarm = found["false_alarm"] + sum(check["false_alarm"] for check in found["checks"].values())
    often = f"at most one audit in {int(1 / (alarm + 3 * FALSE_ALARM))}"
    assert often in (Path(__file__).parents[2] / "docs" / "audits.md").read_text()


def test_half_the_noise_is_beyond_the_bound(
    config: RunConfig, plan: DPPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = IndependentGaussian.terms
    monkeypatch.setattr(
        IndependentGaussian,
        "terms",
        lambda self, step: tuple((of, 0.5 * std) for of, std in terms(self, step)),
    )
    found = lower_bound(config, plan, ALONE, lambda *_: None)
    assert found["epsilon_low"] > plan.epsilon and not found["passed"]
    assert found["checks"]["all_noise"]["value"] == pytest.approx(0.5, abs=0.02)
    assert not found["checks"]["all_noise"]["passed"]


def test_batches_of_one_size_are_refused(
    config: RunConfig, plan: DPPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dpvision.privacy.sampling import Poisson

    def of_one_size(self, num_records, rng):
        return rng.subset(num_records, round(num_records * self.sample_rate))

    monkeypatch.setattr(Poisson, "draw", of_one_size)
    monkeypatch.setattr(bound, "_MOST", 400)
    monkeypatch.setattr(bound, "_LEAST", 400)
    long = draft_plan(PrivacyConfig(**{**vars(config.privacy), "steps": 12}))
    found = lower_bound(config, long, ALONE, lambda *_: None)
    assert not found["checks"]["batch_sizes"]["passed"]


def steps_of(num: int, steps: int, rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((steps, num))


def step_figures(noise_TN: np.ndarray) -> dict[str, Check]:
    direction_TN = noise_TN / np.linalg.norm(noise_TN, axis=1, keepdims=True)
    like_T = (direction_TN[1:] * direction_TN[:-1]).sum(1)
    checks = step_checks(np.square(noise_TN).sum(1), like_T, noise_TN.shape[1])
    return checks | reuse_check(noise_TN.astype(np.float32))


def test_the_checks_of_each_step_refuse_correct_noise_as_rarely_as_stated(monkeypatch) -> None:
    monkeypatch.setattr(bound, "RARE_ALARM", 0.05)
    rng, refused = np.random.default_rng(0), Counter[str]()
    for _ in range(2000):
        checks = step_figures(steps_of(40, 10, rng))
        refused.update(name for name, check in checks.items() if not check.passed)
    limit = 0.05 * 2000 + 4 * math.sqrt(0.05 * 0.95 * 2000)
    for name in ("step_noise", "repeated_noise", "reused_noise"):
        assert 50 < refused[name] < limit, name


@pytest.mark.parametrize("step", [0, 1, 200, 399])
def test_one_step_with_another_noise_is_found(step: int) -> None:
    noise_TN = steps_of(1000, 400, np.random.default_rng(step))
    assert all(check.passed for check in step_figures(noise_TN).values())
    for factor in (0.01, 0.75, 1.3):
        changed = noise_TN.copy()
        changed[step] *= factor
        assert not step_figures(changed)["step_noise"].passed
    again = noise_TN.copy()
    again[step] = 2.0 * again[step - 1] if step else 0.5 * again[1]
    assert not step_figures(again)["repeated_noise"].passed


@pytest.mark.parametrize(("first", "second"), [(0, 2), (3, 2999), (1023, 1024), (1500, 2600)])
def test_noise_that_is_used_again_at_any_later_step_is_found(first: int, second: int) -> None:
    noise_TD = np.random.default_rng(second).standard_normal((3000, 64), np.float32)
    assert reuse_check(noise_TD)["reused_noise"].passed
    for factor in (0.3, -1.0):
        again = noise_TD.copy()
        again[second] = factor * again[first]
        check = reuse_check(again)["reused_noise"]
        assert not check.passed
        assert check.value == pytest.approx(math.copysign(1.0, factor), abs=1e-5)
    noise_TD[first] = 0.0
    with np.errstate(invalid="ignore"):
        assert not reuse_check(noise_TD)["reused_noise"].passed


@pytest.mark.parametrize("steps", [1, 20, 3_000, 73_200, 500_000])
def test_the_comparison_of_all_steps_is_bounded_and_tells_any_two_apart(steps: int) -> None:
    noise_TD, place_D = bound._room(steps, 300_000)
    assert noise_TD.size <= 2**24 and noise_TD.shape[1] == len(place_D) >= 64
    gaps = np.diff(place_D, prepend=0, append=300_000)
    assert gaps[1:].min() > 0 and gaps.max() <= math.ceil(300_000 / len(place_D))
    compared = min(steps, 100_000)
    assert noise_TD.shape[0] == compared
    if steps > 1:
        assert bound._cosine_reach(noise_TD.shape[1], compared * (compared - 1) // 2) < 0.85


def test_executed_steps_with_the_noise_of_earlier_ones_are_refused(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the steps before the last one, whose noise is that of the first; Poisson draws."""
    monkeypatch.setattr(bound, "_MOST", 400)
    monkeypatch.setattr(bound, "_LEAST", 400)
    plan = draft_plan(PrivacyConfig(**{**vars(config.privacy), "steps": 12}))
    honest = lower_bound(config, plan, ALONE, lambda *_: None)["checks"]["reused_noise"]
    assert honest["passed"] and abs(honest["value"]) > 0.05
    terms = IndependentGaussian.terms
    monkeypatch.setattr(
        IndependentGaussian, "terms", lambda self, step: terms(self, 0 if step == 11 else step)
    )
    checks = lower_bound(config, plan, ALONE, lambda *_: None)["checks"]
    assert checks["repeated_noise"]["passed"] and checks["step_noise"]["passed"]
    assert checks["reused_noise"]["value"] == pytest.approx(1.0, abs=1e-3)
    assert not checks["reused_noise"]["passed"]
