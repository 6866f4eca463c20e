"""An encoder of the harness as a network over images of any size, for detection and segmentation."""

from typing import Any

from dpvision.dense.dense_vit import DenseViT
from dpvision.encoders.encoder import Encoder
from dpvision.errors import ConfigError
from dpvision.models.vit import ViT


def dense_backbone(encoder: Encoder, **kw: Any) -> DenseViT:
    """A fresh trainable ``DenseViT`` with a copy of an encoder's weights, on the CPU; ``kw`` are its keywords.

    Raises:
        ConfigError: the encoder is no plain vision transformer of ours (a run's, ``vip:``, ``mae:`` or ``random:``), or as ``DenseViT``.
    """
    network = getattr(encoder.backbone(), "network", None) if encoder.backbone is not None else None
    if not isinstance(network, ViT):
        raise ConfigError(
            f"encoder: {encoder.name} is no plain vision transformer of ours; expected a run of one, random:RUN, vip:FILE or mae:FILE, "
            "whose blocks can be given windows and other positions. Name one."
        )
    return DenseViT(network.requires_grad_(True), **kw)
