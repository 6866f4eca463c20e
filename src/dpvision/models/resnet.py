"""Pre-activation residual networks for private training, without batch statistics.

With GroupNorm and standardised weights, or without norms.

    h = act(norm(x)),    y = shortcut + alpha x convs(h),    shortcut = x, or a 1 x 1 convolution of
                         h where the shape changes

With ``norm="group"`` alpha is 1, norm is GroupNorm and weights are standardised (Qiao et al. 2019):
the WRN-D-K of De et al. 2022 for 32 px, BiT's ResNets for 224 px. With ``norm="none"`` alpha is
0.2, norm is a fixed factor, and scaled standardised convolutions with gains hold the variance
(Brock et al. 2021): the NF-ResNet-50 that De et al. 2022 and TAN (Sander et al. 2022) train on
ImageNet. Both differ only in the norm before an activation and the kind of convolution. The
convolutions are timm's, for which one-pass clipping has rules. timm's own networks have no 32 px
form and cannot be initialised from a given generator.

Legend: B records, C channels, H height, W width, D channels of the last stage, G side of the last
map.
"""

import math

import torch
from torch import Tensor, nn

from dpvision.config import ResNetConfig
from dpvision.models.vit import CHANNELS

_ALPHA = 0.2
"""Weight of a residual branch without norms (Brock et al. 2021, section 3)."""
_RELU_GAIN = math.sqrt(2 / (1 - 1 / math.pi))
"""Gain for which the ReLU of a standard normal number has variance 1 (Brock et al. 2021, section
4); timm uses an estimate, 1.71396.
"""
_STD_EPS = 1e-5
_BOTTLENECK = 4


class ResNet(nn.Module):
    """Residual encoder from a config; ``init_resnet`` draws its weights."""

    def __init__(self, cfg: ResNetConfig) -> None:
        super().__init__()
        self.cfg = cfg
        large = cfg.stem == "7x7"
        self.stem = _conv(
            cfg,
            CHANNELS,
            cfg.stem_width,
            7 if large else 3,
            stride=2 if large else 1,
            after_relu=False,
        )
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if large else nn.Identity()
        stages = []
        channels = cfg.stem_width
        # of a block's input, without norms: each block adds alpha squared, a stage's first shortcut
        # resets it
        variance = 1.0
        for stage, (depth, width) in enumerate(zip(cfg.depths, cfg.widths, strict=True)):
            blocks = []
            for i in range(depth):
                blocks.append(
                    ResidualBlock(
                        cfg, channels, width, stride=2 if stage and i == 0 else 1, variance=variance
                    )
                )
                variance = (1.0 if i == 0 else variance) + _ALPHA**2
                channels = width
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.norm = _norm(cfg, channels)
        self.act = nn.ReLU()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the last map after norm and activation, (B, D, G, G)."""
        return self.act(self.norm(self.stages(self.pool(self.stem(x_BCHW)))))


class ResidualBlock(nn.Module):
    """One pre-activation block: basic or bottleneck."""

    def __init__(
        self, cfg: ResNetConfig, channels: int, width: int, *, stride: int, variance: float
    ) -> None:
        super().__init__()
        group = cfg.norm == "group"
        self.alpha = 1.0 if group else _ALPHA
        self.norm1 = _norm(cfg, channels, variance)
        self.act = nn.ReLU()
        inner = width // _BOTTLENECK if cfg.block == "bottleneck" else width
        # (kernel, stride) of the convolutions; the first 3 x 3 has the stride
        kernels = (
            [(1, 1), (3, stride), (1, 1)] if cfg.block == "bottleneck" else [(3, stride), (3, 1)]
        )
        layers: list[nn.Module] = []
        for i, (kernel, step) in enumerate(kernels):
            out = width if i == len(kernels) - 1 else inner
            if i:
                layers += [_norm(cfg, inner), nn.ReLU()]
            layers.append(_conv(cfg, channels if i == 0 else inner, out, kernel, stride=step))
        self.convs = nn.Sequential(*layers)
        self.shortcut: nn.Module | None = None
        if stride > 1 or channels != width:
            # without norms the map is averaged before the 1 x 1 convolution, as in Brock et al.;
            # with norms the convolution has a stride
            shrink = nn.AvgPool2d(2) if stride > 1 and not group else nn.Identity()
            self.shortcut = nn.Sequential(
                shrink, _conv(cfg, channels, width, 1, stride=stride if group else 1)
            )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the block's map, with its side divided by the stride."""
        h_BCHW = self.act(self.norm1(x_BCHW))
        shortcut_BCHW = x_BCHW if self.shortcut is None else self.shortcut(h_BCHW)
        return shortcut_BCHW + self.alpha * self.convs(h_BCHW)


class FixedScale(nn.Module):
    """Multiplication by 1 / sqrt(expected variance).

    It replaces a norm in a norm-free network.
    """

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def init_resnet(network: ResNet, generator: torch.Generator) -> None:
    """Draw weights from ``generator`` in the modules' order; biases are 0, norms 1 and 0, gains 1.

    Convolutions are normal with variance 2 / fan-in (He et al. 2015), or 1 / fan-in for
    standardised weights, whose scale does not change the function. Gains at the end of a branch
    also start at 1, as in De et al.; timm's NF-ResNets start them at 0.
    """
    for part in network.modules():
        if isinstance(part, nn.Conv2d):
            scale = 1.0 if network.cfg.weight_standardisation else 2.0
            nn.init.normal_(
                part.weight, std=math.sqrt(scale / part.weight[0].numel()), generator=generator
            )
            if part.bias is not None:
                nn.init.zeros_(part.bias)
            if isinstance(gain := getattr(part, "gain", None), nn.Parameter):
                nn.init.ones_(gain)
        elif isinstance(part, nn.GroupNorm):
            nn.init.ones_(part.weight)
            nn.init.zeros_(part.bias)


def _conv(
    cfg: ResNetConfig,
    inputs: int,
    outputs: int,
    kernel: int,
    *,
    stride: int,
    after_relu: bool = True,
) -> nn.Conv2d:
    """Make a convolution padded to keep the side (divided by the stride).

    It has a bias only if no norm follows.

    Args:
        after_relu: False for the stem, whose input is the image; timm uses the gain of a ReLU there
            too.
    """
    from timm.layers import ScaledStdConv2d, StdConv2d  # takes seconds, so only for such networks

    padding = kernel // 2
    if cfg.norm == "none":
        gamma = _RELU_GAIN if after_relu else 1.0
        return ScaledStdConv2d(
            inputs, outputs, kernel, stride=stride, padding=padding, gamma=gamma, eps=_STD_EPS
        )
    if cfg.weight_standardisation:
        return StdConv2d(inputs, outputs, kernel, stride=stride, padding=padding, eps=_STD_EPS)
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False)


def _norm(cfg: ResNetConfig, channels: int, variance: float = 1.0) -> nn.Module:
    return nn.GroupNorm(cfg.groups, channels) if cfg.norm == "group" else FixedScale(variance**-0.5)
