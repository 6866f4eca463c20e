"""Whitened patches against a fixed bank of atoms (after Coates, Ng & Lee 2011, "An analysis of
single-layer networks in unsupervised feature learning"). The atoms are patches of procedural
textures, so the bank costs no privacy.

    p = (patch - its mean) / sqrt(its variance + 10 / 255^2),   q = W (p - m),
    W = (covariance of texture patches + I)^(-1/2)   (ZCA)
    z_k = atom_k . q,   f_k = mean over the positions of a cell of max(0, z_k - 1), and of max(0,
                        -z_k - 1)

The means over the cells of a 3 x 3 grid, their square root, and the average with the mirror image's
give 2 x 9 dimensions per atom. The mirror image needs no second pass over the patches: its
responses are those of the mirrored atoms, in the mirrored cells. An atom and its mirror image
respond with u + v and u - v, from the even and the odd part of a patch, each of half as many
pixels: one product gives both.

Legend: N or B images, C channels, H height, W width, P pixels of a patch (H: half of them), K
atoms, L positions of a patch, G cells per side, Q cells, S signs, M mirrored or not.
"""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpvision.threads import is_traced

VARIANCE_FLOOR = 10 / 255**2
THRESHOLD = 1.0
EIGENVALUE_FLOOR = 1.0
"""Added to the eigenvalues of the patches' covariance, in which a pixel has variance about 1."""
_PATCHES = 100_000
_SEED = 0


