"""Epochs of supervised training on a few images: batches of nearly equal size in random order, and
the learning-rate schedule.
"""

import math
from dataclasses import dataclass

import numpy as np


def warmup_cosine(step: int, steps: int, warmup: int) -> float:
    """Return the learning-rate factor at ``step`` of ``steps``: linear up to 1, then half a cosine
    towards 0.

    >>> [round(warmup_cosine(t, 4, 2), 3) for t in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


@dataclass(frozen=True)
class Epochs:
    """Passes over N records."""

    num_records: int
    batch_size: int
    """Maximum batch size."""
    epochs: int
    warmup_epochs: int
    seed: int
    """Seed of the order."""

    @property
    def batches(self) -> int:
        """Number of batches per epoch."""
        return math.ceil(self.num_records / self.batch_size)

    def order(self, epoch: int) -> np.ndarray:
        """Return a random permutation of the records, int64 (N,)."""
        return np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(
            self.num_records
        )

    def level(self, step: int) -> float:
        """Return the learning-rate factor in ``step``, counted over all epochs."""
        return warmup_cosine(step, self.batches * self.epochs, self.warmup_epochs * self.batches)
