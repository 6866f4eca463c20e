"""Standard normal numbers from the secret stream, addressed by coordinate: the same words on every
device, by the same formulas.

    normal 2 j     = r cos(a)      r = sqrt(-2 log(u)),  u = (k + 1/2) 2^-64 of word k = word 2 j of
                   the subkey's stream
    normal 2 j + 1 = r sin(a)      a = 2 pi 2^-64 w of the signed word w = word 2 j + 1

(Box and Muller 1958), all in float64 and never rounded further. Where u is below 2^-20, a word k'
of the pair's own subkey takes the place of the 1/2: u = (k + (k' + 1/2) 2^-64) 2^-64. Otherwise
the radii beyond 8.2 would be rings farther apart than the grid that ``noise.privatize`` rounds to,
and an output between two of them would show that a sum had moved (docs/proofs.md). The largest
value is sqrt(258 log 2) = 13.37; a normal is beyond it with probability 8.7e-41. The angle has 53
significant bits. Radii below 2^-20 have steps of up to 1.5e-8, a thirtieth of the grid.

Legend: W words (two for two normals), H half of them.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpvision.privacy.stream import WORDS_PER_BLOCK, Key, Keystream, Stream, subkey, uniforms

_ANGLE = 2 * math.pi * 2.0**-64
_RARE = 2.0**-20
"""Uniform numbers below it have a second word."""
_MOST_RARE = 64
"""Pairs of a GPU's piece that may have one; of 2^22 pairs four have, more than 63 with probability
1e-50.
"""
_BLOCK = 2**17
"""Normals computed at once. Larger than a core's cache: with 2^15, which fits it, two threads spend
a third of their time contending for the interpreter lock (``benchmarks/noise.py``).
"""


class Normals:
    """Computes normals on the CPU, block by block, in reused arrays."""

    def __init__(self) -> None:
        self._word_W = np.empty(_BLOCK, dtype="<i8")
        self._spare_3H = np.empty((3, _BLOCK // 2))
        self._full = _Views.of(self._word_W, self._spare_3H, _BLOCK)

    def blocks(
        self, key: Key, first: int, stop: int, std: float = 1.0
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the normals of coordinates ``first`` to ``stop`` - 1 in order, as (number of the
        first one, float64 array).

        An array is valid until the next one is requested; the caller may write to it.

        Args:
            key: from ``stream.subkey``.
            first: 0 or more; ``stop`` at most ``stream.MAX_WORDS``.
            std: standard deviation; if negative, the normals change their signs.
        """
        aligned = first - first % WORDS_PER_BLOCK
        keystream = Keystream(key, aligned // WORDS_PER_BLOCK)
        for at in range(aligned, stop, _BLOCK):
            end = min(at + _BLOCK, stop)
            num_words = -(-(end - at) // WORDS_PER_BLOCK) * WORDS_PER_BLOCK
            keystream.fill(self._word_W[:num_words])
            normal_W = self._box_muller(num_words, std, key, at // 2)
            yield max(at, first), normal_W[max(first - at, 0) : end - at]

    def box_muller(self, word_W: np.ndarray) -> np.ndarray:
        """Standard normals of int64 words, an even number of them up to 2^17, in an array that the
        next call overwrites; without second words.
        """
        self._word_W[: len(word_W)] = word_W
        return self._box_muller(len(word_W), 1.0)

    def _box_muller(
        self, num_words: int, std: float, key: Key | None = None, first_pair: int = 0
    ) -> np.ndarray:
        """Replace the first ``num_words`` words by normals, with second words of ``key``."""
        to = (
            self._full
            if num_words == _BLOCK
            else _Views.of(self._word_W, self._spare_3H, num_words)
        )
        uniforms(to.radius_word_H, to.radius_H, to.part_H)
        if key is not None and to.radius_H.min() < _RARE:
            for pair in np.flatnonzero(to.radius_H < _RARE).tolist():
                word = int(to.radius_word_H[pair])
                to.radius_H[pair] = _refined(word, key, first_pair + pair)
        np.log(to.radius_H, out=to.radius_H)
        np.multiply(to.radius_H, -2.0 * std**2, out=to.radius_H)
        np.sqrt(to.radius_H, out=to.radius_H)
        if std < 0:
            np.negative(to.radius_H, out=to.radius_H)
        np.copyto(to.angle_H, to.angle_word_H)
        np.multiply(to.angle_H, _ANGLE, out=to.angle_H)
        # Torch's sine and cosine are vectorised for float64; NumPy's logarithm is faster than
        # torch's.
        torch.cos(to.angle_tensor_H, out=to.part_tensor_H)
        np.multiply(to.radius_H, to.part_H, out=to.even_H)
        torch.sin(to.angle_tensor_H, out=to.part_tensor_H)
        np.multiply(to.radius_H, to.part_H, out=to.odd_H)
        return to.normal_W


class _Views(NamedTuple):
    """Views of a block's arrays; made once for full blocks, since making them takes longer than
    some of the computation.
    """

    radius_word_H: np.ndarray
    angle_word_H: np.ndarray
    radius_H: np.ndarray
    angle_H: np.ndarray
    part_H: np.ndarray
    angle_tensor_H: Tensor
    part_tensor_H: Tensor
    normal_W: np.ndarray
    even_H: np.ndarray
    odd_H: np.ndarray

    @classmethod
    def of(cls, word_W: np.ndarray, spare_3H: np.ndarray, num_words: int) -> "_Views":
        word_W, normal_W = word_W[:num_words], word_W[:num_words].view(np.float64)
        radius_H, angle_H, part_H = spare_3H[:, : num_words // 2]
        tensors = torch.from_numpy(angle_H), torch.from_numpy(part_H)
        return cls(
            word_W[0::2],
            word_W[1::2],
            radius_H,
            angle_H,
            part_H,
            *tensors,
            normal_W,
            normal_W[0::2],
            normal_W[1::2],
        )


def _refined(word: int, key: Key, pair: int) -> float:
    """Return u of a small word k and the second word of its pair."""
    second = Stream(subkey(key, "second word", step=pair)).uniforms(1)
    return (word + float(second[0])) * 2.0**-64


def normals(key: Key, first: int, stop: int) -> np.ndarray:
    """Return the normals of coordinates ``first`` to ``stop`` - 1: float64 of shape (stop -
    first,).
    """
    return np.concatenate(
        [np.empty(0), *(block.copy() for _, block in Normals().blocks(key, first, stop))]
    )


def key_words(keys: Sequence[Key]) -> Tensor:
    """Keys for ``chacha_triton.chacha_words``: int64 (number of keys, 8) on the CPU, the 32-bit
    words of each.
    """
    return torch.from_numpy(
        np.frombuffer(b"".join(key.secret() for key in keys), dtype="<u4").astype(np.int64)
    ).view(-1, 8)


def smallest_words(word_W: Tensor, most: int = _MOST_RARE) -> Tensor:
    """Return the pairs of the smallest radius words, which may have second words: place and word,
    int64 (K, 2), on the device of the words. The host does not wait.
    """
    word_H = word_W[0::2]
    unsigned_H = word_H ^ torch.iinfo(torch.int64).min  # the order of unsigned words
    place_K = unsigned_H.topk(min(most, len(word_H)), largest=False, sorted=False).indices
    return torch.stack((place_K, word_H[place_K]), dim=1)


def second_uniforms(found_K2: Tensor, key: Key, first_pair: int) -> Tensor:
    """Return u of the pairs of ``smallest_words`` on the host, with second words where there are:
    float64 (K,).

    Args:
        key: of the words.
        first_pair: number of their first pair in the key's stream.
    """
    place_K, word_K = found_K2.unbind(1)
    uniform_K = _uniform(word_K)
    for at in (uniform_K < _RARE).nonzero()[:, 0].tolist():
        uniform_K[at] = _refined(int(word_K[at]), key, first_pair + int(place_K[at]))
    return uniform_K


def box_muller(
    word_W: Tensor, std: float = 1.0, second: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Normals of int64 words by torch's functions, on the words' device; within 4 units in the last
    place of ``Normals``.

    Args:
        second: places of pairs and their ``second_uniforms``, on the device; None for no second
            words.
    """
    word_H2 = word_W.view(-1, 2)
    uniform_H = _uniform(word_H2[:, 0])
    if second is not None:
        uniform_H.index_copy_(0, *second)
    radius_H = uniform_H.log_().mul_(-2.0 * std**2).sqrt_()
    if std < 0:
        radius_H.neg_()
    angle_H = word_H2[:, 1].double() * _ANGLE
    return torch.stack((radius_H * angle_H.cos(), radius_H * angle_H.sin()), dim=1).view(-1)


def _uniform(word_H: Tensor) -> Tensor:
    """Return (k + 1/2) 2^-64 of the unsigned words k."""
    uniform_H = (word_H.double() + 0.5) * 2.0**-64
    return uniform_H.sub_(uniform_H.floor())
