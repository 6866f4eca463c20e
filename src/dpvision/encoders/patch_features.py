"""Features for small data: whitened patches, alone or with a scattering transform, with constants
learned from procedural textures.

    row = [patches / |patches|, 0.7 scattering / |scattering|] / sqrt(1.49),
    each block whitened (``whitening``)

They use no photographs and cost no privacy, so the head can spend all of epsilon. An image is used
at its own resolution: the largest of 32, 64, 128 and 224 px that is at most 1.25 times its shorter
side, up to a declared cap.

Legend: B images, C channels, H height, W width, P paths, Q cells, D feature dimension.
"""

import math
from functools import partial

import torch
from torch import Tensor
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
from dpvision.threads import map_pieces

SCATTERING_WEIGHT = 0.7
_CHUNK = 16


class PatchFeatures:
    """A function from images x_BCHW in [0, 1] to rows of length 1, float32 (B, D)."""

    def __init__(
        self,
        constants: dict[int, SizeConstants],
        *,
        scattering: bool,
        device: str | torch.device = "cpu",
    ) -> None:
        self.constants = {side: found.to(device) for side, found in constants.items()}
        sides = {min(side, SCATTERING_CAP) for side in constants} if scattering else set()
        self.transforms = {
            side: make_scattering(side, device=device, centred=True) for side in sides
        }

    def __call__(self, x_BCHW: Tensor) -> Tensor:
        """Return features of images of one of the sizes, or of smaller ones in the top left corner
        of a NaN canvas (``data.transform``).
        """
        side_B = x_BCHW.shape[-1] - blank_margin(x_BCHW)
        out: Tensor | None = None
        for side in sorted(set(side_B.tolist())):
            index_B = (side_B == side).nonzero()[:, 0]
            row_BD = self._rows(x_BCHW[index_B, :, :side, :side], self.constants[side])
            if out is None:
                out = row_BD.new_empty(len(x_BCHW), row_BD.shape[1])
            out[index_B] = row_BD
        assert out is not None
        return out

    def _rows(self, x_BCHW: Tensor, constants: SizeConstants) -> Tensor:
        # One thread per chunk: twice as fast as two threads per product, and the bits do not depend
        # on the number of threads.
        return torch.cat(
            map_pieces(
                partial(self._chunk, constants=constants), x_BCHW.split(_CHUNK), x_BCHW.device
            )
        )

    @torch.inference_mode()
    def _chunk(self, x_BCHW: Tensor, constants: SizeConstants) -> Tensor:
        # The rounding of a matrix product may depend on its number of rows, so every chunk is
        # padded to one size.
        padded = F.pad(x_BCHW, (0, 0, 0, 0, 0, 0, 0, _CHUNK - len(x_BCHW)))
        row_BD = constants.patches(constants.bank(padded))
        if self.transforms:
            transform = self.transforms[min(x_BCHW.shape[-1], SCATTERING_CAP)]
            other_BD = constants.scattering(scattering_channels(transform, padded))
            row_BD = torch.cat([row_BD, SCATTERING_WEIGHT * other_BD], dim=1) / math.hypot(
                1, SCATTERING_WEIGHT
            )
        return row_BD[: len(x_BCHW)]


def patch_features(
    *, scattering: bool, most_px: int = 128, device: str | torch.device = "cpu"
) -> PatchFeatures:
    """Return the features with the shipped constants, at resolutions up to ``most_px``, one of
    ``SIZES``.
    """
    return PatchFeatures(
        {side: load_constants(side) for side in SIZES if side <= most_px},
        scattering=scattering,
        device=device,
    )
