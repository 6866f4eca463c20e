"""Somebody else's auditor, jax_privacy's, on our canaries' scores.

Its bound is for any mechanism: ln((TPR - delta) / FPR) with Clopper and Pearson's limits of both
rates, the largest over all thresholds, at a shared significance. With ever more scores of the best
attack it tends to the epsilon at delta from below. Ours is for Gaussian noise under the plan's
sampler. So at one confidence theirs is at most ours, and ours at most epsilon.
"""

import math

import numpy as np
import pytest
import torch

from dpvision.audit import bound
from dpvision.audit.bound import CONFIDENCE, area_above, epsilon_of_area, lower_bound, wilson_low
from dpvision.config import PrivacyConfig, RunConfig
from dpvision.privacy import accountant
from dpvision.privacy.mechanism import IndependentGaussian
from dpvision.privacy.plan import DPPlan, draft_plan
from dpvision.train.distributed import Group

from .test_bound import plan_of, simulated

auditing = pytest.importorskip(
    "jax_privacy.auditing",
    reason="jax_privacy is not installed: pip install --target FOLDER jax-privacy==2.0.0, and "
    "FOLDER on PYTHONPATH",
)
ALONE = Group(0, 1, torch.device("cpu"))
ALARM = 1 - CONFIDENCE


def of_a_run(
    config: RunConfig, plan: DPPlan, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict, np.ndarray, np.ndarray]:
    """The bound of executed steps, and the scores that it is computed from."""
    seen = []

    def area(inside: np.ndarray, outside: np.ndarray) -> float:
        seen.append((inside, outside))
        return area_above(inside, outside)

    monkeypatch.setattr(bound, "area_above", area)
    found = lower_bound(config, plan, ALONE, lambda *_: None)
    return found, *seen[0]


@pytest.mark.parametrize("sampling", ["poisson", "full_batch"])
def test_of_executed_steps_their_bound_is_at_most_ours_and_ours_at_most_epsilon(
    config: RunConfig, sampling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = 600.0 if sampling == "poisson" else 2000.0
    settings = {**vars(config.privacy), "sampling": sampling, "expected_batch_size": batch}
    plan = draft_plan(PrivacyConfig(**settings))
    found, inside, outside = of_a_run(config, plan, monkeypatch)
    theirs = auditing.CanaryScoreAuditor(inside, outside)
    low = theirs.epsilon_clopper_pearson(ALARM, plan.delta)
    assert 0 < low <= found["epsilon_low"] <= plan.epsilon
    assert 2 * len(inside) == found["scores"]
    # Their curve is the concave hull of the scores' steps.
    assert found["area"] <= theirs.attack_auroc() <= found["area"] + 4 / math.sqrt(len(inside)) / 10


def test_both_refute_a_quarter_of_the_noise(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = IndependentGaussian.terms
    monkeypatch.setattr(
        IndependentGaussian,
        "terms",
        lambda self, step: tuple((of, 0.25 * std) for of, std in terms(self, step)),
    )
    settings = {**vars(config.privacy), "target_epsilon": 2.0}
    plan = draft_plan(PrivacyConfig(**settings))
    found, inside, outside = of_a_run(config, plan, monkeypatch)
    theirs = auditing.CanaryScoreAuditor(inside, outside)
    low = theirs.epsilon_clopper_pearson(ALARM, plan.delta)
    assert plan.epsilon < low <= found["epsilon_low"]


@pytest.mark.parametrize("rate", [1.0, 0.3])
@pytest.mark.parametrize("delta", [0.1, 0.03])
def test_with_many_scores_both_come_near_epsilon(rate: float, delta: float) -> None:
    """At deltas so large that 200,000 canaries show the rare outputs."""
    plan, num = plan_of(rate, 6, 8.0), 200_000
    inside, outside = simulated(plan, num, 1)
    event = plan.sampler.event(plan.noise.multiplier, plan.steps)
    true = accountant.epsilon(event, delta)
    theirs = auditing.CanaryScoreAuditor(inside, outside).epsilon_clopper_pearson(ALARM, delta)
    at_delta = plan_at(plan, delta)
    ours = epsilon_of_area(at_delta, wilson_low(area_above(inside, outside), num))
    assert 0.9 * true < theirs <= ours <= true
    assert ours > 0.97 * true


def plan_at(plan: DPPlan, delta: float) -> DPPlan:
    """The same mechanism, at another delta."""
    rate = plan.sample_rate
    return draft_plan(
        PrivacyConfig(
            dataset_size=10,
            expected_batch_size=10 * rate,
            steps=plan.steps,
            noise_multiplier=plan.noise.multiplier,
            delta=delta,
            sampling="full_batch" if rate == 1 else "poisson",
        )
    )
