"""The default learning rate of ``many_steps``, a function of the plan alone: public, and the same for every data set of the declared size.

T steps of momentum m at a constant rate r move a weight by about L = T r / (1 - m) times its mean gradient. The noise in that mean has the
standard deviation

    s = noise_std / (expected_batch_size sqrt(T))

in every coordinate, whatever T is: T releases share one budget. So L s is the noise in the head's final weights, and in a logit of a row
of length 1. The rule fixes this noise, and thereby L:

    L s = FINAL_NOISE / (1 + (HALVING s)^2),    L <= LONGEST,    r = (1 - m) L / T

A rate that is too small costs more accuracy than the noise, until noise dominates the gradient (s near 1 / HALVING). Then later gradients
add no information, and a small L, which amounts to one step split into T, is best. docs/log.md (2026-11-22) has the figures.
"""

import math
from dataclasses import replace

from dpvision.config import OptimConfig
from dpvision.errors import ConfigError
from dpvision.privacy.plan import DPPlan

FINAL_NOISE = 0.7
"""Standard deviation of the noise in each final weight, in the limit of small s."""
HALVING = 100.0
"""1 / s at which the final weights have half of that noise: 100 records at a noise multiplier of 1."""
LONGEST = 1e5
"""Upper bound on L; reached without noise, or with millions of records."""


def steps_rate(plan: DPPlan, momentum: float) -> float:
    """Return the learning rate for the plan's steps of SGD.

    >>> from dpvision.adapt.release import full_batch_plan
    >>> round(steps_rate(full_batch_plan(50_000, 1.0, steps=60), 0.9), 1)
    15.5
    """
    s = mean_noise(plan)
    length = LONGEST if s == 0 else min(FINAL_NOISE / (1 + (HALVING * s) ** 2) / s, LONGEST)
    return (1 - momentum) * length / plan.steps


def final_noise(plan: DPPlan, optim: OptimConfig) -> float:
    """Return L s, the standard deviation of the noise in each weight after all steps of SGD at a constant rate."""
    return optim.rate * plan.steps / (1 - optim.momentum) * mean_noise(plan)


def mean_noise(plan: DPPlan) -> float:
    """Return s, the standard deviation of the noise in each coordinate of the mean of all steps' gradients."""
    return plan.noise_std / (plan.expected_batch_size * math.sqrt(plan.steps))


def with_rate(optim: OptimConfig, plan: DPPlan) -> OptimConfig:
    """Return ``optim``, with ``steps_rate`` as its learning rate if it has none.

    Raises:
        ConfigError: the learning rate is None and the optimizer is not SGD.
    """
    if optim.learning_rate is not None:
        return optim
    if optim.name != "sgd":
        raise ConfigError(
            f"optim: learning_rate=None with name={optim.name!r}; expected a number (only 'sgd' has a default). Give --optim.learning-rate."
        )
    return replace(optim, learning_rate=steps_rate(plan, optim.momentum))
