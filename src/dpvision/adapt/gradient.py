"""Clipped gradients of a linear head in closed form.

The gradient of one record's loss with respect to the weight is the outer product of its residual
and its row,

    g_i = (p_i - y_i) x_i^T,    ||g_i|| = ||p_i - y_i|| ||x_i||,    p = softmax(W x + b) or
                                sigmoid(W x + b)

so the clipped sum over a block is one matrix product, sum_i f_i g_i = R^T diag(f) X.
``gradient_sum`` takes it on integers, exactly: the scaled residuals a_i = f_i scale_i (p_i - y_i)
are cut off, towards zero, to multiples of a public grid h, and

    sum_i f_i g_i = h sum_i k_i q_i^T,    |k_i| h <= |a_i|

so a record adds k_i q_i^T h, of norm at most f_i ||g_i|| <= C. The only later rounding is in the
float64 totals over blocks.

At zero weights p is the same for all records, and the sum needs no matrix product: p (sum_i f_i
x_i)^T - Y^T diag(f) X, where Y^T X are sums by class (``sum_at_zero``).

Legend: B records of a block, E row width (``FeatureStream.width``), K classes.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from dpvision.adapt.feature_stream import Block
from dpvision.adapt.integer_products import DIGITS, WholeWeight, largest, outer_products
from dpvision.adapt.integer_rows import IntegerBlock
from dpvision.adapt.release import Contributions
from dpvision.dp.clipped import ClippedSum
from dpvision.privacy.plan import DPPlan

Loss = Literal["softmax", "sigmoid"]
"""Cross-entropy over the classes, or the paper's sum over the classes of binary cross-entropies."""


def gradient_sum(
    blocks: Iterator[IntegerBlock], weight_KE: Tensor, bias_K: Tensor, loss: Loss, plan: DPPlan
) -> ClippedSum:
    """Return the clipped sum of the gradients with respect to the weight, named "weight": float64
    (K, E).

    Args:
        weight_KE: float32; public or released. Products use it rounded to 31 bits, relative to each
            class's largest weight.
        bias_K: fixed bias, float32.
    """
    total = Contributions(plan, {"weight": tuple(weight_KE.shape)})
    weight = WholeWeight(weight_KE)
    for block in blocks:
        residual_BK = probabilities(logits(block, weight, bias_K), loss)
        if block.label_B is None:
            assert block.target_BK is not None
            residual_BK -= block.target_BK
        else:
            residual_BK[torch.arange(len(block.label_B)), block.label_B] -= 1
        norm_B = torch.linalg.vector_norm(residual_BK, dim=1) * block.norm_B
        residual_BK *= total.factors(norm_B, block.row_B).double()[:, None]
        if not torch.isfinite(norm_B).all():  # the weights are not finite, and 0 x NaN is NaN
            residual_BK = residual_BK.masked_fill(~torch.isfinite(norm_B)[:, None], 0.0)
        total.add("weight", _outer(block, residual_BK, weight_KE.shape[1], plan.max_grad_norm))
    return total.sum()


def probabilities(logit_BK: Tensor, loss: Loss) -> Tensor:
    """Return the class probabilities that ``loss`` implies. A row's bits do not depend on its
    position in the batch.

    The last bits of torch's sigmoid differ at the end of a tensor; those of its exp do not.
    """
    return logit_BK.softmax(dim=-1) if loss == "softmax" else 1 / (1 + (-logit_BK).exp())


def logits(block: IntegerBlock, weight: WholeWeight, bias_K: Tensor) -> Tensor:
    """Return the scores of the block's records, float64 (B, K): of a record, the weight and the
    bias alone.
    """
    constant_K = block.constant * weight.value_KE[:, block.digit_BE[0].shape[1] :].sum(dim=1)
    return weight.times(block.digit_BE, block.scale_B).add_(bias_K.double() + constant_K)


def _outer(
    block: IntegerBlock, residual_BK: Tensor, width: int, max_grad_norm: float | None
) -> Tensor:
    """sum_i residual_i x_i^T of clipped residuals, float64 (K, E)."""
    scaled_BK = residual_BK * block.scale_B[:, None]
    if max_grad_norm is None:
        grid = max(float(scaled_BK.abs().max()) if scaled_BK.numel() else 0.0, 1e-300) / largest(
            DIGITS
        )
    else:
        # |a_i| <= C / ||q_i||, and the largest entry of a nonzero row q_i is largest(digits).
        grid = max_grad_norm / (largest(len(block.digit_BE)) * largest(DIGITS))
    most = largest(DIGITS)
    whole_BK = (scaled_BK / grid).trunc_().clamp_(-most, most).to(torch.int32)
    total_KE = residual_BK.new_zeros(residual_BK.shape[1], width)
    for e, digit_BE in enumerate(block.digit_BE):
        for part_KE in outer_products(whole_BK, digit_BE):
            total_KE[:, : digit_BE.shape[1]].add_(part_KE, alpha=grid * 256.0**e)
    total_KE[:, block.digit_BE[0].shape[1] :] = block.constant * residual_BK.sum(dim=0)[:, None]
    return total_KE


def sum_at_zero(
    blocks: Iterator[Block], width: int, bias_K: Tensor, loss: Loss, plan: DPPlan
) -> ClippedSum:
    """Return ``gradient_sum`` at zero weights, computed from float32 rows by class sums, without a
    matrix product.

    Args:
        width: E.
    """
    num_classes = len(bias_K)
    p_K = probabilities(bias_K.double(), loss)
    total = Contributions(plan, {"weight": (num_classes, width)})
    for block in blocks:
        # ||p - y||^2 = ||p||^2 + sum over the record's classes of 1 - 2 p
        if block.label_B is None:
            assert block.target_BK is not None
            own_B = block.target_BK.double() @ (1 - 2 * p_K)
        else:
            own_B = (1 - 2 * p_K)[block.label_B]
        residual_B = (p_K.square().sum() + own_B).clamp(min=0).sqrt()
        x_BE = block.x_BE * total.factors(residual_B * block.norm_B, block.row_B)[:, None]
        class_KE = block.class_sum(x_BE, num_classes)
        # With one label per record, the sum over classes is the sum over records.
        sum_E = (
            class_KE.sum(dim=0) if block.target_BK is None else x_BE.sum(dim=0, dtype=torch.float64)
        )
        total.add("weight", p_K[:, None] * sum_E - class_KE)
    return total.sum()
