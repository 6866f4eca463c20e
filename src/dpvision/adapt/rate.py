"""The learning rate of ``many_steps``, from the plan alone: public before the run, and the same for every data set of the declared size.

T steps of momentum m at a constant rate r move a weight by about L = T r / (1 - m) times its mean gradient, and the noise in that mean has

    s = noise_std / (expected_batch_size sqrt(T))

in every coordinate, whatever T is: T releases share one budget. So L s is the noise in the head's weights at the end, and in a logit of a
row of length 1. The rule fixes this noise, and with it how far the weights go:

    L s = FINAL_NOISE / (1 + (HALVING s)^2),    L <= LONGEST,    r = (1 - m) L / T

A rate that is too small costs more than the noise, until the gradient drowns in it (s near 1 / HALVING): then later gradients say nothing
that the first does not, and short ways, which are one step in 60 parts, are best. docs/heads.md has the figures.
"""

import math
from dataclasses import replace

from dpvision.config import OptimConfig
from dpvision.errors import ConfigError
from dpvision.privacy.plan import DPPlan

FINAL_NOISE = 0.7
"""Standard deviation of the noise in each weight after the last step, where there is little of it in the mean gradient."""
HALVING = 100.0
"""1 / s at which the weights end with half of that noise: 100 records at a noise multiplier of 1."""
LONGEST = 1e5
"""Of L; reached without noise, or by millions of records."""


def steps_rate(plan: DPPlan, momentum: float) -> float:
    """Learning rate of each of the plan's steps of SGD.

    >>> from dpvision.adapt.release import full_batch_plan
    >>> round(steps_rate(full_batch_plan(50_000, 1.0, steps=60), 0.9), 1)
    15.5
    """
    s = mean_noise(plan)
    length = LONGEST if s == 0 else min(FINAL_NOISE / (1 + (HALVING * s) ** 2) / s, LONGEST)
    return (1 - momentum) * length / plan.steps


def final_noise(plan: DPPlan, optim: OptimConfig) -> float:
    """L s: standard deviation of the noise in each weight after all steps of SGD at a constant rate."""
    return optim.rate * plan.steps / (1 - optim.momentum) * mean_noise(plan)


def mean_noise(plan: DPPlan) -> float:
    """s: standard deviation of the noise in each coordinate of the mean of all steps' gradients."""
    return plan.noise_std / (plan.expected_batch_size * math.sqrt(plan.steps))


def with_rate(optim: OptimConfig, plan: DPPlan) -> OptimConfig:
    """``optim`` with the rule's learning rate, where it has none.

    Raises:
        ConfigError: none is given, and the optimizer is not one that the rule is for.
    """
    if optim.learning_rate is not None:
        return optim
    if optim.name != "sgd":
        raise ConfigError(
            f"optim: name={optim.name!r} without a learning rate; expected 'sgd', which has a rule. Say --optim.learning-rate."
        )
    return replace(optim, learning_rate=steps_rate(plan, optim.momentum))
