"""Standard normal numbers from the secret stream, addressed by coordinate: the same words on every device, by the same formulas.

    normal 2 j     = r cos(a)      r = sqrt(-2 log(u)),  u = (k + 1/2) 2^-64 of word k = word 2 j of the subkey's stream
    normal 2 j + 1 = r sin(a)      a = 2 pi 2^-64 w of the signed word w = word 2 j + 1

(Box and Muller 1958), all in float64 and never rounded further. The largest value is sqrt(130 log 2) = 9.492; a normal is beyond it with
probability 2.3e-21. The angle has 53 significant bits. Radii below 2^-20 have steps of up to 1.5e-8, a sixtieth of the grid that
``noise.privatize`` rounds to.

Legend: W words (two for two normals), H half of them.
"""

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from dpvision.privacy.stream import WORDS_PER_BLOCK, Keystream, uniforms

_ANGLE = 2 * math.pi * 2.0**-64
_BLOCK = 2**15
"""Normals computed at once: all arrays of a ``Normals`` together fit a core's cache of 1 MiB."""


class Normals:
    """Normals on the CPU, block by block, in arrays that are used again."""

    def __init__(self) -> None:
        self._word_W = np.empty(_BLOCK, dtype="<i8")
        self._angle_H = np.empty(_BLOCK // 2)
        self._half_2H = np.empty((2, _BLOCK // 2))

    def blocks(self, key: bytes, first: int, stop: int, std: float = 1.0) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the normals of coordinates ``first`` to ``stop`` - 1 in order, as (number of the first one, float64 array).

        An array is valid until the next one is asked for; the caller may write to it.

        Args:
            key: 32 bytes, from ``stream.subkey``.
            first: 0 or more; ``stop`` at most ``stream.MAX_WORDS``.
            std: standard deviation.
        """
        aligned = first - first % WORDS_PER_BLOCK
        keystream = Keystream(key, aligned // WORDS_PER_BLOCK)
        for at in range(aligned, stop, _BLOCK):
            end = min(at + _BLOCK, stop)
            word_W = self._word_W[: -(-(end - at) // WORDS_PER_BLOCK) * WORDS_PER_BLOCK]
            keystream.fill(word_W)
            normal_W = self.box_muller(word_W, std)
            yield max(at, first), normal_W[max(first - at, 0) : end - at]

    def box_muller(self, word_W: np.ndarray, std: float = 1.0) -> np.ndarray:
        """Normals of int64 words, an even number of them up to 2^15; they take the place of the words."""
        half = len(word_W) // 2
        radius_H, part_H = self._half_2H[:, :half]
        angle_H, normal_W = self._angle_H[:half], word_W.view(np.float64)
        uniforms(word_W[0::2], radius_H, part_H)
        np.log(radius_H, out=radius_H)
        radius_H *= -2.0 * std**2
        np.sqrt(radius_H, out=radius_H)
        np.copyto(angle_H, word_W[1::2])
        angle_H *= _ANGLE
        # Torch's sine and cosine are vectorised for float64, NumPy's logarithm is the faster one.
        for part, function in enumerate((torch.cos, torch.sin)):
            function(torch.from_numpy(angle_H), out=torch.from_numpy(part_H))
            np.multiply(radius_H, part_H, out=normal_W[part::2])
        return normal_W


def normals(key: bytes, first: int, stop: int) -> np.ndarray:
    """Return the normals of coordinates ``first`` to ``stop`` - 1: float64 of shape (stop - first,)."""
    return np.concatenate([np.empty(0), *(block.copy() for _, block in Normals().blocks(key, first, stop))])


def box_muller(word_W: Tensor, std: float = 1.0) -> Tensor:
    """Normals of int64 words by torch's functions, on the words' device; within 4 units in the last place of ``Normals``."""
    word_H2 = word_W.view(-1, 2)
    uniform_H = (word_H2[:, 0].double() + 0.5) * 2.0**-64
    uniform_H -= uniform_H.floor()
    radius_H = uniform_H.log_().mul_(-2.0 * std**2).sqrt_()
    angle_H = word_H2[:, 1].double() * _ANGLE
    return torch.stack((radius_H * angle_H.cos(), radius_H * angle_H.sin()), dim=1).view(-1)
