"""Rules of parameters that are broadcast against data (tokens, positions, layer scales, attention
biases): one copy per record.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpvision.dp.batch_dims import MIXED, BatchDim
from dpvision.dp.products import wide
from dpvision.dp.rule import Pass, require


def spread(run: Pass, weight: Tensor, batch_dim: BatchDim, num_dims: int, rule: str) -> Tensor:
    """Expand a weight to ``num_dims`` dimensions, with ``per_record`` rows for each record in
    dimension ``batch_dim.dim``.
    """
    ok = batch_dim != MIXED and batch_dim.side_by_side and weight.ndim <= num_dims
    require(ok, [weight], f"{rule} with a result whose records are not rows side by side")
    padded = weight.detach()[(None,) * (num_dims - weight.ndim)]
    require(
        padded.shape[batch_dim.dim] == 1, [weight], f"{rule} along the dimension of the records"
    )
    slot = run.slot(weight, rule)
    if slot is None:
        return padded
    num, shape = run.num_records, weight.shape
    size = list(padded.shape)
    size[batch_dim.dim] = num * batch_dim.per_record

    def sink(g: Tensor) -> None:
        rows = (
            g.movedim(batch_dim.dim, 0)
            .unflatten(0, (num, batch_dim.per_record))
            .sum(1, dtype=wide(g.dtype))
        )
        slot.add_written(rows.reshape(num, *shape))

    return run.tap(padded.expand(size), (), sink)


def elementwise(run: Pass, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Broadcast trained weights against data: every record gets its own copy of the weight."""
    batch_dim = run.output_batch_dim()
    values = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    data = [a for a in values if run.batch_dim(a) is not None]
    if batch_dim is None or not data:
        return NotImplemented
    num_dims = max(a.ndim for a in values)

    def own(value: Any) -> Any:
        trained = (
            isinstance(value, Tensor)
            and run.batch_dim(value) is None
            and run.slot(value, "") is not None
        )
        return spread(run, value, batch_dim, num_dims, "broadcast") if trained else value

    return function(*map(own, args), **{name: own(value) for name, value in kwargs.items()})


def expand(run: Pass, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """``weight.expand(B, ...)``, ``expand_as``, ``broadcast_to`` and ``repeat``."""
    batch_dim = run.output_batch_dim()
    weight = args[0]
    if batch_dim is None:
        return NotImplemented
    require(not kwargs and run.batch_dim(weight) is None, [weight], "an expansion of this form")
    if function is torch.Tensor.expand_as:
        return spread(run, weight, batch_dim, args[1].ndim, "broadcast").expand_as(args[1])
    sizes = list(args[1] if isinstance(args[1], list | tuple) else args[1:])
    rows = spread(run, weight, batch_dim, len(sizes), "broadcast")
    if function is torch.Tensor.repeat:
        sizes[batch_dim.dim] = 1
        return rows.repeat(sizes)
    return rows.expand(sizes)


def attention(
    run: Pass,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``F.scaled_dot_product_attention`` with a trained attention bias."""
    batch_dim = run.batch_dim(query)
    if (
        batch_dim is None
        or attn_mask is None
        or any(run.slot(t, "") is not None for t in (query, key, value))
    ):
        return NotImplemented
    mask = spread(run, attn_mask, batch_dim, query.ndim, "attention bias")
    return F.scaled_dot_product_attention(query, key, value, mask, *args, **kwargs)
