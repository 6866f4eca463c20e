"""One rule per kind of layer: the layer's own forward and backward pass, and what a record's gradient is made of.

A rule replaces one call of a torch function by an autograd function that computes the same output from weights that autograd
does not see, and hands the input and the output's gradient to the weights' slots as soon as the backward pass has them. No weight
gradient is computed on the way.

Legend: B records, T places of a record, D, P, Q widths, N images (a multiple of B), C channels.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from dpvision.dp.layout import MIXED, Layout
from dpvision.dp.outer import Dense, OneHot, Outer, Patches, Remade, wide
from dpvision.dp.slots import Slot
from dpvision.models.head import autocast_dtype, head_forward, linear_cross_entropy, logit_gradients


class NoRule(Exception):
    """A parameter is used in a way for which there is no rule."""

    def __init__(self, tensors: list[Tensor], reason: str) -> None:
        super().__init__(reason)
        self.tensors = tensors
        self.reason = reason


class Pass(Protocol):
    """What rules need of the pass that calls them."""

    num_records: int
    anchor: Tensor
    """A leaf that requires a gradient: what hangs on it is reached by the backward pass, whatever the input."""

    def slot(self, weight: Tensor | None, rule: str) -> Slot | None:
        """The slot of a trained weight; None for a frozen one."""
        ...

    def layout(self, tensor: Tensor) -> Layout | None:
        """Where the records lie in an argument of the call; None if it has none."""
        ...

    def output_layout(self) -> Layout | None: ...
    @property
    def traced(self) -> bool:
        """Whether the pass is written down for a compiler: rules then use ``hang`` in place of autograd functions."""
        ...

    def hang(self, output: Tensor, saved: tuple[Tensor, ...], sink: Callable[..., None]) -> Tensor:
        """output + 0, where the zeros' gradient g is that of the output: ``sink(*saved, g)`` after the backward pass."""
        ...

    def lowered(self, input: Tensor, *weights: Tensor | None) -> tuple[Tensor, ...]:
        """Operands as autocast hands them to a matrix product; an input met before is converted once."""
        ...


Rule = Callable[..., Any]


def by_record(value: Tensor, layout: Layout, num_records: int) -> Tensor:
    """(..., D) with its records anywhere -> (B, T, D)."""
    rows = value.movedim(layout.dim, 0)
    if not layout.side_by_side:
        rows = rows.unflatten(0, (layout.per_record, num_records)).transpose(0, 1)
    return rows.reshape(num_records, -1, value.shape[-1])


def _require(ok: bool, tensors: list[Tensor | None], reason: str) -> None:
    if not ok:
        raise NoRule([t for t in tensors if t is not None], reason)


def _leading(layout: Layout) -> bool:
    return layout.dim == 0 and layout.side_by_side


