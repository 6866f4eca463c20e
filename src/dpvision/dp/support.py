"""The gates before a private run: a record's gradient must be a function of that record alone, and the clip must be exact for this model.

Modules that are known to mix records are refused first. Then measurements also find hand-written batch statistics and losses that compare
records: on three records (``check_separable``, ``check_exact``), and at the run's physical batch size (``check_at_sizes``), since a model
may mix records at some sizes only. Per-record gradients by ``vmap`` isolate the records by construction, which would silently redefine a
loss that mixes them, so the *batched* loss is measured.

Legend: B records.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp.clip import ClippedSum, LossFn, clipped_sum
from dpvision.dp.compiled import CompiledBlocks
from dpvision.dp.per_record import checked_losses, take
from dpvision.errors import PrivacyError

_MAX_RECORDS = 3
_ROW_TOLERANCE = 1e-6
"""Relative change allowed when a record changes its row, where kernels round differently. A mask keyed by row changes far more."""
_EXACT_TOLERANCE = 1e-9
_SHAPE_TOLERANCE = 1e-10
"""Relative change of a float64 gradient allowed between batch sizes, at which kernels choose other blocks and round differently."""
_COMPILED_TOLERANCE = 1e-5
_FLOAT32_TOLERANCE = 1e-6
"""Norms are reported in float32."""


def check_separable(loss_fn: LossFn, model: nn.Module, batch: Batch, key: StepKey) -> None:
    """Refuse a model and loss in which one record can change another record's gradient.

    On a float64 copy, at fixed shapes: all other records are perturbed, then removed (``valid_B`` False); the gradient of record
    i's loss must not change by a bit, for the first and the last i. Then the rows are reversed: it may change by rounding only.

    Args:
        batch: two or more valid public records in the run's shapes; the first three are used (a cost of seven backward passes).

    Raises:
        PrivacyError: records are mixed; the message names the layer and the remedy.
    """
    for name, module in model.named_modules():
        check_module(name, module)
    copied = copy.deepcopy(model).cpu().double()
    batch = _examples(batch)
    perturbed, removed = _perturbed(batch), _removed(batch)
    num = len(batch.record_id_B)
    probes = (0, num - 1)
    reference = _gradients(loss_fn, copied, batch, key, probes)
    for i in probes:
        if not torch.isfinite(reference[i]).all():
            raise PrivacyError("separability: a gradient of the example batch is not finite; expected numbers. Check the model and loss.")
        for changed in (perturbed, removed):
            mixed = _with_row(changed, batch, i)
            moved = _gradients(loss_fn, copied, mixed, key, (i,))[i]
            if not torch.equal(moved, reference[i]):
                raise PrivacyError(_blame(loss_fn, copied, batch, mixed, key, i))
    turned = Batch._make(None if value is None else value.flip(0) for value in batch)
    moved = _gradients(loss_fn, copied, turned, key, (num - 1,))[num - 1]
    if not (moved - reference[0]).norm() <= _ROW_TOLERANCE * reference[0].norm():
        raise PrivacyError(
            "separability: a record's gradient depends on its row in the batch; expected on the record, the weights and the key only. "
            "Key masks, augmentation and dropout by StepKey and record_id_B."
        )


def check_exact(loss_fn: LossFn, model: nn.Module, batch: Batch, key: StepKey) -> None:
    """Refuse a model whose one-pass clipped sum differs from the sum over single records, each with its own backward pass.

    On a float64 copy, for three records and for one. This tests, on every model before it sees private data, that batch dimensions, tied
    weights and repeated uses of a weight were recognised.

    Args:
        batch: as for ``check_separable`` (a cost of nine backward passes).

    Raises:
        PrivacyError: a norm or a sum differs by more than 1e-9; the message names the parameters.
    """
    copied = copy.deepcopy(model).cpu().double()
    batch = _examples(batch)
    _check_sum(loss_fn, copied, [batch, take(batch, slice(0, 1))], batch, key)


def check_at_sizes(loss_fn: LossFn, model: nn.Module, batch: Batch, key: StepKey) -> None:
    """Check as ``check_separable`` and ``check_exact`` at the run's physical batch size, and at two thirds of it.

    On a float64 copy. At each size the other records are perturbed or removed by padding: the gradients of the first, the middle and the
    last record must not change by a bit. Between the two sizes they may differ by 1e-10. The one-pass clipped sum of each size must equal
    the sum over single records. Buckets of other sizes (``dp.buckets``) are not checked.

    Args:
        batch: valid public records, as many as the physical batch size; a single record needs no check.
            The cost is about eight training steps without privacy on such a batch, in float64.

    Raises:
        PrivacyError: records are mixed, or a sum differs; the message names the size, and the layer if possible.
    """
    num = len(batch.record_id_B)
    if num < 2:
        return
    device = batch.record_id_B.device
    copied = copy.deepcopy(model).to(device).double()
    batch = batch._replace(image_BVCHW=batch.image_BVCHW.double())
    sizes = sorted({num, max(2, 2 * num // 3)}, reverse=True)
    probes = tuple(sorted({0, sizes[-1] // 2, sizes[-1] - 1}))
    references = [_check_probes(loss_fn, copied, take(batch, slice(0, size)), key, probes) for size in sizes]
    if not (references[0] - references[-1]).norm() <= _SHAPE_TOLERANCE * references[0].norm():
        raise PrivacyError(
            f"separability: gradients of records in a batch of {sizes[0]} differ from those in a batch of {sizes[-1]}; expected functions "
            "of each record alone. Remove what depends on the number of records, such as a division by it."
        )
    _check_sum(loss_fn, copied, [take(batch, slice(0, size)) for size in sizes], batch, key)


def _check_probes(loss_fn: LossFn, model: nn.Module, batch: Batch, key: StepKey, probes: tuple[int, ...]) -> Tensor:
    """Return the sum of the gradients of ``probes``; refuse if perturbing or removing all other records changes it by a bit."""
    expected = _gradient_of_sum(loss_fn, model, batch, key, probes)
    if not torch.isfinite(expected).all():
        raise PrivacyError("separability: a gradient of the example batch is not finite; expected numbers. Check the model and loss.")
    perturbed, removed = _perturbed(batch), _removed(batch)
    row_B = torch.arange(len(batch.record_id_B), device=batch.record_id_B.device)
    is_probe_B = torch.isin(row_B, torch.tensor(probes, device=row_B.device))
    for offset in (0, 1):
        mixed = _rows_where(is_probe_B, batch, _rows_where(row_B % 2 == offset, removed, perturbed))
        if not torch.equal(_gradient_of_sum(loss_fn, model, mixed, key, probes), expected):
            raise PrivacyError(f"{_blame(loss_fn, model, batch, mixed, key, probes[0])} Seen in a batch of {len(row_B)}.")
    return expected


def _rows_where(mask_B: Tensor, first: Batch, second: Batch) -> Batch:
    """Take rows of ``first`` where ``mask_B`` is True, of ``second`` elsewhere."""
    values = []
    for one, other in zip(first, second, strict=True):
        chosen = one
        if one is not None and other is not None:
            chosen = torch.where(mask_B.view(-1, *[1] * (one.ndim - 1)), one, other)
        values.append(chosen)
    return Batch._make(values)


def _check_sum(loss_fn: LossFn, model: nn.Module, parts: list[Batch], batch: Batch, key: StepKey) -> None:
    """Refuse if the one-pass sum over ``parts``, each the first rows of ``batch``, differs from the sum over single records; float64."""
    params: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    singles = [take(batch, slice(i, i + 1)) for i in range(len(batch.record_id_B))]
    few = sorted(_norm(_single_gradient(loss_fn, model, params, one, key)) for one in singles[:_MAX_RECORDS])
    max_grad_norm = max(few[len(few) // 2] * 0.999, 1e-12)
    expected = {name: torch.zeros_like(p, requires_grad=False) for name, p in params.items()}
    norms = []
    for i, one in enumerate(singles):
        grads = _single_gradient(loss_fn, model, params, one, key)
        norms.append(_norm(grads))
        times = sum(len(part.record_id_B) > i for part in parts)
        factor = times * (min(1.0, max_grad_norm / norms[i]) if norms[i] else 1.0)
        for name, grad in grads.items():
            expected[name] += factor * grad
    total = ClippedSum.zeros(model, max_grad_norm)
    for part in parts:
        total = total + clipped_sum(loss_fn, model, part, key, max_grad_norm=max_grad_norm)
    num = sum(len(part.record_id_B) for part in parts)
    wrong = [name for name, value in expected.items() if not (total.grads[name] - value).norm() <= _EXACT_TOLERANCE * num * max_grad_norm]
    expected_B = torch.tensor([norms[i] for part in parts for i in range(len(part.record_id_B))], dtype=torch.float64)
    off = (total.norms_B.double().cpu() - expected_B).abs().max()
    if wrong or not off <= _FLOAT32_TOLERANCE * max(*norms, 1e-30):
        named = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        sizes = " and ".join(str(len(part.record_id_B)) for part in parts)
        raise PrivacyError(
            f"clip: one-pass gradients of {named or 'some parameters'} differ from those of single records, in batches of {sizes}; "
            "expected the same. Use method='vmap', and report this model."
        )


def check_compiled(loss_fn: LossFn, model: nn.Module, batch: Batch, key: StepKey, blocks: CompiledBlocks) -> None:
    """Refuse compiled blocks whose clipped sum differs from ``method="vmap"``, which runs them uncompiled; float32, on the device.

    Args:
        batch: valid records, as many as the blocks were compiled for.
        blocks: the model's compiled blocks.

    Raises:
        PrivacyError: norms or sum differ by more than 1e-5.
    """
    fast = clipped_sum(loss_fn, model, batch, key, max_grad_norm=1.0, blocks=blocks)
    slow = clipped_sum(loss_fn, model, batch, key, max_grad_norm=1.0, method="vmap")
    off = max(float((fast.grads[name] - value).norm()) for name, value in slow.grads.items()) / fast.num_records
    norms = float(((fast.norms_B - slow.norms_B).abs() / slow.norms_B.clamp(min=1e-30)).max())
    if not max(off, norms) <= _COMPILED_TOLERANCE:
        raise PrivacyError(
            f"clip: compiled blocks differ from the uncompiled model by {max(off, norms):.1e}; expected at most {_COMPILED_TOLERANCE}. "
            "Leave hardware.compile off."
        )


def _single_gradient(loss_fn: LossFn, model: nn.Module, params: dict[str, Tensor], one: Batch, key: StepKey) -> dict[str, Tensor]:
    """Gradient of one record's loss by plain autograd; restores the buffers."""
    with _buffers_kept(model):
        loss = loss_fn(model, one, key).sum()
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(params, grads, strict=True))


