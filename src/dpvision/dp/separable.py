"""Whether a record's gradient is a function of that record alone: measured on three records, on
every model before it sees private data.

Modules that are known to mix records are refused first. Then measurements also find hand-written
batch statistics and losses that compare records. Per-record gradients by ``vmap`` isolate the
records by construction, which would silently redefine a loss that mixes them, so the *batched* loss
is measured.

Legend: B records.
"""

import contextlib
import copy
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from dpvision.data.batch import Batch, mapped, rows_where, take
from dpvision.data.keys import StepKey
from dpvision.dp.fingerprint import Fingerprint, fingerprint
from dpvision.dp.held_values import Undescribed, held
from dpvision.dp.interception import CHECKPOINTED, RefuseTensorHooks, refuse_backward_hooks
from dpvision.dp.per_record import LossFn, checked_losses
from dpvision.dp.trial import differs
from dpvision.errors import PrivacyError

_LOG = logging.getLogger("dpvision")
MAX_RECORDS = 3
_OTHER_STEPS = (0, 1, 2**20, 2**20 + 1)
_STEPS_OF_LOSSES = (2, 3, 10, 100, 997, 1000, 10_007)
"""Other steps, at which losses are compared in place of gradients."""
_HOSTILE = (0.0, 255.0, 1e30, torch.inf, torch.nan)
"""Numbers that random records do not have."""
_MOST_CLASSES = 10
"""Labels that are tried, two at a time."""
_MANY = 8
"""Checks of one model after which their cost is mentioned."""
_ROW_TOLERANCE = 1e-6
"""Relative change allowed when a record changes its row, where kernels round differently. A mask
keyed by row changes far more.
"""
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Exactly these classes, whose forward pass is known."""
_CHECKED: "weakref.WeakKeyDictionary[nn.Module, set[Any]]" = weakref.WeakKeyDictionary()


def require_separable(
    loss_fn: LossFn, model: nn.Module, batch: Batch, key: StepKey, public: Batch | None = None
) -> bool:
    """Run ``check_separable`` on three random records, once for each model and loss.

    ``clipped_sum`` calls it. The records have the shapes of ``batch``.

    The records are random because ``batch`` may be private: whether the check passes must not
    depend on it. Zero parameters are perturbed. It is repeated for other layers, for other numbers
    that the loss holds, captures or reads, and each time if one of them cannot be described
    (``held_values``). A term that is absent until a later step is looked for at ``_OTHER_STEPS``.

    Args:
        public: public records to check in place of random ones.

    Returns:
        Whether this model was checked before with another loss or other layers: other checks that
        are remembered for it must be repeated.

    Raises:
        PrivacyError: as ``check_separable``; or the model or loss raises on random records.
    """
    passed, case = _CHECKED.setdefault(model, set()), _case(loss_fn, model, batch)
    if case in passed:
        return False
    try:
        with contextlib.ExitStack() as stack:
            for device in {"cpu", batch.record_id_B.device.type}:
                stack.enter_context(torch.autocast(device, enabled=False))
            stack.enter_context(torch.enable_grad())
            records = random_records(batch, MAX_RECORDS) if public is None else public
            check_separable(loss_fn, perturb_zeros(model), records, key, _OTHER_STEPS)
    except PrivacyError:
        raise
    except Exception as error:
        if "checkpoint" in str(error).lower():
            raise PrivacyError(CHECKPOINTED) from None
        if "deepcopy" in str(error):
            raise PrivacyError(
                "separability: the model cannot be copied: it keeps a tensor that was computed "
                "from its parameters, as torch.nn.utils.prune and the older weight_norm make it; "
                "expected parameters and buffers only. Use torch.nn.utils.parametrizations, or "
                "prune.remove."
            ) from None
        raise PrivacyError(
            "separability: the model or loss raises on random records, in float64 on the CPU "
            f"({type(error).__name__}: {(str(error).splitlines() or [''])[0]}); expected losses "
            "of the model that the loss is given. Run check_separable on public records once, "
            "then pass clipped_sum(check_separability=False); in private_loop pass public_batch=."
        ) from error
    # What cannot be described is equal to nothing, and only counted.
    passed.add(len(passed) if isinstance(case, Undescribed) else case)
    if len(passed) == _MANY:
        _LOG.warning(
            "separability: checked %d times for one model, since %s; a loss whose values change "
            "with every step should take them from key.step, or be checked once and given "
            "clipped_sum(check_separability=False)",
            _MANY,
            f"the loss or a layer holds or makes {case.what}, in which changes cannot be seen"
            if isinstance(case, Undescribed)
            else "its layers or the values of its loss changed",
        )
    return len(passed) > 1


def forget_checks(model: nn.Module) -> None:
    """Forget what was checked, so that it is checked again."""
    _CHECKED.pop(model, None)


def _case(loss_fn: LossFn, model: nn.Module, batch: Batch) -> Any:
    """What the check is remembered for: the loss, the layers and all that they hold, the shapes of
    records, which parameters are trained.
    """
    shapes = tuple(None if value is None else (value.shape[1:], value.dtype) for value in batch)
    weights = tuple((id(p), p.requires_grad) for p in model.parameters())
    values = held(loss_fn, model)
    return values if isinstance(values, Undescribed) else (values, shapes, weights)


def random_records(batch: Batch, num: int) -> Batch:
    """Make ``num`` valid records of the shapes and types of ``batch``, on the CPU: normal numbers;
    labels, and other integers, are 0 or 1, which any model knows. The labels of the first two
    differ.
    """
    generator = torch.Generator().manual_seed(0)

    def made(value: Tensor) -> Tensor:
        shape = (num, *value.shape[1:])
        if value.is_floating_point():
            return torch.randn(shape, generator=generator).to(value.dtype)
        made = torch.randint(0, 2, shape, generator=generator)
        if made.ndim == 1:
            made[1:2] = 1 - made[:1]
        return made.to(value.dtype)

    return mapped(batch, made)._replace(
        record_id_B=torch.arange(1, num + 1), valid_B=torch.ones(num, dtype=torch.bool)
    )


def perturb_zeros(model: nn.Module) -> nn.Module:
    """Copy a model to the CPU, with small values in parameters that are all zero: behind a zero
    head all gradients vanish, and any sum is exact.
    """
    # Parameters and buffers as already copied, so that they take no memory on a GPU.
    copies: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("cpu", copy=True), requires_grad=p.requires_grad)
        for p in model.parameters()
    }
    copies |= {id(value): value.to("cpu", copy=True) for value in model.buffers()}
    copied = copy.deepcopy(model, copies)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in copied.parameters():
            if not parameter.any():
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))
    return copied


def check_separable(
    loss_fn: LossFn,
    model: nn.Module,
    batch: Batch,
    key: StepKey,
    other_steps: Sequence[int] = (),
    *,
    weights_by_biases: bool = False,
) -> None:
    """Refuse a model and loss in which one record can change another record's gradient.

    In float64 (``model_in_float64``), at fixed shapes: all other records are perturbed, then
    removed (``valid_B`` False); the gradient of record i's loss must not change by a bit, for the
    first and the last i. Then the rows are reversed: it may change by rounding only. Then the
    others hold numbers and labels that no image of the batch has (``_hostile``). Gradients are
    compared by their fingerprints, and none is held.

    Args:
        batch: two or more valid public records in the run's shapes; the first three are used (a
            cost of seven backward passes, and one for each kind of hostile record).
        other_steps: steps at which the second record's gradient is compared too (two backward
            passes each); if any, its loss is compared at ``_STEPS_OF_LOSSES``, and the first
            record's gradient with that among twice as many records.
        weights_by_biases: leave out the gradients of ``seen_by_biases``, a third of the cost.

    Raises:
        PrivacyError: records are mixed; the message names the layer and the remedy.
    """
    refuse_backward_hooks(model)
    for name, module in model.named_modules():
        check_module(name, module)
    copied = model_in_float64(model)
    batch = examples(batch)
    left_out = seen_by_biases(copied) if weights_by_biases else set()
    params = [p for p in copied.parameters() if p.requires_grad and id(p) not in left_out]
    others = perturbed(batch), removed(batch)
    num = len(batch.record_id_B)
    probes = (0, num - 1)
    losses_B, reference = _gradients(loss_fn, copied, batch, key, probes, params)
    for i in probes:
        if not reference[i].is_finite:
            raise PrivacyError(
                "separability: a gradient of the example batch is not finite; expected numbers. "
                "Check the model and loss."
            )
        for changed in others:
            mixed = _with_row(changed, batch, i)
            moved = _gradients(loss_fn, copied, mixed, key, (i,), params)[1][i]
            if not moved.equals(reference[i]):
                raise PrivacyError(blame(loss_fn, copied, batch, mixed, key, i))
    turned = mapped(batch, lambda value: value.flip(0))
    moved = _gradients(loss_fn, copied, turned, key, (num - 1,), params)[1][num - 1]
    if not moved.distance(reference[0]) <= _ROW_TOLERANCE * reference[0].norm:
        raise PrivacyError(
            "separability: a record's gradient depends on its row in the batch; expected on the "
            "record, the weights and the key only. Key masks, augmentation and dropout by "
            "StepKey and record_id_B."
        )
    if other_steps:
        twice = take(batch, torch.arange(2 * num) % num)
        more = _gradients(loss_fn, copied, twice, key, (0,), params)[1][0]
        if not more.distance(reference[0]) <= _ROW_TOLERANCE * reference[0].norm:
            raise PrivacyError(
                f"separability: a record's gradient among {num} records differs from that among "
                f"{2 * num}; expected a function of the record alone. Remove what depends on the "
                "number of records, such as loss / len(loss): the plan divides by the expected "
                "batch size."
            )
    for step in other_steps:
        at = replace(key, step=step)
        mixed = _with_row(
            others[0], batch, 1
        )  # the second of three has records before it and after it
        first, second = (
            _gradients(loss_fn, copied, one, at, (1,), params)[1][1] for one in (mixed, batch)
        )
        if not (second.is_finite and first.equals(second)):
            raise PrivacyError(blame(loss_fn, copied, batch, mixed, at, 1))
    for step in _STEPS_OF_LOSSES if other_steps else ():
        at, mixed = replace(key, step=step), _with_row(others[0], batch, 1)
        if not torch.equal(
            _losses(loss_fn, copied, mixed, at)[1], _losses(loss_fn, copied, batch, at)[1]
        ):
            raise PrivacyError(blame(loss_fn, copied, batch, mixed, at, 1))
    _check_hostile(loss_fn, copied, batch, key, params, losses_B[0], reference[0])


def seen_by_biases(model: nn.Module) -> set[int]:
    """Ids of the weights of linear and convolutional layers that have a trained bias too: what
    reaches such a weight in the backward pass also reaches its bias, whose gradient is its sum.
    """
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    return {
        id(module.weight)
        for module in model.modules()
        if type(module) in _LAYERS
        and module.bias is not None
        and module.bias.requires_grad
        and owners[id(module.weight)] == 1
    }


def _check_hostile(
    loss_fn: LossFn,
    model: nn.Module,
    batch: Batch,
    key: StepKey,
    params: Sequence[Tensor],
    loss: Tensor,
    expected: Fingerprint,
) -> None:
    """Refuse if records that no random ones resemble change the first record's ``loss``, or its
    gradient ``expected``.

    Not compared: a gradient that is not finite (autograd gives the other rows the factor 0, and
    0 * inf is NaN), and what raises, as a label beyond the model's classes does.
    """
    for changed in _hostile(batch):
        mixed = _with_row(changed, batch, 0)
        try:
            # With autograd: without it PyTorch may take another kernel, whose last bits differ.
            with buffers_kept(model):
                own = checked_losses(loss_fn, model, mixed, key)[0]
                same = torch.equal(own, loss)
                if same:
                    same = fingerprint(own, params, require_finite=True).equals(expected)
        except PrivacyError:
            raise
        except Exception:  # NotFinite among them
            continue
        if not same:
            raise PrivacyError(blame(loss_fn, model, batch, mixed, key, 0))


def _hostile(batch: Batch) -> Iterator[Batch]:
    """Yield the batch with every image, and every other floating-point number, replaced: by each of
    ``_HOSTILE``, then multiplied by 255; then with other labels, the first record's among them.
    """
    for number in _HOSTILE:
        yield mapped(batch, partial(_filled, number=number))
    yield mapped(batch, lambda value: value * 255 if value.is_floating_point() else value)
    label_B = getattr(batch, "label_B", None)
    if label_B is not None and label_B.ndim == 1 and label_B.dtype != torch.bool:
        yield batch._replace(label_B=label_B[:1].expand_as(label_B))
        # Two classes at a time for two other records.
        step = min(2, len(label_B) - 1)
        for label in range(0, _MOST_CLASSES, step):
            others_B = label + torch.arange(len(label_B)) % step
            yield batch._replace(label_B=others_B.to(label_B.dtype))


def _filled(value: Tensor, number: float) -> Tensor:
    """Fill pixels of either kind with a number as far as they can hold it; labels and ids stay."""
    if value.dtype == torch.uint8 and value.ndim > 2:
        return torch.full_like(value, int(min(number, 255.0))) if number == number else value
    return torch.full_like(value, number) if value.is_floating_point() else value


@torch.no_grad()
def _losses(loss_fn: LossFn, model: nn.Module, batch: Batch, key: StepKey) -> Tensor:
    """Losses of a batch; restores the buffers."""
    with buffers_kept(model):
        return checked_losses(loss_fn, model, batch, key)


def check_module(name: str, module: nn.Module) -> None:
    """Raise PrivacyError for a layer that is known to mix records or to draw from the global random
    state.
    """
    kind = type(module).__name__
    if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
        raise PrivacyError(
            f"separability: layer {name!r} ({kind}) uses statistics of the batch; expected every "
            "record for itself. Replace it by GroupNorm or LayerNorm, or put it in eval mode "
            "with public running statistics."
        )
    # Stochastic depth is a class of each library's own.
    drops = isinstance(module, _DropoutNd) or kind.endswith(("DropPath", "StochasticDepth"))
    setting = "drop_prob" if hasattr(module, "drop_prob") else "p"
    if drops and module.training and (getattr(module, setting, None) or 0.0) > 0:
        raise PrivacyError(
            f"separability: layer {name!r} ({kind}) draws from the global random state; expected "
            f"draws keyed by record. Set {setting}=0, put it in eval mode, or, where the loss is "
            "given a key, draw the mask from StepKey and record_id_B."
        )


def examples(batch: Batch) -> Batch:
    rows = batch.valid_B.nonzero()[:MAX_RECORDS, 0]
    if len(rows) < 2:
        raise PrivacyError(
            f"separability: {len(rows)} valid records in the example batch; expected at least 2. "
            "Give a larger one."
        )
    return in_float64(mapped(take(batch, rows), Tensor.cpu))


def model_in_float64(model: nn.Module, device: str | torch.device = "cpu") -> nn.Module:
    """Return a float64 copy of a model on a device; the model itself if it is there in float64, so
    that checks one after another share a copy, and the route of its passes.
    """
    values = [*model.parameters(), *model.buffers()]
    found = torch.device(device)
    hooked = any(getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters())
    if (
        not hooked
        and all(v.dtype == torch.float64 for v in values if v.is_floating_point())
        and all(v.device == found for v in values)
    ):
        return model
    return copy.deepcopy(model).to(found).double()


def in_float64(batch: Batch) -> Batch:
    """Convert pixels and other floating-point numbers to float64."""
    return mapped(batch, lambda value: value.double() if value.is_floating_point() else value)


def perturbed(batch: Batch) -> Batch:
    """Replace every record by another: other pixels, other ids, and its neighbour's tokens and
    labels, or 0 and 1 for a label that is its neighbour's too. In a batch of a user's own form all
    numbers are the neighbour's, which are valid.
    """
    generator = torch.Generator().manual_seed(0)

    def other(value: Tensor) -> Tensor:
        if not (isinstance(batch, Batch) and value.is_floating_point()):
            rolled = value.roll(1, 0)
            if value.ndim > 1 or value.is_floating_point():
                return value.roll(1, -1) if torch.equal(rolled, value) else rolled
            return torch.where((rolled == value) & (value >= 0), (value == 0).to(value), rolled)
        return value + torch.randn(value.shape, generator=generator, dtype=value.dtype)

    return mapped(batch, other)._replace(
        record_id_B=batch.record_id_B + 10**6, valid_B=batch.valid_B
    )


def removed(batch: Batch) -> Batch:
    """Replace every record by padding."""
    return mapped(
        batch, lambda value: torch.zeros_like(value) if value.is_floating_point() else value
    )._replace(valid_B=torch.zeros_like(batch.valid_B))


def _with_row(changed: Batch, original: Batch, i: int) -> Batch:
    """Return ``changed`` with row i of ``original``."""
    row_B = torch.arange(len(original.record_id_B), device=original.record_id_B.device)
    return rows_where(row_B == i, original, changed)


def _gradients(
    loss_fn: LossFn,
    model: nn.Module,
    batch: Batch,
    key: StepKey,
    rows: tuple[int, ...],
    params: Sequence[Tensor],
) -> tuple[Tensor, dict[int, Fingerprint]]:
    """The losses, and the gradient of the loss of each of ``rows`` within the whole batch, by row;
    restores the buffers.
    """
    with buffers_kept(model):
        losses_B = checked_losses(loss_fn, model, batch, key)
        return losses_B.detach(), {i: fingerprint(losses_B[i], params) for i in rows}


def gradient_of_sum(
    loss_fn: LossFn, model: nn.Module, batch: Batch, key: StepKey, rows: tuple[int, ...]
) -> Fingerprint:
    """The gradient of the sum of the losses of ``rows`` within the whole batch; restores the
    buffers.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    with buffers_kept(model):
        losses_B = checked_losses(loss_fn, model, batch, key)
        return fingerprint(losses_B[list(rows)].sum(), params)


