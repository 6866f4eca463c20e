"""The acceptance of the mechanism accepts it, with the stated false alarm and power, and refuses
planted faults.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from dpvision.audit import canaries
from dpvision.audit.acceptance import (
    FALSE_ALARM,
    Check,
    accept,
    mechanism_plan,
    noise_interval,
    sampling_checks,
)
from dpvision.audit.canaries import NORM, network_run
from dpvision.config import RunConfig
from dpvision.dp import clip
from dpvision.dp import noise as noise_module
from dpvision.models import make_model
from dpvision.privacy.mechanism import IndependentGaussian
from dpvision.privacy.plan import DPPlan
from dpvision.train.distributed import Group
from dpvision.train.gates import small_model

_NORM_WEIGHT = 4
"""Place of a parameter of 16 numbers among the shares of noise of a step."""
ALONE = Group(0, 1, torch.device("cpu"))


@pytest.fixture
def checks(config: RunConfig, plan: DPPlan) -> Callable[[], dict[str, Any]]:
    return lambda: accept(config, plan, ALONE, lambda *_: None)


def test_a_thousand_scores_have_the_stated_false_alarm_and_power() -> None:
    low, high = noise_interval(1000)
    assert (round(low, 3), round(high, 3)) == (0.927, 1.074)

    def accepted(ratio: float) -> float:
        return float(np.diff(stats.chi2.cdf(1000 * np.square([low, high]) / ratio**2, 1000))[0])

    assert accepted(1.0) == pytest.approx(1 - FALSE_ALARM, abs=1e-9)
    assert accepted(0.7) < 1e-3
    assert accepted(2**0.5) < 1e-3  # noise of two ranks
    assert accepted(0.9) < 0.15 and accepted(1.1) < 0.15


def test_the_mechanism_is_accepted(checks: Callable[[], dict[str, Any]]) -> None:
    found = checks()
    assert [found[name]["passed"] for name in ("noise", "shift", "parameter")] == [True] * 3
    assert found["scores"] == 200 and found["parameters"] > 30


def test_canaries_reach_every_parameter_and_are_clipped_as_the_oracle_has_it(
    config: RunConfig, plan: DPPlan
) -> None:
    """Without noise in the comparison: the sum that a step releases is that of the gradients which
    autograd gives for each record alone, up to the noise that is drawn again.
    """
    run = network_run(config, mechanism_plan(plan), 20, ALONE)
    canary_KP = run.clipped_NP[:20]
    np.testing.assert_allclose(np.linalg.norm(canary_KP, axis=1), 0.5, rtol=6e-3)
    for name, part in run.parameters.items():
        assert np.square(canary_KP[:, part]).sum() > 0, name
    loss, batch_norm = run.training.loss_fn, []
    total = clip.clipped_sum(
        loss,
        run.training.model,
        _batch(run),
        loss.key,  # type: ignore[attr-defined]
        max_grad_norm=0.5,
        check_separability=False,
    )
    batch_norm = total.norms_B[:20] / 0.5
    torch.testing.assert_close(batch_norm, torch.full((20,), NORM), rtol=1e-3, atol=0.0)
    flat = torch.cat([total.grads[name].flatten() for name in run.parameters]).double().numpy()
    np.testing.assert_allclose(flat, run.clipped_NP.sum(0), atol=2e-5)


def test_of_a_large_network_the_last_parameters_are_audited(
    config: RunConfig, plan: DPPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canaries, "_MOST", 1200)
    run = network_run(config, mechanism_plan(plan), 20, ALONE)
    (released_P, _) = next(run.steps())
    assert run.clipped_NP.shape == (32, len(released_P)) and 600 < len(released_P) <= 1200
    assert "head.bias" in run.parameters


def _batch(run):
    from dpvision.data.loader import physical_batches

    t = run.training
    (batch,) = physical_batches(
        t.store, t.rows, t.loss_fn.key, t.config.data, 8, physical_batch_size=32, workers=1
    )
    return batch


def test_too_little_noise_is_refused(
    checks: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    terms = IndependentGaussian.terms
    monkeypatch.setattr(
        IndependentGaussian,
        "terms",
        lambda self, step: tuple((of, 0.7 * std) for of, std in terms(self, step)),
    )
    found = checks()
    assert found["noise"]["value"] < found["noise"]["low"]
    assert found["shift"]["passed"]


def test_noise_of_every_rank_is_refused(
    checks: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two ranks adds the whole noise, not its share: the variance is twice the plan's."""
    terms = IndependentGaussian.terms
    monkeypatch.setattr(
        IndependentGaussian,
        "terms",
        lambda self, step: (*terms(self, step), *((of + 10**6, s) for of, s in terms(self, step))),
    )
    found = checks()
    assert found["noise"]["value"] > found["noise"]["high"]


