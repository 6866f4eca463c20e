"""The vocabulary head: linear map and cross-entropy, fused and computed in chunks.

No B x L x V tensor is stored, unless ``head_forward`` is asked for one.

    loss_il = logsumexp(W h_il + b) - (W h_il + b)[target_il]

The gradient for the hidden states is computed in the forward pass, from a chunk's logits; the
gradient for the weight recomputes them. That takes four products instead of three, and the memory
of a chunk instead of the batch's.

Legend: B records, N records of a chunk, L tokens, D width, V vocabulary.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from dpvision.devices import adds_by_place
from dpvision.precision import lowered_dtype

IGNORED = -100
"""Target of a token without a loss, as in torch."""
_CHUNK_NUMBERS = {"cpu": 2**22, "cuda": 2**28}
_ALIGNED = 8
"""Logits of a token begin at multiples of this off the CPU."""


def linear_cross_entropy(
    hidden_BLD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_BL: Tensor
) -> Tensor:
    """Return the cross-entropy of every token's next-token distribution.

    ``F.cross_entropy(F.linear(h, W, b))`` without storing logits.

    Args:
        hidden_BLD: final hidden states.
        weight_VD, bias_V: the head, possibly a tied embedding.
        target_BL: int64 token ids, or -100 for tokens without a loss (loss and gradient exactly
            zero).

    Returns:
        loss_BL, float32 (float64 for float64 states); logits are computed in autocast's precision,
        their log-sum-exp in float32.
    """
    operands = (hidden_BLD, weight_VD, bias_V, target_BL)
    if has_torch_function(operands):
        return handle_torch_function(linear_cross_entropy, operands, *operands)
    if (
        torch._C._functorch.peek_interpreter_stack() is not None
    ):  # under vmap, with one record, there is nothing to chunk
        logit_BVL = F.linear(hidden_BLD, weight_VD, bias_V).mT
        dtype = torch.promote_types(logit_BVL.dtype, torch.float32)
        return F.cross_entropy(
            logit_BVL.to(dtype), target_BL, reduction="none", ignore_index=IGNORED
        )
    return _Head.apply(hidden_BLD, weight_VD, bias_V, target_BL)


def aligned_head(weight_VD: Tensor, bias_V: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the head as ``head_forward`` and ``logit_gradients`` take it: on a GPU with words of
    probability zero, so that all rows of logits begin alike in memory.

    Else a softmax would add in an order that depends on a token's place in the batch, and products
    with 30,522 words would take kernels for unaligned rows.
    """
    rest = -len(weight_VD) % _ALIGNED
    if not rest or not adds_by_place(weight_VD.device):
        return weight_VD, bias_V
    bias_V = weight_VD.new_zeros(len(weight_VD)) if bias_V is None else bias_V
    return F.pad(weight_VD, (0, 0, 0, rest)), F.pad(bias_V, (0, rest), value=-math.inf)


