"""Whitening of features, fitted once on procedural textures and applied to every image as a fixed
linear map.

    y = G R (f - mean) / std,   R (C + w I) R^T = I   (Cholesky)

``mean`` is the textures' mean of each dimension, ``std`` their standard deviation of each channel
over all cells, C the covariance of the channels over textures and cells. One matrix R serves all
cells; G works on the cells of each channel (``cell_frequencies``).

Legend: N textures, B images, C channels, Q cells.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

_BANDS = 4


class Whitening(nn.Module):
    """The linear map of public constants, float32.

    Args:
        mean_CQ: mean of each dimension.
        matrix_CC: R / std, lower triangular.
        cells_QQ: G, or None for the identity.
    """

    mean_CQ: Tensor
    matrix_CC: Tensor
    cells_QQ: Tensor | None

    def __init__(self, mean_CQ: Tensor, matrix_CC: Tensor, cells_QQ: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("mean_CQ", mean_CQ)
        self.register_buffer("matrix_CC", matrix_CC)
        self.register_buffer("cells_QQ", cells_QQ)

    def forward(self, f_BCQ: Tensor) -> Tensor:
        """Return rows of length 1, float32 (B, C x Q), cell by cell; a row of zeros is
        unchanged.
        """
        y_BQC = self._whitened((f_BCQ - self.mean_CQ).transpose(1, 2))
        if self.cells_QQ is not None:
            y_BQC = self.cells_QQ @ y_BQC
        y_BD = y_BQC.flatten(1)
        return y_BD / torch.linalg.vector_norm(y_BD, dim=1, keepdim=True).clamp(min=1e-12)

    def _whitened(self, x_BQC: Tensor) -> Tensor:
        """Return x matrix^T, computed in bands that skip most zeros above the diagonal, in 0.6 of
        the full product's time.
        """
        x_MC, count = x_BQC.flatten(0, 1), len(self.matrix_CC)
        edge = [round(i * count / _BANDS) for i in range(_BANDS + 1)]
        bands = [
            x_MC[:, :stop] @ self.matrix_CC[start:stop, :stop].T for start, stop in pairwise(edge)
        ]
        return torch.cat(bands, dim=1).unflatten(0, x_BQC.shape[:2])


def fit_whitening(
    f_NCQ: Tensor,
    floor: float,
    mirror_C: Tensor | None = None,
    cells_QQ: Tensor | None = None,
) -> Whitening:
    """Fit a whitening to public features.

    Args:
        f_NCQ: float32, features of textures.
        floor: w > 0, relative to channels of variance 1: weak directions are amplified by at most 1
            / sqrt(w).
        mirror_C: the channel that each one becomes in the mirror image, int64. If given, the
            constants are for the textures and their mirror images, whose remaining cells are not in
            f_NCQ.
        cells_QQ: G, as in ``Whitening``; it is not fitted.
    """
    mean_CQ = f_NCQ.double().mean(dim=0)
    total_CC = f_NCQ.new_zeros(f_NCQ.shape[1], f_NCQ.shape[1], dtype=torch.float64)
    for part_BCQ in f_NCQ.split(256):
        centred_MC = (part_BCQ - mean_CQ).transpose(1, 2).flatten(0, 1)
        total_CC += centred_MC.T @ centred_MC
    cov_CC = total_CC / (len(f_NCQ) * f_NCQ.shape[2])
    if mirror_C is not None:
        cov_CC = (cov_CC + cov_CC[mirror_C][:, mirror_C]) / 2
    std_C = cov_CC.diagonal().sqrt().clamp(min=1e-6)
    cov_CC = cov_CC / std_C[:, None] / std_C
    cov_CC.diagonal().add_(floor)
    root_CC = torch.linalg.cholesky(cov_CC)
    matrix_CC = torch.linalg.solve_triangular(
        root_CC, torch.eye(len(root_CC), dtype=torch.float64), upper=False
    )
    return Whitening(mean_CQ.float(), (matrix_CC / std_C).float().contiguous(), cells_QQ)


def cell_frequencies(rows: int, columns: int, energy: Sequence[float]) -> Tensor:
    """Return G, the cosine transform over a grid of cells with frequencies (u, v) scaled by the
    root of ``energy[u + v]``: float32 (Q, Q).

    A private head's noise is the same in every direction, so the head learns faster in directions
    of larger scale: the average over cells comes first.

    Args:
        energy: for u + v = 0, 1, ...; the last one applies to all higher ones.
    """
    order = torch.arange(rows)[:, None] + torch.arange(columns)
    scale = torch.tensor(energy, dtype=torch.float64)[order.clamp(max=len(energy) - 1)].sqrt()
    return (scale.flatten()[:, None] * torch.kron(_cosines(rows), _cosines(columns))).float()


def _cosines(count: int) -> Tensor:
    """Return the orthogonal cosine transform (DCT-II) of ``count`` values, float64."""
    place = (torch.arange(count, dtype=torch.float64) + 0.5) * math.pi / count
    wave = (torch.arange(count, dtype=torch.float64)[:, None] * place).cos() * math.sqrt(2 / count)
    wave[0] /= math.sqrt(2)
    return wave
