"""Attacks on the noise itself: its low bits, its tails, its repetition, and any generator beside the one stream.

``test_mersenne_twister.py`` has the attack on the generator that was used before.
"""

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from dpvision.config import PrivacyConfig
from dpvision.dp import noise
from dpvision.dp.clip import ClippedSum
from dpvision.dp.noise import privatize
from dpvision.privacy.plan import make_plan

BATCH, CLIP = 64.0, 1.0
PLAN = make_plan(PrivacyConfig(dataset_size=64, expected_batch_size=64, sampling="full_batch", steps=4, noise_multiplier=2.0))
SIZE = 100_000


def released(total: torch.Tensor, step: int = 0) -> np.ndarray:
    """The noisy sum as an attacker computes it from a float64 release: the divisor is a power of two, so nothing is lost."""
    summed = ClippedSum({"a": total}, 1, torch.ones(1), torch.ones(1), CLIP)
    return privatize(summed, PLAN, step, bytes(32), dtype=torch.float64).grads["a"].numpy() * BATCH


def old_release(total: torch.Tensor) -> np.ndarray:
    """Sum plus noise as it was: no grid."""
    normal = torch.randn(len(total), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return (total.double() + PLAN.noise_std * normal).numpy()


def excluded(noisy: np.ndarray, hypothesis: float, grid: float) -> float:
    """Share of coordinates that no noise whatever can have brought from ``hypothesis`` to what was released."""
    def outcome(drawn: np.ndarray) -> np.ndarray:
        summed = hypothesis + drawn
        return np.rint(summed / grid) * grid if grid else summed

    near = noisy - hypothesis
    around = [near, np.nextafter(near, -np.inf), np.nextafter(near, np.inf)]
    return float(np.mean(~np.any([outcome(drawn) == noisy for drawn in around], axis=0)))
