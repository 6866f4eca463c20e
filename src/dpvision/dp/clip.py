"""Sum of clipped per-record gradients: the contract, and the two methods.

    sum over valid records i of  f_i g_i,    f_i = min(1, C / ||g_i||),    g_i = the gradient of record i's own loss

||g_i|| runs over all trained parameters together. The contract, on which the guarantee rests: whatever a record holds, its
contribution to the sum has norm at most C = ``max_grad_norm``, and depends on that record, the weights and the key only. So
adding or removing one record moves the sum by at most C (up to the rounding of the float sum).

Legend: B records (rows).
"""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpvision.data.batch import Batch, HostRows
from dpvision.data.keys import StepKey
from dpvision.devices import send
from dpvision.dp.buckets import hashes
from dpvision.dp.clipped import ClippedSum as ClippedSum
from dpvision.dp.clipped import once
from dpvision.dp.compiled import CompiledBlocks
from dpvision.dp.one_pass import one_pass
from dpvision.dp.per_record import LossFn as LossFn
from dpvision.dp.per_record import LossModule, copied_buffers, default_chunk, even_chunks, per_record_gradients, prefixed, take
from dpvision.dp.rounding import MOST_ROUNDED, clip_factors, require_exact_products, reserve
from dpvision.dp.seal import seal
from dpvision.dp.separable import require_separable
from dpvision.dp.weight_grads import sum_of_squares, summed
from dpvision.errors import ConfigError

RULES = ("hard", "automatic")
METHODS = ("one_pass", "vmap")


def clipped_sum(
    loss_fn: LossFn,
    model: nn.Module,
    batch: Batch,
    key: StepKey,
    *,
    max_grad_norm: float | None,
    rule: str = "hard",
    method: str = "one_pass",
    loss_scale: float = 1.0,
    chunk_size: int | None = None,
    blocks: CompiledBlocks | None = None,
    host: HostRows | None = None,
    check_separability: bool = True,
) -> ClippedSum:
    """Return the sum of the clipped gradients of the valid records of one physical batch; runs the forward pass.

    Runs under the caller's autocast; norms, factors and the sum are float32 or wider. The model's buffers are copied, so it keeps no
    statistic of the data. Padding rows contribute exactly zero, and so does a record whose gradient is not finite, or so large that the
    sum of 64 of its squares overflows.

    Args:
        loss_fn: one loss per record. Under "one_pass" it gets the batch, under "vmap" batches of one record.
        batch: any number of rows, including 0.
        max_grad_norm: C, between 1e-12 and 1e12. If None, the plain sum of gradients by one backward pass, without clipping or guarantee
            (non-finite gradients are included), and ``norms_B`` is empty.
        rule: "hard", the factor min(1, C / norm); "automatic", C / (norm + 0.01) (Bu et al. 2023).
        method: "one_pass", or "vmap", the much slower reference: the same up to rounding.
        loss_scale: factor of the losses in the backward pass, for float16; a public number, undone before the norm.
        chunk_size: largest number of records whose gradients are held at once, under "vmap" and for parameters without a rule; if None,
            as many as fit 256 MiB. Changes the order of float sums only.
        blocks: compiled programs of the model's blocks (``compiled.compile_blocks``), for "one_pass".
        host: the ids and validity of this batch on the CPU. If None, they are copied from it, and the host waits for a GPU.
        check_separability: whether to run ``check_separable`` on random records, once for each model and loss. False where it was run, on
            public records, before.

    Returns:
        The sum, in the parameters' precision (float32).

    Raises:
        ConfigError: a setting is unknown or out of range, or no parameter is trained.
        PrivacyError: the model cannot be clipped exactly, or mixes records; a record is in two valid rows; or float32 matrix products are
            set to run in reduced precision.
    """
    _check(rule, method, max_grad_norm, loss_scale, chunk_size)
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    if not params:
        raise ConfigError("clip: model has no parameter with requires_grad; expected at least one. Unfreeze the parameters to train.")
    host = host or HostRows(batch.record_id_B.cpu(), batch.valid_B.cpu())
    device = batch.record_id_B.device
    rows = host.valid_B.nonzero()[:, 0]
    if len(rows) == 0:
        return ClippedSum.zeros(model, max_grad_norm)
    whole = len(rows) == len(host.valid_B)
    if max_grad_norm is None:
        return _plain_sum(loss_fn, model, params, batch if whole else take(batch, send(rows, device)), key)
    ids = once(host.record_id_B[rows].numpy())
    if check_separability:
        require_separable(loss_fn, model, batch, key)
    dtype = next(iter(params.values())).dtype
    factors = partial(_factors, max_grad_norm=max_grad_norm, rule=rule, dtype=dtype)
    if method == "vmap":
        batch = batch if whole else take(batch, send(rows, device))
        grads, norms_B, losses_B = _by_vmap(loss_fn, model, params, batch, key, factors, loss_scale, chunk_size)
    else:
        order, source, bits = _by_hash(host, key)
        valid_B = host.valid_B[order]
        batch = take(batch, send(source, device))._replace(valid_B=send(valid_B, device))
        grads, norms, losses = one_pass(loss_fn, model, batch, bits, key, factors, max_grad_norm, loss_scale, chunk_size, blocks)
        place_B = send(torch.empty_like(order).index_copy_(0, order, torch.arange(len(order)))[rows], device)
        norms_B, losses_B = norms[place_B], losses[place_B]
    return seal(ClippedSum(grads, len(losses_B), norms_B.float(), losses_B.float(), max_grad_norm, ids))


