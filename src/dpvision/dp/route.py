"""Routes: how every trained parameter goes through a model's forward pass, found once on two and
three records and then followed.

A parameter that is used in a way without a rule goes through ``per_record_gradients``, by name.
"""

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpvision.data.batch import Batch, mapped, rows_where, take
from dpvision.data.keys import StepKey
from dpvision.dp.batch_dims import (
    NUM_RECORDS,
    Call,
    Source,
    find_batch_dims,
    order_by_gradients,
    order_by_values,
)
from dpvision.dp.compiled import Pending
from dpvision.dp.interception import (
    CHECKPOINTED,
    GraphChanged,
    InterceptedPass,
    RefuseTensorHooks,
    refuse_backward_hooks,
)
from dpvision.dp.per_record import LossModule, copied_buffers, per_record_gradients, prefixed
from dpvision.dp.record_flow import Level, follow
from dpvision.dp.record_reads import RecordsRead
from dpvision.dp.rule import NoRule
from dpvision.errors import PrivacyError
from dpvision.precision import autocast_dtype

_LOG = logging.getLogger("dpvision")
_UNSEEN = "used where no rule sees it"
_MOVED = "rows may have another order than the records"


@dataclass(frozen=True)
class Route:
    """How a model's parameters go through the pass, for one loss and one shape of records."""

    calls: tuple[Call, ...]
    """Calls of the forward pass in their order."""
    uses: dict[str, list[str]]
    """Parameter -> its uses by rule, in the order of the calls."""
    slow: dict[str, str]
    """Parameter without a rule -> why; its gradients are computed one record at a time, in
    chunks.
    """
    losses: tuple[Source, ...] = ()
    """Where the losses come from."""


def _probes(batch: Batch) -> tuple[Batch, Batch, dict[int, Batch]]:
    """Batches for ``batch_dims``, of the first record and of one that differs from it in all
    that can differ.
    """
    device = batch.record_id_B.device
    few, many = (
        take(batch, torch.zeros(num, dtype=torch.long, device=device)) for num in NUM_RECORDS
    )
    if device.type == "meta":
        return few, many, {}
    last = take(batch, slice(-1, None))
    other = mapped(last, _differing)._replace(
        record_id_B=last.record_id_B + 1, valid_B=last.valid_B
    )
    row_B = torch.arange(NUM_RECORDS[1], device=device)
    return few, many, {row: rows_where(row_B == row, other, many) for row in (0, 1)}


def _differing(value: Tensor) -> Tensor:
    """Other numbers and another order of tokens; a label of one number becomes 0 or 1."""
    if value.is_floating_point():
        return value.roll(1, -1) * 0.75 + 0.125
    return value.roll(1, -1) if value.ndim > 1 else value.eq(0).to(value.dtype)


