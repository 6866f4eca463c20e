"""The separability gate: a record's gradient must be a function of that record alone, or clipping it bounds nothing.

Two looks, before a private run: the modules that are known to mix records, then a measurement that also finds batch
statistics computed by hand and losses that compare records. Per-record gradients by ``vmap`` isolate the records by construction;
a loss that mixes them would then silently mean something else, so the *batched* loss is what is measured.

Legend: B records.
"""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp.clip import LossFn
from dpvision.errors import PrivacyError

_MAX_RECORDS = 3
_ROW_TOLERANCE = 1e-6
"""Relative change allowed when a record changes its row: kernels round differently there. A mask keyed by row changes everything."""


def check_separable(loss_fn: LossFn, model: nn.Module, batch: Batch, key: StepKey) -> None:
    """Refuse a model and loss in which one record can move another record's gradient.

    On a float64 copy, at fixed shapes: all other records are perturbed, then removed (``valid_B`` False); the gradient of record
    i's loss may not move by a bit, for the first and the last i. Then the rows are reversed: it may move by rounding only.

    Args:
        batch: two or more valid public records in the run's shapes; the first three are used (a cost of seven backward passes).

    Raises:
        PrivacyError: records are mixed; the message names the layer and the remedy.
    """
    for name, module in model.named_modules():
        _check_module(name, module)
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


def _check_module(name: str, module: nn.Module) -> None:
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
    """Every record replaced by another: other pixels, ids, and the tokens and labels of its neighbour."""
    generator = torch.Generator().manual_seed(0)
    image = batch.image_BVCHW
    return batch._replace(
        record_id_B=batch.record_id_B + 10**6,
        image_BVCHW=image + torch.randn(image.shape, generator=generator, dtype=image.dtype),
        token_BVL=None if batch.token_BVL is None else batch.token_BVL.roll(1, 0),
        label_B=None if batch.label_B is None else batch.label_B.roll(1, 0),
    )


def _removed(batch: Batch) -> Batch:
    """Every record as the padding that stands where a record is missing."""
    return batch._replace(valid_B=torch.zeros_like(batch.valid_B), image_BVCHW=torch.zeros_like(batch.image_BVCHW))


def _with_row(changed: Batch, original: Batch, i: int) -> Batch:
    """``changed`` with row i as it was."""
    values = []
    for new, old in zip(changed, original, strict=True):
        if new is not None and old is not None:
            new = new.clone()
            new[i] = old[i]
        values.append(new)
    return Batch._make(values)


def _gradients(loss_fn: LossFn, model: nn.Module, batch: Batch, key: StepKey, rows: tuple[int, ...]) -> dict[int, Tensor]:
    """Flat gradient of the loss of each of ``rows`` within the whole batch, by row; buffers left as they were."""
    params = [p for p in model.parameters() if p.requires_grad]
    buffers = copy.deepcopy(dict(model.named_buffers()))
    losses_B = loss_fn(model, batch, key)
    if losses_B.shape != batch.record_id_B.shape:
        raise PrivacyError(
            f"separability: losses of shape {tuple(losses_B.shape)}; expected one per record, {tuple(batch.record_id_B.shape)}. "
            "Do not average over the batch."
        )
    gradients = {}
    for i in rows:
        parts = torch.autograd.grad(losses_B[i], params, retain_graph=True, allow_unused=True, materialize_grads=True)
        gradients[i] = torch.cat([part.flatten() for part in parts])
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    return gradients


def _blame(loss_fn: LossFn, model: nn.Module, batch: Batch, mixed: Batch, key: StepKey, i: int) -> str:
    """What to say when record i's gradient moved: random numbers without a key, the first layer that mixes records, or the loss."""
    first, again = _row_outputs(loss_fn, model, batch, key, i), _row_outputs(loss_fn, model, batch, key, i)
    if not _same(first, again) or not torch.equal(*(_gradients(loss_fn, model, batch, key, (i,))[i] for _ in range(2))):
        return (
            "separability: the same batch gives different gradients; expected no random numbers but keyed ones. "
            "Draw them from StepKey and record_id_B."
        )
    other = _row_outputs(loss_fn, model, mixed, key, i)
    for (name, kind, output), (_, _, changed) in zip(first, other, strict=True):
        if not torch.equal(output, changed):
            return (
                f"separability: layer {name!r} ({kind}) mixes records: another record moves this one's gradient; expected every record for "
                "itself. Normalise over a record's own values: GroupNorm or LayerNorm."
            )
    return (
        "separability: the loss function mixes records (all layers keep them apart); expected a loss of each record alone. "
        "Contrastive terms and means over the batch cannot be trained privately: use a loss per record."
    )


def _row_outputs(loss_fn: LossFn, model: nn.Module, batch: Batch, key: StepKey, i: int) -> list[tuple[str, str, Tensor]]:
    """(name, class, row i of the output) of every layer that returns one row per record, innermost first, in the order of the calls."""
    outputs: list[tuple[str, str, Tensor]] = []
    num = len(batch.record_id_B)

    def recorder(name: str, kind: str) -> Callable[[nn.Module, tuple[Tensor, ...], object], None]:
        def record(_module: nn.Module, _inputs: tuple[Tensor, ...], output: object) -> None:
            if isinstance(output, Tensor) and output.ndim and len(output) == num:
                outputs.append((name or "model", kind, output[i].detach().clone()))

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
