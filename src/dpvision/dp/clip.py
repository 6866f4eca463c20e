"""Sum of clipped per-record gradients, the clear way: ``vmap(grad)`` in chunks, exact up to rounding (Abadi et al. 2016).

    sum over valid records i of  f_i g_i,    f_i = min(1, C / ||g_i||),    g_i = the gradient of record i's own loss

||g_i|| runs over all trained parameters together. The contract, on which the guarantee rests: whatever a record holds, its
contribution to the sum has norm at most C = ``max_grad_norm``, and depends on that record, the weights and the key only. So
adding or removing one record moves the sum by at most C (up to the rounding of the float sum).

Legend: B records (rows), P numbers of one parameter.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.errors import ConfigError, PrivacyError

LossFn = Callable[[nn.Module, Batch, StepKey], Tensor]
"""(model, batch, key) -> losses_B: one loss per record, each a function of that record alone (``support.check_separable``)."""

_CHUNK_BYTES = 256 * 2**20
"""Room for one chunk's per-record gradients. On a CPU larger chunks are slower: every tensor is then fresh pages."""
_MAX_CHUNK = 256
_PIECE = 64
"""Numbers whose squares are summed in the gradient's own precision, before float64 takes over."""
_MARGIN_EPS = 32
"""Part of C left free for rounding, in units of the precision's epsilon; see ``_factors``."""


@dataclass(frozen=True, eq=False)
class ClippedSum:
    """Sum of clipped gradients of some records: secret, and the only thing that ``noise.privatize`` accepts."""

    grads: dict[str, Tensor]
    """Sum by parameter name, float32; a tied parameter stands under its first name, once."""
    num_records: int
    """Valid records in the sum (secret)."""
    norms_B: Tensor
    """Gradient norms of the valid records before the clip, float32; not finite where the record was left out; empty without a clip."""
    losses_B: Tensor
    """Losses of the valid records, float32."""

    def __add__(self, other: "ClippedSum") -> "ClippedSum":
        return ClippedSum(
            {name: value + other.grads[name] for name, value in self.grads.items()},
            self.num_records + other.num_records,
            torch.cat([self.norms_B, other.norms_B]),
            torch.cat([self.losses_B, other.losses_B]),
        )

    @staticmethod
    def zeros(model: nn.Module) -> "ClippedSum":
        """The sum over no record, for the trained parameters of ``model``."""
        grads = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
        device = next(iter(grads.values())).device if grads else torch.device("cpu")
        return ClippedSum(grads, 0, torch.zeros(0, device=device), torch.zeros(0, device=device))


def clipped_sum(
    loss_fn: LossFn,
    model: nn.Module,
    batch: Batch,
    key: StepKey,
    *,
    max_grad_norm: float | None,
    rule: str = "hard",
    method: str = "vmap",
    chunk_size: int | None = None,
) -> ClippedSum:
    """Sum of the clipped gradients of the valid records of one physical batch; owns the forward pass.

    Runs under the caller's autocast; norms, factors and the sum stay outside it. Buffers of the model are copied, so that no
    statistic of the data is left in it. Padding rows are dropped before the forward pass: they contribute exactly zero. So
    does a record whose gradient is not finite, or so large that the sum of 64 of its squares overflows.

    Args:
        loss_fn: gets batches of one record.
        batch: any number of rows, also none.
        max_grad_norm: C, between 1e-12 and 1e12. None: no clipping, the plain sum of gradients by one backward pass, without a
            guarantee (a record that is not finite is then in the sum); ``norms_B`` is empty.
        rule: "hard", the factor min(1, C / norm).
        method: "vmap".
        chunk_size: most records whose gradients are held at once; None: as many as fit 256 MiB. Changes the order of float sums only.

    Returns:
        The sum, in the parameters' own precision (float32).

    Raises:
        ConfigError: a setting is unknown or out of range, or nothing is trained.
        PrivacyError: float32 matrix products are set to run in reduced precision.
    """
    _check(rule, method, max_grad_norm, chunk_size)
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    if not params:
        raise ConfigError("clip: model has no parameter with requires_grad; expected at least one. Unfreeze what is to be trained.")
    batch = _rows(batch, batch.valid_B.nonzero()[:, 0])
    total = ClippedSum.zeros(model)
    if len(batch.record_id_B) == 0:
        return total
    if max_grad_norm is None:
        return _plain_sum(loss_fn, model, params, batch, key)
    num_chunks = math.ceil(len(batch.record_id_B) / (chunk_size or _default_chunk(params)))
    # Chunks of even size: a small last one would cost nearly as much as a full one.
    for rows in torch.arange(len(batch.record_id_B), device=batch.record_id_B.device).tensor_split(num_chunks):
        total = total + _chunk_sum(loss_fn, model, params, _rows(batch, rows), key, max_grad_norm)
    return total


