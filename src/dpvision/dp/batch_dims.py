"""Find the record dimension of every tensor in a forward pass by running it, without guessing.

Shapes alone do not distinguish a batch of 64 records from 64 tokens. Passes over two and over three
records do: the dimension that grows holds the records. Shapes also do not show which rows belong to
which record. Passes in which one of three records is replaced do: only its rows change. Where none
changes, as in an expanded token, gradients do: those of a record's loss reach only its rows. The
pass that clips (``one_pass``) then sees the same calls in the same order, and checks every shape
that it relies on against this list.
"""

import itertools
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function

NUM_RECORDS = (2, 3)
_LISTS = (list, tuple)


@dataclass(frozen=True)
class BatchDim:
    """Dimension ``dim`` holds the records, ``per_record`` rows for each."""

    dim: int
    per_record: int
    side_by_side: bool = True
    """Whether the rows of a record are adjacent; if False, the first rows of all records come
    first, then the second rows, and so on.
    """
    known: bool = True
    """Whether ``side_by_side`` was found, which the values of the rows may not tell."""


MIXED = BatchDim(-1, 0)
"""The shape depends on the number of records in another way, or the rows have another order."""


Source = tuple[int, int] | None
"""(position of the call that made a tensor, number among its results), (-1, number of the field)
for a tensor of the batch, None for all others.
"""


class Sources:
    """Where each tensor of a pass comes from, while the pass runs."""

    def __init__(self, batch: Any) -> None:
        self._made: dict[int, tuple[weakref.ref[Tensor], Source]] = {}
        for number, value in enumerate(batch):
            if isinstance(value, Tensor):
                self._made[id(value)] = weakref.ref(value), (-1, number)

    def of(self, tensors: list[Tensor]) -> tuple[Source, ...]:
        """Return the source of each tensor."""
        found = []
        for tensor in tensors:
            made, source = self._made.get(id(tensor), (None, None))
            found.append(source if made is not None and made() is tensor else None)
        return tuple(found)

    def note(self, function: Any, given: list[Tensor], made: list[Tensor], at: int) -> None:
        """Remember the results of call number ``at``. What a function returns unchanged keeps its
        source, and so does a copy of the same shape by a function that returns some unchanged.
        """
        known = {id(tensor) for tensor in given}
        same = given and getattr(function, "__name__", "") in _UNCHANGED
        for number, tensor in enumerate(made):
            if id(tensor) not in known:
                kept = same and tensor.shape == given[0].shape
                source = self.of(given[:1])[0] if kept else (at, number)
                self._made[id(tensor)] = weakref.ref(tensor), source

    def note_block(
        self, given: list[Tensor], made: list[Tensor], inner: tuple[Source, ...], at: int
    ) -> None:
        """Remember the results of a compiled block, whose first call is number ``at``.

        Args:
            inner: sources of the results within the block, whose batch is ``given``.
        """
        for tensor, source in zip(made, inner, strict=True):
            if source is not None and source[0] < 0:
                source = self.of([given[source[1]]])[0]
            elif source is not None:
                source = at + source[0], source[1]
            self._made[id(tensor)] = weakref.ref(tensor), source


_UNCHANGED_NAMES = "contiguous to type type_as float double half bfloat16 cpu cuda flatten dropout"
_UNCHANGED = frozenset(_UNCHANGED_NAMES.split())
"""Names of functions that return some tensors unchanged and copy or view others, depending on
their type or layout.
"""


@dataclass(frozen=True)
class Call:
    """One call of a torch function that returns tensors, with the batch dimensions of its tensor
    arguments and results, None if fixed.
    """

    function: Callable[..., Any]
    inputs: tuple[BatchDim | None, ...]
    outputs: tuple[BatchDim | None, ...]
    settings: tuple[Any, ...] | None = None
    """Non-tensor arguments that determine how rows are moved, with None for those that change with
    the batch; None if they do not matter.
    """
    sources: tuple[Source, ...] = field(default=(), compare=False)
    """Of the tensor arguments."""

    def fits(self, function: Any, args: Any, kwargs: Any, sources: tuple[Source, ...]) -> bool:
        """Return whether a call has this function and arguments, and moves rows the same way."""
        if self.function != function or self.sources != sources:
            return False
        if self.settings is None:
            return True
        found = _settings(function, args, kwargs)
        if found is None or len(found) != len(self.settings):
            return False
        return all(a is None or a == b for a, b in zip(self.settings, found, strict=True))


