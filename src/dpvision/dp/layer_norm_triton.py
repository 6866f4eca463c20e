"""Gradients of a layer norm's weight and bias for every record on a GPU, reading its input and its
gradient once.

Legend: B records, T places, D width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS, _PLACES = 128, 16


@triton.jit
def _sums(  # type: ignore[no-untyped-def]
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
    weight_D, bias_D = tl.zeros((COLUMNS,), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, places, PLACES):
        row_T = start + tl.arange(0, PLACES)
        inside_T = row_T < places
        inside_TD = inside_T[:, None] & inside_D[None, :]
        x_TD = tl.load(
            x + record * stride_x + row_T[:, None] * place_x + column_D[None, :],
            mask=inside_TD,
            other=0.0,
        )
        g_TD = tl.load(
            g + record * stride_g + row_T[:, None] * place_g + column_D[None, :],
            mask=inside_TD,
            other=0.0,
        ).to(tl.float32)
        m_T = tl.load(mean + record * places + row_T, mask=inside_T, other=0.0)
        r_T = tl.load(rstd + record * places + row_T, mask=inside_T, other=0.0)
        normal_TD = (x_TD.to(tl.float32) - m_T[:, None]) * r_T[:, None]
        weight_D += tl.sum(normal_TD * g_TD, 0)
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
    x_BTD, g_BTD = (rows if rows.stride(2) == 1 else rows.contiguous() for rows in (x_BTD, g_BTD))
    num, places, width = x_BTD.shape
    weight_BD, bias_BD = torch.empty(2, num, width, device=x_BTD.device)
    _sums[(triton.cdiv(width, _COLUMNS), num)](
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
