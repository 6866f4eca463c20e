"""The mode under which a model's forward pass runs: it sees every torch function call and passes
those with parameters to the rule of their function.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from dpvision.dp.batch_dims import (
    MIXED,
    OPENED,
    BatchDim,
    Call,
    Sources,
    block_call,
    counts,
    tensors_in,
)
from dpvision.dp.elementwise_rules import (
    attention,
    batch_norm,
    elementwise,
    expand,
    group_norm,
    layer_norm,
    rms_norm,
)
from dpvision.dp.matrix_rules import embedding, getitem, head, linear, make_conv, matmul
from dpvision.dp.rounding import UNIT
from dpvision.dp.rule import NoRule, Rule
from dpvision.dp.weight_grads import Slot
from dpvision.errors import PrivacyError
from dpvision.models.head import linear_cross_entropy
from dpvision.precision import autocast_dtype, lowered_dtype

RULES: dict[Callable[..., Any], Rule] = {
    F.linear: linear,
    torch.matmul: matmul,
    torch.Tensor.matmul: matmul,
    torch.Tensor.__matmul__: matmul,
    F.conv1d: make_conv(1),
    F.conv2d: make_conv(2),
    F.conv3d: make_conv(3),
    F.layer_norm: layer_norm,
    F.group_norm: group_norm,
    F.batch_norm: batch_norm,
    F.rms_norm: rms_norm,
    F.embedding: embedding,
    F.scaled_dot_product_attention: attention,
    torch.Tensor.__getitem__: getitem,
    linear_cross_entropy: head,
}
"""Functions with a rule; a rule returns ``NotImplemented`` for a call that it does not handle
(weights only, for example).
"""


def _named(*names: str) -> set[Callable[..., Any]]:
    return {
        getattr(owner, name)
        for owner in (torch, torch.Tensor)
        for name in names
        if hasattr(owner, name)
    }


ELEMENTWISE = _named(
    "add",
    "add_",
    "__radd__",
    "mul",
    "mul_",
    "__rmul__",
    "sub",
    "sub_",
    "__rsub__",
    "rsub",
    "div",
    "div_",
    "true_divide",
    "__rtruediv__",
    "where",
    "addcmul",
    "lerp",
    "maximum",
    "minimum",
    "pow",
    "multiply",
    "subtract",
    "divide",
)
"""Functions that broadcast their arguments and act elementwise."""


EXPANDING = _named("expand", "expand_as", "broadcast_to", "repeat")
"""Functions that repeat a tensor along new or length-1 dimensions."""


CHECKPOINTED = (
    "clip: the model checkpoints activations or hooks saved tensors; expected neither: all "
    "activations are needed until the norms are known, so it would save nothing. Switch it off "
    "and use a smaller physical batch, which does not change the result."
)


def _refuse_hooks() -> None:
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        raise PrivacyError(CHECKPOINTED)


def refuse_backward_hooks(model: nn.Module) -> None:
    """Raise PrivacyError for the hooks of a model's layers that run in the backward pass."""
    everywhere = vars(nn.modules.module)
    for name, layer in model.named_modules():
        for kind in ("_backward_hooks", "_backward_pre_hooks"):
            for hook in [*vars(layer)[kind].values(), *everywhere[f"_global{kind}"].values()]:
                raise _hooked(f"layer {name!r} ({type(layer).__name__})", hook)


_PROPERTIES = vars(torch._C.TensorBase)
_NODE, _HOOKS = _PROPERTIES["grad_fn"].__get__, _PROPERTIES["_backward_hooks"].__set__
"""What gives access to the hooks of a node of the graph."""


def refuse_tensor_hook(function: Any, args: Any) -> None:
    """Raise PrivacyError for a call that hooks the gradient of a tensor, or could."""
    if function is Tensor.register_hook:
        raise _hooked("a tensor of the forward pass", args[1])
    if function == _HOOKS or (function == _NODE and not args[0].is_leaf):
        raise PrivacyError(
            "separability: the loss or the model takes grad_fn or sets backward hooks of a tensor; "
            "expected neither, since a hook there sees the gradients of all records together. "
            "Ask for requires_grad, and scale values in the forward pass."
        )


def _hooked(where: str, hook: Any) -> PrivacyError:
    name = getattr(hook, "__qualname__", type(hook).__name__)
    return PrivacyError(
        f"separability: {where} has the backward hook {name}; expected none: it sees the gradients "
        "of all records together and may mix them, as g / g.norm() does. Remove it, and scale "
        "values in the forward pass."
    )