class PatchBank(nn.Module):
    """Filters of one image size.

    Args:
        weight_PK: float32, applied to contrast-normalised patches: W atom_k. P is 3 x ``patch_px``
            x ``patch_px``, an even side.
        bias_K: float32, - weight^T m.
        cells: G, cells per side.
    """

    weight_PK: Tensor
    bias_K: Tensor

    def __init__(
        self, weight_PK: Tensor, bias_K: Tensor, patch_px: int, stride: int, cells: int
    ) -> None:
        super().__init__()
        self.register_buffer("weight_PK", weight_PK)
        self.register_buffer("bias_K", bias_K)
        self.patch_px, self.stride, self.cells = patch_px, stride, cells

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return features, float32 (B, 2 K, G^2), with cells row by row.

        On the CPU images are processed one by one, so that the bits of their features do not depend
        on the batch.

        Args:
            x_BCHW: pixels from 0 to 1, square.
        """
        step = 1 if x_BCHW.device.type == "cpu" else 16
        even_HK, odd_HK = _halves(self.weight_PK, self.patch_px, dim=0)
        parts = (x_BCHW,) if is_traced() else x_BCHW.split(step)
        return torch.cat([self._features(part, even_HK / 2, odd_HK / 2) for part in parts])

    def _features(self, x_BCHW: Tensor, even_HK: Tensor, odd_HK: Tensor) -> Tensor:
        patch, stride, grid = self.patch_px, self.stride, self.cells
        # The same number of pixels is left out on both sides, so that the mirror image has the same
        # patches.
        full = int(x_BCHW.shape[-1])
        spare = (full - patch) % stride
        assert spare % 2 == 0, "this side and stride leave out an odd number of pixels"
        x_BCHW = x_BCHW[
            ...,
            spare // 2 : full - spare // 2,
            spare // 2 : full - spare // 2,
        ]
        side = (full - spare - patch) // stride + 1
        patch_BPL = F.unfold(x_BCHW, patch, stride=stride)
        patch_BPL = patch_BPL - patch_BPL.mean(dim=1, keepdim=True)
        patch_BPL = (
            patch_BPL * (patch_BPL.square().mean(dim=1, keepdim=True) + VARIANCE_FLOOR).rsqrt()
        )
        # Columns c and P - 1 - c of a patch: their sums meet the even part of a filter, their
        # differences the odd part.
        parts = [
            half.transpose(1, 2).unflatten(1, (side, side))
            for half in _halves(patch_BPL, patch, dim=1)
        ]
        edge = [round(i * side / grid) for i in range(grid + 1)]
        size = [stop - start for start, stop in pairwise(edge)]
        sum_BK: list[Tensor] = []  # by cell, then mirrored or not, then sign
        for row in zip(*(part.split(size, dim=1) for part in parts), strict=True):
            for cell in zip(*(part.split(size, dim=2) for part in row), strict=True):
                even_BLH, odd_BLH = (half.flatten(1, 2) for half in cell)
                u_BLK = torch.addmm(self.bias_K, even_BLH.flatten(0, 1), even_HK).unflatten(
                    0, even_BLH.shape[:2]
                )
                v_BLK = odd_BLH @ odd_HK
                for z_BLK in (u_BLK + v_BLK, u_BLK.sub_(v_BLK)):
                    # sum of max(0, z - 1) = sum of max(z, 1), minus one per position: half the
                    # passes over z
                    sum_BK.append(z_BLK.clamp(min=THRESHOLD).sum(dim=1))
                    sum_BK.append(z_BLK.clamp_(max=-THRESHOLD).sum(dim=1))
        sum_BHWMSK = torch.cat(sum_BK, dim=1).unflatten(1, (grid, grid, 2, 2, -1))
        count_HW11 = x_BCHW.new_tensor(size).outer(x_BCHW.new_tensor(size))[..., None, None]
        mean_BHWMSK = sum_BHWMSK / torch.stack([count_HW11, -count_HW11], dim=-2)
        root = (mean_BHWMSK - THRESHOLD).clamp_(min=0).sqrt_()
        f_BHWSK = (root[:, :, :, 0] + root[:, :, :, 1].flip(2)) / 2
        return f_BHWSK.flatten(3).flatten(1, 2).transpose(1, 2)


def learn_bank(
    texture_NCHW: Tensor, num_atoms: int, patch_px: int, stride: int, cells: int
) -> PatchBank:
    """Learn a bank from public images: ZCA of 100,000 random patches, with the first ``num_atoms``,
    whitened, as atoms of length 1.

    Args:
        texture_NCHW: uint8, on the CPU.
    """
    patch_MP = _contrast_normalised(_draw_patches(texture_NCHW, patch_px)).double()
    mean_P = patch_MP.mean(dim=0)
    value_P, basis_PP = torch.linalg.eigh(
        (patch_MP - mean_P).T @ (patch_MP - mean_P) / len(patch_MP)
    )
    whiten_PP = (basis_PP / (value_P.clamp(min=0) + EIGENVALUE_FLOOR).sqrt()) @ basis_PP.T
    atom_KP = (patch_MP[:num_atoms] - mean_P) @ whiten_PP
    atom_KP = atom_KP / torch.linalg.vector_norm(atom_KP, dim=1, keepdim=True)
    plain_PK = whiten_PP @ atom_KP.T
    return PatchBank(plain_PK.float(), (-mean_P @ plain_PK).float(), patch_px, stride, cells)


def _halves(value: Tensor, patch_px: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return sums and differences of mirrored pixels of patches along ``dim``, each with P / 2
    entries.
    """
    left, right = value.unflatten(dim, (-1, patch_px)).split(patch_px // 2, dim=dim + 1)
    right = right.flip(dim + 1)
    return (left + right).flatten(dim, dim + 1), (left - right).flatten(dim, dim + 1)


def _draw_patches(image_NCHW: Tensor, patch_px: int) -> Tensor:
    """Draw random patches of random images, float32 (M, P) in [0, 1], in the order of ``F.unfold``
    (channel by channel).
    """
    rng = np.random.Generator(np.random.PCG64(_SEED))
    count, _, height, width = image_NCHW.shape
    drawn = (
        rng.integers(0, n, _PATCHES) for n in (count, height - patch_px + 1, width - patch_px + 1)
    )
    image_M, top_M, left_M = (torch.from_numpy(place) for place in drawn)
    side = torch.arange(patch_px)
    rows, columns = (top_M[:, None] + side)[:, :, None], (left_M[:, None] + side)[:, None, :]
    return (
        image_NCHW[image_M[:, None, None], :, rows, columns].permute(0, 3, 1, 2).flatten(1).float()
        / 255
    )


def _contrast_normalised(patch_MP: Tensor) -> Tensor:
    patch_MP = patch_MP - patch_MP.mean(dim=1, keepdim=True)
    return patch_MP * (patch_MP.square().mean(dim=1, keepdim=True) + VARIANCE_FLOOR).rsqrt()