def _norm(grads: dict[str, Tensor]) -> float:
    return float(torch.stack([grad.norm() for grad in grads.values()]).norm())


def check_module(name: str, module: nn.Module) -> None:
    """Raise PrivacyError for a layer that is known to mix records or to draw from the global random state."""
    kind = type(module).__name__
    if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
        raise PrivacyError(
            f"separability: layer {name!r} ({kind}) uses statistics of the batch; expected every record for itself. "
            "Replace it by GroupNorm or LayerNorm, or put it in eval mode with public running statistics."
        )
    if isinstance(module, _DropoutNd) and module.training and module.p > 0:
        raise PrivacyError(
            f"separability: layer {name!r} ({kind}) draws from the global random state; expected draws keyed by record. "
            "Set p=0, put it in eval mode, or draw the mask from StepKey and record_id_B."
        )


def _examples(batch: Batch) -> Batch:
    rows = batch.valid_B.nonzero()[:_MAX_RECORDS, 0]
    if len(rows) < 2:
        raise PrivacyError(f"separability: {len(rows)} valid records in the example batch; expected at least 2. Give a larger one.")
    chosen = Batch._make(None if value is None else value[rows].cpu() for value in batch)
    return chosen._replace(image_BVCHW=chosen.image_BVCHW.double())


