"""The precision in which a frozen network computes features of images.

bfloat16 changes a row of features by 0.3% to 4% of its length (docs/heads.md, "Precision"). It is
for the features that a head is trained on; predictions and exports are computed in float32.

Legend: B images, D feature dimension, C channels, H height, W width.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from dpvision.devices import has_bfloat16
from dpvision.encoders.encoder import Encoder
from dpvision.errors import ConfigError

Asked = Literal["auto", "float32", "bfloat16"]


def precision_for(
    encoder: Encoder, asked: Asked, device: str | torch.device
) -> Literal["float32", "bfloat16"]:
    """Return the precision for an encoder's features on ``device``: what was asked for, or for
    "auto" bfloat16 of a network on a CPU that has instructions for it.

    Raises:
        ConfigError: bfloat16 of features that no network of PyTorch computes.
    """
    is_network = encoder.network is not None and encoder.family != "fixed"
    if asked == "auto":
        return "bfloat16" if is_network and has_bfloat16(torch.device(device)) else "float32"
    if asked == "bfloat16" and not is_network:
        raise ConfigError(
            f"model.encoder: precision='bfloat16' with {encoder.name}; expected float32, the only "
            "precision of features that no network of PyTorch computes. Leave it out."
        )
    return asked


def in_precision(encoder: Encoder, precision: Asked) -> Encoder:
    """Return the encoder with features computed in ``precision`` (not "auto"); they are float32
    tensors in any case. ``backbone``, and so what is trained further or saved, stays as it is.
    """
    if precision == "float32":
        return encoder
    assert precision == "bfloat16", "chosen by precision_for"
    poolings, stages = encoder.poolings, encoder.stages

    def lowered_poolings(x_BCHW: Tensor) -> dict[str, Tensor]:
        with torch.autocast(x_BCHW.device.type, torch.bfloat16):
            return {name: x_BD.float() for name, x_BD in poolings(x_BCHW).items()}

    def lowered_stages(x_BCHW: Tensor) -> Tensor:
        assert stages is not None
        with torch.autocast(x_BCHW.device.type, torch.bfloat16):
            return stages(x_BCHW).float()

    return replace(
        encoder, poolings=lowered_poolings, stages=None if stages is None else lowered_stages
    )
