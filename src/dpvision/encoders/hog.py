"""Histograms of oriented gradients (Dalal & Triggs 2005, "Histograms of oriented gradients for
human detection"), batched.

Their defaults: gradients by [-1, 0, 1] without smoothing, at each pixel from the colour channel
with the largest; nine orientations from 0 to 180 degrees; a pixel's vote, its gradient magnitude,
shared between the two nearest orientations and the four nearest cells; blocks of 2 x 2 cells that
overlap by one cell, each clipped and normalised by L2-Hys. The Gaussian window over a block is left
out.

Legend: B images, C channels, H height, W width, O orientations, G cells down, F cells across, D
feature dimension.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from dpvision.threads import is_traced

NUM_ORIENTATIONS = 9
_CUT = 0.2
# A gradient of one grey level of 255 at each pixel of a cell: weaker blocks fade to zero instead of
# being amplified.
_FADE = 1 / 255


def hog(x_BCHW: Tensor, cell_px: int, num_orientations: int = NUM_ORIENTATIONS) -> Tensor:
    """Return the normalised blocks of each image, row by row: float32 (B, (G - 1) (F - 1) 4 O) with
    G = H // cell_px, F = W // cell_px.

    A block is its four cells, row by row, with O orientations each. Its length is 1, or less if the
    image is flat to about a grey level. Pixels that do not fill a cell are cropped evenly at the
    borders.

    Args:
        x_BCHW: pixels from 0 to 1, any number of channels; at least 2 cells high and wide.
        cell_px: side of a cell, 2 or more.
    """
    cells_BOGF = cell_histograms(x_BCHW, cell_px, num_orientations)
    corners = (
        cells_BOGF[..., :-1, :-1],
        cells_BOGF[..., :-1, 1:],
        cells_BOGF[..., 1:, :-1],
        cells_BOGF[..., 1:, 1:],
    )
    block_BDGF = torch.cat(corners, dim=1)
    length_B1GF = block_BDGF.norm(dim=1, keepdim=True)
    block_BDGF = F.normalize(F.normalize(block_BDGF).clamp(max=_CUT))
    block_BDGF = (
        block_BDGF
        * length_B1GF
        / _hypot(length_B1GF, torch.full_like(length_B1GF, _FADE * cell_px**2))
    )
    return block_BDGF.permute(0, 2, 3, 1).flatten(1)


def cell_histograms(
    x_BCHW: Tensor, cell_px: int, num_orientations: int = NUM_ORIENTATIONS
) -> Tensor:
    """Return gradient magnitude by orientation around each cell's centre, before normalisation: (B,
    O, G, F).

    Orientation o is centred at (o + 1/2) 180 / O degrees, measured from the row's direction towards
    the columns' (downwards).
    """
    x_BCHW = _whole_cells(x_BCHW, cell_px).float()
    right_BCHW, down_BCHW = _gradient(x_BCHW)
    # Use the channel with the largest gradient.
    best_B1HW = (right_BCHW.square() + down_BCHW.square()).argmax(dim=1, keepdim=True)
    right_BHW, down_BHW = (
        right_BCHW.gather(1, best_B1HW)[:, 0],
        down_BCHW.gather(1, best_B1HW)[:, 0],
    )
    length_BHW = _hypot(right_BHW, down_BHW)
    place_BHW = (
        torch.atan2(down_BHW, right_BHW).remainder(math.pi) * (num_orientations / math.pi) - 0.5
    )
    below_BHW = place_BHW.floor()
    share_BHW = place_BHW - below_BHW
    vote_BOHW = torch.zeros(
        x_BCHW.shape[0], num_orientations, *x_BCHW.shape[2:], device=x_BCHW.device
    )
    for index_BHW, weight_BHW in ((below_BHW, 1 - share_BHW), (below_BHW + 1, share_BHW)):
        orientation_BHW = index_BHW.long().remainder(num_orientations)
        vote_BOHW.scatter_add_(1, orientation_BHW[:, None], (length_BHW * weight_BHW)[:, None])
    # A vote's weight falls linearly with the distance from a cell's centre to zero at the next one,
    # in rows and columns.
    taps = 2 * cell_px - cell_px % 2
    triangle = 1 - (torch.arange(taps, device=x_BCHW.device) - (taps - 1) / 2).abs() / cell_px
    kernel = triangle.outer(triangle)[None, None].expand(num_orientations, 1, taps, taps)
    return F.conv2d(
        vote_BOHW, kernel, stride=cell_px, padding=cell_px // 2, groups=num_orientations
    )


def _gradient(x_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Return central differences to the right and down; zero at the borders."""
    right, down = torch.zeros_like(x_BCHW), torch.zeros_like(x_BCHW)
    right[..., 1:-1] = x_BCHW[..., 2:] - x_BCHW[..., :-2]
    down[..., 1:-1, :] = x_BCHW[..., 2:, :] - x_BCHW[..., :-2, :]
    return right, down


def _hypot(x: Tensor, y: Tensor) -> Tensor:
    """Return sqrt(x^2 + y^2). ONNX has no hypot, whose last bits differ."""
    return (x.square() + y.square()).sqrt() if is_traced() else torch.hypot(x, y)


def _whole_cells(x_BCHW: Tensor, cell_px: int) -> Tensor:
    height, width = map(int, x_BCHW.shape[-2:])
    top, left = height % cell_px // 2, width % cell_px // 2
    return x_BCHW[
        ..., top : top + height // cell_px * cell_px, left : left + width // cell_px * cell_px
    ]
