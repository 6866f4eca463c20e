"""Acceptance of the mechanism: noise, canary shift and draws of executed steps, against the plan.

Each check compares one figure with the interval in which it lies, if the plan is executed, except
with probability ``FALSE_ALARM``. A step's release times the public divisor, minus the known part of
the records that are no canaries, is  shift x (sum of the canaries' clipped gradients) + noise.  On
orthonormal directions that span the canaries' gradients this is a regression with one coefficient:
its estimate is the shift (1 if every canary moves the sum by C), its residuals give the noise.

Legend: N records, P coordinates, K canaries and directions, T steps.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy import stats

from dpvision.audit.canaries import CanaryRun, network_run
from dpvision.config import PrivacyConfig, RunConfig
from dpvision.privacy.plan import DPPlan
from dpvision.train.distributed import Group

FALSE_ALARM = 1e-3
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
    plan, known_NP = run.training.plan, run.clipped_NP
    canary_KP, other_NP = np.split(known_NP, [run.num_canaries])
    direction_PK = np.linalg.qr(canary_KP.T)[0]
    parts = list(run.parameters.values())
    y_T, x_T, sums_T = [], [], []
    for step, (released_P, drawn_N) in enumerate(run.steps()):
        drawn_K, drawn_others = np.split(drawn_N, [run.num_canaries])
        left_P = (released_P - drawn_others @ other_NP) / plan.noise.std(step)
        moved_P = drawn_K @ canary_KP / plan.noise.std(step)
        y_T.append(left_P @ direction_PK)
        x_T.append(moved_P @ direction_PK)
        sums_T.append(
            [
                (
                    left_P[part] @ left_P[part],
                    left_P[part] @ moved_P[part],
                    moved_P[part] @ moved_P[part],
                )
                for part in parts
            ]
        )
        say("mechanism", step + 1, plan.steps)
    y, x = np.concatenate(y_T), np.concatenate(x_T)
    weight = float(x @ x)
    shift = float(x @ y) / weight
    reach = float(stats.norm.isf(FALSE_ALARM / 2)) / math.sqrt(weight)
    noise = math.sqrt(float(np.square(y - shift * x).sum()) / (len(y) - 1))
    square, cross, moved = np.sum(sums_T, axis=0).T
    residual = square - 2 * shift * cross + shift**2 * moved
    num = np.array([(part.stop - part.start) * plan.steps for part in parts])
    tail = np.minimum(stats.chi2.cdf(residual, num), stats.chi2.sf(residual, num))
    least = int(np.argmin(tail))
    return (
        Check(shift, 1 - reach, 1 + reach),
        Check(noise, *noise_interval(len(y) - 1)),
        Check(
            math.sqrt(residual[least] / num[least]),
            *noise_interval(int(num[least]), FALSE_ALARM / len(parts)),
        ),
        list(run.parameters)[least],
    )


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
    low, high = stats.binom.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], coins, rate) / (
        coins * rate
    )
    checks = {"draws": Check(float(size_T.sum() / (coins * rate)), float(low), float(high))}
    if rate < 1:
        checks["batch_sizes"] = _spread(size_T, num, rate)
        checks["record_draws"] = _spread(count_N, num_steps, rate)
    return checks


def _spread(counts: np.ndarray, coins: int, rate: float) -> Check:
    """Check the variance of binomial counts, as a ratio to that of the binomial law.

    Its law is a multiple of a chi-squared one, with the mean and the variance that it has for
    binomial counts (Satterthwaite).
    """
    variance = coins * rate * (1 - rate)
    ratio = float(np.square(counts - coins * rate).mean() / variance)
    scale = 1 + (1 / variance - 6 / coins) / 2  # 1 + excess kurtosis / 2
    degrees = len(counts) / scale
    low, high = stats.chi2.ppf([FALSE_ALARM / 2, 1 - FALSE_ALARM / 2], degrees) / degrees
    # A few whole numbers are all equal by chance more often than that law has it.
    return Check(ratio, float(low) if degrees >= _FEW else 0.0, float(high))
