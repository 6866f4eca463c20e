"""Per-record gradients by ``vmap(grad)``: each record in isolation (Abadi et al. 2016).

Holds records x parameters numbers, so it runs in chunks. It is the oracle of ``one_pass``, and
computes gradients of parameters without a rule there.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch.autograd_function import custom_function_call
from torch._ops import OperatorBase, OpOverloadPacket
from torch.func import functional_call, grad_and_value, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _len_torch_dispatch_stack,
    _pop_torch_dispatch_stack,
    _push_on_torch_dispatch_stack,
)
from torch.utils._pytree import tree_map_only

from dpvision.data.batch import Batch, mapped
from dpvision.data.keys import StepKey
from dpvision.dp.batch_dims import tensors_in
from dpvision.errors import PrivacyError

LossFn = Callable[[nn.Module, Batch, StepKey], Tensor]
"""(model, batch, key) -> losses_B: one loss per record, each a function of that record alone
(``separable.check_separable``).
"""

_CHUNK_BYTES = 256 * 2**20
"""Memory for one chunk's per-record gradients. On a CPU larger chunks are slower: each tensor then
needs new pages.
"""
_MAX_CHUNK = 256
_TEXTS = frozenset(("__repr__", "__str__", "__format__"))
"""Functions that ``vmap`` lets read numbers; it refuses others itself."""


class LossModule(nn.Module):
    """A loss function as a module, so that ``functional_call`` can replace the model's tensors."""

    def __init__(self, loss_fn: Any, model: nn.Module) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self.model = model

    def forward(self, batch: Batch, key: StepKey) -> Tensor:
        return checked_losses(self.loss_fn, self.model, batch, key)


