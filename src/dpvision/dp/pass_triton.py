"""The kernels of a private pass on a GPU: squared norms of sums of outer products without their
Gram matrices, gradients of layer norms record by record, and rows times their record's factor.

Each reads its operands once, where PyTorch's operations would write and read several tensors of the
same size. A record's numbers do not depend on how many others there are.

Legend: N, B records, T places, P, Q, D widths, K tiles of a record, I, J places of a tile.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 128
"""Most places of a tile; also more than the roundings of a number in its sum: a thread has 64 of a
tile's numbers, and the threads' sums are added up by a tree.
"""
_ONE_TILE = 64
"""Where a record has no more places than this, one smaller tile."""
_TERMS = 64
"""Products that are added up at once."""
_COLUMNS, _PLACES = 64, 32
"""A program's part of a layer norm: columns, and places at a time."""
_FLAT = 4096
"""Numbers that a program multiplies by the factor."""


@triton.jit
def _gram(side, row_I, row_J, places, width, stride_place, TERMS: tl.constexpr, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of a record's Gram matrix, float32 (I, J)."""
    column_K = tl.arange(0, TERMS)
    a_IK = side + row_I[:, None] * stride_place + column_K[None, :]
    b_KJ = side + row_J[None, :] * stride_place + column_K[:, None]
    inside_I1, inside_1J = (row_I < places)[:, None], (row_J < places)[None, :]
    gram_IJ = tl.zeros((SIDE, SIDE), tl.float32)
    for start in range(0, width, TERMS):
        in_K = start + column_K < width
        a = tl.load(a_IK + start, mask=inside_I1 & in_K[None, :], other=0.0)
        b = tl.load(b_KJ + start, mask=inside_1J & in_K[:, None], other=0.0)
        gram_IJ = tl.dot(a, b, gram_IJ)
    return gram_IJ


@triton.jit
def _keep_diagonal(gram_IJ, out_T, row_I, places, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    index = tl.arange(0, SIDE)
    own_IJ = index[:, None] == index[None, :]
    tl.store(out_T + row_I, tl.sum(tl.where(own_IJ, gram_IJ, 0.0), 1), mask=row_I < places)


@triton.jit
def _tile_sums(  # type: ignore[no-untyped-def]
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
    SIDE: tl.constexpr,
    TERMS: tl.constexpr,
):
    pair, record = tl.program_id(0), tl.program_id(1).to(tl.int64)
    PAIRS: tl.constexpr = TILES * (TILES + 1) // 2
    # Tile (i, j) of the upper triangle, i <= j, column by column.
    j = 0
    for first in range(1, TILES):
        j += (pair >= first * (first + 1) // 2).to(tl.int32)
    i = pair - j * (j + 1) // 2
    row_I, row_J = i * SIDE + tl.arange(0, SIDE), j * SIDE + tl.arange(0, SIDE)
    l_IJ = _gram(left + record * stride_l, row_I, row_J, places, width_l, place_l, TERMS, SIDE)
    r_IJ = _gram(right + record * stride_r, row_I, row_J, places, width_r, place_r, TERMS, SIDE)
    own = out + record * (3 * PAIRS + 2 * places)
    if i == j:
        _keep_diagonal(l_IJ, own + 3 * PAIRS, row_I, places, SIDE)
        _keep_diagonal(r_IJ, own + 3 * PAIRS + places, row_I, places, SIDE)
    times = tl.where(i == j, 1.0, 2.0)
    tl.store(own + pair, times * tl.sum(tl.sum(l_IJ * r_IJ, 1), 0))
    tl.store(own + PAIRS + pair, tl.sqrt(times * tl.sum(tl.sum(l_IJ * l_IJ, 1), 0)))
    tl.store(own + 2 * PAIRS + pair, tl.sqrt(times * tl.sum(tl.sum(r_IJ * r_IJ, 1), 0)))


def tile_sums(left_NTP: Tensor, right_NTQ: Tensor) -> tuple[Tensor, ...]:
    """For L and R, the Gram matrices of the rows on the left and on the right, float32: the sums of
    L o R over the tiles (N, K), the Frobenius norms of L's tiles and of R's (N, K), and the
    diagonals of L and of R (N, T). Both are symmetric: a tile above the diagonal stands for its
    mirror image too, and counts twice.

    Args:
        left_NTP, right_NTQ: both in bfloat16 or both in float16.
    """
    left_NTP, right_NTQ = _dense(left_NTP), _dense(right_NTQ)
    num, places, width_l = left_NTP.shape
    side = _ONE_TILE if places <= _ONE_TILE else TILE
    tiles = -(-places // side)
    pairs = tiles * (tiles + 1) // 2
    out = torch.empty(num, 3 * pairs + 2 * places, device=left_NTP.device)
    _tile_sums[(pairs, num)](
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
        SIDE=side,
        TERMS=_TERMS,
        num_warps=4 if side == _ONE_TILE else 8,
        num_stages=_stages(out.device),
    )
    return out.split([pairs, pairs, pairs, places, places], 1)


@triton.jit
def _layer_norm_sums(  # type: ignore[no-untyped-def]
    x,
    g,
    mean,
    rstd,
    weight,
    bias,
    places,
    width,
    stride_x,
    stride_g,
    place_x,
    place_g,
    COLUMNS: tl.constexpr,
    PLACES: tl.constexpr,
):
    record = tl.program_id(1).to(tl.int64)
    column_D = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside_D = column_D < width
    x += record * stride_x + column_D[None, :]
    g += record * stride_g + column_D[None, :]
    weight_D, bias_D = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, places, PLACES):
        row_T = start + tl.arange(0, PLACES)
        inside_T = row_T < places
        inside_TD = inside_T[:, None] & inside_D[None, :]
        x_TD = tl.load(x + row_T[:, None] * place_x, mask=inside_TD, other=0.0).to(tl.float32)
        g_TD = tl.load(g + row_T[:, None] * place_g, mask=inside_TD, other=0.0).to(tl.float32)
        mean_T = tl.load(mean + record * places + row_T, mask=inside_T, other=0.0)
        rstd_T = tl.load(rstd + record * places + row_T, mask=inside_T, other=0.0)
        weight_D += tl.sum((x_TD - mean_T[:, None]) * rstd_T[:, None] * g_TD, 0)
        bias_D += tl.sum(g_TD, 0)
    tl.store(weight + record * width + column_D, weight_D, mask=inside_D)
    tl.store(bias + record * width + column_D, bias_D, mask=inside_D)


def layer_norm_sums(
    x_BTD: Tensor, mean_BT1: Tensor, rstd_BT1: Tensor, g_BTD: Tensor
) -> tuple[Tensor, Tensor]:
    """The sums over places of g times the normalised input, and of g, float32 (B, D) each.

    Args:
        x_BTD, g_BTD: float32 or half precision.
        mean_BT1, rstd_BT1: float32.
    """
    x_BTD, g_BTD = _dense(x_BTD), _dense(g_BTD)
    num, places, width = x_BTD.shape
    weight_BD, bias_BD = torch.empty(2, num, width, device=x_BTD.device)
    _layer_norm_sums[(-(-width // _COLUMNS), num)](
        x_BTD,
        g_BTD,
        mean_BT1.contiguous(),
        rstd_BT1.contiguous(),
        weight_BD,
        bias_BD,
        places,
        width,
        x_BTD.stride(0),
        g_BTD.stride(0),
        x_BTD.stride(1),
        g_BTD.stride(1),
        COLUMNS=_COLUMNS,
        PLACES=_PLACES,
        num_warps=4,
    )
    return weight_BD, bias_BD


@triton.jit
def _scale(value, factor, out, numbers, stride, FLAT: tl.constexpr):  # type: ignore[no-untyped-def]
    record = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * FLAT + tl.arange(0, FLAT)
    inside = at < numbers
    scaled = tl.load(value + record * stride + at, mask=inside).to(tl.float32) * tl.load(
        factor + record
    )
    tl.store(out + record * numbers + at, scaled.to(out.dtype.element_ty), mask=inside)


def scaled_rows(value_NTP: Tensor, factor_N: Tensor) -> Tensor:
    """Rows in half precision times their record's factor (float32), rounded once."""
    if not value_NTP[0].is_contiguous():
        value_NTP = value_NTP.contiguous()
    num, numbers = len(value_NTP), value_NTP[0].numel()
    out = torch.empty(value_NTP.shape, dtype=value_NTP.dtype, device=value_NTP.device)
    _scale[(-(-numbers // _FLAT), num)](
        value_NTP, factor_N.contiguous(), out, numbers, value_NTP.stride(0), FLAT=_FLAT, num_warps=8
    )
    return out


@functools.lru_cache
def _stages(device: torch.device) -> int:
    """Loads in flight: as many as the shared memory holds, 32 KiB each."""
    if device.type != "cuda":  # Triton's interpreter
        return 1
    properties = torch.cuda.get_device_properties(device)
    return 4 if properties.shared_memory_per_block_optin >= 160 * 2**10 else 2


def _dense(rows_NTP: Tensor) -> Tensor:
    """Rows whose numbers lie side by side."""
    return rows_NTP if rows_NTP.stride(2) == 1 else rows_NTP.contiguous()