def _perturbed(batch: Batch) -> Batch:
    """Replace every record by another: other pixels, other ids, and its neighbour's tokens and labels."""
    generator = torch.Generator().manual_seed(0)
    image = batch.image_BVCHW
    return batch._replace(
        record_id_B=batch.record_id_B + 10**6,
        image_BVCHW=image + torch.randn(image.shape, generator=generator, dtype=image.dtype),
        token_BVL=None if batch.token_BVL is None else batch.token_BVL.roll(1, 0),
        label_B=None if batch.label_B is None else batch.label_B.roll(1, 0),
        label_BV=None if batch.label_BV is None else batch.label_BV.roll(1, 0),
    )


def _removed(batch: Batch) -> Batch:
    """Replace every record by padding."""
    return batch._replace(valid_B=torch.zeros_like(batch.valid_B), image_BVCHW=torch.zeros_like(batch.image_BVCHW))


def _with_row(changed: Batch, original: Batch, i: int) -> Batch:
    """Return ``changed`` with row i of ``original``."""
    values = []
    for new, old in zip(changed, original, strict=True):
        if new is not None and old is not None:
            new = new.clone()
            new[i] = old[i]
        values.append(new)
    return Batch._make(values)


def _gradients(loss_fn: LossFn, model: nn.Module, batch: Batch, key: StepKey, rows: tuple[int, ...]) -> dict[int, Tensor]:
    """Flat gradient of the loss of each of ``rows`` within the whole batch, by row; restores the buffers."""
    with _buffers_kept(model):
        losses_B = checked_losses(loss_fn, model, batch, key)
        return {i: _flat_gradient(losses_B[i], model) for i in rows}


