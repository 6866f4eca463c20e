"""The gates before a private run: a record's gradient must be a function of that record alone, and
the clip must be exact for this model.

Modules that are known to mix records are refused first. Then measurements also find hand-written
batch statistics and losses that compare records: on three records (``check_separable``,
``check_exact``), and at the run's physical batch size (``check_at_sizes``), since a model may mix
records at some sizes only. Per-record gradients by ``vmap`` isolate the records by construction,
which would silently redefine a loss that mixes them, so the *batched* loss is measured.

Legend: B records.
"""

import torch
from torch import Tensor, nn

from dpvision.data.batch import Batch, rows_where, take
from dpvision.data.keys import StepKey
from dpvision.dp.clip import LossFn, clipped_sum
from dpvision.dp.compiled import CompiledBlocks
from dpvision.dp.fingerprint import Fingerprint, fingerprint, norms_of, values_of
from dpvision.dp.rounding import reserve
from dpvision.dp.separable import (
    MAX_RECORDS,
    blame,
    buffers_kept,
    examples,
    gradient_of_sum,
    in_float64,
    model_in_float64,
    perturbed,
    removed,
)
from dpvision.errors import PrivacyError

_EXACT_TOLERANCE = 1e-9
_SHAPE_TOLERANCE = 1e-10
"""Relative change of a float64 gradient allowed between batch sizes, at which kernels choose other
blocks and round differently.
"""
_COMPILED_TOLERANCE = 1e-5
_FLOAT32_TOLERANCE = 1e-6
"""Norms are reported in float32."""


def check_exact(loss_fn: LossFn, model: nn.Module, batch: Batch, key: StepKey) -> None:
    """Refuse a model whose one-pass clipped sum differs from the sum over single records, each with
    its own backward pass.

    In float64 (``model_in_float64``), for three records and for one. This tests, on every model
    before it sees private data, that batch dimensions, tied weights and repeated uses of a weight
    were recognised.

    Args:
        batch: as for ``check_separable`` (a cost of nine backward passes).

    Raises:
        PrivacyError: a norm or a sum differs by more than 1e-9; the message names the parameters.
    """
    copied = model_in_float64(model)
    batch = examples(batch)
    _check_sum(loss_fn, copied, [batch, take(batch, slice(0, 1))], batch, key)


