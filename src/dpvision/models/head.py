"""The vocabulary head: linear map and cross-entropy, fused and computed in chunks.

    loss_il = logsumexp(W h_il + b) - (W h_il + b)[target_il]

The gradients for the logits and the hidden states are computed in the forward pass, from a chunk's
logits. Those for the logits are kept if the head is trained: the only B x L x V tensor, in the
states' precision.

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
    trained = any(p is not None and p.requires_grad for p in (weight_VD, bias_V))
    keep = trained and torch.is_grad_enabled()
    return _Head.apply(hidden_BLD, weight_VD, bias_V, target_BL, keep)


def aligned_head(weight_VD: Tensor, bias_V: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return the head as ``head_forward`` takes it: on a GPU with words of probability zero, so
    that all rows of logits begin alike in memory.

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
    *,
    keep: bool,
    product: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute loss and gradients in one pass over chunks of records, for autograd functions.

    Args:
        weight_VD, bias_V: of ``aligned_head``.
        keep: whether to return the gradients of the logits.
        product: batched matrix product, for the Gram matrices of these gradients.

    Returns:
        (loss_BL; d loss / d hidden, (B, L, D); with ``keep``, d loss / d logits, (B, L, V); with
        ``product``, their inner products within each record, (B, L, L)).
    """
    wide = torch.promote_types(hidden_BLD.dtype, torch.float32)
    num, length, _ = hidden_BLD.shape
    loss_BL = torch.empty(num, length, dtype=wide, device=hidden_BLD.device)
    grad_BLD = torch.empty_like(hidden_BLD)
    delta_BLV = grad_BLD.new_empty(num, length, len(weight_VD)) if keep else None
    gram_BLL = None if product is None else loss_BL.new_empty(num, length, length)
    for rows in _chunks(hidden_BLD, weight_VD):
        log_probability_NLV = _logits(hidden_BLD[rows], weight_VD, bias_V).log_softmax(2)
        at_target_NL = log_probability_NLV.gather(2, target_BL[rows].clamp(min=0)[..., None])[
            ..., 0
        ]
        loss_BL[rows] = -at_target_NL.where(target_BL[rows] != IGNORED, 0.0)
        delta_NLV = _minus_target(log_probability_NLV.exp_(), target_BL[rows]).to(hidden_BLD.dtype)
        grad_BLD[rows] = delta_NLV @ weight_VD
        if delta_BLV is not None:
            delta_BLV[rows] = delta_NLV
        if product is not None and gram_BLL is not None:
            gram_BLL[rows] = product(delta_NLV, delta_NLV.mT)
    return loss_BL, grad_BLD, delta_BLV, gram_BLL


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_BLD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_BL: Tensor,
        keep: bool,
    ) -> Tensor:
        dtype = lowered_dtype(hidden_BLD)
        hidden, weight = hidden_BLD.to(dtype), weight_VD.to(dtype)
        bias = None if bias_V is None else bias_V.to(dtype)
        weight, bias = aligned_head(weight, bias)
        loss_BL, grad_BLD, delta_BLV, _ = head_forward(hidden, weight, bias, target_BL, keep=keep)
        ctx.save_for_backward(hidden, delta_BLV, grad_BLD)
        ctx.dtypes = hidden_BLD.dtype, weight_VD.dtype
        ctx.num_words = len(weight_VD)
        return loss_BL

    @staticmethod
    def backward(ctx: Any, g_BL: Tensor) -> tuple[Any, ...]:
        hidden_BLD, delta_BLV, grad_BLD = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        grad_hidden = (grad_BLD * g_BL[..., None]).to(hidden_dtype)
        if delta_BLV is None:  # a frozen head
            return grad_hidden, *[None] * 4
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        delta_NV, own = delta_BLV.flatten(0, 1), slice(ctx.num_words)
        scaled_NX = (hidden_BLD * g_BL[..., None]).flatten(0, 1).to(delta_NV.dtype)
        weight_grad = (delta_NV.mT @ scaled_NX)[own].to(weight_dtype) if needs_weight else None
        g_N = g_BL.flatten().to(delta_NV.dtype)
        bias_grad = (g_N @ delta_NV)[own].to(weight_dtype) if needs_bias else None
        return grad_hidden, weight_grad, bias_grad, *[None] * 2


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
