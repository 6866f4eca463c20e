"""Weights as layers use them, with every record's gradient: materialised where that is small, else
as outer products.

A slot is a parameter, or a weight that the model computes from parameters alone (a reshaped layer
scale, a standardised kernel). A parameter's gradient is its slots' gradients pulled back through
that computation. If the weight is a view of the parameter, the slot's norm is the parameter's;
otherwise gradients are materialised a chunk at a time and pulled back one by one, for the norm and
again for the sum.

Legend: B records, N records of a chunk, W the dimensions of a weight.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpvision.devices import row_sums
from dpvision.dp.gram import (
    PlaceSums,
    SquareNorms,
    square_norms,
    summed_squares,
    sums_of_shared,
    written_square_norms,
)
from dpvision.dp.outer_products import OUTER_NUMBERS, Dense, OuterProducts, chunks, wide
from dpvision.dp.rounding import sum_dtype
from dpvision.errors import PrivacyError
from dpvision.threads import map_pieces

_PIECE = 64
"""Numbers whose squares are summed in the gradient's own precision, before float64 takes over."""
_WRITTEN = {"cpu": 1.5, "cuda": 1.0}
"""Gradients with up to this many times the numbers of their factors are written out. On a processor
half as many numbers again are worth the time that they save; on a GPU that was not measured.
"""
_AGAIN = 1e-6
"""Relative excess of a squared norm that is rounding: half of it is in the reserve."""
_SMALL = 2**16
"""Most numbers of a record's gradient that is copied beside others, to be normed with them."""