def per_record_gradients(
    loss_fn: LossFn, model: nn.Module, params: dict[str, Tensor], batch: Batch, key: StepKey
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradient of each record's own loss, the other records out of its sight.

    Args:
        params: the trained parameters by name, detached.

    Returns:
        ({name: (B, *parameter shape)}, losses_B).
    """
    wrapped = _Loss(loss_fn, model)
    buffers = _buffers(model)
    present = [name for name, value in zip(Batch._fields, batch, strict=True) if value is not None]

    def loss_of_one(params: dict[str, Tensor], *values: Tensor) -> Tensor:
        one = Batch(**{name: value[None] for name, value in zip(present, values, strict=True)})  # type: ignore[arg-type]
        return functional_call(wrapped, _prefixed({**buffers, **params}), (one, key)).sum()

    values = [getattr(batch, name) for name in present]
    return vmap(grad_and_value(loss_of_one), in_dims=(None, *[0] * len(values)))(params, *values)


class _Loss(nn.Module):
    """A loss function as a module, so that ``functional_call`` can put other tensors in the model's place."""

    def __init__(self, loss_fn: LossFn, model: nn.Module) -> None:
        super().__init__()
        self.loss_fn = loss_fn
        self.model = model

    def forward(self, batch: Batch, key: StepKey) -> Tensor:
        return self.loss_fn(self.model, batch, key)


def _prefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}": value for name, value in tensors.items()}


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def _rows(batch: Batch, rows: Tensor) -> Batch:
    return Batch._make(None if value is None else value[rows] for value in batch)


def _default_chunk(params: dict[str, Tensor]) -> int:
    record_bytes = sum(p.numel() * p.element_size() for p in params.values())
    return max(1, min(_MAX_CHUNK, _CHUNK_BYTES // record_bytes))


def _chunk_sum(
    loss_fn: LossFn, model: nn.Module, params: dict[str, Tensor], batch: Batch, key: StepKey, max_grad_norm: float
) -> ClippedSum:
    grads, losses_B = per_record_gradients(loss_fn, model, params, batch, key)
    with torch.autocast(losses_B.device.type, enabled=False):
        norms_B = _norms(grads)
        finite_B = torch.isfinite(norms_B)
        if not finite_B.all():
            # A factor of zero would not do: 0 x NaN is NaN. Both operands are zeroed.
            for value in grads.values():
                value.masked_fill_(~finite_B.view(-1, *[1] * (value.ndim - 1)), 0.0)
        factor_B = _factors(norms_B, finite_B, max_grad_norm, next(iter(params.values())).dtype)
        summed = {name: (factor_B @ value.reshape(len(value), -1)).view(value.shape[1:]) for name, value in grads.items()}
    return ClippedSum(summed, len(losses_B), norms_B.float(), losses_B.detach().float())


def _norms(grads: dict[str, Tensor]) -> Tensor:
    """Norm of each record's whole gradient, float64.

    Pieces of at most 64 squares are summed in the gradient's precision, the pieces in float64: a relative error of at most
    (64 / 2 + 1) eps / 2, in whatever order a device sums, where a whole layer in float32 has no useful bound.
    """
    square_B = torch.zeros((), dtype=torch.float64, device=next(iter(grads.values())).device)
    for value in grads.values():
        piece = math.gcd(value[0].numel(), _PIECE)
        part_BN = torch.linalg.vector_norm(value.reshape(len(value), -1, piece), dim=2)
        square_B = square_B + part_BN.double().square().sum(1)
    return square_B.sqrt()


def _factors(norms_B: Tensor, finite_B: Tensor, max_grad_norm: float, dtype: torch.dtype) -> Tensor:
    """min(1, C (1 - margin) / norm), zero where the gradient is not finite, in ``dtype``.

    The margin of 32 eps (4e-6 in float32) is more than all that can make a contribution larger than computed: the error of the
    norm (16.5 eps), the rounding of the factor and of factor x gradient (half an eps each).
    """
    bound = max_grad_norm * (1 - _MARGIN_EPS * torch.finfo(dtype).eps)
    factor_B = torch.where(norms_B > bound, bound / norms_B, 1.0)
    return torch.where(finite_B, factor_B, 0.0).to(dtype)


def _plain_sum(loss_fn: LossFn, model: nn.Module, params: dict[str, Tensor], batch: Batch, key: StepKey) -> ClippedSum:
    leaves = {name: p.requires_grad_() for name, p in params.items()}
    losses_B = functional_call(_Loss(loss_fn, model), _prefixed({**_buffers(model), **leaves}), (batch, key))
    grads = torch.autograd.grad(losses_B.sum(), list(leaves.values()), materialize_grads=True, allow_unused=True)
    empty = torch.zeros(0, device=losses_B.device)
    return ClippedSum(dict(zip(leaves, grads, strict=True)), len(losses_B), empty, losses_B.detach().float())


def _check(rule: str, method: str, max_grad_norm: float | None, chunk_size: int | None) -> None:
    if rule != "hard":
        raise ConfigError(f"clip: rule={rule!r}; expected 'hard'. Leave it out.")
    if method != "vmap":
        raise ConfigError(f"clip: method={method!r}; expected 'vmap'. Leave it out.")
    # Beyond these, factors and squares leave the range of float32, and the bound on a contribution with it.
    if max_grad_norm is not None and not 1e-12 <= max_grad_norm <= 1e12:
        raise ConfigError(f"clip: max_grad_norm={max_grad_norm!r}; expected between 1e-12 and 1e12. Typical: 0.1 to 1.")
    if chunk_size is not None and not chunk_size >= 1:
        raise ConfigError(f"clip: chunk_size={chunk_size!r}; expected at least 1. Leave it out for what fits in memory.")
    precision = torch.get_float32_matmul_precision()
    if max_grad_norm is not None and precision != "highest":
        raise PrivacyError(
            f"clip: float32_matmul_precision={precision!r}; expected 'highest': a product rounded to fewer bits can exceed the clip norm. "
            "Call torch.set_float32_matmul_precision('highest')."
        )