class RefuseTensorHooks(TorchFunctionMode):
    """Runs code as it is, without hooks on gradients."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        refuse_tensor_hook(func, args)
        return func(*args, **(kwargs or {}))


class GraphChanged(Exception):
    """The pass made another call than when its batch dimensions were found."""


class RouteForgotten(Exception):
    """A pass did otherwise than its route: what was checked before is to be checked again."""


class _Identity(torch.autograd.Function):
    """Returns the output unchanged, and passes its gradient to the sink during the backward
    pass.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, output: Tensor, saved: tuple[Tensor | None, ...], sink: Any
    ) -> Tensor:
        ctx.save_for_backward(*saved)
        ctx.sink = sink
        return output.detach()  # no view: the model may change it in place

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        ctx.sink(*ctx.saved_tensors, g)
        return None, g if ctx.needs_input_grad[1] else None, None, None


@dataclass(eq=False)
class Tap:
    """An output with zeros added to obtain its gradient: ``_Identity`` in a form that can be
    compiled.
    """

    shape: torch.Size
    dtype: torch.dtype
    saved: tuple[Tensor | None, ...]
    sink: Callable[..., None] = field(repr=False)


class InterceptedPass(TorchFunctionMode):
    """One forward pass over ``num_records`` records; see ``rule.Pass`` for what rules use of it."""

    def __init__(
        self,
        params: dict[str, Tensor],
        calls: tuple[Call, ...],
        num_records: int,
        slow: dict[str, str],
        batch: Any = (),
    ) -> None:
        super().__init__()
        self.num_records, self.sources = num_records, Sources(batch)
        device = next(iter(params.values())).device
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self._calls, self._at = calls, 0
        self._known: dict[int, tuple[Tensor, frozenset[str]]] = {
            id(p): (p, frozenset([name])) for name, p in params.items() if name not in slow
        }
        self._slots: dict[int, Slot] = {}
        self._batch_dims: dict[int, BatchDim | None] = {}
        self._output: BatchDim | None = None
        self._lowered: dict[int, tuple[weakref.ref[Tensor], Tensor]] = {}
        self.low: torch.dtype | None = None
        """Half precision that autocast chose, also one that the model switched on itself."""
        self.taps: list[Tap] = []
        self._block_nodes: list[Any] = []
        """Of the backward passes of compiled blocks."""
        self.traced = False
        self.zeros: list[Tensor] | None = None
        """In a traced pass, the zeros that ``tap`` adds, in the order of the calls."""
        self.run_block: Callable[..., Any] | None = None
        """Runs a block as a compiled program: (pass, the block's name, its forward method,
        *arguments) -> (number of calls that it replaces, output, sources of its tensors within the
        block), or None.
        """

    @property
    def slots(self) -> list[Slot]:
        return list(self._slots.values())

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        refuse_tensor_hook(func, args)
        if func is block_call and self.run_block is not None and torch.is_grad_enabled():
            done = self.run_block(self, *args, **kwargs)
            if done is not None:
                num_calls, output, inner = done
                block_args = tensors_in(args[2:], kwargs)
                made = tensors_in((output,), {})
                self.sources.note_block(block_args, made, inner, self._at)
                self._block_nodes += [t.grad_fn for t in made]
                self._at += num_calls
                return output
        if func in OPENED:
            with self:
                return OPENED[func](*args, **kwargs)
        given = tensors_in(args, kwargs)
        sources = self.sources.of(given)
        self.check_backward(given)
        known = [t for t in given if id(t) in self._known] if torch.is_grad_enabled() else []
        out = self._use(func, args, kwargs, known) if known else func(*args, **kwargs)
        made = tensors_in((out,), {})
        if counts(func, made):
            call = self._calls[self._at] if self._at < len(self._calls) else None
            # The arguments of a traced block come from outside of the trace.
            found = call.sources if call is not None and self.traced else sources
            if call is None or not call.fits(func, args, kwargs, found):
                raise GraphChanged(func.__name__)
            self.sources.note(func, given, made, self._at)
            self._at += 1
        return out

    def check_backward(self, tensors: list[Tensor]) -> None:
        """Raise NoRule for the weights used so far if the gradient of one of the tensors comes from
        a backward pass of the user's own: it sees the gradients of all records together, and only
        ``vmap`` gives those of each record alone.
        """
        if not self._slots:
            return
        for tensor in tensors:
            node = tensor.grad_fn
            if (
                isinstance(node, BackwardCFunction)
                and node not in self._block_nodes
                and not node._forward_cls.__module__.startswith("dpvision.")
            ):
                weights = [slot.weight for slot in self.slots]
                raise NoRule(weights, "before a backward pass of your own")

    def _use(self, func: Any, args: Any, kwargs: Any, known: list[Tensor]) -> Any:
        """Make a call that has parameters among its arguments."""
        _refuse_hooks()
        if func in RULES or func in ELEMENTWISE or func in EXPANDING:
            self._enter(func, args, kwargs)
            if func in RULES:
                out = RULES[func](self, *args, **kwargs)
            elif func in ELEMENTWISE:
                out = elementwise(self, func, args, kwargs)
            else:
                out = expand(self, func, args, kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        made = [t for t in tensors_in((out,), {}) if t.requires_grad]
        if func is torch.Tensor.__setitem__:
            raise NoRule(known, "written into another tensor")
        if not made:
            return out  # a shape, a comparison, a detached copy
        self._enter(func, args, kwargs)
        if any(
            batch_dim is not None
            for batch_dim in (*self._calls[self._at].inputs, *self._calls[self._at].outputs)
        ):
            raise NoRule(known, f"used by {func.__name__}")
        if not all(t.dtype in UNIT for t in made):
            # The sum's gradient would be rounded to half precision on its way back to the
            # parameter.
            raise NoRule(known, f"computed in {str(made[0].dtype).removeprefix('torch.')}")
        names = frozenset().union(*(self._known[id(t)][1] for t in known))
        for tensor in made:
            self._known[id(tensor)] = tensor, names
        return out

    def _enter(self, func: Any, args: Any, kwargs: Any) -> None:
        """Look up the record dimensions of this call's tensors, and check them."""
        if self._at >= len(self._calls) or self._calls[self._at].function != func:
            raise GraphChanged(func.__name__)
        call, tensors = self._calls[self._at], tensors_in(args, kwargs)
        if len(call.inputs) != len(tensors):
            raise GraphChanged(func.__name__)
        for tensor, batch_dim in zip(tensors, call.inputs, strict=True):
            ok = (
                batch_dim is None
                or batch_dim == MIXED
                or tensor.shape[batch_dim.dim] == self.num_records * batch_dim.per_record
            )
            if not ok:
                raise GraphChanged(func.__name__)
        self._batch_dims = {
            id(tensor): batch_dim for tensor, batch_dim in zip(tensors, call.inputs, strict=True)
        }
        self._output = call.outputs[0]

    def slot(self, weight: Tensor | None, rule: str) -> Slot | None:
        if weight is None or id(weight) not in self._known:
            return None
        if id(weight) not in self._slots:
            self._slots[id(weight)] = Slot(*self._known[id(weight)])
        slot = self._slots[id(weight)]
        if rule:
            slot.rules.append(rule)
        return slot

    def tap(
        self, output: Tensor, saved: tuple[Tensor | None, ...], sink: Callable[..., None]
    ) -> Tensor:
        if not self.traced:
            return _Identity.apply(self.anchor, output, saved, sink)
        zeros = self.zeros[len(self.taps)] if self.zeros is not None else 0
        self.taps.append(Tap(output.shape, output.dtype, saved, sink))
        return output + zeros

    @property
    def position(self) -> int:
        """int: number of calls seen."""
        return self._at

    def coming(self) -> tuple[Call, ...]:
        """Return the remaining calls."""
        return self._calls[self._at :]

    def knows(self, parameter: Tensor) -> bool:
        """Return whether rules handle a parameter."""
        return id(parameter) in self._known

    def batch_dim(self, tensor: Tensor) -> BatchDim | None:
        return self._batch_dims[id(tensor)]

    def output_batch_dim(self) -> BatchDim | None:
        return self._output

    def lowered(self, input: Tensor, *weights: Tensor | None) -> tuple[Tensor, ...]:
        if autocast_dtype(input.device) is None:
            return (input, *weights)  # type: ignore[arg-type]
        dtype = lowered_dtype(input)
        self.low = dtype if dtype not in UNIT else self.low
        made = input
        if dtype != input.dtype:
            source, kept = self._lowered.get(id(input), (None, None))
            made = (
                kept
                if kept is not None and source is not None and source() is input
                else input.to(dtype)
            )
            self._lowered[id(input)] = weakref.ref(input), made
        return (made, *(None if w is None else w.to(dtype) for w in weights))  # type: ignore[arg-type]

    def names_of(self, tensors: list[Tensor]) -> set[str]:
        return {name for t in tensors if id(t) in self._known for name in self._known[id(t)][1]}
