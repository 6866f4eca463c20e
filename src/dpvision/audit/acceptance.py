"""Acceptance of the mechanism: noise, canary shift and draws of executed steps, against the plan.

Each check compares one figure with the interval in which it lies, if the plan is executed, except
with probability ``FALSE_ALARM``. A step's release times the public divisor is

    shift x (the canaries' clipped gradients) + (those of the other records) + noise.

On orthonormal directions that span the canaries' gradients this is a regression on two known sums.
The coefficient of the first is the shift: 1 if every canary moves the sum by C. The residuals give
the noise.

Legend: N records, P coordinates, K canaries and directions, G parameters.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats

from dpvision.audit.canaries import CanaryRun, network_run
from dpvision.config import PrivacyConfig, RunConfig
from dpvision.privacy.coin_guesses import FALSE_ALARM
from dpvision.privacy.plan import DPPlan
from dpvision.train.distributed import Group

RARE_ALARM = 1e-4
"""The same for the checks of all steps, whose figures are far more precise."""
_CANARIES, _OTHERS, _STEPS = 20, 12, 50
"""1,000 scores: one for each canary direction and step."""
_FEW = 8
"""Degrees of freedom below which a small spread is not refused."""
Say = Callable[[str, int, int], None]
"""Shows progress: what is done, and how much of how much."""


@dataclass(frozen=True)
class Check:
    """A figure and the interval in which it is accepted."""

    value: float
    low: float
    high: float
    false_alarm: float = FALSE_ALARM
    """Probability, at most, with which the plan's own mechanism is not accepted."""

    @property
    def passed(self) -> bool:
        return self.low <= self.value <= self.high

    def to_dict(self) -> dict[str, Any]:
        """Plain dict, ready for JSON."""
        return asdict(self) | {"passed": self.passed}


def noise_interval(num: float, false_alarm: float = FALSE_ALARM) -> tuple[float, float]:
    """Return the interval of the ratio of an estimated standard deviation to the true one, from
    ``num`` normal scores of known mean, except with probability ``false_alarm``.
    """
    return (
        math.sqrt(stats.chi2.ppf(false_alarm / 2, num) / num),
        math.sqrt(stats.chi2.isf(false_alarm / 2, num) / num),
    )


def mechanism_plan(plan: DPPlan) -> PrivacyConfig:
    """Return the settings of the steps that ``accept`` executes: noise, clipping norm and rule of
    the plan. Poisson draws have the rate 1/2, so that a canary is in half of the steps.
    """
    num = _CANARIES + _OTHERS
    return PrivacyConfig(
        dataset_size=num,
        expected_batch_size=num / 2 if plan.sampler.random else num,
        steps=_STEPS,
        sampling="poisson" if plan.sampler.random else "full_batch",
        noise_multiplier=plan.noise.multiplier,
        max_grad_norm=plan.max_grad_norm,
        clipping=plan.clipping,
        delta=plan.delta,
    )


def accept(config: RunConfig, plan: DPPlan, group: Group, say: Say) -> dict[str, Any]:
    """Execute steps with the noise and clipping of ``plan`` on canaries, in the config's loss and
    precision, and check what was released.

    Returns:
        The checks "noise", "shift" and "parameter" (the one whose noise is the least likely), and
        what was executed.
    """
    run = network_run(config, mechanism_plan(plan), _CANARIES, group)
    found = _regression(run, say)
    shift, noise, parameter, name = found
    checks = {"noise": noise, "shift": shift, "parameter": parameter}
    return {key: check.to_dict() for key, check in checks.items()} | {
        "least_likely_parameter": name,
        "parameters": len(run.parameters),
        "coordinates": run.clipped_NP.shape[1],
        "network": run.training.config.model.kind,
        "precision": run.training.config.hardware.precision,
        "canaries": _CANARIES,
        "records": run.training.store.num_records,
        "steps": _STEPS,
        "scores": _CANARIES * _STEPS,
    }


