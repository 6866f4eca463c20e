"""What a head's config leaves open, by rules that read public numbers only: the head, the rate and
number of its steps, and the weight of spatial frequencies. Calibrated on public images
(docs/heads.md has the figures).

The head (``recommend_head``):

    s = sigma / N,    sigma = noise multiplier of one release at (epsilon, delta)

is the noise in each coordinate of a mean over all records of contributions of length 1. Many steps,
except with too few records a class for more than class means.

The rate of ``many_steps``, the same for every data set of the declared size:

T steps of momentum m at a constant rate r move a weight by about L = T r / (1 - m) times its mean
gradient. The noise in that mean has the standard deviation

    s = noise_std / (expected_batch_size sqrt(T))

in every coordinate, whatever T is: T releases share one budget. So L s is the noise in the head's
final weights, and in a logit of a row of length 1. The rule fixes this noise, and thereby L:

    L s = FINAL_NOISE / (1 + (HALVING s)^2),    L <= LONGEST,    r = (1 - m) L / T

A rate that is too small costs more accuracy than the noise, until noise dominates the gradient (s
near 1 / HALVING). Then later gradients add no information, and a small L, which amounts to one step
split into T, is best. docs/log (2026-11-22) has the figures.

Gradient steps with momentum diverge where r times the curvature of the loss exceeds 2 (1 + m). On
rows of length 1 the curvature is at most CURVATURE, and features whose rows lie close together come
near it. Unless features are known to stay far from it, r is therefore at most

    STABLE 2 (1 + m) / CURVATURE

and more steps keep L (``enough_steps``); full batches divide a target epsilon over any number of
steps without loss. With a given noise multiplier every step costs epsilon: the number of steps
stays, and L is shortened.

Frequencies (``frequency_decay``):

    energy of frequency f is divided by decay^f,    decay = max(1, STEEPEST / (1 + 1 / (HALF s)))

with s as above. Noise is the same in every direction, so the scale of a direction is a prior. With
few records or a small epsilon the positions of details cannot be learned, and what all positions
share gets more weight. Tuned on training images of CIFAR-10, EuroSAT and MedNIST (docs/log.md,
2026-11-22).
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from dpvision.config import OptimConfig
from dpvision.errors import ConfigError
from dpvision.privacy import gaussian
from dpvision.privacy.plan import DPPlan, default_delta

FEWEST_RECORDS_OF_A_CLASS = 5.0


def recommend_head(
    num_records: int,
    num_classes: int,
    epsilon: float,
    feature_width: int,
    delta: float | None = None,
    *,
    people: bool = False,
) -> tuple[str, str]:
    """Return the recommended head, and the reason in one sentence.

    Args:
        num_records: N, as declared; where people are drawn, their number.
        num_classes: K, as declared.
        epsilon: of the whole head; positive, infinite without a guarantee.
        feature_width: D.
        delta: if None, ``privacy.plan.default_delta``.
        people: whether people are drawn, for the words of the reason.

    Raises:
        ConfigError: a number is out of range.
    """
    if not (num_records >= 1 and num_classes >= 2 and feature_width >= 1 and epsilon > 0):
        raise ConfigError(
            f"adapt: num_records={num_records}, num_classes={num_classes}, "
            f"feature_width={feature_width}, epsilon={epsilon}; expected at least one record, "
            "two classes and one feature dimension, and a positive epsilon. Set --dataset-size, "
            "--num-classes, --epsilon."
        )
    noise = noise_of_a_mean(num_records, epsilon, delta)
    per_class, several = num_records / num_classes, "people" if people else "records"
    if per_class < FEWEST_RECORDS_OF_A_CLASS:
        return (
            "prototypes",
            f"{per_class:.3g} {several} a class: only class means are worth measuring",
        )
    return "many_steps", (
        f"{num_records:,} {several} and noise of {noise:.2g} in each coordinate of their mean "
        f"gradient: gradient steps, at a rate that goes by this noise, for {feature_width:,} "
        "feature dimensions"
    )


def noise_of_a_mean(num_records: int, epsilon: float, delta: float | None = None) -> float:
    """Return sigma / N, or 0 if epsilon is infinite."""
    if math.isinf(epsilon):
        return 0.0
    delta = default_delta(num_records) if delta is None else delta
    return gaussian.noise_for(epsilon, delta) / num_records


FINAL_NOISE = 0.7
"""Standard deviation of the noise in each final weight, in the limit of small s."""
HALVING = 100.0
"""1 / s at which the final weights have half of that noise: 100 records at a noise multiplier of
1.
"""
LONGEST = 1e5
"""Upper bound on L; reached without noise, or with millions of records."""
CURVATURE = 0.5
"""Upper bound on the eigenvalues of diag(p) - p p^T, the Hessian of the softmax loss in a record's
scores; sigmoid: 1/4.
"""
STABLE = 0.6
"""Share of the stability limit, which holds for a quadratic loss. On identical rows of two classes,
the softmax loss oscillates without end at 0.75 of it and converges at 0.67 (docs/log,
2026-11-23).
"""
MOST_STEPS = 500
"""Upper bound on ``enough_steps``, for the sake of time; beyond it, L is shortened."""


def steps_rate(plan: DPPlan, momentum: float, *, bounded: bool = True) -> float:
    """Return the learning rate for the plan's steps of SGD.

    Args:
        bounded: whether to keep to ``stable_rate``, which only features of known low curvature may
            exceed.

    >>> from dpvision.adapt.release import full_batch_plan
    >>> plan = full_batch_plan(50_000, 1.0, steps=60)
    >>> round(steps_rate(plan, 0.9, bounded=False), 1), round(steps_rate(plan, 0.9), 1)
    (15.5, 4.6)
    """
    rate = (1 - momentum) * _length(plan) / plan.steps
    return min(rate, stable_rate(momentum)) if bounded else rate


def stable_rate(momentum: float) -> float:
    """Return the largest rate that the rule gives to features of any curvature."""
    return STABLE * 2 * (1 + momentum) / CURVATURE


def enough_steps(plan: DPPlan, momentum: float) -> int:
    """Return the smallest number of full-batch steps, from the plan's on, at which ``stable_rate``
    does not shorten L; at most MOST_STEPS.

    >>> from dpvision.adapt.release import full_batch_plan
    >>> [enough_steps(full_batch_plan(n, 8.0, steps=60), 0.9) for n in (2_000, 10_000, 1_000_000)]
    [60, 274, 500]
    """
    stable = stable_rate(momentum)
    enough = math.ceil((1 - momentum) * _length(plan) / stable)
    return max(plan.steps, min(enough, MOST_STEPS))


def _length(plan: DPPlan) -> float:
    s = mean_noise(plan)
    return LONGEST if s == 0 else min(FINAL_NOISE / (1 + (HALVING * s) ** 2) / s, LONGEST)


def final_noise(plan: DPPlan, optim: OptimConfig) -> float:
    """Return L s, the standard deviation of the noise in each weight after all steps of SGD at a
    constant rate.
    """
    return optim.rate * plan.steps / (1 - optim.momentum) * mean_noise(plan)


def mean_noise(plan: DPPlan) -> float:
    """Return s, the standard deviation of the noise in each coordinate of the mean of all steps'
    gradients.
    """
    return plan.noise_std / (plan.expected_batch_size * math.sqrt(plan.steps))


def with_rate(optim: OptimConfig, plan: DPPlan, *, bounded: bool = True) -> OptimConfig:
    """Return ``optim``, with ``steps_rate`` as its learning rate if it has none.

    Args:
        bounded: as in ``steps_rate``.

    Raises:
        ConfigError: the learning rate is None and the optimizer is not SGD.
    """
    if optim.learning_rate is not None:
        return optim
    if optim.name != "sgd":
        raise ConfigError(
            f"optim: learning_rate=None with name={optim.name!r}; expected a number (only 'sgd' "
            "has a default). Give --optim.learning-rate."
        )
    return replace(optim, learning_rate=steps_rate(plan, optim.momentum, bounded=bounded))


STEEPEST = 4.0
"""Decay in the limit of infinite noise."""
HALF = 3000.0
"""1 / s at which the decay is half of ``STEEPEST``."""
TEXTURE_SHARE = (0.40, 0.25, 0.18, 0.17)
"""Fraction of a row's squared length in each frequency, measured on textures. Keeps scaled rows
near length 1.
"""


def frequency_decay(plan: DPPlan) -> float:
    """Return the decay for a plan, from 1 (no noise) to ``STEEPEST``.

    >>> from dpvision.adapt.release import full_batch_plan
    >>> [round(frequency_decay(full_batch_plan(n, 1.0)), 1) for n in (300, 5_000, 50_000)]
    [3.8, 2.6, 1.0]
    """
    s = mean_noise(plan)
    return max(1.0, STEEPEST * HALF * s / (HALF * s + 1))


def frequency_scale(order_D: Tensor, decay: float) -> Tensor | None:
    """Return the factor of each dimension, float32 (D,), or None if all are 1.

    Args:
        order_D: frequency of each dimension, int64 from 0 (``Encoder.order_D``).
        decay: 1 or more.
    """
    if decay == 1:
        return None
    energy_F = decay ** -torch.arange(int(order_D.max()) + 1, dtype=torch.float64)
    share_F = torch.tensor(TEXTURE_SHARE, dtype=torch.float64)[: len(energy_F)]
    return (energy_F[order_D] / (share_F @ energy_F / share_F.sum())).sqrt().float()