def _by_hash(host: HostRows, key: StepKey) -> tuple[Tensor, Tensor, np.ndarray]:
    """Order of the rows by the records' hashes, with invalid rows last; the row to take at each place; the valid records' hashes.

    In the place of invalid rows a valid one is taken: it keeps the shape of the forward pass independent of the records, and gets the
    factor zero. All three are on the CPU.
    """
    hash_B = hashes(key, host.record_id_B).where(host.valid_B, torch.iinfo(torch.int64).max)
    order = hash_B.argsort(stable=True)
    valid_B = host.valid_B[order]
    return order, order.where(valid_B, order[0]), hash_B[order][valid_B].numpy()


def _by_vmap(
    loss_fn: LossFn,
    model: nn.Module,
    params: dict[str, Tensor],
    batch: Batch,
    key: StepKey,
    factors: Callable[[Tensor, Tensor], Tensor],
    loss_scale: float,
    chunk_size: int | None,
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in params.items()}
    norms, losses = [], []
    for rows in even_chunks(len(batch.record_id_B), chunk_size or default_chunk(params)):
        grads, losses_B = per_record_gradients(loss_fn, model, params, take(batch, rows), key, loss_scale)
        with torch.autocast(losses_B.device.type, enabled=False):
            norms_B = _norms(grads) / loss_scale
            finite_B = torch.isfinite(norms_B)
            factor_B = factors(norms_B, finite_B) / loss_scale
            for name, value in grads.items():
                total[name] += summed(value, factor_B, finite_B)
        norms.append(norms_B)
        losses.append(losses_B.detach())
    if len(batch.record_id_B) <= MOST_ROUNDED:
        total = {name: value.to(params[name].dtype) for name, value in total.items()}
    return total, torch.cat(norms), torch.cat(losses)


def _norms(grads: dict[str, Tensor]) -> Tensor:
    """Norm of each record's whole gradient, float64; ``weight_grads.sum_of_squares`` bounds its error."""
    return torch.stack([sum_of_squares(value) for value in grads.values()]).sum(0).sqrt()


def _factors(norms_B: Tensor, finite_B: Tensor, *, max_grad_norm: float, rule: str, dtype: torch.dtype) -> Tensor:
    """``rounding.clip_factors`` for gradients of ``dtype``, in ``dtype``."""
    return clip_factors(norms_B, finite_B, max_grad_norm=max_grad_norm, rule=rule, kept=reserve(dtype)).to(dtype)


def _plain_sum(loss_fn: LossFn, model: nn.Module, params: dict[str, Tensor], batch: Batch, key: StepKey) -> ClippedSum:
    leaves = {name: p.requires_grad_() for name, p in params.items()}
    losses_B = functional_call(LossModule(loss_fn, model), prefixed({**copied_buffers(model), **leaves}), (batch, key))
    grads = torch.autograd.grad(losses_B.sum(), list(leaves.values()), materialize_grads=True, allow_unused=True)
    empty = torch.zeros(0, device=losses_B.device)
    return seal(ClippedSum(dict(zip(leaves, grads, strict=True)), len(losses_B), empty, losses_B.detach().float(), None))


def _check(rule: str, method: str, max_grad_norm: float | None, loss_scale: float, chunk_size: int | None) -> None:
    for name, value, choices in (("rule", rule, RULES), ("method", method, METHODS)):
        if value not in choices:
            raise ConfigError(f"clip: {name}={value!r}; expected one of {', '.join(map(repr, choices))}. Choose one of them.")
    # Beyond these, factors and squares leave the range of float32, and the bound on a contribution fails.
    if max_grad_norm is not None and not 1e-12 <= max_grad_norm <= 1e12:
        raise ConfigError(f"clip: max_grad_norm={max_grad_norm!r}; expected between 1e-12 and 1e12. Use 0.1 to 1.")
    if not (0 < loss_scale < math.inf and math.frexp(loss_scale)[0] == 0.5):
        raise ConfigError(f"clip: loss_scale={loss_scale!r}; expected a power of two, which scales without rounding. Use 65536.")
    if chunk_size is not None and not chunk_size >= 1:
        raise ConfigError(f"clip: chunk_size={chunk_size!r}; expected at least 1. Leave it out for as many as fit 256 MiB.")
    if max_grad_norm is not None:
        require_exact_products("clip")
