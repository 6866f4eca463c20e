"""Normal numbers that are hard to attack: a cryptographic stream, four draws added and halved for each number used.

AES-256 in counter mode gives the bits, Box-Muller in float64 the normals. A sum of four leaves no trace of the pattern of
values that a single floating-point draw can take (Mironov 2012; Holohan and Braghin, "Secure random sampling in differential
privacy", 2021): a mitigation, not a proof.
"""

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

_DRAWS = 4


def hardened_normals(key: bytes, count: int) -> Tensor:
    """Standard normal float64 numbers.

    Args:
        key: 32 secret bytes, used for this one stream only (its counter starts at zero).
    """
    uniforms = _uniforms(key, _DRAWS * count).reshape(2, -1)
    radius, angle = np.sqrt(-2.0 * np.log(uniforms[0])), 2.0 * np.pi * uniforms[1]
    normals = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)]).reshape(_DRAWS, -1)
    return torch.from_numpy(normals.sum(axis=0) / 2.0)


def _uniforms(key: bytes, count: int) -> np.ndarray:
    """Uniform float64 numbers in the open interval (0, 1): odd multiples of 2^-53, so that no logarithm of zero is taken."""
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    bits = np.frombuffer(encryptor.update(bytes(8 * count)), dtype="<u8")
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
