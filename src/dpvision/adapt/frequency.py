"""Low spatial frequencies first, where noise is large: public factors of the dimensions, from the plan alone.

    energy of frequency f is divided by decay^f,    decay = max(1, STEEPEST / (1 + 1 / (HALF s)))

with s the noise in a mean gradient (``rate.mean_noise``). Noise is the same in every direction, so the scale of a direction is a prior:
with few records or a small epsilon there is too little to learn what is where in an image: what all places share counts more.
Chosen on training images of CIFAR-10, EuroSAT and MedNIST (docs/heads.md).
"""

import torch
from torch import Tensor

from dpvision.adapt.rate import mean_noise
from dpvision.privacy.plan import DPPlan

STEEPEST = 4.0
"""Decay where there is nothing but noise."""
HALF = 3000.0
"""1 / s at which the decay is half of that."""
TEXTURE_SHARE = (0.40, 0.25, 0.18, 0.17)
"""Part of a row's squared length in each frequency, of textures: keeps scaled rows near length 1."""


def frequency_decay(plan: DPPlan) -> float:
    """The rule's decay, from 1 (no noise) to ``STEEPEST``.

    >>> from dpvision.adapt.release import full_batch_plan
    >>> [round(frequency_decay(full_batch_plan(n, 1.0)), 1) for n in (300, 5_000, 50_000)]
    [3.8, 2.6, 1.0]
    """
    s = mean_noise(plan)
    return max(1.0, STEEPEST * HALF * s / (HALF * s + 1))


def frequency_scale(order_D: Tensor, decay: float) -> Tensor | None:
    """Factors of the dimensions, float32 (D,); None where all are 1.

    Args:
        order_D: frequency of each dimension, int64 from 0 (``Encoder.order_D``).
        decay: 1 or more.
    """
    if decay == 1:
        return None
    energy_F = decay ** -torch.arange(int(order_D.max()) + 1, dtype=torch.float64)
    share_F = torch.tensor(TEXTURE_SHARE, dtype=torch.float64)[: len(energy_F)]
    return (energy_F[order_D] / (share_F @ energy_F / share_F.sum())).sqrt().float()