def make_route(loss_fn: Any, model: nn.Module, batch: Batch, key: StepKey) -> Route:
    """Find how every trained parameter goes through the pass: seven forward passes and one
    backward pass of two or three records, and at most one forward and two backward passes more.

    Works on the ``meta`` device, without memory for the weights.

    Args:
        batch: one record or more, of the shapes to come.

    Raises:
        PrivacyError: the forward pass depends on the number of records, reads them in Python, or
            computes a loss from several; it checkpoints activations; or it uses a parameter in a
            way for which there is neither a rule nor per-record gradients.
    """
    refuse_backward_hooks(model)
    params = trained(model)
    wrapped, buffers = LossModule(loss_fn, model), prefixed(copied_buffers(model))

    def run(batch: Batch) -> Tensor:
        return functional_call(wrapped, buffers, (batch, key))

    def make_losses() -> Callable[[Batch], Tensor]:
        weights = prefixed(
            {
                **copied_buffers(model),
                **{name: _without_zeros(p).requires_grad_() for name, p in params.items()},
            }
        )
        return lambda batch: functional_call(wrapped, weights, (batch, key))

    few, many, replaced = _probes(batch)
    with torch.no_grad(), RefuseTensorHooks():
        calls, moved = _followed(run, few, many)
        if replaced and isinstance(calls, list):
            calls = order_by_values(run, many, replaced, calls)
        if isinstance(calls, str):
            raise PrivacyError(
                f"clip: the model cannot be followed: {calls}; expected the same for any batch. "
                "Use method='vmap'."
            )
        if replaced:
            calls = order_by_gradients(make_losses, many, calls)
    slow = dict.fromkeys(params, _MOVED) if moved else {}
    while True:
        record = InterceptedPass(params, tuple(calls), NUM_RECORDS[1], slow, many)
        try:
            with record, torch.enable_grad():
                losses_B = run(many)
            record.check_backward([losses_B])
        except NoRule as error:
            names = record.names_of(error.tensors)
            assert names, "a rule gave up on tensors that are no parameters"
            slow |= {name: error.reason for name in names}
            continue
        except GraphChanged as error:
            raise PrivacyError(
                f"clip: the forward pass came to {error} with gradients, and did otherwise "
                "without; expected the same calls. Leave out what asks for requires_grad or "
                "torch.is_grad_enabled()."
            ) from None
        leaked = backward(params, slow, record, [], losses_B, 1.0)
        if leaked:
            slow |= dict.fromkeys(leaked, _UNSEEN)
            continue
        _check_slow(loss_fn, model, params, slow, few, key)
        uses: dict[str, list[str]] = {name: [] for name in params}
        for slot in record.slots:
            for name in sorted(slot.names):
                uses[name] += slot.rules
        return Route(tuple(calls), uses, slow, record.sources.of([losses_B]))


