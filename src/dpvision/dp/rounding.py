"""What rounding may add to one record's part of a sum, and the part of C that is kept free for it.

The computed sums of two data sets that differ in one record must differ by at most C, in the
numbers that are really added. So a gradient is clipped to less than C, and what rounding can add
has proven bounds that together stay below the difference (docs/clipping.md, "Sensitivity, rounding
included", has the proof):

    (1 - RESERVE) (1 + LOOSE) C     a contribution: its norm is known to LOOSE
    + 3 BUDGET C                    float32 matrix products, of which one record reaches one block
                                    of records only (``dp.buckets``)
    + ROUNDED C                     the pass's sum in float32
    <= C

The bounds are those of the standard model of IEEE arithmetic (Higham 2002, section 3.1): a sum of n
products is off by at most gamma_n = n u / (1 - n u) times the sum of their absolute values, in any
order, with or without fused multiply-add.
"""

import torch
from torch import Tensor

from dpvision.errors import PrivacyError

UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
"""Unit roundoff."""
RESERVE = 5e-3
"""Part of C kept free in a sum of float32 gradients."""
LOOSE = 5e-4
"""Largest proven relative error of a norm from Gram matrices that is not added to it before the
factor is chosen.
"""
BUDGET = 1.35e-3
"""Proven error, in units of C, of the product for one block of records; a block with more is split
(``dp.buckets.blocks``).
"""
ROUNDED = 4e-4
"""Part of C for rounding in a pass's sum in float32, more than 3 (``MOST_SUMMED`` + 3
``MOST_ROUNDED``) u: a pass can be halved in one data set and not in the other.
"""
MOST_ROUNDED = 256
"""Records of a pass whose sum is rounded to float32, three times at most; a larger pass gives its
sum in float64.
"""
MOST_SUMMED = 1200
"""Blocks (or pieces of them) times records of a pass up to which their sums, whose norms add up to
at most C for each record, are added in float32.
"""
MARGIN_EPS = 32
"""Part of C kept free, in epsilons of float32, where every gradient is written out, or is float64:
more than all that can make a contribution larger than computed (in float32 the norm: 16.5 eps; the
factor, and factor x gradient: half an eps each; in float64 the sum of 10,000 records).
"""
MARGIN = MARGIN_EPS * torch.finfo(torch.float32).eps
AUTOMATIC_GAMMA = 0.01
"""gamma of automatic clipping (Bu et al. 2023, AUTO-S): added to the norm of a record's gradient,
so in the units of that norm, whatever C is. Records whose gradient is much shorter than this are
scaled by about C / 0.01.
"""


def gamma(count: float, dtype: torch.dtype = torch.float32) -> float:
    """gamma_n = n u / (1 - n u): relative error of a sum of n products in ``dtype``, in any order;
    infinite from n u = 1 on.
    """
    part = count * UNIT[dtype]
    return part / (1 - part) if part < 1 else float("inf")


def reserve(dtype: torch.dtype) -> float:
    """Part of C kept free where gradients of ``dtype`` are summed by matrix products."""
    return RESERVE if dtype == torch.float32 else MARGIN


def sum_dtype(num_blocks: int, num_records: int, dtype: torch.dtype, *, exact: bool) -> torch.dtype:
    """Precision in which the sums of a pass's blocks, each of ``dtype``, are added.

    Args:
        exact: whether it is float64 in any case, since a record's part may be longer than C.
    """
    return dtype if num_blocks * num_records <= MOST_SUMMED and not exact else torch.float64


def proven_bound() -> float:
    """Bound on |computed sum(D) - computed sum(D')| / C for neighbouring data sets, float32
    gradients: at most 1.
    """
    return (1 - RESERVE) * (1 + LOOSE) * (1 + MARGIN) + 3 * BUDGET + ROUNDED


def added_bound() -> float:
    """The part of ``proven_bound`` that rounding adds: 3 BUDGET + ROUNDED, and the looseness of the
    norm.
    """
    return proven_bound() - (1 - RESERVE)


def clip_factors(
    norm_B: Tensor, finite_B: Tensor, *, max_grad_norm: float, rule: str, kept: float
) -> Tensor:
    """min(1, C (1 - kept) / norm), or C (1 - kept) / (norm + gamma); 0 where the gradient is not
    finite. float64 (B,).

    Args:
        norm_B: float64.
        rule: "hard" or "automatic".
        kept: part of C left free for rounding.
    """
    bound = max_grad_norm * (1 - kept)
    factor_B = (
        bound / (norm_B + AUTOMATIC_GAMMA)
        if rule == "automatic"
        else torch.where(norm_B > bound, bound / norm_B, 1.0)
    )
    return torch.where(finite_B, factor_B, 0.0)


_TOO_LONG = "a product rounded to fewer bits can exceed the clip norm"


def require_exact_products(where: str) -> None:
    """Refuse float32 matrix products in reduced precision: the bounds do not hold for them.

    Raises:
        PrivacyError: they are switched on.
    """
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:  # where ``torch.backends`` has set it otherwise; refused below
        precision = "highest"
    if precision != "highest":
        raise PrivacyError(
            f"{where}: float32_matmul_precision={precision!r}; expected 'highest': {_TOO_LONG}. "
            "Call torch.set_float32_matmul_precision('highest')."
        )
    for name in ("mkldnn.conv", "mkldnn.matmul", "mkldnn.rnn", "cuda.matmul"):
        backend, _, kind = name.partition(".")
        settings = getattr(getattr(torch.backends, backend), kind, None)
        precision = getattr(settings, "fp32_precision", "none")
        if precision not in ("none", "ieee"):
            raise PrivacyError(
                f"{where}: torch.backends.{name}.fp32_precision={precision!r}; expected 'ieee': "
                f"{_TOO_LONG}. Leave torch.backends.fp32_precision as it was."
            )
