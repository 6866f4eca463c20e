"""A 64-bit counter hash (splitmix64's finaliser), the same bits in numpy and in torch on any
device.

For everything that has to be well spread and reproducible: masks, crops, procedural images. Never
for secrets (docs/privacy.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
"""Step of the counter: 2^64 over the golden ratio."""
_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB


def signed(x: int) -> int:
    """The int64 with the same bits as the unsigned 64-bit ``x``."""
    return x - (1 << 64) if x >= 1 << 63 else x


def mix_torch(x: Tensor) -> Tensor:
    """The finaliser over int64 of any shape, read as unsigned."""
    x = (x ^ _shift_right(x, 30)) * signed(_M1)
    x = (x ^ _shift_right(x, 27)) * signed(_M2)
    return x ^ _shift_right(x, 31)


def mix_numpy(x: np.ndarray) -> np.ndarray:
    """The same over uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_M1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_M2)
    return x ^ (x >> np.uint64(31))


def uniform_torch(start: Tensor, count: int) -> Tensor:
    """Uniform float32 in [0, 1), multiples of 2^-24, of shape (..., count): the counter's first
    ``count`` values from int64 ``start``.
    """
    import torch  # not above: processes that read images do without it

    counter = torch.arange(1, count + 1, device=start.device, dtype=torch.int64) * signed(GOLDEN)
    bits = mix_torch(start[..., None] + counter) & ((1 << 63) - 1)
    return (bits >> 39).float() * 2.0**-24


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Logical (zero-filling) shift of int64."""
    return (x >> by) & ((1 << (64 - by)) - 1)
