"""Random numbers of one record, keyed by (config seed, step, record id).

They never depend on the record's row or its position in the batch.

A counter-based generator (splitmix64's finaliser over a keyed counter), the same bits in numpy
(data side) and in torch (model side, any device, also under ``torch.func.vmap``). This is for
masks, crops and flips, which need to be reproducible and well spread. It is not for noise or for
drawing the batch: those are secret (docs/privacy.md).

Legend: B records, N numbers per record.
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpvision.mixing import GOLDEN, mix_numpy, mix_torch, signed


@dataclass(frozen=True)
class StepKey:
    """Public key of one logical step: the config's seed and the step's number in the ledger."""

    seed: int
    step: int
    image: int = 0
    """Position among the images of a person in this step, where people are drawn: an image that
    takes several positions gets other crops and captions in each.
    """

    def base(self, stream: str) -> int:
        """Unsigned 64-bit constant of this (seed, step, image, stream)."""
        text = (
            f"dpvision {self.seed} {self.step} {stream}{f' {self.image}' if self.image else ''}"
        ).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    def bits(self, record_id_B: Tensor, stream: str, count: int) -> Tensor:
        """Random int64 numbers from 0 to 2^63 - 1, on the ids' device.

        Of shape (B, count), or (count,) for a scalar id.
        """
        start = mix_torch(record_id_B.long() ^ signed(self.base(stream)))
        counter = torch.arange(1, count + 1, device=record_id_B.device, dtype=torch.int64) * signed(
            GOLDEN
        )
        return mix_torch(start[..., None] + counter) & ((1 << 63) - 1)

    def uniform(self, record_id_B: Tensor, stream: str, count: int) -> Tensor:
        """Uniform float32 numbers in [0, 1), multiples of 2^-24, shape (B, count)."""
        return (self.bits(record_id_B, stream, count) >> 39).float() * 2.0**-24

    def uniform_numpy(self, record_id_B: np.ndarray, stream: str, count: int) -> np.ndarray:
        """The numbers of ``uniform`` as float64 (B, count), for code that runs in data workers."""
        with np.errstate(over="ignore"):
            start = mix_numpy(
                np.asarray(record_id_B).astype(np.uint64) ^ np.uint64(self.base(stream))
            )
            counter = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GOLDEN)
            bits = mix_numpy(start[..., None] + counter) & np.uint64((1 << 63) - 1)
        return (bits >> np.uint64(39)).astype(np.float64) * 2.0**-24
