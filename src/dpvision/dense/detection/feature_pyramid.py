"""The simple feature pyramid of a plain transformer (ViTDet, Li et al. 2022, section 3 and appendix
A.2): four scales of the last map.

    patch / 4   deconvolution 2 x 2, LayerNorm, GELU, deconvolution 2 x 2
    patch / 2   deconvolution 2 x 2
    patch       the map itself
    2 patch     2 x 2 max pooling

Each is projected to C channels by a 1 x 1 and a 3 x 3 convolution, each followed by a LayerNorm
over the channels. A fifth scale, for proposals only, subsamples the fourth by two. There is no
top-down path and no lateral connection.

Legend: B images, C channels, D width of the transformer, H height, W width (px).
"""

from collections import OrderedDict

from timm.layers import LayerNorm2d
from torch import Tensor, nn
from torch.nn import functional as F

from dpvision.dense.dense_vit import DenseViT

LEVELS = ("0", "1", "2", "3")
"""Names of the scales for regions, finest first; "pool" is the fifth."""


class FeaturePyramid(nn.Module):
    """A transformer with its pyramid, as a backbone for torchvision's detectors."""

    def __init__(self, vit: DenseViT, channels: int = 256) -> None:
        super().__init__()
        self.vit, self.out_channels = vit, channels
        width = vit.width
        finer: list[nn.Module] = [
            nn.ConvTranspose2d(width, width // 2, 2, 2),
            LayerNorm2d(width // 2),
            nn.GELU(),
        ]
        scales: list[tuple[list[nn.Module], int]] = [
            ([*finer, nn.ConvTranspose2d(width // 2, width // 4, 2, 2)], width // 4),
            ([nn.ConvTranspose2d(width, width // 2, 2, 2)], width // 2),
            ([], width),
            ([nn.MaxPool2d(2, 2)], width),
        ]
        self.scales = nn.ModuleList(
            nn.Sequential(
                *first,
                nn.Conv2d(have, channels, 1, bias=False),
                LayerNorm2d(channels),
                nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                LayerNorm2d(channels),
            )
            for first, have in scales
        )

    @property
    def strides(self) -> tuple[float, ...]:
        """Strides of the five scales, in pixels."""
        patch = self.vit.patch_size
        return (patch / 4, patch / 2, patch, 2 * patch, 4 * patch)

    def forward(self, x_BCHW: Tensor) -> "OrderedDict[str, Tensor]":
        """Return maps by name, finest first, float32 (B, C, H / stride, W / stride); H and W must
        be multiples of twice the patch.
        """
        (last,) = self.vit(x_BCHW, (self.vit.depth - 1,))
        # Anchors take their dtype from the maps: in bfloat16 a box near 1,000 px would be off by 4
        # px.
        maps = OrderedDict(
            (name, scale(last).float()) for name, scale in zip(LEVELS, self.scales, strict=True)
        )
        maps["pool"] = F.max_pool2d(maps[LEVELS[-1]], 1, 2)
        return maps
