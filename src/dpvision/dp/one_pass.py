"""All records' clipped gradients from one forward and one backward pass, exact (book-keeping, Bu et
al. 2023).

The forward pass runs under a mode that sees every torch function. Where a trained parameter, or
what is computed from parameters alone, meets data, a rule (``rule``) takes the call; the backward
pass leaves inputs and output gradients in slots; then norms, factors, and each weight's gradient
once, already clipped. Models are taken as they are: no hooks, no replaced layers.

Unsupported uses of a parameter are found before the pass (``route``), those that autograd reaches
past the rules after it; both fall back to ``per_record_gradients`` for that parameter. A pass whose
calls differ from those for two and three records is refused.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from dpvision.data.batch import Batch, take
from dpvision.data.keys import StepKey
from dpvision.devices import send
from dpvision.dp.buckets import block_error, blocks
from dpvision.dp.compiled import CompiledBlocks, Pending
from dpvision.dp.gram import SquareNorms
from dpvision.dp.interception import GraphChanged, InterceptedPass, RouteForgotten
from dpvision.dp.outer_products import rounding
from dpvision.dp.per_record import (
    LossModule,
    copied_buffers,
    default_chunk,
    even_chunks,
    per_record_gradients,
    prefixed,
)
from dpvision.dp.rounding import BUDGET, LOOSE, MOST_ROUNDED
from dpvision.dp.route import Route, add_slow, backward, forget, route_of, trained
from dpvision.dp.rule import NoRule
from dpvision.dp.weight_grads import (
    Slot,
    by_places,
    groups_of,
    most_terms,
    norm_is_own,
    pull_back,
    pulled_sum,
    require_no_longer,
    small_written,
    summed,
    summed_square,
    total_square_norms,
    weighted_sums,
    written_out,
)
from dpvision.precision import autocast_dtype
from dpvision.threads import map_pieces

_LOWERED = 0.95
"""Where the proven error of a norm would lower the clip factor beyond this, the record's gradient
is written out instead.
"""


@dataclass(frozen=True)
class How:
    """How a pass is computed: all but the model, the loss and the records."""

    factors: Callable[[Tensor, Tensor], Tensor]
    """(norms_B float64, finite_B bool) -> factor_B."""
    max_grad_norm: float
    loss_scale: float = 1.0
    """Factor of the losses in the backward pass, undone before the norm."""
    chunk_size: int | None = None
    """Most records of a chunk, for parameters without a rule."""
    compiled: CompiledBlocks | None = None
    """Programs of the model's blocks."""


@dataclass(frozen=True, eq=False)
class Passed:
    """What the forward and the backward pass leave for the norms and the sum."""

    params: dict[str, Tensor]
    losses_B: Tensor
    groups: list[list[Slot]]
    slow: dict[str, Tensor]
    """Detached parameters without a rule."""
    slow_gradients: Callable[[slice], dict[str, Tensor]]
    """Gradients of a chunk's records for ``slow``."""
    chunks: list[slice]
    """Records whose ``slow_gradients`` are computed together; empty if all parameters have
    rules.
    """
    rounding: float
    """Relative rounding of the scaled operands of weight gradients (``outer_products.rounding``),
    in the precision of the forward pass; 0 but for half precision on a GPU.
    """


@dataclass(frozen=True, eq=False)
class Weighed:
    """Norms and factors of a pass, and how its sum is cut."""

    norms_B: Tensor
    factor_B: Tensor
    """Zero for rows that are not valid."""
    finite_B: Tensor
    apart: list[int]
    """Records that are added one by one, in float64."""
    kept: Tensor | None
    """bool (B,), False for records that the products leave out; None if none is left out."""
    parts: list[list[list[Slot]]]
    cuts: list[list[slice]]
    """Blocks of valid records for each of ``parts``."""
    cost_KB: Tensor
    """By which the blocks are cut, on the CPU."""
    slow_B: Tensor
    """Square norms of the gradients for slow parameters, in units of the loss scale."""