def _followed(
    run: Callable[[Any], Tensor], few: Batch, many: Batch
) -> tuple[list[Call] | str, bool]:
    """The calls of the pass (``find_batch_dims``), and whether rows may have another order than the
    batch on their way to the losses.

    Raises:
        PrivacyError: several records may decide a loss.
    """
    try:
        calls = find_batch_dims(run, few, many)
        if isinstance(calls, str):
            return calls, False
        level = follow(run, many, calls)
    except RecordsRead as error:
        raise PrivacyError(
            f"separability: the loss or the model reads records in Python ({error}, as in `if`, "
            "`.item()` or `.tolist()`), so that one record may decide what others give; expected "
            "operations on tensors alone. Use torch.where on each record's own values."
        ) from None
    except (PrivacyError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise PrivacyError(
            "clip: the model cannot be followed: a call in it raises "
            f"{type(error).__name__} ({(str(error).splitlines() or [''])[0]}); expected calls of "
            "PyTorch on tensors, which can be seen. Use method='vmap'."
        ) from None
    if level == Level.JOINED:
        raise PrivacyError(
            "separability: the loss or the model mixes records: the losses depend on a value that "
            "is computed from several (as x.max() or (label_B == 1).any()); expected a function of "
            "each record alone. Compute it from each record's own values: x.flatten(1).amax(1)."
        )
    return calls, level == Level.MOVED


def _without_zeros(param: Tensor) -> Tensor:
    """Copy a parameter, with small numbers if it is all zero: behind a zero head or scale, all
    gradients vanish.
    """
    value = param.detach().clone()
    if not value.any():
        numbers = torch.arange(value.numel(), dtype=value.dtype, device=value.device)
        value += 0.02 * (1.7 * numbers + 0.3).cos().view_as(value)
    return value


def _check_slow(
    loss_fn: Any,
    model: nn.Module,
    params: dict[str, Tensor],
    slow: dict[str, str],
    batch: Batch,
    key: StepKey,
) -> None:
    """Warn of parameters without a rule; refuse those without per-record gradients too."""
    if not slow:
        return
    told = ", ".join(f"{name} ({reason})" for name, reason in slow.items())
    if set(slow.values()) == {_MOVED}:
        told = f"all {len(slow)} parameters ({_MOVED})"
    try:
        with torch.no_grad():
            per_record_gradients(
                loss_fn, model, {name: params[name].detach() for name in slow}, batch, key
            )
    except PrivacyError as error:
        if not isinstance(error.__cause__, RuntimeError):
            raise
        raise PrivacyError(
            f"clip: no exact way to the per-record gradients of {told}: torch.func.vmap says "
            f"{str(error.__cause__).splitlines()[0]!r}. Freeze these parameters "
            "(requires_grad_(False)), or write the layer with operations that have a rule "
            "(docs/clipping.md)."
        ) from None
    _LOG.warning(
        "clipping: no rule for %s; gradients one record at a time, in chunks: exact, slower", told
    )


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The trained parameters by name, a tied one once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


_ROUTES: "weakref.WeakKeyDictionary[nn.Module, dict[Any, Route]]" = weakref.WeakKeyDictionary()


def route_key(loss_fn: Any, model: nn.Module, batch: Batch) -> Any:
    """What a route depends on: loss, shapes of a record, precision, kinds and modes of the modules,
    and which parameters are trained.
    """
    shapes = tuple(
        None if value is None else (value.shape[1:], value.dtype, value.device) for value in batch
    )
    autocast = autocast_dtype(batch.record_id_B.device)
    modes = tuple((type(module), module.training) for module in model.modules())
    weights = tuple((id(p), p.requires_grad, p.dtype, p.device) for p in model.parameters())
    # Not the function itself, which may hold the model: what its captured values change in the
    # calls is seen in the pass.
    function = loss_fn.func if isinstance(loss_fn, partial) else loss_fn
    return getattr(function, "__code__", type(function)), shapes, autocast, modes, weights


def route_of(loss_fn: Any, model: nn.Module, batch: Batch, key: StepKey) -> Route:
    """The route of this loss, model and shape of records; found once and remembered as long as the
    model lives.
    """
    routes = _ROUTES.setdefault(model, {})
    name = route_key(loss_fn, model, batch)
    if name not in routes:
        routes[name] = make_route(loss_fn, model, batch, key)
    return routes[name]


def share_route(
    loss_fn: Any, model: nn.Module, batch: Batch, key: StepKey, copy: nn.Module, its_batch: Batch
) -> None:
    """Let a copy of a model, in another precision, follow the model's route: its passes are then
    refused if they make other calls.
    """
    route = route_of(loss_fn, model, batch, key)
    _ROUTES.setdefault(copy, {})[route_key(loss_fn, copy, its_batch)] = route


def forget(loss_fn: Any, model: nn.Module, batch: Batch) -> None:
    """Forget a route, so that ``route_of`` finds it again."""
    del _ROUTES[model][route_key(loss_fn, model, batch)]


def add_slow(
    route: Route, leaked: list[str], loss_fn: Any, model: nn.Module, batch: Batch, key: StepKey
) -> None:
    """Remember that the parameters ``leaked`` have no rule in this route. Raises PrivacyError as
    ``make_route``.
    """
    slow = {**route.slow, **dict.fromkeys(leaked, _UNSEEN)}
    _check_slow(loss_fn, model, trained(model), slow, batch, key)
    _ROUTES[model][route_key(loss_fn, model, batch)] = replace(route, slow=slow)


def backward(
    params: dict[str, Tensor],
    slow: dict[str, str],
    run: InterceptedPass,
    pending: list[Pending],
    losses_B: Tensor,
    loss_scale: float,
) -> list[str]:
    """Fill the slots; returns the parameters that autograd reached past the rules."""
    for slot in run.slots:
        slot.open = True
    if not losses_B.requires_grad:
        return []
    fast = [name for name in params if name not in slow]
    inputs = [
        run.anchor,
        *(params[name] for name in fast),
        *(zeros for block in pending for zeros in block.zeros),
    ]
    try:
        with torch.enable_grad():
            grads = torch.autograd.grad(losses_B.sum() * loss_scale, inputs, allow_unused=True)
    except RuntimeError as error:
        if "checkpoint" not in str(error).lower():
            raise
        raise PrivacyError(CHECKPOINTED) from None
    at = 1 + len(fast)
    for block in pending:
        block.settle(grads[at : at + len(block.zeros)])
        at += len(block.zeros)
    return [name for name, grad in zip(fast, grads[1:], strict=False) if grad is not None]
