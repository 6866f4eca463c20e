"""Clipped gradients of a linear head in closed form.

The gradient of one record's loss with respect to the weight is the outer product of its residual and its row,

    g_i = (p_i - y_i) x_i^T,    ||g_i|| = ||p_i - y_i|| ||x_i||,    p = softmax(W x + b) or sigmoid(W x + b)

so the clipped sum over a block is one matrix product, sum_i f_i g_i = R^T diag(f) X. At a head of zeros p is the same for all records
and known, and the sum needs no product at all: p (sum_i f_i x_i)^T - Y^T diag(f) X, where Y^T X are sums by class.

Legend: B records of a block, E numbers of a row (``stream``), K classes.
"""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from dpvision.adapt.release import Contributions
from dpvision.adapt.stream import Block
from dpvision.dp.clip import ClippedSum
from dpvision.privacy.plan import DPPlan

Loss = Literal["softmax", "sigmoid"]
"""Cross-entropy over the classes, or the sum over the classes of binary cross-entropies, as the paper has it."""


def head_sum(blocks: Iterator[Block], weight_KE: Tensor, bias_K: Tensor, loss: Loss, plan: DPPlan) -> ClippedSum:
    """Clipped sum of the gradients with respect to the weight, under the name "weight": float64 (K, E).

    Args:
        weight_KE: float32; public or released.
        bias_K: fixed bias, float32.
    """
    if weight_KE.any():
        return _dense(blocks, weight_KE, bias_K, loss, plan)
    return _at_zero(blocks, weight_KE.shape[1], bias_K, loss, plan)


def probabilities(logit_BK: Tensor, loss: Loss) -> Tensor:
    """What the loss takes for the probability of each class."""
    return logit_BK.softmax(dim=-1) if loss == "softmax" else logit_BK.sigmoid()


def _dense(blocks: Iterator[Block], weight_KE: Tensor, bias_K: Tensor, loss: Loss, plan: DPPlan) -> ClippedSum:
    total = Contributions(plan, {"weight": tuple(weight_KE.shape)})
    for block in blocks:
        residual_BK = probabilities(torch.addmm(bias_K, block.x_BE, weight_KE.T), loss)
        if block.label_B is None:
            assert block.target_BK is not None
            residual_BK -= block.target_BK
        else:
            residual_BK[torch.arange(len(block.label_B)), block.label_B] -= 1
        norm_B = torch.linalg.vector_norm(residual_BK, dim=1, dtype=torch.float64) * block.norm_B
        factor_B = total.factors(norm_B)
        if not torch.isfinite(norm_B).all():  # logits of a huge row overflow; 0 x NaN is NaN
            residual_BK = residual_BK.masked_fill(~torch.isfinite(norm_B)[:, None], 0.0)
        total.add("weight", residual_BK.mul_(factor_B[:, None]).double().T @ block.x_BE.double())
    return total.sum()


def _at_zero(blocks: Iterator[Block], width: int, bias_K: Tensor, loss: Loss, plan: DPPlan) -> ClippedSum:
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
        x_BE = block.x_BE * total.factors(residual_B * block.norm_B)[:, None]
        class_KE = block.class_sum(x_BE, num_classes)
        # With one label each, the sum over the classes is that over the records.
        sum_E = class_KE.sum(dim=0) if block.target_BK is None else x_BE.sum(dim=0, dtype=torch.float64)
        total.add("weight", p_K[:, None] * sum_E - class_KE)
    return total.sum()
