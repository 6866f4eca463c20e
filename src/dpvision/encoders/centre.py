"""A public point to take off every feature: where an encoder puts images that show nothing in particular.

Features of most encoders share a large common part, which tells no class from another and yet takes most of a clipped record's length.
The mean over procedural textures has nearly its direction and costs no privacy: no image of anybody is in it.

Legend: B images, D feature dimensions.
"""

import torch
from torch import Tensor

from dpvision.encoders.encoder import Encoder
from dpvision.synthetic.textures import textures

NUM_TEXTURES = 256
_FIRST = 1_000_000
"""Beyond those that patches are drawn from."""
_BATCH = 32


@torch.inference_mode()
def texture_centre(encoder: Encoder, pooling: str, device: str | torch.device = "cpu") -> Tensor:
    """Mean of the encoder's features of 256 procedural textures: float32 (D,), on the CPU."""
    mean, std = (torch.tensor(v)[:, None, None] for v in (encoder.mean, encoder.std))
    total: Tensor | None = None
    for start in range(_FIRST, _FIRST + NUM_TEXTURES, _BATCH):
        pixel_BCHW = textures(torch.arange(start, start + _BATCH), encoder.image_size).float() / 255
        part_D = encoder(((pixel_BCHW - mean) / std).to(device), pooling).double().sum(dim=0).cpu()
        total = part_D if total is None else total + part_D
    assert total is not None
    return (total / NUM_TEXTURES).float()