@dataclass(eq=False)
class Slot:
    """One weight and all records' gradients for it."""

    weight: Tensor
    names: frozenset[str]
    """Parameters that the weight is, or is computed from."""
    rules: list[str] = field(default_factory=list)
    """Names of the rules that used it, in the order of the calls."""
    written_BW: Tensor | None = None
    outers: list[OuterProducts] = field(default_factory=list)
    open: bool = False
    """Set after the forward pass: gradients that arrive earlier come from a backward pass inside
    the loss.
    """

    def add_written(self, grad_BW: Tensor) -> None:
        """Add gradients (B, *weight shape) of one use."""
        self._require_open()
        grad_BW = grad_BW.to(wide(grad_BW.dtype))
        self.written_BW = grad_BW if self.written_BW is None else self.written_BW + grad_BW

    def add_outer_products(self, outer: OuterProducts) -> None:
        """Add the gradients of one use as outer products; those hardly larger than their factors
        are materialised at once.
        """
        self._require_open()
        room = _WRITTEN.get(outer.device.type, _WRITTEN["cuda"])
        if outer.written_numbers <= room * outer.stored_numbers:
            parts = [
                outer.write_out(rows)
                for rows in chunks(
                    outer.num_records, outer.working_numbers, OUTER_NUMBERS, outer.device
                )
            ]
            self.add_written(parts[0] if len(parts) == 1 else torch.cat(parts))
        else:
            self.outers.append(outer)

    def _require_open(self) -> None:
        if not self.open:
            raise PrivacyError(
                "clip: the loss computes a gradient inside the forward pass; expected none, "
                "because per-record gradients come from a single backward pass. Leave out "
                "gradient penalties."
            )

    @property
    def uses(self) -> int:
        """int: parts that its sum is made of, each of which may be longer than the whole."""
        return len(self.outers) + (self.written_BW is not None)

    @property
    def used(self) -> bool:
        return self.uses > 0

    def write_out(self, rows: slice) -> Tensor:
        """Materialise the gradients of some records, (N, *weight shape)."""
        parts = [outer.write_out(rows) for outer in self.outers]
        if self.written_BW is not None:
            parts.append(self.written_BW[rows])
        return functools.reduce(torch.add, parts)  # ``sum`` would add by a number's place

    def square_norms(self, num_records: int) -> SquareNorms:
        """Return the squared norms of the records' gradients for the weight."""
        # Three ways, the cheapest exact one: Gram matrices of the uses, which cost positions^2;
        # numbers that are written out already; or else the outer products written out here, in
        # chunks, and only for the norm.
        if self.written_BW is None and self._gram_is_cheaper():
            return square_norms(self.outers)
        if not self.outers:
            assert self.written_BW is not None
            return SquareNorms.certain(sum_of_squares(self.written_BW))
        numbers = max(outer.working_numbers for outer in self.outers)
        rows = list(chunks(num_records, numbers, OUTER_NUMBERS, self.weight.device))
        return SquareNorms.joined([self._written_norms(part) for part in rows])

    def _written_norms(self, rows: slice) -> SquareNorms:
        value_N, dtype = sum_of_squares(self.write_out(rows)), wide(self.weight.dtype)
        kept = [] if self.written_BW is None else [sum_of_squares(self.written_BW[rows]).sqrt()]
        return written_square_norms(self.outers, kept, rows, value_N, dtype)

    def shared_input(self) -> tuple[int, torch.Size, tuple[int, ...]] | None:
        """Return an identifier of the input if its Gram matrix is needed and may be shared with
        other weights, else None.
        """
        if self.written_BW is not None or len(self.outers) != 1 or not self._gram_is_cheaper():
            return None
        left, right = self.outers[0].left, self.outers[0].right
        if not isinstance(left, Dense) or not isinstance(right, Dense):
            return None
        return right.kept.data_ptr(), right.kept.shape, right.kept.stride()

    def weighted_sum(self, factor_B: Tensor, keep_B: Tensor | None, blocks: list[slice]) -> Tensor:
        """Return the sum over i of factor_i G_i, of the weight's shape; records with ``keep_B``
        False are left out, whatever they hold.

        ``blocks`` and the precision of the sum are as in ``OuterProducts.weighted_sum``; several
        uses are added in float64.
        """
        exact = self.uses > 1
        # One sum for each use kept as outer products, and one for all that were written out: a
        # product of the factors with the matrix of gradients, block by block. Then their sum.
        parts = [outer.weighted_sum(factor_B, keep_B, blocks, exact=exact) for outer in self.outers]
        if self.written_BW is not None:
            grad_BN = self.written_BW.reshape(len(self.written_BW), -1)
            sum_N = weighted_rows(grad_BN, factor_B, keep_B, blocks, exact=exact)
            parts.append(sum_N.view(self.weight.shape))
        total = parts[0].double() if exact else parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def release(self) -> None:
        """Free the gradients, to make room for the next slot's sum."""
        self.written_BW, self.outers = None, []

    def _gram_is_cheaper(self) -> bool:
        if not self.outers:
            return False
        first = self.outers[0]
        places = [outer.left.places for outer in self.outers]
        pairs = (sum(places) ** 2 + sum(t * t for t in places)) / 2  # of uses, each pair once
        gram = pairs * (first.left.width + first.right.width)
        return gram < sum(places) * first.left.width * first.right.width


def sum_of_squares(grad_BW: Tensor) -> Tensor:
    """Return the squared norms of materialised gradients, float64 (B,).

    Pieces of at most 64 squares are summed in the gradient's precision, the pieces in float64: a
    relative error of at most (64 / 2 + 1) eps in any order of summation, whereas the sum of a whole
    layer in float32 has no useful bound.
    """
    if not grad_BW[0:1].numel():
        return torch.zeros(len(grad_BW), dtype=torch.float64, device=grad_BW.device)
    piece = math.gcd(grad_BW[0].numel(), _PIECE)
    part_BN = torch.linalg.vector_norm(grad_BW.reshape(len(grad_BW), -1, piece), dim=2)
    return row_sums(part_BN.double().square())


def weighted_rows(
    grad_BN: Tensor,
    factor_B: Tensor,
    keep_B: Tensor | None,
    blocks: list[slice],
    *,
    exact: bool = False,
) -> Tensor:
    """Return the sum over i of factor_i times row i, (N,); arguments as for
    ``Slot.weighted_sum``.
    """
    if keep_B is not None:
        grad_BN = grad_BN.masked_fill(~keep_B[:, None], 0.0)
    factor_B = factor_B.to(grad_BN.dtype)
    sums = (factor_B[block] @ grad_BN[block] for block in blocks)
    total = next(sums)
    if len(blocks) > 1:
        total = total.to(sum_dtype(len(blocks), blocks[-1].stop, total.dtype, exact=exact))
        for part in sums:
            total += part
    return total


