"""Sums, gradients and keys that no mechanism made, for tests: the one place that seals by hand and
knows the bytes of keys.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dpvision.dp.clipped import ClippedSum, seal
from dpvision.dp.noise import DPGradient
from dpvision.privacy.stream import Key
from dpvision.runs.run import Secrets

RAW = bytes(range(32))


def key(raw: bytes = RAW) -> Key:
    """A new key of known bytes, for one use of each step."""
    return Key.for_tests(raw)


def secrets(draw: bytes = b"d" * 32, noise: bytes = b"n" * 32) -> Secrets:
    """New keys of known bytes, for one start."""
    return Secrets(Key.for_tests(draw), Key.for_tests(noise))


def made_sum(
    grads: dict[str, Tensor], num_records: int = 1, max_grad_norm: float | None = 1.0
) -> ClippedSum:
    """A sum of these numbers."""
    return seal(
        ClippedSum(
            grads, num_records, torch.ones(num_records), torch.ones(num_records), max_grad_norm
        )
    )


def changed(total: ClippedSum, **changes: Any) -> ClippedSum:
    """A sum with other fields."""
    return seal(replace(total, **changes))


def released(grads: dict[str, Tensor]) -> DPGradient:
    """A gradient of these numbers."""
    return seal(DPGradient(grads))
