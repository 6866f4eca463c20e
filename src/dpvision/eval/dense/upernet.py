"""UPerNet (Xiao et al. 2018) on a plain vision transformer, as in BEiT's and MAE's transfer to
ADE20K.

Maps after a third, a half, two thirds and all of the blocks (3, 5, 7, 11 of 12, counted from 0) are
rescaled to 1/4, 1/2, 1 and 2 times the patch (strides 4, 8, 16, 32 for a patch of 16) by
deconvolutions, identity and pooling; pyramid pooling on the last; a top-down path; fusion of all
four levels. In training an auxiliary head of one convolution uses the third map.

Legend: B records, C channels, D width, K classes, H height, W width (px); h, w of a map.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpvision.eval.dense.dense_vit import DenseViT
from dpvision.eval.dense.settings import NormKind

MakeNorm = Callable[[int], nn.Module]
POOLED = (1, 2, 3, 6)
"""Sides of pyramid pooling (Zhao et al. 2017)."""


def tapped_blocks(depth: int) -> tuple[int, int, int, int]:
    """Return the blocks, counted from 0, whose maps are used: the last of the first third, half,
    two thirds, and of all.

    >>> tapped_blocks(12), tapped_blocks(24)
    ((3, 5, 7, 11), (7, 11, 15, 23))
    """
    first, second, third = (max(0, round(depth * part) - 1) for part in (1 / 3, 1 / 2, 2 / 3))
    return first, second, third, depth - 1


def norm_maker(kind: NormKind) -> MakeNorm:
    """Return a maker of BatchNorm, or of GroupNorm with at most 32 groups of at least 16 channels
    (Wu and He 2018).

    A group of one channel would make a map of one position zero, which pyramid pooling has.
    """
    return (
        nn.BatchNorm2d
        if kind == "batch"
        else lambda channels: nn.GroupNorm(_num_groups(channels), channels)
    )


class Segmenter(nn.Module):
    """A backbone with UPerNet, from images to logits at four times the patches' resolution."""

    def __init__(
        self,
        backbone: DenseViT,
        num_classes: int,
        *,
        channels: int | None = None,
        auxiliary_channels: int = 256,
        dropout: float = 0.1,
        norm: NormKind = "batch",
    ) -> None:
        """
        Args:
            channels: channels of the head; if None, the backbone's width.
            dropout: probability that a channel is dropped before the last layer.
        """
        super().__init__()
        make_norm, width = norm_maker(norm), backbone.width
        self.backbone, self.blocks = backbone, tapped_blocks(backbone.depth)
        self.levels = nn.ModuleList(_levels(width, make_norm))
        self.head = UPerHead(width, channels or width, num_classes, dropout, make_norm)
        last = nn.Conv2d(auxiliary_channels, num_classes, 1)
        self.auxiliary = nn.Sequential(
            _conv(width, auxiliary_channels, 3, make_norm), nn.Dropout2d(dropout), last
        )
        for part in (self.levels, self.head, self.auxiliary):
            part.apply(_initialise)
        for classify in (self.head.classify, last):
            nn.init.normal_(classify.weight, std=0.01)

    def forward(self, x_BCHW: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return logits (B, K, 4h, 4w) for a grid of h x w patches, and in training the auxiliary
        head's, (B, K, h, w).
        """
        maps = self.backbone(x_BCHW, self.blocks)
        levels = [level(found) for level, found in zip(self.levels, maps, strict=True)]
        return self.head(levels), self.auxiliary(levels[2]) if self.training else None

    def logits(self, x_BCHW: Tensor) -> Tensor:
        """Return logits at the image's size, float32 (B, K, H, W)."""
        return _enlarged(self(x_BCHW)[0].float(), x_BCHW.shape[-2:])


class UPerHead(nn.Module):
    """Pyramid pooling, top-down path and fusion over four maps, the finest first."""

    def __init__(
        self, width: int, channels: int, num_classes: int, dropout: float, make_norm: MakeNorm
    ) -> None:
        super().__init__()
        self.pooled = nn.ModuleList(_conv(width, channels, 1, make_norm) for _ in POOLED)
        self.top = _conv(width + len(POOLED) * channels, channels, 3, make_norm)
        self.lateral = nn.ModuleList(_conv(width, channels, 1, make_norm) for _ in range(3))
        self.smooth = nn.ModuleList(_conv(channels, channels, 3, make_norm) for _ in range(3))
        self.fuse = _conv(4 * channels, channels, 3, make_norm)
        self.dropout = nn.Dropout2d(dropout)
        self.classify = nn.Conv2d(channels, num_classes, 1)

    def forward(self, levels: list[Tensor]) -> Tensor:
        """Return logits at the finest map's size."""
        last = levels[-1]
        pools = [
            _enlarged(conv(F.adaptive_avg_pool2d(last, side)), last.shape[-2:])
            for side, conv in zip(POOLED, self.pooled, strict=True)
        ]
        path = [lateral(level) for lateral, level in zip(self.lateral, levels[:-1], strict=True)]
        path.append(self.top(torch.cat([last, *pools], dim=1)))
        for i in (2, 1, 0):
            path[i] = path[i] + _enlarged(path[i + 1], path[i].shape[-2:])
        smooth = [conv(found) for conv, found in zip(self.smooth, path[:-1], strict=True)] + [
            path[-1]
        ]
        return self.classify(
            self.dropout(
                self.fuse(
                    torch.cat([_enlarged(found, path[0].shape[-2:]) for found in smooth], dim=1)
                )
            )
        )


def segmentation_loss(
    model: nn.Module, x_BCHW: Tensor, class_BHW: Tensor, auxiliary_weight: float, ignored: int
) -> Tensor:
    """Return the head's cross-entropy plus ``auxiliary_weight`` times the auxiliary head's, at the
    images' size.

    The mean is over all pixels, with zeros for ignored ones, so that an image's weight does not
    depend on the batch.
    """
    logits, auxiliary = model(x_BCHW)
    total = torch.zeros((), device=x_BCHW.device)
    for found, weight in ((logits, 1.0), (auxiliary, auxiliary_weight)):
        if found is not None and weight:
            enlarged = _enlarged(found.float(), class_BHW.shape[-2:])
            total = (
                total
                + weight
                * F.cross_entropy(enlarged, class_BHW, ignore_index=ignored, reduction="sum")
                / class_BHW.numel()
            )
    return total


def _levels(width: int, make_norm: MakeNorm) -> list[nn.Module]:
    """Return the layers that rescale maps of stride one patch to 1/4, 1/2, 1 and 2 patches."""
    finest = nn.Sequential(
        nn.ConvTranspose2d(width, width, 2, 2),
        make_norm(width),
        nn.GELU(),
        nn.ConvTranspose2d(width, width, 2, 2),
    )
    return [finest, nn.ConvTranspose2d(width, width, 2, 2), nn.Identity(), nn.MaxPool2d(2, 2)]


def _conv(in_channels: int, out_channels: int, side: int, make_norm: MakeNorm) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, side, padding=side // 2, bias=False),
        make_norm(out_channels),
        nn.ReLU(inplace=True),
    )


def _initialise(part: nn.Module) -> None:
    if isinstance(part, nn.Conv2d):
        nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
        if part.bias is not None:
            nn.init.zeros_(part.bias)


def _enlarged(x_BCHW: Tensor, size: tuple[int, ...] | torch.Size) -> Tensor:
    same = tuple(x_BCHW.shape[-2:]) == tuple(size)
    return (
        x_BCHW
        if same
        else F.interpolate(x_BCHW, size=tuple(size), mode="bilinear", align_corners=False)
    )


def _num_groups(channels: int) -> int:
    return next(n for n in range(min(32, max(1, channels // 16)), 0, -1) if channels % n == 0)