def summed(grad_BW: Tensor, factor_B: Tensor, finite_B: Tensor) -> Tensor:
    """Return the sum over i of factor_i times a materialised gradient, in float64, record by
    record; non-finite ones are left out.
    """
    total = torch.zeros(grad_BW.shape[1:], dtype=torch.float64, device=grad_BW.device)
    for grad, factor, finite in zip(grad_BW, factor_B.tolist(), finite_B.tolist(), strict=True):
        if finite:  # a factor of zero is not enough: 0 x NaN is NaN
            total.add_(grad, alpha=factor)
    return total


def groups_of(slots: Iterable[Slot]) -> list[list[Slot]]:
    """Group slots that have parameters in common, directly or through other slots."""
    # Each slot joins all groups that share a parameter with it so far into one.
    group_of: dict[str, list[Slot]] = {}
    names_of: dict[int, set[str]] = {}
    groups: dict[int, list[Slot]] = {}
    for slot in slots:
        members, names = [slot], set(slot.names)
        for group in {
            id(group_of[name]): group_of[name] for name in names if name in group_of
        }.values():
            names |= names_of.pop(id(group))
            members = groups.pop(id(group)) + members
        groups[id(members)], names_of[id(members)] = members, names
        group_of.update(dict.fromkeys(names, members))
    return list(groups.values())


