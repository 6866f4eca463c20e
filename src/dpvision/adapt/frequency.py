"""Public per-dimension factors, computed from the plan alone, that favour low spatial frequencies
where noise is large.

    energy of frequency f is divided by decay^f,    decay = max(1, STEEPEST / (1 + 1 / (HALF s)))

with s the noise in a mean gradient (``rate.mean_noise``). Noise is the same in every direction, so
the scale of a direction is a prior. With few records or a small epsilon the positions of details
cannot be learned, and what all positions share gets more weight. Tuned on training images of
CIFAR-10, EuroSAT and MedNIST (docs/log, 2026-11-22).
"""

import torch
from torch import Tensor

from dpvision.adapt.rate import mean_noise
from dpvision.privacy.plan import DPPlan

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
