"""Rules of bare parameters: tokens, positions, layer scales, attention biases. Every record gets its own copy of the weight."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpvision.dp.layout import MIXED, Layout
from dpvision.dp.products import wide
from dpvision.dp.rule import Pass, require


class _Spread(torch.autograd.Function):
    """A weight repeated for every row along one dimension; the gradient of each row is its own."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weight: Tensor, size: Any, sink: Any) -> Tensor:
        ctx.sink = sink
        return weight.expand(size)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        ctx.sink(g)
        return None, None, None, None


def spread(run: Pass, weight: Tensor, layout: Layout, num_dims: int, rule: str) -> Tensor:
    """A weight with a row for every record (``per_record`` of them) in dimension ``layout.dim`` of ``num_dims``, elsewhere as it is."""
    ok = layout != MIXED and layout.side_by_side and weight.ndim <= num_dims
    require(ok, [weight], f"{rule} with a result whose records are not rows side by side")
    padded = weight.detach()[(None,) * (num_dims - weight.ndim)]
    require(padded.shape[layout.dim] == 1, [weight], f"{rule} along the dimension of the records")
    slot = run.slot(weight, rule)
    if slot is None:
        return padded
    num, shape = run.num_records, weight.shape
    size = list(padded.shape)
    size[layout.dim] = num * layout.per_record

    def sink(g: Tensor) -> None:
        rows = g.movedim(layout.dim, 0).unflatten(0, (num, layout.per_record)).sum(1, dtype=wide(g.dtype))
        slot.add_written(rows.reshape(num, *shape))

    if run.traced:
        return run.hang(padded.expand(size), (), sink)
    return _Spread.apply(run.anchor, padded, size, sink)


def elementwise(run: Pass, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A broadcast of trained weights with data: every record gets its own copy of the weight."""
    layout = run.output_layout()
    values = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    data = [a for a in values if run.layout(a) is not None]
    if layout is None or not data:
        return NotImplemented
    num_dims = max(a.ndim for a in values)

    def own(value: Any) -> Any:
        trained = isinstance(value, Tensor) and run.layout(value) is None and run.slot(value, "") is not None
        return spread(run, value, layout, num_dims, "bare") if trained else value

    return function(*map(own, args), **{name: own(value) for name, value in kwargs.items()})


def expand(run: Pass, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``weight.expand(B, ...)`` and its like."""
    layout = run.output_layout()
    weight = args[0]
    if layout is None:
        return NotImplemented
    require(not kwargs and run.layout(weight) is None, [weight], "an expansion of this form")
    if function is torch.Tensor.expand_as:
        return spread(run, weight, layout, args[1].ndim, "bare").expand_as(args[1])
    sizes = list(args[1] if isinstance(args[1], list | tuple) else args[1:])
    rows = spread(run, weight, layout, len(sizes), "bare")
    if function is torch.Tensor.repeat:
        sizes[layout.dim] = 1
        return rows.repeat(sizes)
    return rows.expand(sizes)


def attention(run: Pass, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """``F.scaled_dot_product_attention`` with a trained bias of the attention scores."""
    layout = run.layout(query)
    if layout is None or attn_mask is None or any(run.slot(t, "") is not None for t in (query, key, value)):
        return NotImplemented
    mask = spread(run, attn_mask, layout, query.ndim, "attention bias")
    return F.scaled_dot_product_attention(query, key, value, mask, *args, **kwargs)
