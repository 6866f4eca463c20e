"""An encoder with a linear head, for supervised training and fine-tuning.

Legend: B records, V views, D width, L tokens, K classes, C channels, H height, W width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpvision.config import ClassifierConfig, EncoderConfig, ResNetConfig, ViTConfig
from dpvision.models.layers import init_weights
from dpvision.models.resnet import ResNet, init_resnet
from dpvision.models.timm_encoder import TimmEncoder
from dpvision.models.tuned import Encoder, tune
from dpvision.models.vit import ViT


class Classifier(nn.Module):
    """Encoder, pooling and linear head. ``init_classifier`` draws the weights and freezes untrained
    parts.
    """

    def __init__(self, cfg: ClassifierConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.encoder = _make_encoder(cfg.encoder)
        width = (
            self.encoder.width(cfg.pooling)
            if isinstance(self.encoder, TimmEncoder)
            else self.encoder.cfg.width
        )
        self.head = nn.Linear(width, cfg.num_classes)

    def features(self, x_BCHW: Tensor) -> Tensor:
        """Return the head's input, (B, D), as ``head_input``."""
        return head_input(self.encoder, self.cfg.pooling, x_BCHW)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the logits, (B, K)."""
        return self.head(self.features(x_BCHW))


def head_input(encoder: Encoder, pooling: str, x_BCHW: Tensor) -> Tensor:
    """Return the input of a classifier's head, (B, D): the mean of patch tokens or of the last map,
    the class token, or timm's own pooling.
    """
    if isinstance(encoder, TimmEncoder):
        return encoder.pooled(x_BCHW, pooling)
    if isinstance(encoder, ResNet):
        return encoder(x_BCHW).mean((2, 3))
    token_BLD = encoder(x_BCHW)
    return token_BLD[:, 0] if pooling == "cls" else token_BLD[:, 1:].mean(1)


def init_classifier(model: Classifier, generator: torch.Generator) -> None:
    """Initialise the encoder (timm's already is) and the head from ``generator``, then call
    ``tune``.
    """
    if isinstance(model.encoder, ResNet):
        init_resnet(model.encoder, generator)
    elif isinstance(model.encoder, ViT):
        init_weights(model.encoder, generator)
    init_head(model, generator)
    tune(model.encoder, model.head, model.cfg, generator)


@torch.no_grad()
def init_head(model: Classifier, generator: torch.Generator) -> None:
    """Initialise the head's weight by ``head_init`` times ``head_scale``, and its bias with
    ``head_bias``.
    """
    cfg, weight = model.cfg, model.head.weight
    nn.init.constant_(model.head.bias, cfg.head_bias)
    if cfg.head_init == "zero":
        nn.init.zeros_(weight)
    elif cfg.head_init == "xavier":
        nn.init.xavier_uniform_(weight, generator=generator)
    else:
        nn.init.normal_(weight, std=weight.shape[1] ** -0.5, generator=generator)
    weight.mul_(cfg.head_scale)


def losses(
    model: Classifier, x_BVCHW: Tensor, label_B: Tensor | None, label_BV: Tensor | None = None
) -> Tensor:
    """Return the cross-entropy of each record by ``loss``, averaged over its views.

    A label outside 0 ... K - 1, or a target that is neither 0 nor 1, gives a loss of NaN and a
    gradient of exactly zero. Nothing is raised, because whether a step raises must not depend on a
    private label. Stores are checked before the first step.

    Args:
        label_B: int64 (B,); for the sigmoid loss also integers (B, K), 1 for each class of a record
            and 0 elsewhere.
        label_BV: in place of ``label_B``, one label (or K) for each view.

    Returns:
        loss_B, float32 also under autocast (float64 for float64 images).
    """
    views = x_BVCHW.shape[1]
    logits = model(x_BVCHW.flatten(0, 1))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if label_BV is None:
        assert label_B is not None
        label_BV = label_B[:, None].expand(-1, views, *label_B.shape[1:])
    several = label_BV.ndim == 3
    known_BV = (
        ((label_BV == 0) | (label_BV == 1)).all(2)
        if several
        else (label_BV >= 0) & (label_BV < model.cfg.num_classes)
    )
    target = torch.where(known_BV[..., None] if several else known_BV, label_BV, 0).flatten(0, 1)
    if model.cfg.loss == "softmax":
        loss = F.cross_entropy(logits, target, reduction="none")
    else:
        target = (
            target
            if several
            else target[:, None] == torch.arange(model.cfg.num_classes, device=target.device)
        )
        loss = F.binary_cross_entropy_with_logits(
            logits, target.to(logits.dtype), reduction="none"
        ).sum(1)
    return torch.where(known_BV.all(1), loss.unflatten(0, (-1, views)).mean(1), torch.nan)


def _make_encoder(cfg: EncoderConfig) -> Encoder:
    match cfg:
        case ViTConfig():
            return ViT(cfg)
        case ResNetConfig():
            return ResNet(cfg)
        case _:
            return TimmEncoder(cfg)
