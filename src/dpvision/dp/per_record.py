"""Per-record gradients by ``vmap(grad)``: each record in isolation (Abadi et al. 2016).

Holds records x parameters numbers, so it runs in chunks. It is the oracle of ``one_pass``, and
computes gradients of parameters without a rule there.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.func import functional_call, grad_and_value, vmap
from torch.overrides import TorchFunctionMode

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


class _Raised(TorchFunctionMode):
    """Remembers that a call raised, and lets none read numbers under ``vmap``."""

    call: str | None = None

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "a call")
        try:
            if name in _TEXTS and any(map(is_functorch_wrapped_tensor, tensors_in(args, {}))):
                raise RuntimeError("vmap: a call reads the records in Python")  # as .item()
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self.call = self.call or f"{name} raised {type(error).__name__}"
            raise


def checked_losses(loss_fn: Any, model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    """Return the loss of every record, (B,).

    Raises:
        PrivacyError: the losses have another shape; a call raised and the exception was caught; or
            the batch was changed: passes that read it again would clip by the norms of other
            gradients than those that they add up.
    """
    before, raised = versions(batch), _Raised()
    with raised:
        losses_B = loss_fn(model, batch, key)
    if raised.call is not None:
        raise PrivacyError(
            f"separability: {raised.call}, and the loss or the model caught the exception; "
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


def versions(batch: Batch) -> list[int]:
    """How often each tensor of the batch was written to."""
    return [0 if value is None or value.is_inference() else value._version for value in batch]


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
    grads, (_, losses_B) = vmap(
        grad_and_value(loss_of_one, has_aux=True), in_dims=(None, *[0] * len(values))
    )(params, *values)
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