class _Linear(torch.autograd.Function):
    """y = x W^T + b, or x W."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs_input: bool, sink: Any) -> Tensor:
        ctx.save_for_backward(x if needs_input else None, weight)
        ctx.sink = sink
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        grad = g @ weight if ctx.needs_input_grad[1] else None
        ctx.sink(x, g)
        return None, grad, None, None, None, None


def linear(run: Pass, input: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> Any:
    """``F.linear``, and ``x @ W`` (transposed)."""
    layout = run.layout(input)
    if layout is None or run.layout(weight) is not None:
        return NotImplemented
    _require(layout != MIXED and layout.dim < input.ndim - 1, [weight, bias], "an input whose records are not rows")
    slot, bias_slot = run.slot(weight, "linear"), run.slot(bias, "bias")
    num, shape = run.num_records, weight.shape
    x, w, b = run.lowered(input, weight.detach().t() if transposed else weight.detach(), None if bias is None else bias.detach())

    def sink(x: Tensor | None, g: Tensor) -> None:
        g_BTP = by_record(g, layout, num)
        if slot is not None and x is not None:
            outputs, inputs = Dense(g_BTP), Dense(by_record(x, layout, num))
            slot.add_outer(Outer(inputs, outputs, shape) if transposed else Outer(outputs, inputs, shape))
        if bias_slot is not None:
            bias_slot.add_written(g_BTP.sum(1, dtype=wide(g.dtype)))

    if run.traced:
        return run.hang(F.linear(x, w, b), (x,), sink)
    return _Linear.apply(run.anchor, x, w, b, slot is not None, sink)


def matmul(run: Pass, input: Tensor, other: Tensor) -> Any:
    """x W with a matrix W."""
    if other.ndim != 2 or run.layout(other) is not None or input.ndim < 2:
        return NotImplemented
    return linear(run, input, other, transposed=True)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any, sink: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.sink = geometry, sink
        stride, padding, dilation, groups = geometry
        return torch.convolution(x, weight, bias, stride, padding, dilation, False, [0] * len(stride), groups)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        grad = _conv_backward(g, x, weight, ctx.geometry, input_grad=True) if ctx.needs_input_grad[1] else None
        ctx.sink(x, g)
        return None, grad, None, None, None, None


def _conv_backward(g: Tensor, x: Tensor, weight: Tensor, geometry: Any, *, input_grad: bool) -> Tensor:
    stride, padding, dilation, groups = geometry
    mask = [input_grad, not input_grad, False]
    grads = torch.ops.aten.convolution_backward(g, x, weight, None, stride, padding, dilation, False, [0] * len(stride), groups, mask)
    return grads[0 if input_grad else 1]


def _make_conv(num_dims: int) -> Rule:
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
        layout = run.layout(input)
        if layout is None or run.layout(weight) is not None:
            return NotImplemented
        _require(_leading(layout), [weight, bias], "a convolution whose records are not its first dimension")
        stride, dilation = _tuple(stride, num_dims), _tuple(dilation, num_dims)
        if padding == "same":
            _require(all(d * (k - 1) % 2 == 0 for d, k in zip(dilation, weight.shape[2:], strict=True)), [weight, bias], "uneven padding")
            padding = tuple(d * (k - 1) // 2 for d, k in zip(dilation, weight.shape[2:], strict=True))
        padding = (0,) * num_dims if padding == "valid" else _tuple(padding, num_dims)
        slot, bias_slot = run.slot(weight, "convolution"), run.slot(bias, "bias")
        x, w, b = run.lowered(input, weight.detach(), None if bias is None else bias.detach())
        num, shape, geometry = run.num_records, weight.shape, (stride, padding, dilation, groups)

        def sink(x: Tensor, g: Tensor) -> None:
            if slot is not None and num_dims == 2 and groups == 1:
                patches = Patches(x, layout.per_record, (shape[2], shape[3]), stride, padding, dilation)
                left = g.flatten(2).mT.reshape(num, -1, shape[0])
                slot.add_outer(Outer(Dense(left), patches, shape))
            elif slot is not None:
                slot.add_written(_record_kernels(g, x, shape, geometry, num))
            if bias_slot is not None:
                bias_slot.add_written(g.flatten(2).sum(2, dtype=wide(g.dtype)).view(num, -1, shape[0]).sum(1))

        if run.traced:
            return run.hang(torch.convolution(x, w, b, stride, padding, dilation, False, [0] * num_dims, groups), (x,), sink)
        return _Conv.apply(run.anchor, x, w, b, geometry, sink)

    return conv


def _tuple(value: Any, num_dims: int) -> tuple[int, ...]:
    """A setting of a convolution for every dimension: torch takes a number, or one or ``num_dims`` of them."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * num_dims if len(values) == 1 else values


def _record_kernels(g: Tensor, x: Tensor, shape: torch.Size, geometry: Any, num_records: int) -> Tensor:
    """Every record's kernel gradient (B, *shape), all records as groups of one convolution (Rochette et al. 2019)."""
    stride, padding, dilation, groups = geometry
    dtype = wide(g.dtype)

    def as_groups(value: Tensor) -> Tensor:  # (B * k, C, ...) -> (k, B * C, ...)
        return value.to(dtype).unflatten(0, (num_records, -1)).transpose(0, 1).flatten(1, 2)

    kernel = torch.zeros(num_records * shape[0], *shape[1:], dtype=dtype, device=g.device)
    grad = _conv_backward(as_groups(g), as_groups(x), kernel, (stride, padding, dilation, groups * num_records), input_grad=False)
    return grad.view(num_records, *shape)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: float, sink: Any
    ) -> Tensor:
        y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        ctx.shape, ctx.sink = shape, sink
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, mean, rstd, weight, bias = ctx.saved_tensors
        grad = None
        if ctx.needs_input_grad[1]:
            grad = torch.ops.aten.native_layer_norm_backward(g, x, ctx.shape, mean, rstd, weight, bias, [True, False, False])[0]
        ctx.sink(g, x, mean, rstd)
        return None, grad, None, None, None, None, None