def small_written(groups: list[list[Slot]], params: dict[str, Tensor]) -> list[list[Slot]]:
    """Return the groups of one parameter whose gradients are written out and small: biases, norms,
    tokens. Together they are one matrix (``joined``), whose norms and sum take one operation each.
    """
    found = [
        group
        for group in groups
        if len(group) == 1
        and group[0].written_BW is not None
        and not group[0].outers
        and group[0].weight is params.get(next(iter(group[0].names)))
        and group[0].weight.numel() <= _SMALL
        and group[0].weight.numel() % (_PIECE // 2) == 0  # few pieces, in ``sum_of_squares``
    ]
    dtypes = {group[0].written_BW.dtype for group in found}  # type: ignore[union-attr]
    return found if len(found) > 1 and len(dtypes) == 1 else []


def joined(groups: list[list[Slot]]) -> Tensor:
    """The gradients of ``small_written`` beside one another, (B, all their numbers)."""
    return torch.cat([group[0].written_BW.flatten(1) for group in groups], 1)  # type: ignore[union-attr]


def weighted_sums(
    groups: list[list[Slot]], factor_B: Tensor, keep_B: Tensor | None, blocks: list[slice]
) -> list[Tensor]:
    """``Slot.weighted_sum`` of each group of ``small_written``."""
    total = weighted_rows(joined(groups), factor_B, keep_B, blocks)
    weights = [group[0].weight for group in groups]
    sums = total.split([weight.numel() for weight in weights])
    return [part.view(weight.shape) for part, weight in zip(sums, weights, strict=True)]


def by_places(groups: list[list[Slot]]) -> list[list[list[Slot]]]:
    """Split groups by position count, at half the maximum; one list if all are above it.

    Float32 sums over many positions round more. Each part has its own blocks (``buckets.blocks``),
    so that layers of few positions, which may hold most of the weights, are cut less finely.
    """
    places = [
        max((outer.left.places for slot in group for outer in slot.outers), default=0)
        for group in groups
    ]
    half = max(places, default=0) / 2
    many = [group for group, num in zip(groups, places, strict=True) if num > half]
    few = [group for group, num in zip(groups, places, strict=True) if num <= half]
    return [part for part in (many, few) if part] or [[]]


def most_terms(groups: list[list[Slot]]) -> int:
    """T + 1 of the weight used at the largest number of places T, over all its uses."""
    return 1 + max(
        (sum(outer.left.places for outer in slot.outers) for group in groups for slot in group),
        default=0,
    )


def total_square_norms(
    groups: list[list[Slot]], params: dict[str, Tensor], num_records: int, device: torch.device
) -> SquareNorms:
    """Return the squared norms of the records' gradients over all groups; weights with the same
    input share its Gram matrix.
    """
    # Weights with the same input (queries, keys and values, say) are normed together, so that its
    # Gram matrix is computed once, and small gradients that are written out as one matrix. All
    # other groups are normed on their own. The pieces run on several threads, and are added up in
    # this order, whichever finishes first.
    sharing: dict[Any, list[Slot]] = {}
    alone = []
    small = small_written(groups, params)
    in_small = set(map(id, small))
    for group in groups:
        shared = group[0].shared_input() if len(group) == 1 and norm_is_own(group, params) else None
        if shared is not None:
            sharing.setdefault(shared, []).append(group[0])
        elif id(group) not in in_small:
            alone.append(group)
    pieces: list[Callable[[], list[PlaceSums] | SquareNorms]] = [
        partial(_shared_sums, slots) for slots in sharing.values()
    ]
    pieces += [partial(group_square_norms, group, params, num_records) for group in alone]
    made = map_pieces(torch.no_grad()(operator.call), pieces, device)
    by_place = [sums for part in made if isinstance(part, list) for sums in part]
    parts = [part for part in made if isinstance(part, SquareNorms)]
    if by_place:
        parts.append(summed_squares(by_place))
    if small:
        parts.append(SquareNorms.certain(sum_of_squares(joined(small))))
    zero_B = torch.zeros(num_records, dtype=torch.float64, device=device)
    return SquareNorms.total([SquareNorms.certain(zero_B), *parts])


def group_square_norms(
    group: list[Slot], params: dict[str, Tensor], num_records: int
) -> SquareNorms:
    """Return the squared norms of the gradients for all parameters of one group."""
    # If the slots are disjoint parts of one parameter, their square norms add up. If not, what is
    # normed is what is added (``pulled_sum``).
    if norm_is_own(group, params):
        total = group[0].square_norms(num_records)
        for slot in group[1:]:
            total = total + slot.square_norms(num_records)
        return total
    parts = [
        SquareNorms.certain(summed_square(pulled.values()))
        for _, pulled in _pulled_chunks(group, params, num_records)
    ]
    return SquareNorms.joined(parts)


def summed_square(grads: Iterable[Tensor]) -> Tensor:
    """Squared norms of the records' gradients for several parameters together, float64 (B,)."""
    return functools.reduce(torch.add, map(sum_of_squares, grads))


def require_no_longer(square_B: Tensor, normed_B: Tensor) -> None:
    """Refuse gradients that were computed twice and are longer in the sum than in the norm.

    Raises:
        PrivacyError: code of the model does something else the second time.
    """
    longer_B = ~(square_B <= normed_B * (1 + _AGAIN)) & torch.isfinite(normed_B)
    if bool(longer_B.any()):
        raise PrivacyError(
            "clip: gradients differ from one computation to the next; expected a function of the "
            "record, the weights and the key. The model or the loss counts its calls, or draws "
            "random numbers of its own: compute them from the step (docs/clipping.md)."
        )


def pulled_sum(
    group: list[Slot], params: dict[str, Tensor], factor_B: Tensor, keep_B: Tensor | None
) -> dict[str, Tensor]:
    """Return the sum over i of factor_i G_i for the parameters of a group, float64; records with
    ``keep_B`` False are left out.

    For parameters of which the weights are computed, or that have overlapping views. Each record's
    gradient is pulled back by itself, as for its norm: pulled back after the sum, it would be
    rounded relative to the weights' sums, which may be far longer than C where their gradients
    cancel in the parameter (a standardised kernel, copies by an index).
    """
    total: dict[str, Tensor] = {}
    for rows, pulled in _pulled_chunks(group, params, len(factor_B)):
        for name, grad_NW in pulled.items():
            grad_NP = grad_NW.reshape(len(grad_NW), -1).double()
            if keep_B is not None:
                grad_NP = grad_NP.masked_fill(~keep_B[rows, None], 0.0)
            part = factor_B[rows].double() @ grad_NP
            total[name] = total[name] + part if name in total else part
    return {name: value.view_as(params[name]) for name, value in total.items()}


def _pulled_chunks(
    group: list[Slot], params: dict[str, Tensor], num_records: int
) -> Iterator[tuple[slice, dict[str, Tensor]]]:
    """``written_out`` for a chunk of records at a time, the same chunks each time."""
    numbers = sum(slot.weight.numel() for slot in group) + max(
        (o.working_numbers for s in group for o in s.outers), default=0
    )
    for rows in chunks(num_records, numbers, OUTER_NUMBERS, group[0].weight.device):
        yield rows, written_out(group, params, rows)


def written_out(group: list[Slot], params: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    """Materialise the gradients of some records for the parameters of one group, (N, *parameter
    shape).
    """
    return pull_back(group, [slot.write_out(rows) for slot in group], params, batched=True)


def _shared_sums(slots: list[Slot]) -> list[PlaceSums]:
    """Sums by place over slots with the same ``shared_input``."""
    return sums_of_shared([slot.outers[0].left for slot in slots], slots[0].outers[0].right)


def pull_back(
    group: list[Slot], grads: list[Tensor], params: dict[str, Tensor], *, batched: bool
) -> dict[str, Tensor]:
    """Compute gradients for the parameters from gradients for the slots, by the chain rule.

    Args:
        grads: one per slot, of the weight's shape, with a leading record dimension if ``batched``.
    """
    names = sorted(frozenset().union(*(slot.names for slot in group)))
    total: dict[str, Tensor] = {}
    for slot, grad in zip(group, grads, strict=True):
        if slot.weight is params.get(next(iter(slot.names))):
            parts: tuple[Tensor | None, ...] = tuple(
                grad if name in slot.names else None for name in names
            )
        else:
            parts = _pulled(slot.weight, [params[name] for name in names], grad, batched=batched)
        for name, part in zip(names, parts, strict=True):
            if part is not None:
                total[name] = total[name] + part if name in total else part
    return total


def _pulled(
    weight: Tensor, wanted: list[Tensor], grad: Tensor, *, batched: bool
) -> tuple[Tensor | None, ...]:
    """``torch.autograd.grad``, in two parts for a wider gradient, so that nothing is rounded if the
    weight is a view.
    """
    # grad = high + rest, both in the weight's precision; pulling back is linear.
    high = grad.to(weight.dtype)
    parts = torch.autograd.grad(
        weight, wanted, high, retain_graph=True, allow_unused=True, is_grads_batched=batched
    )
    if grad.dtype == weight.dtype:
        return parts
    rest = (grad - high).to(weight.dtype)
    low = torch.autograd.grad(
        weight, wanted, rest, retain_graph=True, allow_unused=True, is_grads_batched=batched
    )
    return tuple(
        None if a is None or b is None else a.to(grad.dtype) + b
        for a, b in zip(parts, low, strict=True)
    )


def norm_is_own(group: list[Slot], params: dict[str, Tensor]) -> bool:
    """Return whether the slots are disjoint parts of one parameter, so that their squared norms add
    up to the parameter's.
    """
    if (
        any(len(slot.names) != 1 for slot in group)
        or len({name for slot in group for name in slot.names}) != 1
    ):
        return False
    # One slot must show every number of the parameter once. Several must be contiguous views whose
    # intervals in the parameter's memory do not overlap.
    param = params[next(iter(group[0].names))]
    if len(group) == 1:
        return group[0].weight is param or _shows_all(group[0].weight, param)
    spans = []
    for slot in group:
        if not (_is_view(slot.weight, param) and slot.weight.is_contiguous()):
            return False
        spans.append(
            (slot.weight.storage_offset(), slot.weight.storage_offset() + slot.weight.numel())
        )
    spans.sort()
    return all(first[1] <= second[0] for first, second in itertools.pairwise(spans))


def _is_view(weight: Tensor, param: Tensor) -> bool:
    return weight is param or (weight.is_meta == param.is_meta and weight._base is param)


def _shows_all(weight: Tensor, param: Tensor) -> bool:
    """Return whether a tensor is a view that shows each number of a parameter once."""
    if not _is_view(weight, param) or weight.numel() != param.numel():
        return False
    # From the smallest stride on, each is the number of elements inside it: no gap, no overlap.
    expected = 1
    for stride, size in sorted(
        (stride, size)
        for size, stride in zip(weight.shape, weight.stride(), strict=True)
        if size > 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True