class _Unseen(TorchDispatchMode):
    """Notes operators that no call of PyTorch from Python ran: those of TorchScript and of compiled
    extensions. Views are none: the C++ code of ``Function.apply`` and of ``vmap`` makes some.
    """

    name = ""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled under this mode: PyTorch need not import its compiler (4 s)."""
        return False

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = [value.alias_info for value in func._schema.returns]
        if not made or any(alias is None or alias.is_write for alias in made):
            self.name = self.name or func._schema.name
        return func(*args, **(kwargs or {}))


_CUTS = frozenset(("resize", "resize_", "resize_as_", "resize_as_sparse_"))


_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_GRAD = vars(torch._C.TensorBase)["grad"].__get__


class _Seen(TorchFunctionMode):
    """Refuses calls that hide what they do to records, and remembers that one raised."""

    raised: str | None = None

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "a call")
        # Operators of this call are not unseen. Without a mode, one of them makes the call.
        mode = _pop_torch_dispatch_stack(None) if _len_torch_dispatch_stack() else None
        try:
            if name in _TEXTS and any(map(is_functorch_wrapped_tensor, tensors_in(args, {}))):
                raise RuntimeError("vmap: a call reads the records in Python")  # as .item()
            _refuse_hidden(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self.raised = self.raised or f"{name} raised {type(error).__name__}"
            raise
        finally:
            if mode is not None:
                _push_on_torch_dispatch_stack(mode)


class _Widened(TorchFunctionMode):
    """Makes a call again with all numbers in float64 where it refuses float32 beside it: the checks
    compute a copy of the model in float64, and a loss may hold class weights, a kernel or a teacher
    in float32.
    """

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            found = {t.dtype for t in tensors_in(args, kwargs)}
            if not found >= {torch.float32, torch.float64}:
                raise
        args, kwargs = tree_map_only(Tensor, _widened, (args, kwargs))
        return func(*args, **kwargs)


def _widened(value: Tensor) -> Tensor:
    return value.double() if value.dtype == torch.float32 else value


def _refuse_hidden(func: Any, args: Any, kwargs: Any) -> None:
    """Raise PrivacyError for an operator that is not PyTorch's own, or that runs Python functions:
    what its code does to the records, and what ``vmap`` makes of it, is not seen; for
    ``resize_``, by which ``vmap`` cuts the memory of all records; and for gradients.
    """
    if getattr(func, "__name__", "").partition(".")[0] in _CUTS:
        raise PrivacyError(
            f"separability: the loss or the model calls {func.__name__}, which cuts the memory of "
            "all records; expected a function of each. Use x[:, :n], or reshape."
        )
    if func in _GRADIENTS or (func == _GRAD and args[0].grad is not None):
        raise PrivacyError(
            "separability: the loss or the model takes a gradient itself (autograd.grad, backward "
            "or .grad, as adversarial training and gradient penalties do); expected none: it sees "
            "all records of a pass together. Leave it out."
        )
    if not isinstance(func, OperatorBase | OpOverloadPacket):
        return
    if func is custom_function_call and args[0].generate_vmap_rule:
        return  # its own operators run under ``vmap``
    name = getattr(func, "_qualified_op_name", None) or func.name()
    if not name.startswith("aten::") and any(True for _ in tensors_in(args, kwargs)):
        raise _hidden(name)


def _hidden(name: str) -> PrivacyError:
    return PrivacyError(
        f"separability: the loss or the model runs {name!r}, whose code is not seen (TorchScript, "
        "an extension, an operator that is not PyTorch's own, or an autograd.Function under vmap); "
        "expected PyTorch's own functions, called from Python. Take out torch.jit.script, write an "
        "operator with torch functions, or set generate_vmap_rule = True in an autograd.Function."
    )


def checked_losses(loss_fn: Any, model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    """Return the loss of every record, (B,).

    Raises:
        PrivacyError: the losses have another shape; a call raised and the exception was caught; or
            the batch was changed: passes that read it again would clip by the norms of other
            gradients than those that they add up.
    """
    before, unseen = versions(batch), _Unseen()
    wide = any(p.dtype == torch.float64 for p in model.parameters())
    with unseen, _Widened() if wide else contextlib.nullcontext(), _Seen() as seen:
        losses_B = loss_fn(model, batch, key)
    if unseen.name:
        raise _hidden(unseen.name)
    if seen.raised is not None:
        raise PrivacyError(
            f"separability: {seen.raised}, and the loss or the model caught the exception; "
            "expected none to be caught, since one record's numbers may raise it and so decide "
            "what others give. Let it pass, or test the shapes before the call."
        )
    got, wanted = tuple(getattr(losses_B, "shape", ())), tuple(batch.record_id_B.shape)
    if got != wanted:
        raise PrivacyError(
            f"clip: losses of shape {got}; expected one per record, {wanted}. Do not average "
            "over the batch: pass reduction='none' to a loss of torch."
        )
    require_unchanged(batch, before)
    return losses_B


def require_unchanged(batch: Batch, before: list[int]) -> None:
    """Raise PrivacyError if a tensor of the batch was written to since ``versions`` gave
    ``before``.
    """
    if versions(batch) != before:
        raise PrivacyError(
            "clip: the loss function or the model changes the batch in place; expected it "
            "unchanged, since it is read more than once. Write x = (x - mean) / std in place of "
            "x.sub_(mean).div_(std), or clone x first."
        )


def versions(values: Iterable[Tensor | None]) -> list[int]:
    """How often each tensor was written to."""
    return [0 if value is None or value.is_inference() else value._version for value in values]


def per_record_gradients(
    loss_fn: Any,
    model: nn.Module,
    params: dict[str, Tensor],
    batch: Batch,
    key: StepKey,
    loss_scale: float = 1.0,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the gradient of each record's loss, computed in isolation from the other records.

    Args:
        params: the trained parameters by name, detached; all others are constants.
        loss_scale: factor of the losses in the backward pass; the gradients returned are scaled by
            it.

    Returns:
        ({name: (B, *parameter shape)}, losses_B).
    """
    wrapped = LossModule(loss_fn, model)
    others = {name: p.detach() for name, p in model.named_parameters() if name not in params}
    fixed = {**copied_buffers(model), **others}

    def loss_of_one(params: dict[str, Tensor], *values: Tensor) -> tuple[Tensor, Tensor]:
        own = iter(values)
        one = mapped(batch, lambda _: next(own)[None])
        loss = functional_call(wrapped, prefixed({**fixed, **params}), (one, key)).sum()
        return loss * loss_scale, loss

    values, before = [value for value in batch if value is not None], versions(batch)
    try:
        grads, (_, losses_B) = vmap(
            grad_and_value(loss_of_one, has_aux=True), in_dims=(None, *[0] * len(values))
        )(params, *values)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise PrivacyError(
            "clip: the loss of one record alone cannot be computed: torch.func.vmap says "
            f"{(str(error).splitlines() or [''])[0]!r}. Freeze the parameters before that call "
            "(requires_grad_(False)), or write it with operations that have a rule "
            "(docs/clipping.md)."
        ) from error
    require_unchanged(batch, before)
    return grads, losses_B


def prefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename tensors as in a ``LossModule``."""
    return {f"model.{name}": value for name, value in tensors.items()}


def copied_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the model's buffers by name, so that writes of a pass are discarded."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def default_chunk(params: dict[str, Tensor]) -> int:
    """Number of records whose gradients for ``params`` fit 256 MiB, at most 256."""
    record_bytes = sum(p.numel() * p.element_size() for p in params.values())
    return max(1, min(_MAX_CHUNK, _CHUNK_BYTES // max(1, record_bytes)))


def even_chunks(num_records: int, chunk_size: int) -> list[slice]:
    """Slices of even size: a small last chunk would cost nearly as much as a full one."""
    count = -(-num_records // chunk_size)
    return [slice(i * num_records // count, (i + 1) * num_records // count) for i in range(count)]