def test_noise_missing_in_one_parameter_is_refused(
    config: RunConfig, checks: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few of all coordinates, which the canary scores do not show."""
    made = make_model(small_model(config.model), 0)
    share, count, parameters = noise_module._Share, itertools.count(), len(list(made.parameters()))

    def quiet(summed, out, terms, first, stop):
        half = next(count) % parameters == _NORM_WEIGHT
        assert not half or out.numel() == 16
        return share(
            summed, out, tuple((k, s * (0.5 if half else 1)) for k, s in terms), first, stop
        )

    monkeypatch.setattr(noise_module, "_Share", quiet)
    found = checks()
    assert found["noise"]["passed"]
    assert not found["parameter"]["passed"]


def test_a_wrong_divisor_is_found_by_the_shift(
    checks: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epsilon is as stated, since sum and noise are divided alike; both figures show it."""
    init = noise_module._Release.__init__
    monkeypatch.setattr(
        noise_module._Release, "__init__", lambda self, std, divisor: init(self, std, 2 * divisor)
    )
    found = checks()
    assert found["shift"]["value"] < found["shift"]["low"]
    assert found["noise"]["value"] == pytest.approx(0.5, abs=0.1)


def test_a_missing_clip_is_found_by_the_shift(
    checks: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clip, "clip_factors", lambda norm_B, *_, **__: torch.ones_like(norm_B))
    found = checks()
    assert found["shift"]["value"] > 0.9 * NORM


def checks_of(drawn_TN: np.ndarray, rate: float) -> dict[str, Check]:
    return sampling_checks(drawn_TN.sum(1), drawn_TN.sum(0), rate)


def coins(num_steps: int, num: int, rate: float, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random((num_steps, num)) < rate


@pytest.mark.parametrize(
    ("num_steps", "num", "rate"), [(6, 600, 0.3), (200, 300, 0.1), (2000, 300, 3e-4), (2, 40, 0.5)]
)
def test_draws_by_coins_are_accepted(num_steps: int, num: int, rate: float) -> None:
    """In 300 data sets at three checks of 1e-3 each, 0.9 false alarms are expected; more than 6
    have a probability below 1e-4.
    """
    alarms = sum(
        not check.passed
        for seed in range(300)
        for check in checks_of(coins(num_steps, num, rate, seed), rate).values()
    )
    assert alarms <= 6


def test_other_draws_are_refused() -> None:
    rate, rng = 0.1, np.random.default_rng(0)
    sizes = np.array([rng.permutation(np.arange(300) < 30) for _ in range(50)])
    turns = np.array([np.arange(300) // 30 == t % 10 for t in range(50)])
    together = np.repeat(coins(50, 30, rate, 1), 10, axis=1)
    again = np.tile(coins(5, 300, rate, 2), (10, 1))

    def refused(drawn_TN: np.ndarray) -> set[str]:
        return {n for n, check in checks_of(drawn_TN, rate).items() if not check.passed}

    assert refused(coins(50, 300, rate, 3)) == set()
    assert refused(sizes) == {"batch_sizes"}
    assert refused(turns) >= {"batch_sizes", "record_draws"}
    assert "batch_sizes" in refused(together)
    assert "record_draws" in refused(again)
    assert "draws" in refused(coins(50, 300, 0.15, 4))
    assert checks_of(np.ones((3, 5), dtype=bool), 1.0)["draws"].passed
    assert not checks_of(np.arange(15).reshape(3, 5) > 0, 1.0)["draws"].passed


def test_one_step_of_fair_coins_is_no_fault() -> None:
    """Each record is in it or not: at a rate of 1/2 both are as far from the mean."""
    for seed in range(5):
        drawn_1N = coins(1, 500, 0.5, seed)
        found = sampling_checks(drawn_1N.sum(1), drawn_1N.sum(0), 0.5)
        assert all(check.passed for check in found.values())
