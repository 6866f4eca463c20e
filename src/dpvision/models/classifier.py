"""An encoder with a linear head: supervised training, and fine-tuning of an encoder that was trained otherwise.

Legend: B records, V views, D width, L tokens, K classes, C channels, H height, W width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpvision.config import ClassifierConfig, ViTConfig
from dpvision.models.layers import init_weights
from dpvision.models.resnet import ResNet, init_resnet
from dpvision.models.vit import ViT


class Classifier(nn.Module):
    """Encoder, pooling, linear head."""

    def __init__(self, cfg: ClassifierConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.encoder: ViT | ResNet = ViT(cfg.encoder) if isinstance(cfg.encoder, ViTConfig) else ResNet(cfg.encoder)
        self.head = nn.Linear(cfg.encoder.width, cfg.num_classes)

    def features(self, x_BCHW: Tensor) -> Tensor:
        """What the head sees, (B, D): the mean of all patch tokens or places of the last map, or the class token."""
        if isinstance(self.encoder, ResNet):
            return self.encoder(x_BCHW).mean((2, 3))
        token_BLD = self.encoder(x_BCHW)
        return token_BLD[:, 0] if self.cfg.pooling == "cls" else token_BLD[:, 1:].mean(1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Logits, (B, K)."""
        return self.head(self.features(x_BCHW))


def init_classifier(model: Classifier, generator: torch.Generator) -> None:
    """Encoder as its kind is initialised, then the head by ``head_init``, drawn from ``generator``."""
    if isinstance(model.encoder, ResNet):
        init_resnet(model.encoder, generator)
    else:
        init_weights(model.encoder, generator)
    init_head(model, generator)


def init_head(model: Classifier, generator: torch.Generator) -> None:
    """The head by ``head_init``: zeros, or Xavier-uniform weights and a bias of zeros."""
    nn.init.zeros_(model.head.bias)
    if model.cfg.head_init == "zero":
        nn.init.zeros_(model.head.weight)
    else:
        nn.init.xavier_uniform_(model.head.weight, generator=generator)


def losses(model: Classifier, x_BVCHW: Tensor, label_B: Tensor) -> Tensor:
    """Cross-entropy of each record, the mean over its views.

    A label outside 0 ... K - 1 gives a loss of NaN and a gradient of exactly zero: such a record takes no part, and nothing is raised,
    because whether a step raises must not depend on a private label. Stores are checked before the first step.

    Args:
        label_B: int64.

    Returns:
        loss_B, float32 also under autocast (float64 for float64 pictures).
    """
    views = x_BVCHW.shape[1]
    logits = model(x_BVCHW.flatten(0, 1))
    known_B = (label_B >= 0) & (label_B < model.cfg.num_classes)
    target = torch.where(known_B, label_B, 0).repeat_interleave(views)
    loss = F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target, reduction="none")
    return torch.where(known_B, loss.unflatten(0, (-1, views)).mean(1), torch.nan)