@contextlib.contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the buffers afterwards.

    Raises:
        PrivacyError: they changed. Passes of a private run discard that: it may hold records.
    """
    buffers = copy.deepcopy(dict(model.named_buffers()))
    changed = list[str]()
    try:
        yield
        changed = [n for n, b in model.named_buffers() if differs(b, buffers.get(n, b))]
    finally:
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers.get(name, buffer))
    if changed:
        raise PrivacyError(
            f"separability: the forward pass changes the buffer {changed[0]!r}; expected it to "
            "stay: a private run keeps buffers as they are, since they may hold numbers of "
            "records, so statistics, a codebook or the power iteration of spectral_norm would "
            "stand still. Put that layer in eval mode, or leave it out."
        )


def blame(
    loss_fn: LossFn, model: nn.Module, batch: Batch, mixed: Batch, key: StepKey, i: int
) -> str:
    """Explain why record i's gradient changed: random numbers without a key, the first layer that
    mixes records, or the loss.
    """
    first, again = (
        _row_outputs(loss_fn, model, batch, key, i),
        _row_outputs(loss_fn, model, batch, key, i),
    )
    params = [p for p in model.parameters() if p.requires_grad]
    one, other = (_gradients(loss_fn, model, batch, key, (i,), params)[1][i] for _ in range(2))
    if not (_same(first, again) and one.is_finite and one.equals(other)):
        return (
            "separability: the same batch gives different gradients; expected no state that a pass "
            "leaves to the next, and keyed random numbers only. Draw them from StepKey and "
            "record_id_B; in private_loop draw none (dropout: p=0)."
        )
    outputs = _row_outputs(loss_fn, model, mixed, key, i)
    for (name, kind, output), (_, _, changed) in zip(first, outputs, strict=True):
        if not torch.equal(output, changed):
            return (
                f"separability: layer {name!r} ({kind}) mixes records: another record changes "
                "this one's gradient; expected a function of each record alone. Normalise over "
                "a record's own values (GroupNorm or LayerNorm); attention and recurrent layers "
                "need batch_first=True where records come first."
            )
    with RefuseTensorHooks():
        loss_fn(model, batch, key)
    return (
        "separability: the loss function mixes records (no layer does); expected a loss of each "
        "record alone. Contrastive terms and means over the batch cannot be trained privately: "
        "use a loss per record."
    )


def _row_outputs(
    loss_fn: LossFn, model: nn.Module, batch: Batch, key: StepKey, i: int
) -> list[tuple[str, str, Tensor]]:
    """(name, class, rows of record i) of every layer that returns equally many rows per record, in
    the order of calls, innermost first.

    The views of a record are adjacent rows.
    """
    outputs: list[tuple[str, str, Tensor]] = []
    num = len(batch.record_id_B)

    def recorder(name: str, kind: str) -> Callable[[nn.Module, tuple[Tensor, ...], object], None]:
        def record(_module: nn.Module, _inputs: tuple[Tensor, ...], output: object) -> None:
            if (
                isinstance(output, Tensor)
                and output.ndim
                and len(output)
                and len(output) % num == 0
            ):
                outputs.append(
                    (name or "model", kind, output.unflatten(0, (num, -1))[i].detach().clone())
                )

        return record

    handles = [
        module.register_forward_hook(recorder(name, type(module).__name__))
        for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad():
            loss_fn(model, batch, key)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def _same(first: list[tuple[str, str, Tensor]], second: list[tuple[str, str, Tensor]]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a, b) for (_, _, a), (_, _, b) in zip(first, second, strict=True)
    )
