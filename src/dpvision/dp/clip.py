"""Sum of clipped per-record gradients: the contract, and the two methods.

    sum over valid records i of  f_i g_i,    f_i = min(1, C / ||g_i||),    g_i = the gradient of
                                             record i's own loss

||g_i|| runs over all trained parameters together. The contract, on which the guarantee rests:
whatever a record holds, its contribution to the sum has norm at most C = ``max_grad_norm``, and
depends on that record, the weights and the key only. So adding or removing one record moves the sum
by at most C (up to the rounding of the float sum).

Legend: B records (rows).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpvision.data.batch import Batch, HostRows, take
from dpvision.data.keys import StepKey
from dpvision.devices import fixed_kernels, send
from dpvision.dp.buckets import hashes, passes
from dpvision.dp.clipped import ClippedSum as ClippedSum
from dpvision.dp.clipped import once, seal
from dpvision.dp.compiled import CompiledBlocks
from dpvision.dp.interception import RouteForgotten
from dpvision.dp.one_pass import How, one_pass
from dpvision.dp.per_record import LossFn as LossFn
from dpvision.dp.per_record import LossModule, copied_buffers, prefixed, versions
from dpvision.dp.reference_bits import (
    admit,
    admitted,
    forget_admitted,
    next_size,
    vmap_chunks,
    written_norms,
)
from dpvision.dp.rounding import MOST_ROUNDED, UNIT, clip_factors, require_exact_products, reserve
from dpvision.dp.route import trained
from dpvision.dp.separable import check_module, forget_checks, require_separable
from dpvision.dp.weight_grads import summed
from dpvision.errors import ConfigError, PrivacyError

RULES = ("hard", "automatic")
METHODS = ("one_pass", "vmap")
_T = TypeVar("_T")


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
    rows: int | None = None,
) -> ClippedSum:
    """Return the sum of the clipped gradients of the valid records of one physical batch; runs the
    forward pass.

    Runs under the caller's autocast; norms, factors and the sum are float32 or wider. The model's
    buffers are copied, so it keeps no statistic of the data. Padding rows contribute exactly zero,
    and so does a record whose gradient is not finite, or so large that the sum of 64 of its squares
    overflows.

    Args:
        loss_fn: one loss per record. Under "one_pass" it gets the batch, under "vmap" batches of
            one record.
        batch: any number of rows, including 0.
        max_grad_norm: C, between 1e-12 and 1e12. If None, the plain sum of gradients by one
            backward pass, without clipping or guarantee (non-finite gradients are included), and
            ``norms_B`` is empty.
        rule: "hard", the factor min(1, C / norm); "automatic", C / (norm + 0.01) (Bu et al. 2023).
        method: "one_pass", or "vmap", the much slower reference: the same up to rounding.
        loss_scale: factor of the losses in the backward pass, for float16; a public power of two,
            2^-12 to 2^24, undone before the norm.
        chunk_size: largest number of records whose gradients are held at once, under "vmap" and for
            parameters without a rule; if None, as many as fit 256 MiB. Changes the order of float
            sums only.
        blocks: compiled programs of the model's blocks (``compiled.compile_blocks``), for
            "one_pass".
        host: the ids and validity of this batch on the CPU. If None, they are copied from it, and
            the host waits for a GPU. A row that differs from them contributes zero.
        check_separability: whether to run ``check_separable`` on random records, once for each
            model and loss. False where it was run, on public records, before.
        rows: rows of a pass; public, and the same for a whole run. A larger batch is split by the
            records' hashes, and passes are padded. At the first use for a model, loss, precision,
            device and number of threads, ``check_bits`` runs. If None, nothing is checked, and
            ``privatize`` refuses the sum under a guarantee.

    Returns:
        The sum, in the parameters' precision (float32).

    Raises:
        ConfigError: a setting is unknown or out of range, or no parameter is trained.
        PrivacyError: the model cannot be clipped exactly, or mixes records; a layer is in a mode
            that ``check_module`` refuses; a record is in two valid rows; a record's bits depend on
            the other rows of its pass; trained parameters are in half precision or in several
            precisions; float32 matrix products are set to run in reduced precision; or ``host`` is
            not of this batch (seen on a CPU).
    """
    _check(rule, method, max_grad_norm, loss_scale, chunk_size, rows)
    params = trained_parameters(model, max_grad_norm)
    device = batch.record_id_B.device
    host = _host_rows(batch, host)
    valid = host.valid_B.nonzero()[:, 0]
    if len(valid) == 0:
        return ClippedSum.zeros(model, max_grad_norm)
    if max_grad_norm is None:
        return _plain_sum(
            loss_fn,
            model,
            params,
            batch if len(valid) == len(host.valid_B) else take(batch, send(valid, device)),
            key,
        )
    for name, module in model.named_modules():  # at every pass, since modes may have changed
        check_module(name, module)
    once(host.record_id_B[valid].numpy())
    how = _how(params, max_grad_norm, rule, loss_scale, chunk_size, blocks)

    def checked() -> ClippedSum:
        if check_separability and require_separable(loss_fn, model, batch, key):
            forget_admitted(model)
        if rows is None:
            return _sum_of_pass(
                loss_fn, model, batch, key, method, how, host, valid, len(host.valid_B), None
            )
        return _sum_of_passes(loss_fn, model, batch, key, method, how, host, valid, rows)

    return _again_if_forgotten(model, checked)


def _state(model: nn.Module) -> tuple[list[tuple[int, Tensor | None]], list[int]]:
    """The parameters and buffers, by identity, and how often each was written to."""
    tensors = [
        value
        for module in model.modules()
        for value in (*module._parameters.values(), *module._buffers.values())
    ]
    return [(id(value), value) for value in tensors], versions(tensors)


def _again_if_forgotten(model: nn.Module, run: Callable[[], _T]) -> _T:
    """Return ``run()``; where a pass does otherwise than its route, as another loss or setting
    makes it do, all checks of the model are made again, once.
    """
    try:
        return run()
    except RouteForgotten:
        forget_admitted(model)
        forget_checks(model)
    try:
        return run()
    except RouteForgotten as error:
        raise PrivacyError(
            f"clip: the forward pass came to {error}, where it did otherwise for two and "
            "three records; expected the same calls for any records. Use method='vmap'."
        ) from None


def _sum_of_passes(
    loss_fn: LossFn,
    model: nn.Module,
    batch: Batch,
    key: StepKey,
    method: str,
    how: How,
    host: HostRows,
    valid: Tensor,
    rows: int,
) -> ClippedSum:
    """The sum of the records at ``valid``, from passes of at most ``rows`` rows."""
    device = batch.record_id_B.device
    with fixed_kernels():
        sizes = admitted(loss_fn, model, batch, key, rows, method, how)
        places = [
            valid[part].sort().values
            for part in passes(key, host.record_id_B[valid].numpy(), 1, rows)
        ]
        sums = (
            _sum_of_pass(
                loss_fn,
                model,
                batch,
                key,
                method,
                how,
                host,
                part,
                next_size(sizes, len(part)),
                rows,
            )
            for part in places
        )
        if len(places) == 1:
            return next(sums)
        total = ClippedSum.add_up(model, how.max_grad_norm, sums)
        back_B = send(torch.cat(places).argsort(), device)
        return seal(replace(total, norms_B=total.norms_B[back_B], losses_B=total.losses_B[back_B]))


def check_bits(
    loss_fn: LossFn,
    model: nn.Module,
    public: Batch,
    key: StepKey,
    sizes: Sequence[int] = (),
    *,
    max_grad_norm: float,
    rule: str = "hard",
    method: str = "one_pass",
    loss_scale: float = 1.0,
    chunk_size: int | None = None,
    blocks: CompiledBlocks | None = None,
) -> tuple[int, ...]:
    """Check that a record's bits do not depend on the other rows of its pass, for later
    ``clipped_sum(..., rows=len(public.valid_B))``.

    ``clipped_sum`` does this itself, on random images, when it first needs it; then all passes are
    padded to ``rows``. Runs under the caller's autocast.

    Args:
        public: as many valid public records as a pass has rows, in the shapes to come.
        sizes: smaller numbers of rows to check too; a pass is padded to the next admitted number.

    Returns:
        The numbers of rows admitted, ascending.

    Raises:
        PrivacyError: a record's bits differ within passes of that many rows.
    """
    _check(rule, method, max_grad_norm, loss_scale, chunk_size)
    params = trained_parameters(model, max_grad_norm)
    how = _how(params, max_grad_norm, rule, loss_scale, chunk_size, blocks)
    with fixed_kernels():
        return _again_if_forgotten(
            model, partial(admit, loss_fn, model, public, key, sizes, method, how)
        )


def _how(
    params: dict[str, Tensor],
    max_grad_norm: float,
    rule: str,
    loss_scale: float,
    chunk_size: int | None,
    blocks: CompiledBlocks | None,
) -> How:
    dtype = next(iter(params.values())).dtype
    return How(
        partial(_factors, max_grad_norm=max_grad_norm, rule=rule, dtype=dtype),
        max_grad_norm,
        loss_scale,
        chunk_size,
        blocks,
    )


def _host_rows(batch: Batch, host: HostRows | None) -> HostRows:
    """``host`` if it is of this batch, as far as a CPU can tell; a copy from the batch if None."""
    if host is None:
        return HostRows(batch.record_id_B.cpu(), batch.valid_B.cpu())
    same = all(a.shape == b.shape for a, b in zip(host, batch[:2], strict=True))
    if same and batch.record_id_B.device.type == "cpu":
        same = all(torch.equal(a, b) for a, b in zip(host, batch[:2], strict=True))
    if not same:
        raise PrivacyError(
            "clip: host= has other ids or other valid rows than the batch; expected those of this "
            "batch: they decide which rows count, and that no record counts twice. Leave it out."
        )
    return host


def _sum_of_pass(
    loss_fn: LossFn,
    model: nn.Module,
    batch: Batch,
    key: StepKey,
    method: str,
    how: How,
    host: HostRows,
    valid: Tensor,
    num_rows: int,
    rows: int | None,
) -> ClippedSum:
    """The sum of the records at ``valid`` from a pass of ``num_rows`` rows; its norms and losses
    are in the order of ``valid``.

    Records are ordered by their hashes. The other rows hold the first record again and get the
    factor zero.
    """
    device, num = batch.record_id_B.device, len(valid)
    hash_B = hashes(key, host.record_id_B[valid])
    order = hash_B.argsort(stable=True)
    source = torch.cat([valid[order], valid[order[:1]].expand(num_rows - num)])
    source_B, id_B = send(torch.stack([source, host.record_id_B[source]]), device)  # one copy
    batch = take(batch, source_B)
    is_own_B = send(torch.arange(num_rows) < num, device)
    if device.type != "cpu":  # compared there before; here without waiting for the device
        is_own_B &= batch.valid_B & (batch.record_id_B == id_B)
    for value in batch:
        # Behind a NaN, kernels may give finite gradients that depend on a record's place.
        if value is not None and value.is_floating_point():
            finite = value.isfinite()
            is_own_B &= finite if finite.ndim == 1 else finite.flatten(1).all(1)
    batch = batch._replace(valid_B=is_own_B)
    before = _state(model)
    if method == "vmap":
        grads, norms, losses = _by_vmap(loss_fn, model, batch, num, key, how)
    else:
        grads, norms, losses = one_pass(loss_fn, model, batch, hash_B[order].numpy(), key, how)
    if _state(model) != before:
        raise PrivacyError(
            "clip: the loss or the model writes to a parameter in the forward pass, or replaces "
            "one; expected all as they were: what is written is computed from the records and "
            "stays, without noise. Return it from the loss function, or use a buffer, whose "
            "changes are discarded."
        )
    place_B = send(torch.empty_like(order).index_copy_(0, order, torch.arange(num)), device)
    ids = once(host.record_id_B[valid].numpy())
    norms, losses = norms[place_B].float(), losses[place_B].float()
    return seal(ClippedSum(grads, num, norms, losses, how.max_grad_norm, ids, rows, key.step))


def _by_vmap(
    loss_fn: LossFn, model: nn.Module, batch: Batch, num_records: int, key: StepKey, how: How
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """As ``one_pass``; the valid records are the first ``num_records``."""
    params = trained(model)
    total = {
        name: torch.zeros_like(p, dtype=torch.float64, requires_grad=False)
        for name, p in params.items()
    }
    norms, losses = [], []
    for part, grads, losses_B in vmap_chunks(loss_fn, model, batch, key, how):
        with torch.autocast(losses_B.device.type, enabled=False):
            norms_B = written_norms(grads) / how.loss_scale
            finite_B = torch.isfinite(norms_B)
            factor_B = how.factors(norms_B, finite_B) / how.loss_scale
            for name, value in grads.items():
                total[name] += summed(value, factor_B, finite_B & batch.valid_B[part])
        norms.append(norms_B)
        losses.append(losses_B.detach())
    if num_records <= MOST_ROUNDED:
        total = {name: value.to(params[name].dtype) for name, value in total.items()}
    return total, torch.cat(norms), torch.cat(losses)


def _factors(
    norms_B: Tensor, finite_B: Tensor, *, max_grad_norm: float, rule: str, dtype: torch.dtype
) -> Tensor:
    """``rounding.clip_factors`` for gradients of ``dtype``, in ``dtype``."""
    return clip_factors(
        norms_B, finite_B, max_grad_norm=max_grad_norm, rule=rule, kept=reserve(dtype)
    ).to(dtype)


def _plain_sum(
    loss_fn: LossFn, model: nn.Module, params: dict[str, Tensor], batch: Batch, key: StepKey
) -> ClippedSum:
    leaves = {name: p.requires_grad_() for name, p in params.items()}
    losses_B = functional_call(
        LossModule(loss_fn, model), prefixed({**copied_buffers(model), **leaves}), (batch, key)
    )
    grads = torch.autograd.grad(
        losses_B.sum(), list(leaves.values()), materialize_grads=True, allow_unused=True
    )
    empty = torch.zeros(0, device=losses_B.device)
    return seal(
        ClippedSum(
            dict(zip(leaves, grads, strict=True)),
            len(losses_B),
            empty,
            losses_B.detach().float(),
            None,
        )
    )


def trained_parameters(model: nn.Module, max_grad_norm: float | None) -> dict[str, Tensor]:
    """Return the trained parameters by name, detached; refuse none, and with clipping those in half
    or mixed precision.
    """
    params = {name: p.detach() for name, p in trained(model).items()}
    if not params:
        raise ConfigError(
            "clip: model has no parameter with requires_grad; expected at least one. Unfreeze "
            "the parameters to train."
        )
    if max_grad_norm is not None:
        _require_wide(params)
    return params


def _require_wide(params: dict[str, Tensor]) -> None:
    """Refuse trained parameters whose sums would be rounded to half precision, or whose reserve is
    another's (``rounding.reserve``).
    """
    kinds: dict[torch.dtype, str] = {}
    for name, p in params.items():
        kinds.setdefault(p.dtype, name)
    if len(kinds) > 1 or not kinds.keys() <= UNIT.keys():
        found = ", ".join(
            f"{str(dtype).removeprefix('torch.')} ({name})" for dtype, name in kinds.items()
        )
        raise PrivacyError(
            f"clip: trained parameters are {found}; expected all float32 or all float64: "
            "rounding in half precision moves a sum by more than the clip norm. Keep trained "
            "weights in float32 (p.data = p.data.float()) and run the forward pass under "
            "torch.autocast."
        )


def _check(
    rule: str,
    method: str,
    max_grad_norm: float | None,
    loss_scale: float,
    chunk_size: int | None,
    rows: int | None = None,
) -> None:
    for name, value, choices in (("rule", rule, RULES), ("method", method, METHODS)):
        if value not in choices:
            raise ConfigError(
                f"clip: {name}={value!r}; expected one of {', '.join(map(repr, choices))}. "
                "Choose one of them."
            )
    # Beyond these, factors and squares leave the range of float32, and the bound on a contribution
    # fails.
    if max_grad_norm is not None and not 1e-12 <= max_grad_norm <= 1e12:
        raise ConfigError(
            f"clip: max_grad_norm={max_grad_norm!r}; expected between 1e-12 and 1e12. Use 0.1 to 1."
        )
    # Squares of smaller gradients would be lost, and the norm with them.
    least, most = 2.0 ** (_SMALLEST - _HEADROOM), 2.0**_LARGEST
    if not (least <= loss_scale <= most and math.frexp(loss_scale)[0] == 0.5):
        raise ConfigError(
            f"clip: loss_scale={loss_scale!r}; expected a power of two, which scales without "
            "rounding, from 2^-12 to 2^24. Use 65536."
        )
    if chunk_size is not None and not chunk_size >= 1:
        raise ConfigError(
            f"clip: chunk_size={chunk_size!r}; expected at least 1. Leave it out for as many as "
            "fit 256 MiB."
        )
    if rows is not None and not rows >= 1:
        raise ConfigError(f"clip: rows={rows!r}; expected at least 1. Use 64.")
    if max_grad_norm is not None:
        require_exact_products("clip")


_LARGEST, _SMALLEST = 24, -8
_HEADROOM = 4
"""Binary orders of magnitude by which private gradients may be larger than the public ones before
they overflow.
"""


def public_loss_scale(
    loss_fn: LossFn, model: nn.Module, public_batch: Batch, key: StepKey
) -> float:
    """Return the largest power of two at which no gradient of the public batch overflows, less
    headroom; under the caller's autocast.

    Args:
        public_batch: a few public records, in the run's shapes and on the model's device.

    Returns:
        A power of two between 2^-12 and 2^20.
    """
    low, high = _SMALLEST, _LARGEST + 1  # exponents: bisection, five passes over the public batch
    while high - low > 1:
        middle = (low + high) // 2
        total = clipped_sum(
            loss_fn,
            model,
            public_batch,
            key,
            max_grad_norm=1.0,
            loss_scale=2.0**middle,
            check_separability=False,
        )
        if bool(total.norms_B.isfinite().all()):
            low = middle
        else:
            high = middle
    return 2.0 ** (low - _HEADROOM)