def check_at_sizes(loss_fn: LossFn, model: nn.Module, batch: Batch, key: StepKey) -> None:
    """Check as ``check_separable`` and ``check_exact`` at the run's physical batch size, and at two
    thirds of it.

    In float64, on the batch's device. At each size the other records are perturbed or removed by
    padding: the gradients of the first, the middle and the last record must not change by a bit.
    Between the two sizes they may differ by 1e-10. The one-pass clipped sum of each size must equal
    the sum over single records. Buckets of other sizes (``dp.buckets``) are not checked.

    Args:
        batch: valid public records, as many as the physical batch size; a single record needs no
            check. The cost is about eight training steps without privacy on such a batch, in
            float64.

    Raises:
        PrivacyError: records are mixed, or a sum differs; the message names the size, and the layer
            if possible.
    """
    num = len(batch.record_id_B)
    if num < 2:
        return
    device = batch.record_id_B.device
    copied = model_in_float64(model, device)
    batch = in_float64(batch)
    # At each size: the sum of three probes' gradients, which must not move by a bit when all other
    # records are perturbed or removed (every second one each, then the other way round). Then the
    # sizes are compared with each other, and each clipped sum with single records.
    sizes = sorted({num, max(2, 2 * num // 3)}, reverse=True)
    probes = tuple(sorted({0, sizes[-1] // 2, sizes[-1] - 1}))
    references = [
        _check_probes(loss_fn, copied, take(batch, slice(0, size)), key, probes) for size in sizes
    ]
    if not references[0].distance(references[-1]) <= _SHAPE_TOLERANCE * references[0].norm:
        raise PrivacyError(
            f"separability: gradients of records in a batch of {sizes[0]} differ from those in a "
            f"batch of {sizes[-1]}; expected functions of each record alone. Remove what depends "
            "on the number of records, such as a division by it."
        )
    _check_sum(loss_fn, copied, [take(batch, slice(0, size)) for size in sizes], batch, key)


def _check_probes(
    loss_fn: LossFn, model: nn.Module, batch: Batch, key: StepKey, probes: tuple[int, ...]
) -> Fingerprint:
    """Return the sum of the gradients of ``probes``; refuse if perturbing or removing all other
    records changes it by a bit.
    """
    expected = gradient_of_sum(loss_fn, model, batch, key, probes)
    if not expected.is_finite:
        raise PrivacyError(
            "separability: a gradient of the example batch is not finite; expected numbers. "
            "Check the model and loss."
        )
    other, padding = perturbed(batch), removed(batch)
    row_B = torch.arange(len(batch.record_id_B), device=batch.record_id_B.device)
    is_probe_B = torch.isin(row_B, torch.tensor(probes, device=row_B.device))
    for offset in (0, 1):
        mixed = rows_where(is_probe_B, batch, rows_where(row_B % 2 == offset, padding, other))
        if not gradient_of_sum(loss_fn, model, mixed, key, probes).equals(expected):
            raise PrivacyError(
                f"{blame(loss_fn, model, batch, mixed, key, probes[0])} Seen in a batch of "
                f"{len(row_B)}."
            )
    return expected


def _check_sum(
    loss_fn: LossFn, model: nn.Module, parts: list[Batch], batch: Batch, key: StepKey
) -> None:
    """Refuse if the one-pass sum over ``parts``, each the first rows of ``batch``, differs from the
    sum over single records; float64.
    """
    # The oracle: each record's gradient by its own backward pass, clipped and added up as written
    # in the definition; a large model's sums are compared in their projections. C is the median
    # of three norms, so that some records are clipped and some are not.
    params: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    weights = list(params.values())
    records = [take(batch, slice(i, i + 1)) for i in range(len(batch.record_id_B))]
    first = [_single_gradient(loss_fn, model, weights, one, key) for one in records[:MAX_RECORDS]]
    few = sorted(single.norm for single in first)
    max_grad_norm = max(few[len(few) // 2] * 0.999, 1e-12)
    norms: list[float] = []
    expected = [torch.zeros_like(first[0].values) for _ in parts]
    for i, one in enumerate(records):
        known = i < len(first)
        single = first[i] if known else _single_gradient(loss_fn, model, weights, one, key)
        norms.append(single.norm)
        clipped = max_grad_norm * (1 - reserve(torch.float64))
        factor = min(1.0, clipped / single.norm) if single.norm else 1.0
        for part, total in zip(parts, expected, strict=True):
            if i < len(part.record_id_B):
                total += factor * single.values
    wrong: dict[str, None] = {}
    off = 0.0
    for part, total in zip(parts, expected, strict=True):
        num = len(part.record_id_B)
        values, norms_B = _one_pass_sum(loss_fn, model, list(params), part, key, max_grad_norm)
        for name, distance in zip(params, norms_of(values - total, weights), strict=True):
            if not distance <= _EXACT_TOLERANCE * num * max_grad_norm:
                wrong[name] = None
        worst = float((norms_B - torch.tensor(norms[:num], dtype=torch.float64)).abs().max())
        off = off if worst <= off else worst  # NaN stays
    if wrong or not off <= _FLOAT32_TOLERANCE * max(*norms, 1e-30):
        names = list(wrong)
        named = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        sizes = " and ".join(str(len(part.record_id_B)) for part in parts)
        raise PrivacyError(
            f"clip: one-pass gradients of {named or 'some parameters'} differ from those of "
            f"single records, in batches of {sizes}; expected the same. Use method='vmap', and "
            "report this model."
        )


def _one_pass_sum(
    loss_fn: LossFn,
    model: nn.Module,
    names: list[str],
    batch: Batch,
    key: StepKey,
    max_grad_norm: float,
) -> tuple[Tensor, Tensor]:
    """``values_of`` the one-pass sum, and the norms, on the CPU."""
    found = clipped_sum(
        loss_fn, model, batch, key, max_grad_norm=max_grad_norm, check_separability=False
    )
    return values_of([found.grads[name] for name in names]), found.norms_B.double().cpu()


def check_compiled(
    loss_fn: LossFn, model: nn.Module, batch: Batch, key: StepKey, blocks: CompiledBlocks
) -> None:
    """Refuse compiled blocks whose clipped sum differs from ``method="vmap"``, which runs them
    uncompiled; float32, on the device.

    Args:
        batch: valid records, as many as the blocks were compiled for.
        blocks: the model's compiled blocks.

    Raises:
        PrivacyError: norms or sum differ by more than 1e-5.
    """
    fast = clipped_sum(
        loss_fn, model, batch, key, max_grad_norm=1.0, blocks=blocks, check_separability=False
    )
    slow = clipped_sum(
        loss_fn, model, batch, key, max_grad_norm=1.0, method="vmap", check_separability=False
    )
    off = (
        max(float((fast.grads[name] - value).norm()) for name, value in slow.grads.items())
        / fast.num_records
    )
    norms = float(((fast.norms_B - slow.norms_B).abs() / slow.norms_B.clamp(min=1e-30)).max())
    if not max(off, norms) <= _COMPILED_TOLERANCE:
        raise PrivacyError(
            f"clip: compiled blocks differ from the uncompiled model by {max(off, norms):.1e}; "
            f"expected at most {_COMPILED_TOLERANCE}. Leave hardware.compile off."
        )


def _single_gradient(
    loss_fn: LossFn, model: nn.Module, params: list[Tensor], one: Batch, key: StepKey
) -> Fingerprint:
    """Gradient of one record's loss by plain autograd; restores the buffers."""
    with buffers_kept(model):
        return fingerprint(loss_fn(model, one, key).sum(), params)
