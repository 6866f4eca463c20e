"""Matrix products accumulated in float32 or wider, whatever the precision of the operands.

Legend: N records of a chunk, T places, P rows, I, J, K dimensions of a product.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

GRAM_NUMBERS = {"cpu": 2**20, "cuda": 2**27}
"""Numbers in one chunk of Gram matrices: on a CPU, what stays in a core's cache; on a GPU, half a
gigabyte.
"""
OUTER_NUMBERS = {"cpu": 2**22, "cuda": 2**28}
"""Numbers in one chunk of scaled operands, or of written-out gradients."""
MOST_TERMS = 1024
"""Products that are added up at once; more are added up in blocks, so that the proven error is that
of a block.
"""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision in which operands of ``dtype`` are accumulated: float32, or float64 for
    float64.
    """
    return torch.promote_types(dtype, torch.float32)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Batched matrix product, (N, I, K) x (N, K, J) -> (N, I, J), in float32 or wider, at most 1024
    terms at once.
    """
    terms = a.shape[2]
    if terms > MOST_TERMS:
        total = product(a[:, :, :MOST_TERMS], b[:, :MOST_TERMS])
        for start in range(MOST_TERMS, terms, MOST_TERMS):
            total += product(a[:, :, start : start + MOST_TERMS], b[:, start : start + MOST_TERMS])
        return total
    if a.dtype == b.dtype and a.dtype in (torch.float16, torch.bfloat16) and a.is_cuda:
        return torch.bmm(a, b, out_dtype=torch.float32)
    dtype = wide(torch.promote_types(a.dtype, b.dtype))
    return torch.bmm(a.to(dtype), b.to(dtype))


def accumulated(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a b, two-dimensional, in place where there is a total; accumulated in float32 or
    wider.
    """
    if a.dtype == b.dtype and a.dtype in (torch.float16, torch.bfloat16) and a.is_cuda:
        part = torch.mm(a, b, out_dtype=torch.float32)
        return part if total is None else total.add_(part)
    dtype = wide(torch.promote_types(a.dtype, b.dtype))
    return a.to(dtype) @ b.to(dtype) if total is None else total.addmm_(a.to(dtype), b.to(dtype))


def scaled(value_NTP: Tensor, factor_N: Tensor) -> Tensor:
    """Rows times their record's factor: in float32 or wider, and on a GPU rounded once to the
    operand's half precision.

    With l rounded to l (1 + d), |d| <= u = ``rounding``, the sum of outer products moves by at most
    u x sum of |l_t| |r_t|: that is added to the norm before the factor is chosen, so that the
    rounded contribution is no longer than C.
    """
    wide_NTP = (
        value_NTP * factor_N[:, None, None]
    )  # factors are float32 or wider, so is the product
    return wide_NTP.to(value_NTP.dtype) if rounding(value_NTP.dtype, value_NTP.device) else wide_NTP


def rounding(dtype: torch.dtype, device: torch.device) -> float:
    """Largest relative error of ``scaled``: 2^-8 for bfloat16 and 2^-11 for float16 on a GPU, else
    0.
    """
    return (
        torch.finfo(dtype).eps / 2
        if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
        else 0.0
    )


def chunks(
    num_records: int, numbers: int, room: dict[str, int], device: torch.device
) -> Iterator[slice]:
    """Slices of records of which each holds about as many numbers as there is room for, of even
    sizes.
    """
    per_chunk = max(1, room.get(device.type, room["cuda"]) // max(1, numbers))
    count = max(1, -(-num_records // per_chunk))
    for i in range(count):
        yield slice(i * num_records // count, (i + 1) * num_records // count)