def one_pass(
    loss_fn: Any, model: nn.Module, batch: Batch, bits: np.ndarray, key: StepKey, how: How
) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Sum of the records' gradients, each times its factor.

    Args:
        batch: one record or more in the order of their hashes, rows that are not valid after all
            others.
        bits: hashes of the valid records.

    Returns:
        ({name: sum}, in the parameters' precision or float64; norms_B float64, losses_B).
    """
    passed = forward_backward(loss_fn, model, batch, key, how)
    weighed = weigh(passed, batch, bits, how)
    return _add_up(passed, weighed, len(bits), how), weighed.norms_B, passed.losses_B


def forward_backward(
    loss_fn: Any, model: nn.Module, batch: Batch, key: StepKey, how: How
) -> Passed:
    """Run the forward and the backward pass.

    Raises:
        RouteForgotten: the pass makes other calls than when its route was found.
    """
    params = trained(model)
    while True:
        route = route_of(loss_fn, model, batch, key)
        pending: list[Pending] = []  # compiled blocks that wait for their backward pass
        try:
            run, losses_B = _forward(
                loss_fn, model, params, route, batch, key, how.compiled, pending
            )
        except (GraphChanged, NoRule) as error:
            forget(loss_fn, model, batch)
            raise RouteForgotten(str(error)) from None
        leaked = backward(params, route.slow, run, pending, losses_B, how.loss_scale)
        if not leaked:
            break
        add_slow(route, leaked, loss_fn, model, batch, key)
    slow = {name: params[name].detach() for name in route.slow}
    chunks = (
        even_chunks(len(batch.record_id_B), how.chunk_size or default_chunk(slow)) if slow else []
    )
    held: list[dict[str, Tensor]] = []

    def slow_gradients(rows: slice) -> dict[str, Tensor]:
        grads = held or [
            per_record_gradients(loss_fn, model, slow, take(batch, rows), key, how.loss_scale)[0]
        ]
        if len(chunks) == 1:
            held[:] = grads
        return grads[0]

    return Passed(
        params,
        losses_B.detach(),
        groups_of(slot for slot in run.slots if slot.used),
        slow,
        slow_gradients,
        chunks,
        _rounding(params, run.low),
    )


def _forward(
    loss_fn: Any,
    model: nn.Module,
    params: dict[str, Tensor],
    route: Route,
    batch: Batch,
    key: StepKey,
    compiled: CompiledBlocks | None,
    pending: list[Pending],
) -> tuple[InterceptedPass, Tensor]:
    run = InterceptedPass(params, route.calls, len(batch.record_id_B), route.slow, batch)
    buffers = prefixed(copied_buffers(model))
    blocks = contextlib.nullcontext() if compiled is None else compiled.intercepted(run, pending)
    with blocks, run, torch.enable_grad():
        losses_B = functional_call(LossModule(loss_fn, model), buffers, (batch, key))
    run.check_backward([losses_B])
    if route.losses != run.sources.of([losses_B]):
        raise GraphChanged("other losses")
    return run, losses_B


def weigh(passed: Passed, batch: Batch, bits: np.ndarray, how: How) -> Weighed:
    """Norms, factors and cuts, from what the backward pass left in the slots.

    1. Norms come from Gram matrices, without any record's gradient, each with a bound on its error.
    2. A record is clipped by the upper end of its norm. Where that bound is too wide for the
       factor, or for the error of the sum, the record's gradient is written out.
    3. The other records are cut into blocks, each with a proven error of its float32 product.
    """
    parts = by_places(passed.groups)
    with torch.autocast(batch.record_id_B.device.type, enabled=False), torch.no_grad():
        norms = _norms(passed, parts, batch, how)
        factor_B = norms.factor_B(how)
        # The host has to know these: a pass waits for the device here, and nowhere else unless a
        # record is written out.
        doubtful_B = _doubtful(norms, factor_B, parts, batch, how)
        found = torch.stack([doubtful_B.double(), norms.finite_B.double()])
        doubtful, finite, *costs = torch.cat([found, norms.cost_KB(factor_B, batch)]).cpu()
        apart = doubtful.nonzero()[:, 0].tolist()
        if apart:
            _write_out(norms, apart, passed, how)
            factor_B, found = norms.factor_B(how), norms.finite_B[None].double()
            finite, *costs = torch.cat([found, norms.cost_KB(factor_B, batch)]).cpu()
        factor_B = factor_B.where(batch.valid_B, 0.0)
        # In half precision on a GPU the bound is not proven (docs/clipping.md), and blocks would
        # double the price of the products. Rows that are not valid are in no block: the sum's bits
        # do not depend on how many there are.
        num = len(bits)
        whole = passed.rounding > 0
        cuts = [
            [slice(0, num)]
            if whole
            else blocks(bits, cost[:num].numpy(), most_terms(members), how.max_grad_norm)
            for cost, members in zip(costs, parts, strict=True)
        ]
        added = [i for i in apart if finite[i]]
        finite[apart] = 0
        kept = None if bool(finite[:num].all()) else send(finite.bool(), factor_B.device)
    return Weighed(
        norms.value_B,
        factor_B,
        norms.finite_B,
        added,
        kept,
        parts,
        cuts,
        torch.stack(costs),
        norms.slow_B,
    )


@dataclass(eq=False)
class _Norms:
    """Norms of the records' gradients, and what is proven of them."""

    value_B: Tensor
    """float64; the slow parameters' share included."""
    slow_B: Tensor
    """Square norms of the gradients for slow parameters, in units of the loss scale."""
    highest_B: Tensor
    """No norm is larger, beyond what the reserve covers."""
    slack_B: Tensor
    """What rounding the scaled operands to half precision can add."""
    lengths_KB: Tensor
    """(T + 1) x the lengths of a record's outer products in each part (``SquareNorms.work_B``)."""
    finite_B: Tensor

    def factor_B(self, how: How) -> Tensor:
        return how.factors(
            torch.maximum(self.value_B, self.highest_B) + self.slack_B, self.finite_B
        )

    def cost_KB(self, factor_B: Tensor, batch: Batch) -> Tensor:
        """``buckets.blocks``'s cost of every record in each part of the weights, float64 (K, B)."""
        cost_KB = factor_B.where(batch.valid_B, 0.0) * self.lengths_KB
        return cost_KB.where(self.finite_B, 0.0).double()


def _norms(passed: Passed, parts: list[list[list[Slot]]], batch: Batch, how: How) -> _Norms:
    """The norms from Gram matrices, and of slow parameters from their gradients."""
    num, device, params, scale = (
        len(batch.record_id_B),
        batch.record_id_B.device,
        passed.params,
        how.loss_scale,
    )
    slow_B = torch.zeros(num, dtype=torch.float64, device=device)
    for rows in passed.chunks:
        slow_B[rows] = summed_square(passed.slow_gradients(rows).values())
    squares = [total_square_norms(members, params, num, device) for members in parts]
    squares[0] = squares[0] + SquareNorms.certain(slow_B)
    square = sum(squares[1:], start=squares[0])
    loose = LOOSE if next(iter(params.values())).dtype == torch.float32 else 0.0
    highest_B = (square.value_B + square.error_B).sqrt() / ((1 + loose) * scale)
    # The blocks of each part may use 1 / sqrt(number of parts) of the budget: they round different
    # numbers, so the squares add up.
    works_KB = torch.stack([norms.work_B for norms in squares])
    return _Norms(
        square.value_B.clamp(min=0).sqrt() / scale,  # below zero by rounding only; NaN stays NaN
        slow_B,
        highest_B,
        passed.rounding * square.length_B.sqrt() / scale,
        works_KB.mul_(len(parts)).sqrt_() / scale,
        torch.isfinite(highest_B),
    )


def _doubtful(
    norms: _Norms, factor_B: Tensor, parts: list[list[list[Slot]]], batch: Batch, how: How
) -> Tensor:
    """Valid records to write out, bool (B,): those whose outer products nearly cancel, or are far
    longer than their sum, so that their norm, or their sum in float32, may be off by too much.
    """
    low_B = factor_B < _LOWERED * how.factors(norms.value_B + norms.slack_B, norms.finite_B)
    errors_KB = torch.stack(
        [
            block_error(1, terms) * factor_B * own_B
            for terms, own_B in zip(map(most_terms, parts), norms.lengths_KB, strict=True)
        ]
    )
    heavy_B = (errors_KB > BUDGET * how.max_grad_norm).any(0)
    unknown_B = ~norms.finite_B & torch.isfinite(norms.value_B)
    return (low_B | heavy_B | unknown_B) & batch.valid_B


def _write_out(norms: _Norms, apart: list[int], passed: Passed, how: How) -> None:
    """Replace the norms of the records ``apart`` by those of their gradients, written out one by
    one: what is normed is then what is added.
    """
    for i in apart:
        total = norms.slow_B[i]
        for group in passed.groups:
            grads = written_out(group, passed.params, slice(i, i + 1))
            total = total + summed_square(grads.values())[0]
        norms.value_B[i] = total.sqrt() / how.loss_scale
    norms.finite_B = torch.isfinite(norms.value_B)
    norms.highest_B[apart] = norms.value_B[apart]
    norms.slack_B[apart] = 0.0
    norms.lengths_KB[:, apart] = 0.0


def _add_up(passed: Passed, weighed: Weighed, num_records: int, how: How) -> dict[str, Tensor]:
    """The sum of ``num_records`` valid records' gradients times their factors; frees the slots."""
    params, factor_B = passed.params, weighed.factor_B / how.loss_scale

    @torch.no_grad()
    def add_up(piece: tuple[list[list[Slot]], list[slice]]) -> dict[str, Tensor]:
        groups, cut = piece
        # One group, or small ones together.
        if len(groups) > 1:
            small = weighted_sums(groups, factor_B, weighed.kept, cut)
            sums = [
                pull_back(group, [own], params, batched=False)
                for group, own in zip(groups, small, strict=True)
            ]
        elif norm_is_own(groups[0], params):
            each = [slot.weighted_sum(factor_B, weighed.kept, cut) for slot in groups[0]]
            sums = [pull_back(groups[0], each, params, batched=False)]
        else:
            sums = [pulled_sum(groups[0], params, factor_B, weighed.kept)]
        made: dict[str, Tensor] = {}
        for group, part in zip(groups, sums, strict=True):
            for i in weighed.apart:
                for name, grad in written_out(group, params, slice(i, i + 1)).items():
                    part[name] = part[name].double().add_(grad[0].double() * factor_B[i].double())
            for slot in group:
                slot.release()
            for name, value in part.items():
                made[name] = _rounded(value, params[name], num_records)
        return made

    pieces = []
    for members, cut in zip(weighed.parts, weighed.cuts, strict=True):
        small = small_written(members, params)
        in_small = set(map(id, small))
        pieces += [([group], cut) for group in members if id(group) not in in_small]
        pieces += [(small, cut)] if small else []
    total: dict[str, Tensor] = {}
    with torch.autocast(factor_B.device.type, enabled=False), torch.no_grad():
        for part in map_pieces(add_up, pieces, factor_B.device):
            total |= part  # a parameter is in one group only
        for rows in passed.chunks:
            grads = passed.slow_gradients(rows)
            if len(passed.chunks) > 1:  # computed anew
                require_no_longer(summed_square(grads.values()), weighed.slow_B[rows])
            for name, value in grads.items():
                added = summed(value, factor_B[rows], weighed.finite_B[rows])
                total[name] = added.add_(total[name]) if name in total else added
        either = total | {
            name: torch.zeros_like(p, requires_grad=False)
            for name, p in params.items()
            if name not in total
        }
    return {name: _rounded(either[name], p, num_records) for name, p in params.items()}


def _rounded(value: Tensor, param: Tensor, num_records: int) -> Tensor:
    """A sum in the parameter's precision, or in float64 where rounding that many records' parts
    would be too much.
    """
    return value.to(param.dtype) if num_records <= MOST_ROUNDED else value.double()


def _rounding(params: dict[str, Tensor], low: torch.dtype | None) -> float:
    """Relative rounding of the scaled operands of weight gradients, in the precision of the forward
    pass.

    Args:
        low: half precision that the pass used (``InterceptedPass.low``).
    """
    sample = next(iter(params.values()))
    return rounding(low or autocast_dtype(sample.device) or sample.dtype, sample.device)
