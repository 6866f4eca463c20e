"""Rules of parameters that are broadcast against data (tokens, positions, layer scales, attention
biases), of which every record gets a copy; and of normalisation layers.

Legend: B records, T places of a record, D width, N images (a multiple of B), C channels, S places
of an image.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpvision.devices import row_sums
from dpvision.dp.batch_dims import MIXED, BatchDim
from dpvision.dp.outer_products import wide
from dpvision.dp.rule import Pass, by_record, leading, require
from dpvision.precision import autocast_dtype


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


_PART_NUMBERS = 2**18
"""Numbers of a layer norm's input processed at a time on a CPU: with far fewer, starting a second
thread costs more than it saves.
"""


def layer_norm(
    run: Pass,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """``F.layer_norm`` over the last dimensions."""
    batch_dim = run.batch_dim(input)
    if batch_dim is None:
        return NotImplemented
    slot, bias_slot = run.slot(weight, "layer norm"), run.slot(bias, "layer norm")
    shape = tuple(normalized_shape)
    require(
        batch_dim != MIXED and batch_dim.dim < input.ndim - len(shape),
        [weight, bias],
        "a layer norm over records",
    )
    num = run.num_records

    def rows(value: Tensor) -> Tensor:
        return by_record(value.flatten(value.ndim - len(shape)), batch_dim, num)

    # The gradient of the weight is the sum over places of g times the normalised input, which is
    # made again from the mean and the inverse deviation that torch keeps; of the bias, that of g.
    def sink(x: Tensor, mean: Tensor, rstd: Tensor, g: Tensor) -> None:
        dtype = wide(g.dtype)
        g_BTD, x_BTD, m_BT1, r_BT1 = rows(g), rows(x), rows(mean), rows(rstd)
        if slot is not None and g.device.type == "cuda" and dtype == torch.float32:
            from dpvision.dp.pass_triton import layer_norm_sums

            weight_BD, bias_BD = layer_norm_sums(x_BTD, m_BT1, r_BT1, g_BTD)
            slot.add_written(weight_BD.view(num, *shape))
            if bias_slot is not None:
                bias_slot.add_written(bias_BD.view(num, *shape))
            return
        if slot is not None:
            grad_BD = torch.empty(num, g_BTD.shape[-1], dtype=dtype, device=g.device)
            for part in _record_parts(g_BTD):
                normal = (x_BTD[part] - m_BT1[part]).mul_(r_BT1[part])
                torch.sum(
                    normal.mul_(g_BTD[part]) if normal.dtype == g.dtype else normal * g_BTD[part],
                    1,
                    dtype=dtype,
                    out=grad_BD[part],
                )
            slot.add_written(grad_BD.view(num, *shape))
        if bias_slot is not None:
            bias_slot.add_written(g_BTD.sum(1, dtype=dtype).view(num, *shape))

    x = _widened(input)
    y, mean, rstd = torch.native_layer_norm(x, shape, _like(weight, x), _like(bias, x), eps)
    return run.tap(y, (x, mean, rstd), sink)


def group_norm(
    run: Pass,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """``F.group_norm``."""
    batch_dim = run.batch_dim(input)
    if batch_dim is None:
        return NotImplemented
    slot, bias_slot = run.slot(weight, "group norm"), run.slot(bias, "group norm")
    require(
        leading(batch_dim), [weight, bias], "a group norm whose records are not its first dimension"
    )
    num, channels = run.num_records, input.shape[1]

    def sink(x: Tensor, mean: Tensor, rstd: Tensor, g: Tensor) -> None:
        dtype = wide(g.dtype)
        if slot is not None:
            normal = (x.unflatten(1, (num_groups, -1)).flatten(3) - mean[..., None, None]) * rstd[
                ..., None, None
            ]  # (N, G, C / G, S)
            grad_NC = row_sums(normal.flatten(1, 2).view(*x.shape[:2], -1) * g.flatten(2), dtype)
            slot.add_written(grad_NC.view(num, -1, channels).sum(1))
        if bias_slot is not None:
            bias_slot.add_written(row_sums(g.flatten(2), dtype).view(num, -1, channels).sum(1))

    x = _widened(input).contiguous()
    sizes = x.shape[0], channels, x.shape[2:].numel()
    y, mean, rstd = torch.native_group_norm(
        x, _like(weight, x), _like(bias, x), *sizes, num_groups, eps
    )
    return run.tap(y, (x, mean, rstd), sink)


def _record_parts(x_BTD: Tensor) -> list[slice]:
    """Slices of few records on a CPU, whose numbers stay in the cache."""
    num = len(x_BTD)
    at_once = (
        max(1, _PART_NUMBERS * num // max(1, x_BTD.numel()))
        if x_BTD.device.type == "cpu"
        else max(1, num)
    )
    return [slice(i, i + at_once) for i in range(0, num, at_once)]


def _widened(x: Tensor) -> Tensor:
    """The input of a norm as autocast hands it over: float32 on a GPU; a CPU takes it as it is."""
    low = x.dtype in (torch.float16, torch.bfloat16)
    return (
        x.float() if low and x.device.type != "cpu" and autocast_dtype(x.device) is not None else x
    )


def _like(weight: Tensor | None, x: Tensor) -> Tensor | None:
    """A norm's weight without its graph; on a GPU in the input's precision."""
    if weight is None:
        return None
    return weight.detach() if x.device.type == "cpu" else weight.detach().to(x.dtype)


def batch_norm(
    run: Pass,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """``F.batch_norm`` of data with fixed statistics: an elementwise scale and shift."""
    batch_dim = run.batch_dim(input)
    if batch_dim is None:
        return NotImplemented
    require(not training and leading(batch_dim), [weight, bias], "a batch norm on batch statistics")
    y = F.batch_norm(input, running_mean, running_var, None, None, False, 0.0, eps)
    ones = (1,) * (input.ndim - 2)
    if weight is not None:
        y = y * _scale(run, weight, batch_dim, y.ndim).unflatten(1, (-1, *ones))
    return y if bias is None else y + _scale(run, bias, batch_dim, y.ndim).unflatten(1, (-1, *ones))


def _scale(run: Pass, weight: Tensor, batch_dim: BatchDim, num_dims: int) -> Tensor:
    return spread(run, weight, batch_dim, 2, "batch norm")


def rms_norm(
    run: Pass,
    input: Tensor,
    normalized_shape: Any,
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """``F.rms_norm``: the norm, then an elementwise scale."""
    batch_dim = run.batch_dim(input)
    if batch_dim is None or weight is None:
        return NotImplemented
    return F.rms_norm(input, normalized_shape, None, eps) * spread(
        run, weight, batch_dim, input.ndim, "rms norm"
    )