def _gradient_of_sum(loss_fn: LossFn, model: nn.Module, batch: Batch, key: StepKey, rows: tuple[int, ...]) -> Tensor:
    """Flat gradient of the sum of the losses of ``rows`` within the whole batch; restores the buffers."""
    with _buffers_kept(model):
        return _flat_gradient(checked_losses(loss_fn, model, batch, key)[list(rows)].sum(), model)


def _flat_gradient(loss: Tensor, model: nn.Module) -> Tensor:
    params = [p for p in model.parameters() if p.requires_grad]
    parts = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True, materialize_grads=True)
    return torch.cat([part.flatten() for part in parts])


@contextlib.contextmanager
def _buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the buffers afterwards."""
    buffers = copy.deepcopy(dict(model.named_buffers()))
    yield
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])


def _blame(loss_fn: LossFn, model: nn.Module, batch: Batch, mixed: Batch, key: StepKey, i: int) -> str:
    """Explain why record i's gradient changed: random numbers without a key, the first layer that mixes records, or the loss."""
    first, again = _row_outputs(loss_fn, model, batch, key, i), _row_outputs(loss_fn, model, batch, key, i)
    if not _same(first, again) or not torch.equal(*(_gradients(loss_fn, model, batch, key, (i,))[i] for _ in range(2))):
        return (
            "separability: the same batch gives different gradients; expected keyed random numbers only. "
            "Draw them from StepKey and record_id_B."
        )
    other = _row_outputs(loss_fn, model, mixed, key, i)
    for (name, kind, output), (_, _, changed) in zip(first, other, strict=True):
        if not torch.equal(output, changed):
            return (
                f"separability: layer {name!r} ({kind}) mixes records: another record changes this one's gradient; expected a function of "
                "each record alone. Normalise over a record's own values: GroupNorm or LayerNorm."
            )
    return (
        "separability: the loss function mixes records (no layer does); expected a loss of each record alone. "
        "Contrastive terms and means over the batch cannot be trained privately: use a loss per record."
    )


def _row_outputs(loss_fn: LossFn, model: nn.Module, batch: Batch, key: StepKey, i: int) -> list[tuple[str, str, Tensor]]:
    """(name, class, rows of record i) of every layer that returns equally many rows per record, in the order of calls, innermost first.

    The views of a record are adjacent rows.
    """
    outputs: list[tuple[str, str, Tensor]] = []
    num = len(batch.record_id_B)

    def recorder(name: str, kind: str) -> Callable[[nn.Module, tuple[Tensor, ...], object], None]:
        def record(_module: nn.Module, _inputs: tuple[Tensor, ...], output: object) -> None:
            if isinstance(output, Tensor) and output.ndim and len(output) and len(output) % num == 0:
                outputs.append((name or "model", kind, output.unflatten(0, (num, -1))[i].detach().clone()))

        return record

    handles = [module.register_forward_hook(recorder(name, type(module).__name__)) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            loss_fn(model, batch, key)
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def _same(first: list[tuple[str, str, Tensor]], second: list[tuple[str, str, Tensor]]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for (_, _, a), (_, _, b) in zip(first, second, strict=True))
