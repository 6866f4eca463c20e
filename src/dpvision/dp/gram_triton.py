"""Squared norms of sums of outer products on a GPU, in half precision, without the Gram matrices.

A program computes one tile of the left and of the right Gram matrix of one record, and leaves what
the norm and its bound need of them: three numbers, and the diagonal. Both matrices are symmetric,
so tiles above the diagonal are computed only, and count twice. A record's numbers do not depend on
how many others there are.

Legend: N records, T places, P, Q widths, K tiles of a record, I, J places of a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64
"""Places of a tile; also more than the roundings of a number in its sum, by a tree over threads."""
_TERMS = 64
"""Products that are added up at once."""


@triton.jit
def _gram(side, row_I, row_J, places, width, stride_place, TERMS: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of a record's Gram matrix, float32 (I, J)."""
    column_K = tl.arange(0, TERMS)
    a_IK = side + row_I[:, None] * stride_place + column_K[None, :]
    b_KJ = side + row_J[None, :] * stride_place + column_K[:, None]
    inside_I1, inside_1J = (row_I < places)[:, None], (row_J < places)[None, :]
    gram_IJ = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, width, TERMS):
        in_K = start + column_K < width
        a = tl.load(a_IK + start, mask=inside_I1 & in_K[None, :], other=0.0)
        b = tl.load(b_KJ + start, mask=inside_1J & in_K[:, None], other=0.0)
        gram_IJ = tl.dot(a, b, gram_IJ)
    return gram_IJ


@triton.jit
def _keep_diagonal(gram_IJ, out_T, row_I, places, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.arange(0, TILE)
    own_IJ = index[:, None] == index[None, :]
    tl.store(out_T + row_I, tl.sum(tl.where(own_IJ, gram_IJ, 0.0), 1), mask=row_I < places)


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
    left,
    right,
    out,
    places,
    width_l,
    width_r,
    stride_l,
    stride_r,
    place_l,
    place_r,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    TERMS: tl.constexpr,
):
    pair, record = tl.program_id(0), tl.program_id(1).to(tl.int64)
    PAIRS: tl.constexpr = TILES * (TILES + 1) // 2
    j = 0
    for first in range(1, TILES):
        j += (pair >= first * (first + 1) // 2).to(tl.int32)
    i = pair - j * (j + 1) // 2
    row_I, row_J = i * TILE + tl.arange(0, TILE), j * TILE + tl.arange(0, TILE)
    l_IJ = _gram(left + record * stride_l, row_I, row_J, places, width_l, place_l, TERMS, TILE)
    r_IJ = _gram(right + record * stride_r, row_I, row_J, places, width_r, place_r, TERMS, TILE)
    own = out + record * (3 * PAIRS + 2 * places)
    if i == j:
        _keep_diagonal(l_IJ, own + 3 * PAIRS, row_I, places, TILE)
        _keep_diagonal(r_IJ, own + 3 * PAIRS + places, row_I, places, TILE)
    times = tl.where(i == j, 1.0, 2.0)
    tl.store(own + pair, times * tl.sum(tl.sum(l_IJ * r_IJ, 1), 0))
    tl.store(own + PAIRS + pair, tl.sqrt(times * tl.sum(tl.sum(l_IJ * l_IJ, 1), 0)))
    tl.store(own + 2 * PAIRS + pair, tl.sqrt(times * tl.sum(tl.sum(r_IJ * r_IJ, 1), 0)))


def tile_sums(left_NTP: Tensor, right_NTQ: Tensor) -> tuple[Tensor, ...]:
    """For L and R, the Gram matrices of the rows on the left and on the right, float32: the sums of
    L o R over the tiles (N, K), the Frobenius norms of L's tiles and of R's (N, K), and the
    diagonals of L and of R (N, T). A tile that stands for its mirror image too counts twice.
    """
    left_NTP, right_NTQ = (
        side if side.stride(2) == 1 else side.contiguous() for side in (left_NTP, right_NTQ)
    )
    num, places, width_l = left_NTP.shape
    tiles = triton.cdiv(places, TILE)
    pairs = tiles * (tiles + 1) // 2
    out = torch.empty(num, 3 * pairs + 2 * places, device=left_NTP.device)
    _sums[(pairs, num)](
        left_NTP,
        right_NTQ,
        out,
        places,
        width_l,
        right_NTQ.shape[2],
        left_NTP.stride(0),
        right_NTQ.stride(0),
        left_NTP.stride(1),
        right_NTQ.stride(1),
        TILES=tiles,
        TILE=TILE,
        TERMS=_TERMS,
        num_warps=4,
        num_stages=3,
    )
    return out.split([pairs, pairs, pairs, places, places], 1)
