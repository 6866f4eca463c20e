"""Turn an encoder into a network for images of any size, for detection and segmentation."""

from typing import Any

from dpvision.dense.dense_vit import DenseViT
from dpvision.encoders.encoder import Encoder
from dpvision.errors import ConfigError
from dpvision.models.vit import ViT


def dense_backbone(encoder: Encoder, **kw: Any) -> DenseViT:
    """Return a new trainable ``DenseViT`` with a copy of an encoder's weights, on the CPU; ``kw``
    are its arguments.

    Raises:
        ConfigError: the encoder is not a plain ``models.vit.ViT`` (a run's, ``vip:``, ``mae:`` or
            ``random:``), or as ``DenseViT``.
    """
    network = getattr(encoder.backbone(), "network", None) if encoder.backbone is not None else None
    if not isinstance(network, ViT):
        raise ConfigError(
            f"encoder: {encoder.name} is not a plain vision transformer; expected a run of one, "
            "random:RUN, vip:FILE or mae:FILE, whose blocks accept windows and other positions. "
            "Use one of these."
        )
    return DenseViT(network.requires_grad_(True), **kw)
