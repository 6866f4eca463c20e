"""Features for small data: whitened patches, alone or with a scattering transform, with constants
learned from procedural textures.

    row = [patches / |patches|, 0.7 scattering / |scattering|] / sqrt(1.49),
    each block whitened (``whitening``)

With zooms a row is the mean of the rows of three versions of the image, scaled to length 1: as it
is, its middle 7/8 enlarged, and the image with a mirrored border shrunk to 8/9 of its side.

They use no photographs and cost no privacy, so the head can spend all of epsilon. An image is used
at its own resolution: the largest of 32, 64, 128 and 224 px that is at most 1.25 times its shorter
side, up to a declared cap.

Legend: B images, C channels, H height, W width, P paths, Q cells, D feature dimension.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpvision.data.transform import blank_margin
from dpvision.encoders.patch_constants import (
    SCATTERING_CAP,
    SIZES,
    SizeConstants,
    load_constants,
    scattering_channels,
)
from dpvision.encoders.scattering import make_scattering
from dpvision.threads import is_traced, map_pieces

SCATTERING_WEIGHT = 0.7
ZOOMS = (7 / 8, 9 / 8)
"""Side of the seen part of an image relative to its own (docs/log/2026-11-28-zooms.md)."""
_CHUNK = 16


class PatchFeatures(nn.Module):
    """A function from images x_BCHW in [0, 1] to rows of length 1, float32 (B, D).

    Args:
        constants: by side of the images, px.
        scattering: whether to add the scattering transform.
        zooms: whether to average over ``ZOOMS``, at three times the work.
    """

    def __init__(
        self, constants: dict[int, SizeConstants], *, scattering: bool, zooms: bool = False
    ) -> None:
        super().__init__()
        self.zooms = ZOOMS if zooms else ()
        self.constants = nn.ModuleDict({str(side): found for side, found in constants.items()})
        sides = {min(side, SCATTERING_CAP) for side in constants} if scattering else set()
        self.transforms = nn.ModuleDict(
            {str(side): make_scattering(side, centred=True) for side in sorted(sides)}
        )

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return features of images of one of the sizes, or of smaller ones in the top left corner
        of a NaN canvas (``data.transform``).
        """
        full = int(x_BCHW.shape[-1])
        side_B = full - blank_margin(x_BCHW)
        if is_traced():
            return self._at_every_size(x_BCHW, side_B)
        out: Tensor | None = None
        for side in sorted(set(side_B.tolist())):
            index_B = (side_B == side).nonzero()[:, 0]
            row_BD = self._rows(x_BCHW[index_B, :, :side, :side])
            if out is None:
                out = row_BD.new_empty(len(x_BCHW), row_BD.shape[1])
            out[index_B] = row_BD
        assert out is not None
        return out

    def _at_every_size(self, x_BCHW: Tensor, side_B: Tensor) -> Tensor:
        """Return the same features without a branch on the images: every image is computed at every
        size, and each keeps the row of its own.
        """
        sides = [side for side in map(int, self.constants) if side <= int(x_BCHW.shape[-1])]
        out = self._features(x_BCHW[..., : sides[0], : sides[0]])
        for side in sides[1:]:
            row_BD = self._features(x_BCHW[..., :side, :side])
            out = torch.where(side_B[:, None] == side, row_BD, out)
        return out

    def _rows(self, x_BCHW: Tensor) -> Tensor:
        # One thread per chunk: twice as fast as two threads per product, and the bits do not depend
        # on the number of threads.
        return torch.cat(map_pieces(self._chunk, x_BCHW.split(_CHUNK), x_BCHW.device))

    @torch.inference_mode()
    def _chunk(self, x_BCHW: Tensor) -> Tensor:
        # The rounding of a matrix product may depend on its number of rows, so every chunk is
        # padded to one size.
        padded = F.pad(x_BCHW, (0, 0, 0, 0, 0, 0, 0, _CHUNK - len(x_BCHW)))
        return self._features(padded)[: len(x_BCHW)]

    def _features(self, x_BCHW: Tensor) -> Tensor:
        row_BD = self._of_version(x_BCHW)
        for zoom in self.zooms:
            row_BD = row_BD + self._of_version(zoomed(x_BCHW, zoom))
        return F.normalize(row_BD, dim=1) if self.zooms else row_BD

    def _of_version(self, x_BCHW: Tensor) -> Tensor:
        side = int(x_BCHW.shape[-1])
        constants: Any = self.constants[str(side)]
        row_BD = constants.patches(constants.bank(x_BCHW))
        if not self.transforms:
            return row_BD
        transform: Any = self.transforms[str(min(side, SCATTERING_CAP))]
        other_BD = constants.scattering(scattering_channels(transform, x_BCHW))
        return torch.cat([row_BD, SCATTERING_WEIGHT * other_BD], dim=1) / math.hypot(
            1, SCATTERING_WEIGHT
        )


def zoomed(x_BCHW: Tensor, zoom: float) -> Tensor:
    """Return images of the same size that show the middle ``zoom`` of the side of each; where that
    is above 1, a mirrored border too.
    """
    side = int(x_BCHW.shape[-1])
    border = (2 * round(side * zoom / 2) - side) // 2
    if border < 0:
        x_BCHW = x_BCHW[..., -border:border, -border:border]
    else:
        x_BCHW = F.pad(x_BCHW, (border,) * 4, mode="reflect")
    return F.interpolate(
        x_BCHW, (side, side), mode="bicubic", align_corners=False, antialias=border > 0
    )


def patch_features(*, scattering: bool, most_px: int = 128, zooms: bool = False) -> PatchFeatures:
    """Return the features with the shipped constants, at resolutions up to ``most_px``, one of
    ``SIZES``.
    """
    constants = {side: load_constants(side) for side in SIZES if side <= most_px}
    return PatchFeatures(constants, scattering=scattering, zooms=zooms)