def head_forward(
    hidden_BLD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None,
    target_BL: Tensor,
    product: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    """Compute loss and gradients in one pass over chunks of records, for autograd functions.

    Args:
        weight_VD, bias_V: of ``aligned_head``.
        product: batched matrix product, if gradients of the logits are wanted.

    Returns:
        (loss_BL; d loss / d hidden, (B, L, D); with ``product``, d loss / d logits, (B, L, V), and
        their inner products within each record, (B, L, L), else None).
    """
    wide = torch.promote_types(hidden_BLD.dtype, torch.float32)
    num, length, _ = hidden_BLD.shape
    loss_BL = torch.empty(num, length, dtype=wide, device=hidden_BLD.device)
    grad_BLD = torch.empty_like(hidden_BLD)
    kept: tuple[Tensor, Tensor] | None = None
    if product is not None:
        kept = (
            grad_BLD.new_empty(num, length, len(weight_VD)),
            loss_BL.new_empty(num, length, length),
        )
    for rows in _chunks(hidden_BLD, weight_VD):
        log_probability_NLV = _logits(hidden_BLD[rows], weight_VD, bias_V).log_softmax(2)
        at_target_NL = log_probability_NLV.gather(2, target_BL[rows].clamp(min=0)[..., None])[
            ..., 0
        ]
        loss_BL[rows] = -at_target_NL.where(target_BL[rows] != IGNORED, 0.0)
        delta_NLV = _minus_target(log_probability_NLV.exp_(), target_BL[rows]).to(hidden_BLD.dtype)
        grad_BLD[rows] = delta_NLV @ weight_VD
        if product is not None and kept is not None:
            kept[0][rows], kept[1][rows] = delta_NLV, product(delta_NLV, delta_NLV.mT)
    return loss_BL, grad_BLD, kept


def logit_gradients(
    hidden_NLD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_NL: Tensor
) -> Tensor:
    """Recompute d loss / d logits of some records: softmax - one-hot, (N, L, V), for the words of
    ``aligned_head``.

    In the states' precision.
    """
    return _minus_target(_logits(hidden_NLD, weight_VD, bias_V).softmax(2), target_NL).to(
        hidden_NLD.dtype
    )


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_BLD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_BL: Tensor
    ) -> Tensor:
        dtype = lowered_dtype(hidden_BLD)
        hidden, weight = hidden_BLD.to(dtype), weight_VD.to(dtype)
        bias = None if bias_V is None else bias_V.to(dtype)
        weight, bias = aligned_head(weight, bias)
        loss_BL, grad_BLD, _ = head_forward(hidden, weight, bias, target_BL)
        ctx.save_for_backward(hidden, weight, bias, target_BL, grad_BLD)
        ctx.dtypes = hidden_BLD.dtype, weight_VD.dtype
        ctx.num_words, ctx.with_bias = len(weight_VD), bias_V is not None
        return loss_BL

    @staticmethod
    def backward(ctx: Any, g_BL: Tensor) -> tuple[Any, ...]:
        hidden_BLD, weight_VD, bias_V, target_BL, grad_BLD = ctx.saved_tensors
        weight_grad = torch.zeros(weight_VD.shape, dtype=g_BL.dtype, device=g_BL.device)
        bias_grad = weight_grad.new_zeros(len(weight_VD)) if ctx.with_bias else None
        for rows in _chunks(hidden_BLD, weight_VD):
            delta_NLV = logit_gradients(hidden_BLD[rows], weight_VD, bias_V, target_BL[rows])
            scaled_NLD = (hidden_BLD[rows] * g_BL[rows][..., None]).to(delta_NLV.dtype)
            weight_grad += delta_NLV.flatten(0, 1).mT @ scaled_NLD.flatten(0, 1)
            if bias_grad is not None:
                bias_grad += g_BL[rows].flatten() @ delta_NLV.flatten(0, 1).to(g_BL.dtype)
        hidden_dtype, weight_dtype = ctx.dtypes
        own = slice(ctx.num_words)
        bias_grad = None if bias_grad is None else bias_grad[own].to(weight_dtype)
        return (
            (grad_BLD * g_BL[..., None]).to(hidden_dtype),
            weight_grad[own].to(weight_dtype),
            bias_grad,
            None,
        )


def _chunks(hidden_BLD: Tensor, weight_VD: Tensor) -> Iterator[slice]:
    num, length, _ = hidden_BLD.shape
    room = _CHUNK_NUMBERS["cpu" if hidden_BLD.device.type == "cpu" else "cuda"]
    step = max(1, room // (length * len(weight_VD)))
    return (slice(i, min(i + step, num)) for i in range(0, num, step))


def _logits(hidden_NLD: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """Return the logits in float32 or wider, as a new tensor."""
    known = torch.amp.is_autocast_available(hidden_NLD.device.type)  # not for the meta device
    with (
        torch.autocast(hidden_NLD.device.type, enabled=False) if known else contextlib.nullcontext()
    ):
        logit_NLV = F.linear(hidden_NLD, weight_VD, bias_V)
    return logit_NLV.to(torch.promote_types(logit_NLV.dtype, torch.float32))


def _minus_target(probability_NLV: Tensor, target_NL: Tensor) -> Tensor:
    """Compute softmax - one-hot in place; zero for tokens without a loss."""
    index_NL1 = target_NL.clamp(min=0)[..., None]
    probability_NLV.scatter_add_(
        2, index_NL1, torch.full_like(index_NL1, -1, dtype=probability_NLV.dtype)
    )
    ignored_NL = target_NL == IGNORED
    if target_NL.device.type == "cpu" and not ignored_NL.any():
        return (
            probability_NLV  # saves a pass on a CPU; elsewhere the host would wait for the answer
        )
    return probability_NLV.masked_fill_(ignored_NL[..., None], 0.0)
