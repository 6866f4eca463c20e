"""Targets of a masked autoencoder: pixels, pixels normalised per patch, or histograms of oriented
gradients.

Each is a fixed function of the record's image, so the loss stays separable and private training is
unchanged.

Legend: B records, L patches, E values per patch, T values per target, C channels, H height, W
width, P patch side, S cell side.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from dpvision.models.layers import patchify

ORIENTATIONS = 9
CELLS = 2
"""Cells per side of a patch."""
_NORM_EPS = 1e-6


def target_size(kind: str, patch_size: int, channels: int = 3) -> int:
    """Return T, the number of values predicted per patch."""
    return channels * ORIENTATIONS * CELLS**2 if kind == "gradients" else channels * patch_size**2


def make_targets(x_BCHW: Tensor, patch_size: int, kind: str) -> Tensor:
    """Return the targets of all patches, (B, L, T), in raster order.

    Args:
        x_BCHW: normalised images.
        kind: "pixels" (ViP); "normalised_pixels" (MAE's better variant: each patch minus its mean,
            over its standard deviation); "gradients" (MaskFeat, Wei et al. 2022: histograms of
            gradient orientations).
    """
    if kind == "gradients":
        return _gradient_histograms(x_BCHW, patch_size)
    patch_BLE = patchify(x_BCHW, patch_size)
    if kind == "pixels":
        return patch_BLE
    mean, variance = patch_BLE.mean(dim=-1, keepdim=True), patch_BLE.var(dim=-1, keepdim=True)
    return (patch_BLE - mean) / (variance + _NORM_EPS).sqrt()


def to_pixels(prediction_BLT: Tensor, patch_BLE: Tensor, kind: str) -> Tensor:
    """Return pixels (B, L, E) of predicted targets, for display only. Normalised ones use the true
    patch's mean and variance.
    """
    if kind == "pixels":
        return prediction_BLT
    assert kind == "normalised_pixels", "gradients have no pixels"
    mean, variance = patch_BLE.mean(dim=-1, keepdim=True), patch_BLE.var(dim=-1, keepdim=True)
    return prediction_BLT * (variance + _NORM_EPS).sqrt() + mean


def _gradient_histograms(x_BCHW: Tensor, patch_size: int) -> Tensor:
    """Return gradient magnitudes by unsigned orientation in nine bins, of Euclidean norm 1, for
    each channel and each of 2 x 2 cells.

    Returns:
        (B, L, C x 4 x 9).
    """
    padded = F.pad(x_BCHW, (1, 1, 1, 1), mode="replicate")
    right = padded[:, :, 1:-1, 2:] - padded[:, :, 1:-1, :-2]
    down = padded[:, :, 2:, 1:-1] - padded[:, :, :-2, 1:-1]
    size_BCHW = (right * right + down * down).sqrt()
    bin_BCHW = (torch.atan2(down, right) * (ORIENTATIONS / math.pi)).floor().long() % ORIENTATIONS
    one_hot = torch.arange(ORIENTATIONS, device=x_BCHW.device)[:, None, None]
    # A plane per orientation, averaged over cells: this avoids scatter, which would need rules for
    # vmap and one-pass clipping.
    planes = torch.where(bin_BCHW[:, :, None] == one_hot, size_BCHW[:, :, None], 0.0).flatten(1, 2)
    cells = F.avg_pool2d(planes, patch_size // CELLS).unflatten(1, (-1, ORIENTATIONS))
    cells = cells / (cells.norm(dim=2, keepdim=True) + _NORM_EPS)
    return patchify(cells.flatten(1, 2), CELLS)