def layer_norm(
    run: Pass, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Any:
    """``F.layer_norm`` over the last dimensions."""
    layout = run.layout(input)
    if layout is None:
        return NotImplemented
    slot, bias_slot = run.slot(weight, "layer norm"), run.slot(bias, "layer norm")
    shape = tuple(normalized_shape)
    _require(layout != MIXED and layout.dim < input.ndim - len(shape), [weight, bias], "a layer norm over records")
    num = run.num_records

    def rows(value: Tensor) -> Tensor:
        return by_record(value.flatten(value.ndim - len(shape)), layout, num)

    def sink(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> None:
        dtype = wide(g.dtype)
        g_BTD = rows(g)
        if slot is not None:
            # A record at a time: what is in hand stays in the cache.
            x_BTD, m_BT1, r_BT1 = rows(x), rows(mean), rows(rstd)
            grad_BD = torch.empty(num, g_BTD.shape[-1], dtype=dtype, device=g.device)
            for part in _record_parts(num, g.device):
                normal = (x_BTD[part] - m_BT1[part]).mul_(r_BT1[part])
                torch.sum(normal.mul_(g_BTD[part]) if normal.dtype == g.dtype else normal * g_BTD[part], 1, dtype=dtype, out=grad_BD[part])
            slot.add_written(grad_BD.view(num, *shape))
        if bias_slot is not None:
            bias_slot.add_written(g_BTD.sum(1, dtype=dtype).view(num, *shape))

    x = _widened(input)
    if run.traced:
        y = F.layer_norm(x, shape, _like(weight, x), _like(bias, x), eps)
        return run.hang(y, (x,), lambda x, g: sink(g, x, *torch.native_layer_norm(x, shape, None, None, eps)[1:]))
    return _LayerNorm.apply(run.anchor, x, shape, _like(weight, x), _like(bias, x), eps, sink)


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, sink: Any
    ) -> Tensor:
        x = x.contiguous()
        sizes = (x.shape[0], x.shape[1], x.shape[2:].numel())
        y, mean, rstd = torch.native_group_norm(x, weight, bias, *sizes, groups, eps)
        ctx.save_for_backward(x, mean, rstd, weight)
        ctx.sizes, ctx.groups, ctx.sink = sizes, groups, sink
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, mean, rstd, weight = ctx.saved_tensors
        g, grad = g.contiguous(), None
        if ctx.needs_input_grad[1]:
            grad = torch.ops.aten.native_group_norm_backward(g, x, mean, rstd, weight, *ctx.sizes, ctx.groups, [True, False, False])[0]
        ctx.sink(g, x, mean, rstd)
        return None, grad, None, None, None, None, None


def group_norm(
    run: Pass, input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Any:
    """``F.group_norm``."""
    layout = run.layout(input)
    if layout is None:
        return NotImplemented
    slot, bias_slot = run.slot(weight, "group norm"), run.slot(bias, "group norm")
    _require(_leading(layout), [weight, bias], "a group norm whose records are not its first dimension")
    num, channels = run.num_records, input.shape[1]

    def sink(g: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> None:
        dtype = wide(g.dtype)
        if slot is not None:
            normal = (x.unflatten(1, (num_groups, -1)).flatten(3) - mean[..., None, None]) * rstd[..., None, None]  # (N, G, C / G, S)
            grad_NC = (normal.flatten(1, 2).view(*x.shape[:2], -1) * g.flatten(2)).sum(2, dtype=dtype)
            slot.add_written(grad_NC.view(num, -1, channels).sum(1))
        if bias_slot is not None:
            bias_slot.add_written(g.flatten(2).sum(2, dtype=dtype).view(num, -1, channels).sum(1))

    x = _widened(input)
    _require(not run.traced, [weight, bias], "a group norm in a compiled block")
    return _GroupNorm.apply(run.anchor, x, num_groups, _like(weight, x), _like(bias, x), eps, sink)


def _record_parts(num: int, device: torch.device) -> list[slice]:
    return [slice(i, i + 1) for i in range(num)] if device.type == "cpu" else [slice(0, num)]


def _widened(x: Tensor) -> Tensor:
    """The input of a norm as autocast hands it over: float32 on a GPU; a CPU takes it as it is."""
    low = x.dtype in (torch.float16, torch.bfloat16)
    return x.float() if low and x.device.type != "cpu" and autocast_dtype(x.device) is not None else x


def _like(weight: Tensor | None, x: Tensor) -> Tensor | None:
    """A norm's weight without its graph; on a GPU in the input's precision."""
    if weight is None:
        return None
    return weight.detach() if x.device.type == "cpu" else weight.detach().to(x.dtype)


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
    _require(ok, [weight], f"{rule} with a result whose records are not rows side by side")
    padded = weight.detach()[(None,) * (num_dims - weight.ndim)]
    _require(padded.shape[layout.dim] == 1, [weight], f"{rule} along the dimension of the records")
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
    _require(not kwargs and run.layout(weight) is None, [weight], "an expansion of this form")
    if function is torch.Tensor.expand_as:
        return spread(run, weight, layout, args[1].ndim, "bare").expand_as(args[1])
    sizes = list(args[1] if isinstance(args[1], list | tuple) else args[1:])
    rows = spread(run, weight, layout, len(sizes), "bare")
    if function is torch.Tensor.repeat:
        sizes[layout.dim] = 1
        return rows.repeat(sizes)
    return rows.expand(sizes)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, index: Tensor, weight: Tensor, sink: Any) -> Tensor:
        ctx.save_for_backward(index)
        ctx.sink = sink
        return F.embedding(index, weight)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        (index,) = ctx.saved_tensors
        ctx.sink(index, g)
        return None, None, None, None


def embedding(
    run: Pass,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """``F.embedding``; the gradient of ``padding_idx`` is zero as in torch."""
    layout = run.layout(input)
    if layout is None:
        return NotImplemented
    _require(layout != MIXED, [weight], "an index whose records are not in one dimension")
    _require(max_norm is None and not scale_grad_by_freq, [weight], "an embedding with max_norm or scale_grad_by_freq")
    slot = run.slot(weight, "embedding")
    num, shape = run.num_records, weight.shape
    if padding_idx is not None and padding_idx < 0:
        padding_idx += shape[0]

    def sink(index: Tensor, g: Tensor) -> None:
        assert slot is not None
        if padding_idx is not None:
            g = g.masked_fill((index == padding_idx)[..., None], 0.0)
        index_BT = by_record(index[..., None], layout, num)[..., 0]
        slot.add_outer(Outer(OneHot(index_BT, shape[0], g.dtype), Dense(by_record(g, layout, num)), shape))

    if run.traced:
        return run.hang(F.embedding(input, weight.detach()), (input,), sink)
    return _Embedding.apply(run.anchor, input, weight.detach(), sink)


def getitem(run: Pass, weight: Tensor, index: Any) -> Any:
    """``table[token]``: an embedding."""
    if not isinstance(index, Tensor) or index.dtype == torch.bool or weight.ndim != 2 or run.layout(weight) is not None:
        return NotImplemented
    return embedding(run, index, weight)


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
    layout = run.layout(input)
    if layout is None:
        return NotImplemented
    _require(not training and _leading(layout), [weight, bias], "a batch norm on batch statistics")
    y = F.batch_norm(input, running_mean, running_var, None, None, False, 0.0, eps)
    ones = (1,) * (input.ndim - 2)
    if weight is not None:
        y = y * _scale(run, weight, layout, y.ndim).unflatten(1, (-1, *ones))
    return y if bias is None else y + _scale(run, bias, layout, y.ndim).unflatten(1, (-1, *ones))


def _scale(run: Pass, weight: Tensor, layout: Layout, num_dims: int) -> Tensor:
    return spread(run, weight, layout, 2, "batch norm")


def rms_norm(run: Pass, input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
    """``F.rms_norm``: the norm, then an elementwise scale."""
    layout = run.layout(input)
    if layout is None or weight is None:
        return NotImplemented
    return F.rms_norm(input, normalized_shape, None, eps) * spread(run, weight, layout, input.ndim, "rms norm")


def attention(run: Pass, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """``F.scaled_dot_product_attention`` with a trained bias of the attention scores."""
    layout = run.layout(query)
    if layout is None or attn_mask is None or any(run.slot(t, "") is not None for t in (query, key, value)):
        return NotImplemented
    mask = spread(run, attn_mask, layout, query.ndim, "attention bias")
    return F.scaled_dot_product_attention(query, key, value, mask, *args, **kwargs)


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, sink: Any) -> Tensor:
        loss_BT, grad_BTD, gram_BTT = head_forward(hidden, weight, bias, target, with_gram=True)
        ctx.save_for_backward(hidden, weight, bias, target, grad_BTD, gram_BTT)
        ctx.sink = sink
        return loss_BT

    @staticmethod
    def backward(ctx: Any, g_BT: Tensor) -> tuple[Any, ...]:
        *operands, grad_BTD, gram_BTT = ctx.saved_tensors
        ctx.sink(operands, gram_BTT, g_BT)
        return None, (grad_BTD * g_BT[..., None]).to(grad_BTD.dtype), None, None, None, None


def head(run: Pass, hidden_BLD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, target_BL: Tensor) -> Any:
    """``models.head.linear_cross_entropy``: the logits' gradients are made again when they are needed, their Gram matrix is kept."""
    layout = run.layout(hidden_BLD)
    if layout is None or run.layout(weight_VD) is not None:
        return NotImplemented
    ok = _leading(layout) and not run.traced
    _require(ok, [weight_VD, bias_V], "a vocabulary head whose records are not its first dimension, or in a compiled block")
    slot, bias_slot = run.slot(weight_VD, "vocabulary head"), run.slot(bias_V, "vocabulary head")
    num, shape = run.num_records, weight_VD.shape
    hidden, weight, bias = run.lowered(hidden_BLD, weight_VD.detach(), None if bias_V is None else bias_V.detach())

    def sink(operands: list[Any], gram_BTT: Tensor, g_BT: Tensor) -> None:
        hidden, weight, bias, target = operands
        left = Remade(lambda rows: logit_gradients(hidden[rows], weight, bias, target[rows]), gram_BTT, shape[0], hidden.shape[2])
        if slot is not None:
            slot.add_outer(Outer(left, Dense((hidden * g_BT[..., None]).to(hidden.dtype)), shape))
        if bias_slot is not None:
            bias_slot.add_outer(Outer(left, Dense(g_BT[..., None].to(hidden.dtype)), shape[:1]))

    # All rows of a record are its tokens: the head treats each token by itself.
    loss_BT = _Head.apply(run.anchor, hidden.reshape(num, -1, shape[1]), weight, bias, target_BL.reshape(num, -1), sink)
    return loss_BT.view(target_BL.shape)


RULES: dict[Callable[..., Any], Rule] = {
    F.linear: linear,
    torch.matmul: matmul,
    torch.Tensor.matmul: matmul,
    torch.Tensor.__matmul__: matmul,
    F.conv1d: _make_conv(1),
    F.conv2d: _make_conv(2),
    F.conv3d: _make_conv(3),
    F.layer_norm: layer_norm,
    F.group_norm: group_norm,
    F.batch_norm: batch_norm,
    F.rms_norm: rms_norm,
    F.embedding: embedding,
    F.scaled_dot_product_attention: attention,
    torch.Tensor.__getitem__: getitem,
    linear_cross_entropy: head,
}
"""Functions with a rule; a rule answers ``NotImplemented`` for a call that is not its business (weights alone, say)."""


def _named(*names: str) -> set[Callable[..., Any]]:
    return {getattr(owner, name) for owner in (torch, torch.Tensor) for name in names if hasattr(owner, name)}


ELEMENTWISE = _named(
    "add", "add_", "__radd__", "mul", "mul_", "__rmul__", "sub", "sub_", "__rsub__", "rsub", "div", "div_", "true_divide", "__rtruediv__",
    "where", "addcmul", "lerp", "maximum", "minimum", "pow", "multiply", "subtract", "divide",
)  # fmt: skip
"""Functions that broadcast their arguments and treat each number by itself."""
EXPANDING = _named("expand", "expand_as", "broadcast_to", "repeat")
"""Functions that repeat a tensor along new or single rows."""