def _regression(run: CanaryRun, say: Say) -> tuple[Check, Check, Check, str]:
    """Return the checks of shift and noise, and of the noise in the least likely parameter."""
    plan = run.training.plan
    canary_KP, other_NP = np.split(run.clipped_NP, [run.num_canaries])
    direction_PK = np.linalg.qr(canary_KP.T)[0]
    parts = list(run.parameters.values())
    gram_33, gram_G33 = np.zeros((3, 3)), np.zeros((len(parts), 3, 3))
    for step, (released_P, drawn_N) in enumerate(run.steps()):
        drawn_K, drawn_others = np.split(drawn_N, [run.num_canaries])
        known = drawn_K @ canary_KP, drawn_others @ other_NP
        column_P3 = np.stack([released_P, *known], axis=1) / plan.noise.std(step)
        score_K3 = direction_PK.T @ column_P3
        gram_33 += score_K3.T @ score_K3
        gram_G33 += [column_P3[part].T @ column_P3[part] for part in parts]
        say("mechanism", step + 1, plan.steps)
    inverse_22, residual_3 = _least_squares(gram_33)
    num = run.num_canaries * plan.steps - 2
    noise = math.sqrt(residual_3 @ gram_33 @ residual_3 / num)
    reach = float(stats.norm.isf(FALSE_ALARM / 2)) * math.sqrt(inverse_22[0, 0])
    # On all coordinates: the other records' sum lies mostly outside the canaries' directions.
    _, residual_all_3 = _least_squares(gram_G33.sum(0))
    square_G = np.einsum("i,gij,j->g", residual_all_3, gram_G33, residual_all_3)
    num_G = np.array([(part.stop - part.start) * plan.steps for part in parts])
    tail_G = np.minimum(stats.chi2.cdf(square_G, num_G), stats.chi2.sf(square_G, num_G))
    least = int(np.argmin(tail_G))
    of_least = noise_interval(int(num_G[least]), FALSE_ALARM / len(parts))
    return (
        Check(float(-residual_3[1]), 1 - reach, 1 + reach),
        Check(noise, *noise_interval(num)),
        Check(math.sqrt(square_G[least] / num_G[least]), *of_least),
        list(run.parameters)[least],
    )


def _least_squares(gram_33: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Fit the release to the two known sums, by the inner products of the three.

    Returns:
        The coefficients' covariance, for noise of variance 1, and the combination of the three that
        is the residual.
    """
    inverse_22 = np.linalg.inv(gram_33[1:, 1:])
    return inverse_22, np.array([1.0, *-(inverse_22 @ gram_33[1:, 0])])


def sampling_checks(size_T: np.ndarray, count_N: np.ndarray, rate: float) -> dict[str, Check]:
    """Check that every record was drawn by coins of its own.

    The number of draws shows another rate. The spread of the batches' sizes shows coins that
    records share (too large) and batches of one size (none); the spread of the records' numbers of
    draws shows draws that repeat (too large) and batches in turn (too small).

    Args:
        size_T: number of records in each step.
        count_N: number of steps that each record was in.
        rate: of the plan.
    """
    num_steps, num = len(size_T), len(count_N)
    coins = num_steps * num
    low, high = stats.binom.ppf([RARE_ALARM / 2, 1 - RARE_ALARM / 2], coins, rate) / (coins * rate)
    checks = {
        "draws": Check(float(size_T.sum() / (coins * rate)), float(low), float(high), RARE_ALARM)
    }
    if rate < 1:
        checks["batch_sizes"] = _spread(size_T, num, rate)
        checks["record_draws"] = _spread(count_N, num_steps, rate)
    return checks


def _spread(counts: np.ndarray, coins: int, rate: float) -> Check:
    """Check the variance of counts, divided by the binomial variance.

    Its law is a multiple of a chi-squared one, with the mean and the variance that it has for
    binomial counts (Satterthwaite).
    """
    variance = coins * rate * (1 - rate)
    ratio = float(np.square(counts - coins * rate).mean() / variance)
    scale = max(1 + (1 / variance - 6 / coins) / 2, 1e-9)  # 1 + excess kurtosis / 2; 0 of one coin
    degrees = len(counts) / scale
    low, high = stats.chi2.ppf([RARE_ALARM / 2, 1 - RARE_ALARM / 2], degrees) / degrees
    # A few whole numbers are all equal by chance more often than that law has it.
    return Check(ratio, float(low) if degrees >= _FEW else 0.0, float(high), RARE_ALARM)
