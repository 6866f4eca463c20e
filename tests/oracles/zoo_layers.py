"""The zoo's kinds of layers: linear, convolution, norms, parametrisations."""

import torch
import torch.nn.functional as F
from timm.layers import ScaledStdConv2d, StdConv2d
from torch import nn
from zoo import class_losses, patches


class Linears(nn.Module):
    """Linear layers on inputs of two, three and four dimensions; wide ones, whose gradients are
    larger than their factors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.four, self.three, self.two = nn.Linear(12, 40), nn.Linear(40, 30), nn.Linear(30, 5)

    def forward(self, x):
        x = torch.tanh(self.four(patches(x).unflatten(1, (4, 4))))
        return self.two(torch.tanh(self.three(x.flatten(1, 2))).mean(1))


def conv_net(conv: nn.Module, channels: int, *norms: nn.Module) -> nn.Module:
    """A convolution, norms, and a linear head on 2 x 2 means."""
    return nn.Sequential(
        conv, *norms, nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 5)
    )


class Conv1d(nn.Module):
    """Convolutions along the columns of the image laid end to end, strided and in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.grouped, self.head = (
            nn.Conv1d(3, 6, 5, stride=3, padding=2),
            nn.Conv1d(6, 6, 3, groups=2),
            nn.Linear(6, 5),
        )

    def forward(self, x):
        return self.head(torch.tanh(self.grouped(torch.tanh(self.body(x.flatten(2))))).mean(2))


class Conv3d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv3d(1, 4, (2, 3, 3), stride=(1, 2, 2)), nn.Linear(4, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x[:, None])).flatten(2).mean(2))


class Norms(nn.Module):
    """LayerNorm over one and two dimensions, with and without bias, one without parameters;
    RMSNorm.
    """

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.two = nn.LayerNorm(12), nn.LayerNorm((4, 12))
        self.scale_only, self.none, self.rms = (
            nn.LayerNorm(12, bias=False),
            nn.LayerNorm(12, elementwise_affine=False),
            nn.RMSNorm(12),
        )
        self.head = nn.Linear(12, 5)

    def forward(self, x):
        x = self.two(self.plain(patches(x)).unflatten(1, (4, 4)))
        return self.head(
            torch.tanh(self.rms(self.none(self.scale_only(x.sin()))).cumsum(1)).mean((1, 2))
        )


class FrozenStatistics(nn.Module):
    """BatchNorm in eval mode: a scale and a shift, by statistics that are fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.flat, self.head = (
            nn.Conv2d(3, 6, 3),
            nn.BatchNorm2d(6),
            nn.BatchNorm1d(6),
            nn.Linear(6, 5),
        )
        for norm in (self.norm, self.flat):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            norm.eval()

    def forward(self, x):
        return self.head(self.flat(torch.tanh(self.norm(self.conv(x))).mean((2, 3))))


class WeightNorm(nn.Module):
    """Weights computed from two parameters each, by torch's parametrisation."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.utils.parametrizations.weight_norm(nn.Linear(12, 20))
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(20, 5))

    def forward(self, x):
        return self.head(torch.tanh(self.body(patches(x))).mean(1))


class Halves(nn.Module):
    """One matrix whose rows are two layers' weights, and one whose halves overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.apart, self.over, self.head = (
            nn.Parameter(torch.randn(12, 12)),
            nn.Parameter(torch.randn(9, 6)),
            nn.Linear(6, 5),
        )

    def forward(self, x):
        x = torch.tanh(F.linear(patches(x), self.apart[:6])) + torch.sin(
            F.linear(patches(x), self.apart[6:])
        )
        return self.head(
            torch.tanh(F.linear(x, self.over[:6]) + F.linear(x, self.over[3:])).mean(1)
        )


LAYERS = {
    "linears": (Linears, class_losses),
    "conv_dilated": (
        lambda: conv_net(nn.Conv2d(3, 8, 3, stride=2, padding=2, dilation=2), 8),
        class_losses,
    ),
    "conv_rectangular": (
        lambda: conv_net(nn.Conv2d(3, 32, (3, 2), stride=(2, 3), padding=(0, 1), bias=False), 32),
        class_losses,
    ),
    "conv_gram": (lambda: conv_net(nn.Conv2d(3, 32, 3, stride=2), 32), class_losses),
    "conv_outer": (lambda: conv_net(nn.Conv2d(3, 32, 3, stride=2, padding=1), 32), class_losses),
    "conv_patches": (lambda: conv_net(nn.Conv2d(3, 16, 4, stride=4), 16), class_losses),
    "conv_grouped": (
        lambda: conv_net(
            nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1, groups=4)), 8
        ),
        class_losses,
    ),
    "conv_depthwise": (lambda: conv_net(nn.Conv2d(3, 6, 3, stride=2, groups=3), 6), class_losses),
    "conv_1x1": (
        lambda: conv_net(nn.Sequential(nn.Conv2d(3, 70, 1), nn.Tanh(), nn.Conv2d(70, 66, 1)), 66),
        class_losses,
    ),
    "conv_same": (
        lambda: conv_net(nn.Conv2d(3, 8, (3, 5), padding="same", dilation=(2, 1)), 8),
        class_losses,
    ),
    "conv_same_even": (lambda: conv_net(nn.Conv2d(3, 8, (2, 4), padding="same"), 8), class_losses),
    "conv_valid": (lambda: conv_net(nn.Conv2d(3, 8, 3, padding="valid"), 8), class_losses),
    "conv_reflected": (
        lambda: conv_net(nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), 8),
        class_losses,
    ),
    "conv_transposed": (lambda: conv_net(nn.ConvTranspose2d(3, 8, 2, stride=2), 8), class_losses),
    "conv1d": (Conv1d, class_losses),
    "conv3d": (Conv3d, class_losses),
    "group_norm": (
        lambda: conv_net(
            nn.Conv2d(3, 8, 3), 8, nn.GroupNorm(4, 8), nn.GroupNorm(1, 8, affine=False)
        ),
        class_losses,
    ),
    "norms": (Norms, class_losses),
    "frozen_statistics": (FrozenStatistics, class_losses),
    "weight_norm": (WeightNorm, class_losses),
    "standardised": (lambda: conv_net(StdConv2d(3, 8, 3, bias=True), 8), class_losses),
    "standardised_scaled": (lambda: conv_net(ScaledStdConv2d(3, 8, 3), 8), class_losses),
    "halves": (Halves, class_losses),
}
