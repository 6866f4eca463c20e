"""Architectures as others wrote them (timm, torchvision), shrunk by their own arguments; an image
has ``SIZE`` x ``SIZE`` pixels.
"""

from functools import partial

import timm
import torch
from timm.layers import GroupNormAct
from timm.models.nfnet import NfCfg, NormFreeNet
from timm.models.resnetv2 import ResNetV2
from torch import nn
from torchvision.models import VisionTransformer

SIZE = 32


def _woken(model: nn.Module) -> nn.Module:
    """The model with all parameters moved: zero heads, and scales near zero, hide what lies before
    them.
    """
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn_like(p))
    return model


def _timm(name: str, **settings) -> nn.Module:
    return _woken(timm.create_model(name, pretrained=False, num_classes=5, **settings))


class MeanOfHeads(nn.Module):
    """The distilled model's two heads, whose outputs in training are a pair."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x):
        return sum(self.model(x)) / 2


def distilled_deit() -> nn.Module:
    model = _timm(
        "deit_tiny_distilled_patch16_224",
        img_size=SIZE,
        patch_size=8,
        embed_dim=12,
        depth=1,
        num_heads=2,
    )
    model.set_distilled_training(True)
    return MeanOfHeads(model)


def bit() -> nn.Module:
    norm = partial(GroupNormAct, num_groups=4)
    return _woken(ResNetV2([1, 1], channels=(16, 32), num_classes=5, stem_chs=8, norm_layer=norm))


def norm_free() -> nn.Module:
    config = NfCfg(
        (1, 1, 1, 1),
        (8, 8, 16, 16),
        stem_chs=8,
        group_size=4,
        skipinit=True,
        attn_layer="se",
        attn_kwargs={},
        num_features=16,
    )
    return _woken(NormFreeNet(config, num_classes=5))


PUBLISHED = {
    "vit": lambda: _timm(
        "vit_tiny_patch16_224",
        img_size=SIZE,
        patch_size=8,
        embed_dim=12,
        depth=2,
        num_heads=2,
        init_values=0.1,
    ),
    "vit_relative": lambda: _timm(
        "vit_relpos_small_patch16_224",
        img_size=SIZE,
        patch_size=8,
        embed_dim=12,
        depth=1,
        num_heads=2,
        init_values=None,
    ).eval(),  # its position network has a dropout of its own
    "deit_distilled": distilled_deit,
    "convnext": lambda: _timm("convnext_atto", depths=(1, 1, 1, 1), dims=(6, 8, 8, 12)),
    "convnextv2": lambda: _timm("convnextv2_atto", depths=(1, 1, 1, 1), dims=(6, 8, 8, 12)),
    "bit": bit,
    "norm_free": norm_free,
    "swin": lambda: _timm(
        "swin_tiny_patch4_window7_224",
        img_size=SIZE,
        window_size=4,
        embed_dim=8,
        depths=(2, 1),
        num_heads=(2, 2),
        drop_path_rate=0.0,
    ),
    "torchvision_vit": lambda: _woken(
        VisionTransformer(
            SIZE, 8, num_layers=2, num_heads=2, hidden_dim=12, mlp_dim=20, num_classes=5
        )
    ),
}
