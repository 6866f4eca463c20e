"""Rules of layers with a weight matrix or table: linear maps, convolutions, embeddings, the
vocabulary head.

Legend: B records, T positions of a record, D, P, Q widths, N images (a multiple of B), C channels.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpvision.devices import row_sums
from dpvision.dp.batch_dims import MIXED
from dpvision.dp.outer_products import (
    Dense,
    OneHot,
    OuterProducts,
    Patches,
    WithGram,
    kernel_gradient,
    one_by_one_pays,
    product,
    wide,
)
from dpvision.dp.rule import Pass, Rule, by_record, leading, require
from dpvision.models.head import aligned_head, head_forward


def linear(
    run: Pass,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    transposed: bool = False,
) -> Any:
    """``F.linear``, and ``x @ W`` (transposed)."""
    batch_dim = run.batch_dim(input)
    if batch_dim is None or run.batch_dim(weight) is not None:
        return NotImplemented
    require(
        batch_dim != MIXED and batch_dim.dim < input.ndim - 1,
        [weight, bias],
        "an input whose records are not rows",
    )
    slot, bias_slot = run.slot(weight, "linear"), run.slot(bias, "bias")
    num, shape = run.num_records, weight.shape
    x, w, b = run.lowered(
        input,
        weight.detach().t() if transposed else weight.detach(),
        None if bias is None else bias.detach(),
    )

    def sink(x: Tensor | None, g: Tensor) -> None:
        g_BTP = by_record(g, batch_dim, num)
        if slot is not None and x is not None:
            outputs, inputs = Dense(g_BTP), Dense(by_record(x, batch_dim, num))
            slot.add_outer_products(
                OuterProducts(inputs, outputs, shape)
                if transposed
                else OuterProducts(outputs, inputs, shape)
            )
        if bias_slot is not None:
            bias_slot.add_written(g_BTP.sum(1, dtype=wide(g.dtype)))

    return run.tap(F.linear(x, w, b), (None if slot is None else x,), sink)


def matmul(run: Pass, input: Tensor, other: Tensor) -> Any:
    """x W with a matrix W."""
    if other.ndim != 2 or run.batch_dim(other) is not None or input.ndim < 2:
        return NotImplemented
    return linear(run, input, other, transposed=True)


def make_conv(num_dims: int) -> Rule:
    def conv(
        run: Pass,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        batch_dim = run.batch_dim(input)
        if batch_dim is None or run.batch_dim(weight) is not None:
            return NotImplemented
        require(
            leading(batch_dim),
            [weight, bias],
            "a convolution whose records are not its first dimension",
        )
        stride, dilation = _tuple(stride, num_dims), _tuple(dilation, num_dims)
        if padding == "same":
            require(
                all(d * (k - 1) % 2 == 0 for d, k in zip(dilation, weight.shape[2:], strict=True)),
                [weight, bias],
                "uneven padding",
            )
            padding = tuple(
                d * (k - 1) // 2 for d, k in zip(dilation, weight.shape[2:], strict=True)
            )
        padding = (0,) * num_dims if padding == "valid" else _tuple(padding, num_dims)
        slot, bias_slot = run.slot(weight, "convolution"), run.slot(bias, "bias")
        x, w, b = run.lowered(input, weight.detach(), None if bias is None else bias.detach())
        num, shape, geometry = run.num_records, weight.shape, (stride, padding, dilation, groups)

        def sink(x: Tensor, g: Tensor) -> None:
            written = shape.numel() * num <= g.numel() + x.numel()
            one_by_one = written and shape[2:].numel() > 1 and one_by_one_pays(x.device)
            if slot is not None and one_by_one:
                slot.add_written(_one_by_one(g, x, shape, geometry, num))
            elif slot is not None and num_dims == 2 and groups == 1:
                patches = Patches(
                    x, batch_dim.per_record, (shape[2], shape[3]), stride, padding, dilation
                )
                left = g.flatten(2).mT.reshape(num, -1, shape[0])
                slot.add_outer_products(OuterProducts(Dense(left), patches, shape))
            elif slot is not None:
                slot.add_written(_record_kernels(g, x, shape, geometry, num))
            if bias_slot is not None:
                bias_slot.add_written(
                    row_sums(g.flatten(2), wide(g.dtype)).view(num, -1, shape[0]).sum(1)
                )

        return run.tap(
            torch.convolution(x, w, b, stride, padding, dilation, False, [0] * num_dims, groups),
            (x,),
            sink,
        )

    return conv


def _tuple(value: Any, num_dims: int) -> tuple[int, ...]:
    """Expand a setting of a convolution to every dimension: torch takes a number, or a tuple of one
    or ``num_dims``.
    """
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * num_dims if len(values) == 1 else values


def _one_by_one(g: Tensor, x: Tensor, shape: torch.Size, geometry: Any, num_records: int) -> Tensor:
    """Every record's kernel gradient (B, *shape), one after the other: on a CPU a third of the time
    of ``_record_kernels``.
    """
    dtype = wide(g.dtype)
    parts = (value.to(dtype).unflatten(0, (num_records, -1)) for value in (g, x))
    made = g.new_empty(num_records, *shape, dtype=dtype)
    for i, (g_part, x_part) in enumerate(zip(*parts, strict=True)):
        made[i] = kernel_gradient(g_part, x_part, shape, geometry)
    return made


def _record_kernels(
    g: Tensor, x: Tensor, shape: torch.Size, geometry: Any, num_records: int
) -> Tensor:
    """Every record's kernel gradient (B, *shape), all records as groups of one convolution
    (Rochette et al. 2019).
    """
    stride, padding, dilation, groups = geometry
    dtype = wide(g.dtype)

    def as_groups(value: Tensor) -> Tensor:  # (B * k, C, ...) -> (k, B * C, ...)
        return value.to(dtype).unflatten(0, (num_records, -1)).transpose(0, 1).flatten(1, 2)

    grad = kernel_gradient(
        as_groups(g),
        as_groups(x),
        torch.Size((num_records * shape[0], *shape[1:])),
        (stride, padding, dilation, groups * num_records),
    )
    return grad.view(num_records, *shape)


def embedding(
    run: Pass,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    *,
    from_end: bool = False,
) -> Any:
    """``F.embedding``; the gradient of ``padding_idx`` is zero as in torch.

    Args:
        from_end: whether negative numbers count from the end.
    """
    batch_dim = run.batch_dim(input)
    if batch_dim is None:
        return NotImplemented
    require(batch_dim != MIXED, [weight], "an index whose records are not in one dimension")
    require(
        max_norm is None and not scale_grad_by_freq,
        [weight],
        "an embedding with max_norm or scale_grad_by_freq",
    )
    slot = run.slot(weight, "embedding")
    num, shape = run.num_records, weight.shape
    if padding_idx is not None and padding_idx < 0:
        padding_idx += shape[0]

    def sink(index: Tensor, g: Tensor) -> None:
        assert slot is not None
        if padding_idx is not None:
            g = g.masked_fill((index == padding_idx)[..., None], 0.0)
        index_BT = by_record(index[..., None], batch_dim, num)[..., 0]
        slot.add_outer_products(
            OuterProducts(
                OneHot(index_BT, shape[0], g.dtype), Dense(by_record(g, batch_dim, num)), shape
            )
        )

    row = input.where(input >= 0, input + shape[0]) if from_end else input
    return run.tap(F.embedding(row, weight.detach()), (row,), sink)


def getitem(run: Pass, weight: Tensor, index: Any) -> Any:
    """``table[token]``: an embedding."""
    if (
        not isinstance(index, Tensor)
        or index.dtype == torch.bool
        or weight.ndim != 2
        or run.batch_dim(weight) is not None
    ):
        return NotImplemented
    return embedding(run, index, weight, from_end=True)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        sink: Any,
    ) -> Tensor:
        loss_BT, *kept = head_forward(hidden, weight, bias, target, keep=True, product=product)
        ctx.save_for_backward(hidden, *kept)
        ctx.sink = sink
        return loss_BT

    @staticmethod
    def backward(ctx: Any, g_BT: Tensor) -> tuple[Any, ...]:
        hidden, grad_BTD, delta_BTV, gram_BTT = ctx.saved_tensors
        ctx.sink(hidden, delta_BTV, gram_BTT, g_BT)
        return None, (grad_BTD * g_BT[..., None]).to(grad_BTD.dtype), None, None, None, None


def head(
    run: Pass, hidden_BLD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_BL: Tensor
) -> Any:
    """``models.head.linear_cross_entropy``: the gradients of the logits are kept, with their Gram
    matrices.
    """
    batch_dim = run.batch_dim(hidden_BLD)
    if batch_dim is None or run.batch_dim(weight_VD) is not None:
        return NotImplemented
    ok = leading(batch_dim) and not run.traced
    require(
        ok,
        [weight_VD, bias_V],
        "a vocabulary head whose records are not its first dimension, or in a compiled block",
    )
    slot, bias_slot = run.slot(weight_VD, "vocabulary head"), run.slot(bias_V, "vocabulary head")
    num, shape = run.num_records, weight_VD.shape
    hidden, *low = run.lowered(
        hidden_BLD, weight_VD.detach(), None if bias_V is None else bias_V.detach()
    )
    weight, bias = aligned_head(*low)

    def sink(hidden: Tensor, delta_BTV: Tensor, gram_BTT: Tensor, g_BT: Tensor) -> None:
        left = WithGram(delta_BTV[..., : shape[0]].contiguous(), gram_BTT)
        if slot is not None:
            slot.add_outer_products(
                OuterProducts(left, Dense((hidden * g_BT[..., None]).to(hidden.dtype)), shape)
            )
        if bias_slot is not None:
            bias_slot.add_outer_products(
                OuterProducts(left, Dense(g_BT[..., None].to(hidden.dtype)), shape[:1])
            )

    # All rows of a record are its tokens: the head treats each token separately.
    loss_BT = _Head.apply(
        run.anchor,
        hidden.reshape(num, -1, shape[1]),
        weight,
        bias,
        target_BL.reshape(num, -1),
        sink,
    )
    return loss_BT.view(target_BL.shape)