def block_call(name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a block that may be compiled as a whole (``compiled.compile_blocks``); modes see one
    call and replace it by ``OPENED``'s.
    """
    if torch._C._is_torch_function_mode_enabled():
        return handle_torch_function(
            block_call, tensors_in(args, kwargs), name, forward, *args, **kwargs
        )
    return forward(*args, **kwargs)


def _opened(function: Any) -> Callable[..., Any]:
    """Copy a function without torch's override check, so that a mode sees the calls inside it, not
    the function.
    """
    opened = types.FunctionType(
        function.__code__,
        {**function.__globals__, "has_torch_function": lambda _: False},
        function.__name__,
        function.__defaults__,
    )
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


OPENED: dict[Callable[..., Any], Callable[..., Any]] = {
    F.multi_head_attention_forward: _opened(F.multi_head_attention_forward),
    block_call: lambda name, forward, *args, **kwargs: forward(*args, **kwargs),
}
"""Functions that use parameters in several ways, each with a version in which a mode sees every
use.
"""


_MOVING_NAMES = """permute transpose movedim moveaxis swapaxes swapdims view reshape flatten
    unflatten squeeze unsqueeze __getitem__ select narrow split chunk unbind cat stack repeat expand
    roll flip unfold einsum tensordot repeat_interleave tile sum mean"""
_MOVING: set[Any] = {
    getattr(owner, name)
    for owner in (torch, torch.Tensor)
    for name in _MOVING_NAMES.split()
    if hasattr(owner, name)
}
"""Functions that move or combine rows."""


_ARITHMETIC_NAMES = """add radd sub rsub mul rmul div rdiv truediv rtruediv true_divide floordiv
    rfloordiv floor_divide mod rmod remainder fmod pow rpow and rand or ror xor rxor lshift rshift
    eq ne lt le gt ge iadd isub imul itruediv clamp clip maximum minimum where masked_fill fill
    full full_like new_full tensor as_tensor scalar_tensor bitwise_and bitwise_or bitwise_xor
    bitwise_left_shift bitwise_right_shift multiply subtract divide"""
_ARITHMETIC = frozenset(
    form.format(name) for name in _ARITHMETIC_NAMES.split() for form in ("{}", "{}_", "__{}__")
)
"""Names of functions whose non-tensor arguments are numbers to compute with, such as a weight that
follows the step.
"""


def _settings(function: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """Non-tensor arguments of a function, which may decide where rows go and whether they are
    combined (a dimension, say); None for arithmetic. Of floating-point numbers only that they are.
    """
    if function not in _MOVING and getattr(function, "__name__", "") in _ARITHMETIC:
        return None
    flat: list[Any] = []
    for value in (*args, *(kwargs[name] for name in sorted(kwargs))) if kwargs else args:
        if isinstance(value, _LISTS):
            flat += value
        else:
            flat.append(value)
    return tuple(map(_setting, flat))


_PLAIN, _NESTED = (int, str, np.integer), (slice, list, tuple)


def _setting(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Tensor
    if value is None or isinstance(value, _PLAIN):
        return value
    return str(value) if isinstance(value, _NESTED) else type(value)


_PICKING: set[Any] = {
    getattr(owner, name)
    for owner in (torch, torch.Tensor)
    for name in ("masked_select", "nonzero", "unique")
}
"""Functions whose result size depends on the data."""
_READ_NAMES = """__bool__ __int__ __float__ __complex__ __index__ __contains__ __array__ __dlpack__
    __format__ __repr__ __str__ __reduce_ex__ __deepcopy__ item tolist numpy equal allclose
    is_nonzero storage untyped_storage _typed_storage data_ptr _to_dlpack to_dlpack apply_ map_
    map2_"""
READS = frozenset(_READ_NAMES.split())
"""Names of functions that give Python a tensor's numbers."""
_WRITES = frozenset(("__setitem__", "__set__", "__delitem__"))


def counts(function: Any, made: list[Tensor]) -> bool:
    """Return whether a call is one of those that a later pass must repeat: it makes tensors, gives
    Python numbers, or writes into a tensor and returns none.
    """
    name = getattr(function, "__name__", "")
    return bool(made) or name in READS or name in _WRITES or name.startswith("_foreach_")


Losses = Callable[[Any], Tensor]
"""batch -> losses_B."""
Note = Callable[[int, list[Tensor]], list[Any]]
"""(position of the call, its tensors) -> one note per tensor."""


class _Recorder(TorchFunctionMode):
    """Records every call that returns tensors, with the notes ``inputs`` of its arguments and
    ``outputs`` of its results.
    """

    def __init__(self, batch: Any, inputs: Note, outputs: Note) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        """(function, notes of the arguments, notes of the results, settings, sources)"""
        self._inputs, self._outputs, self._sources = inputs, outputs, Sources(batch)

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OPENED:
            with self:
                return OPENED[func](*args, **kwargs)
        given, at = tensors_in(args, kwargs), len(self.calls)
        with torch._C.DisableTorchFunction():  # outer modes watch the model, not what is noted here
            inputs, sources = self._inputs(at, given), self._sources.of(given)
        out = func(*args, **kwargs)
        made = tensors_in((out,), {})
        if counts(func, made):
            with torch._C.DisableTorchFunction():
                self._sources.note(func, given, made, at)
                outputs, settings = self._outputs(at, made), _settings(func, args, kwargs)
            self.calls.append((func, inputs, outputs, settings, sources))
        return out


def find_batch_dims(run: Callable[[Any], object], few: Any, many: Any) -> list[Call] | str:
    """List the calls of a forward pass with the batch dimension of every tensor.

    Args:
        run: runs the pass over a batch.
        few, many: batches of ``NUM_RECORDS`` equal records.

    Returns:
        The calls, as if the rows of a record were adjacent (``order_by_values`` corrects it), or
        the reason why they cannot be determined.
    """

    masked: set[int] = set()

    def shapes(at: int, tensors: list[Tensor]) -> list[Any]:
        if any(t.dtype == torch.bool for t in tensors[1:]):
            masked.add(at)
        return [t.shape for t in tensors]

    first, second = (_record(run, batch, shapes, shapes) for batch in (few, many))
    if [(call[0], call[4]) for call in first] != [(call[0], call[4]) for call in second]:
        return "its forward pass makes other calls for two records than for three"
    calls = [
        Call(a[0], _batch_dims(a[1], b[1]), _batch_dims(a[2], b[2]), _fixed(a[3], b[3]), a[4])
        for a, b in zip(first, second, strict=True)
    ]
    for at, call in enumerate(calls):
        indexed = call.function is torch.Tensor.__getitem__
        if (call.function in _PICKING or (indexed and at in masked)) and any(
            call.inputs[1:] if indexed else call.inputs
        ):
            return (
                f"{call.function.__name__} picks rows by their values, so that a record's rows "
                "cannot be told"
            )
    return calls


def order_by_values(
    run: Callable[[Any], object], many: Any, replaced: dict[int, Any], calls: list[Call]
) -> list[Call] | str:
    """Correct the order of rows in the calls, by which rows change with which record; it stays
    unknown where none does (``order_by_gradients``).

    Args:
        replaced: row -> ``many`` with another record in that row.

    Returns:
        The calls, or the reason why their order cannot be determined.
    """
    directions: dict[torch.device, Tensor] = {}
    kept = _Kept()

    def marks(
        at: int, tensors: list[Tensor], batch_dims: Callable[[Call], tuple[BatchDim | None, ...]]
    ) -> list[Any]:
        known = batch_dims(calls[at]) if at < len(calls) else ()
        return [
            kept.copy(_row_marks(t, batch_dim, directions))
            for t, batch_dim in zip(tensors, known, strict=False)
        ]

    def inputs(at: int, tensors: list[Tensor]) -> list[Any]:
        return marks(at, tensors, lambda call: call.inputs)

    def outputs(at: int, tensors: list[Tensor]) -> list[Any]:
        return marks(at, tensors, lambda call: call.outputs)

    reference = _record(run, many, inputs, outputs)
    others = {row: _record(run, batch, inputs, outputs) for row, batch in replaced.items()}
    if any(
        [call[0] for call in other] != [call[0] for call in reference] for other in others.values()
    ):
        return "its forward pass makes other calls for other records"

    def corrected(
        batch_dims: tuple[BatchDim | None, ...], at: int, part: int
    ) -> tuple[BatchDim | None, ...]:
        return tuple(
            batch_dim
            and _by_values(
                batch_dim,
                reference[at][part][i],
                {row: other[at][part][i] for row, other in others.items()},
            )
            for i, batch_dim in enumerate(batch_dims)
        )

    return [
        replace(call, inputs=corrected(call.inputs, at, 1), outputs=corrected(call.outputs, at, 2))
        for at, call in enumerate(calls)
    ]


def order_by_gradients(
    make_losses: Callable[[], Losses], many: Any, calls: list[Call]
) -> list[Call]:
    """Find the order of rows that no record changes: the gradient of a record's loss reaches only
    its own rows.

    Args:
        make_losses: returns the pass with other weights, none of them all zero, as a function that
            returns losses_B; called if needed.
    """
    unknown = {
        at for at, call in enumerate(calls) if any(map(_is_unknown, (*call.inputs, *call.outputs)))
    }
    if not unknown:
        return calls

    def kept(batch_dims: tuple[BatchDim | None, ...], tensors: list[Tensor]) -> list[Any]:
        return [
            t if _is_unknown(dim) and t.requires_grad else None
            for t, dim in zip(tensors, batch_dims, strict=False)
        ]

    def inputs(at: int, tensors: list[Tensor]) -> list[Any]:
        return kept(calls[at].inputs, tensors) if at in unknown else []

    def outputs(at: int, tensors: list[Tensor]) -> list[Any]:
        return kept(calls[at].outputs, tensors) if at in unknown else []

    losses, found = make_losses(), list[Tensor]()
    with torch.enable_grad():
        made = _record(lambda batch: found.append(losses(batch)), many, inputs, outputs)
        if [call[0] for call in made] != [call.function for call in calls]:
            made = []
        tensors = {
            id(t): t
            for at in (unknown if made else ())
            for t in (*made[at][1], *made[at][2])
            if t is not None
        }
        reached: dict[int, dict[int, Tensor]] = {key: {} for key in tensors}
        for record in (0, 1) if tensors and found[0].requires_grad else ():
            grads = torch.autograd.grad(
                found[0][record], list(tensors.values()), retain_graph=True, allow_unused=True
            )
            for key, grad in zip(tensors, grads, strict=True):
                if grad is not None:
                    reached[key][record] = grad.cpu()

    def corrected(
        batch_dims: tuple[BatchDim | None, ...], note: list[Any]
    ) -> tuple[BatchDim | None, ...]:
        pairs = itertools.zip_longest(batch_dims, note)
        return tuple(
            _known(dim, reached.get(id(t), {})) if dim is not None and not dim.known else dim
            for dim, t in pairs
        )

    for at in unknown:
        own, out = made[at][1:3] if made else ([], [])
        calls[at] = replace(
            calls[at],
            inputs=corrected(calls[at].inputs, own),
            outputs=corrected(calls[at].outputs, out),
        )
    return calls


def _is_unknown(batch_dim: BatchDim | None) -> bool:
    return batch_dim is not None and not batch_dim.known


def _known(batch_dim: BatchDim, grads: dict[int, Tensor]) -> BatchDim:
    """The batch dimension with the order of rows that the gradients of records' losses reach;
    ``MIXED`` if they do not tell.
    """
    rows = {}
    for record, g in grads.items():
        reached = g.movedim(batch_dim.dim, 0).reshape(g.shape[batch_dim.dim], -1).ne(0).any(1)
        rows[record] = reached.nonzero()[:, 0]
    found = _ordered(batch_dim, rows)
    return found if found.known else MIXED


def tensors_in(args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors among the arguments, including those in lists and tuples, in a fixed order."""
    found: list[Tensor] = []
    for value in (*args, *kwargs.values()) if kwargs else args:  # at every call of a pass
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, _LISTS):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


def _record(run: Callable[[Any], object], batch: Any, inputs: Note, outputs: Note) -> list[Any]:
    """What ``_Recorder`` notes of every call."""
    recorder = _Recorder(batch, inputs, outputs)
    with recorder:
        run(batch)
    return recorder.calls


def _fixed(few: tuple[Any, ...] | None, many: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    if few is None or many is None or len(few) != len(many):
        return None
    return tuple(a if a == b else None for a, b in zip(few, many, strict=True))


def _batch_dims(few: list[torch.Size], many: list[torch.Size]) -> tuple[BatchDim | None, ...]:
    if len(few) != len(many):  # a list with one tensor for each record
        return (MIXED,) * len(few)
    return tuple(map(_batch_dim, few, many))


def _batch_dim(few: torch.Size, many: torch.Size) -> BatchDim | None:
    if few == many:
        return None
    if len(few) != len(many):
        return MIXED
    grown = [dim for dim in range(len(few)) if few[dim] != many[dim]]
    per_record = [
        shape[grown[0]] / num for shape, num in zip((few, many), NUM_RECORDS, strict=True)
    ]
    if len(grown) > 1 or per_record[0] != per_record[1] or per_record[0] != int(per_record[0]):
        return MIXED
    return BatchDim(grown[0], int(per_record[0]))


class _Kept:
    """Small vectors in a few large pieces of memory: one by one they would lie between the
    activations of a pass, in memory that no later activation fits in, a gigabyte for a base model.
    """

    _NUMBERS = 2**18

    def __init__(self) -> None:
        self._piece, self._used = torch.empty(0, dtype=torch.float64), 0

    def copy(self, value: Tensor | None) -> Tensor | None:
        """Return a copy of a float64 vector on the CPU."""
        if value is None:
            return None
        if self._used + len(value) > len(self._piece):
            size = max(self._NUMBERS, len(value))
            self._piece, self._used = torch.empty(size, dtype=torch.float64), 0
        copied = self._piece[self._used : self._used + len(value)].copy_(value)
        self._used += len(value)
        return copied


def _row_marks(
    value: Tensor, batch_dim: BatchDim | None, directions: dict[torch.device, Tensor]
) -> Tensor | None:
    """One number per row along the records' dimension, which almost any change of the row changes;
    on the CPU.

    Args:
        directions: the longest vector so far that rows were multiplied by, on each device.
    """
    size = NUM_RECORDS[1] * (batch_dim.per_record if batch_dim else 0)
    if (
        batch_dim is None
        or batch_dim == MIXED
        or value.ndim <= batch_dim.dim
        or value.shape[batch_dim.dim] != size
    ):
        return None
    rows = (
        value.detach()
        .movedim(batch_dim.dim, 0)
        .reshape(value.shape[batch_dim.dim], -1)
        .double()
        .nan_to_num()
    )
    width, found = rows.shape[1], directions.get(rows.device)
    if found is None or len(found) < width:
        found = directions[rows.device] = (
            torch.arange(width, dtype=torch.float64, device=rows.device).mul_(1.7).add_(0.3).cos_()
        )
    return (rows @ found[:width]).cpu()


def _by_values(
    batch_dim: BatchDim, before: Tensor | None, after: dict[int, Tensor | None]
) -> BatchDim:
    """The batch dimension with the order of rows that explains which changed with which record;
    unknown if none did.
    """
    if batch_dim == MIXED or before is None:
        return MIXED
    changed = {}
    for record, marks in after.items():
        if marks is None:
            return MIXED
        changed[record] = (before != marks).nonzero()[:, 0]
    return _ordered(batch_dim, changed)


def _ordered(batch_dim: BatchDim, rows: dict[int, Tensor]) -> BatchDim:
    """The batch dimension with the order in which ``rows`` of each record are its own; ``MIXED`` if
    no order or both are, unknown without rows.
    """
    side_by_side = all(
        bool((own // batch_dim.per_record == record).all()) for record, own in rows.items()
    )
    if batch_dim.per_record == 1:
        return batch_dim if side_by_side else MIXED
    if all(len(own) == 0 for own in rows.values()):
        return replace(batch_dim, known=False)
    one_by_one = all(bool((own % NUM_RECORDS[1] == record).all()) for record, own in rows.items())
    return (
        MIXED
        if side_by_side == one_by_one
        else replace(batch_dim, side_by_side=side_by_side, known=True)
    )
