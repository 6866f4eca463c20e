"""A public centre to subtract from features: an encoder's mean over procedural textures.

Features of most encoders share a large common component, which carries no class information yet
takes up most of a clipped record's norm. The mean over procedural textures has nearly the same
direction and costs no privacy.

Legend: B images, D feature dimension.
"""

import torch
from torch import Tensor

from dpvision.encoders.encoder import Encoder
from dpvision.synthetic.textures import textures

NUM_TEXTURES = 256
_FIRST = 1_000_000
"""First texture number; lower ones are used to learn patches."""
_BATCH = 32


@torch.inference_mode()
def texture_centre(encoder: Encoder, pooling: str, device: str | torch.device = "cpu") -> Tensor:
    """Return the mean of the encoder's features over 256 procedural textures: float32 (D,), on the
    CPU.
    """
    mean, std = (torch.tensor(v)[:, None, None] for v in (encoder.mean, encoder.std))
    total: Tensor | None = None
    for start in range(_FIRST, _FIRST + NUM_TEXTURES, _BATCH):
        pixel_BCHW = textures(torch.arange(start, start + _BATCH), encoder.image_size).float() / 255
        part_D = encoder(((pixel_BCHW - mean) / std).to(device), pooling).double().sum(dim=0).cpu()
        total = part_D if total is None else total + part_D
    assert total is not None
    return (total / NUM_TEXTURES).float()
