"""Where the records' numbers go in a forward pass: from call to call, whatever they are.

``batch_dims`` compares a few records, and ``separable`` too. Neither sees what those records do not
show: rows sorted by a label that they share, or a branch taken for images above 20. This module
follows every tensor that is computed from the records and asks only what each call may do to rows:
by its name and dimensions, and, since no list of names is complete, by trying it alone on random
numbers (``_Trial``). What Python reads of the records is seen by ``record_reads``.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dpvision.dp.batch_dims import MIXED, OPENED, READS, BatchDim, Call, counts, tensors_in
from dpvision.dp.record_reads import ReadsOfRecords, RecordsRead, reads_harmlessly
from dpvision.precision import autocast_dtype


class Level(IntEnum):
    """What a tensor holds of the records; a result has at least the highest of its arguments."""

    PUBLIC = 0
    """Nothing."""
    ROWS = 1
    """Row r is computed from record r alone."""
    MOVED = 2
    """Rows may have another order, which may depend on the records."""
    JOINED = 3
    """A number may be computed from several records."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MAKERS = _names(
    """zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros
    new_ones new_empty new_full"""
)
"""Functions that take a shape from their first argument, and no numbers."""
_PLACING = _names(
    "pad index_copy index_put scatter put masked_scatter slice_scatter select_scatter"
)
"""Functions that put rows into a larger tensor, for example one of a fixed number of rows."""
_LAYOUT = _names(
    """permute transpose movedim moveaxis swapaxes swapdims view reshape flatten unflatten squeeze
    unsqueeze __getitem__ narrow split chunk unbind cat concat stack repeat expand roll flip unfold
    repeat_interleave tile gather index_select take_along_dim sort argsort topk"""
)
"""Functions that move numbers and combine none."""
_BY_INDEX = _names("gather index_select take_along_dim sort argsort topk flip roll rot90")
_INTO = _names("scatter scatter_add scatter_reduce index_copy index_add index_fill index_reduce")
_ALONG = _names(
    """softmax log_softmax softmin gumbel_softmax normalize renorm cumsum cumprod cummax
    cummin logcumsumexp"""
)
"""Functions that combine the numbers along a dimension and keep its size."""
_DIM = {"take_along_dim": 2, "topk": 2, "roll": 2, "rot90": 2, "normalize": 2, "renorm": 2}
"""Position of the dimension among the arguments, where it is not the second."""
_DIM_IF_NONE = {"sort": -1, "argsort": -1, "topk": -1, "normalize": 1, "gumbel_softmax": -1}
_ANYWHERE = _names("take put index index_put masked_scatter as_strided msort flipud")
"""Functions without a dimension that may move rows."""


_ROUNDING = 1e-6
"""Relative change of a row below which it counts as rounding."""
_PLAIN: tuple[type, ...] = (type(None), bool, int, float, str, type(...))
_PLAIN += (torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types of the settings that a remembered trial may have."""


def follow(run: Callable[[Any], Tensor], batch: Any, calls: list[Call]) -> Level:
    """Return what the losses of a pass hold in row r.

    Args:
        run: runs the pass over a batch and returns its losses.
        calls: those of this pass, with the batch dimensions of their results.

    Raises:
        RecordsRead: a number of the records becomes one of Python, which may decide anything.
    """
    reads = ReadsOfRecords(batch)
    flow = _Flow(batch, calls, reads)
    with reads, flow:
        losses_B = run(batch)
    if reads.read:  # the model caught the exception
        raise RecordsRead(reads.read)
    level = flow.level(losses_B)
    return max(level, Level.MOVED) if flow.lost or not flow.knows(losses_B) else level


_TRIED: dict[Any, tuple[BatchDim | None, ...] | None] = {}
"""Call of a function of PyTorch, as far as a trial depends on it -> the trial's result."""
_MOST_TRIED = 2**12


class _Flow(TorchFunctionMode):
    def __init__(self, batch: Any, calls: list[Call], reads: ReadsOfRecords) -> None:
        super().__init__()
        self._calls, self._at, self._reads = calls, 0, reads
        self._tensors: dict[int, tuple[Tensor, int, Level, BatchDim | None]] = {}
        """Object -> itself and its storage, which another may replace (``x.data = y``)."""
        self._storages: dict[int, tuple[Level, BatchDim | None]] = {}
        """Of tensors that come back as other objects."""
        self._written: dict[int, Level] = {}
        """Storage -> the highest level written into it."""
        self._counting: dict[int, Tensor] = {}
        """Tensors that hold 0, 1, 2, ... whatever the batch."""
        self.lost = False
        """Whether tensors came by that cannot be followed, as inside ``torch.vmap``."""
        for value in batch:
            if value is not None:
                self._put(value, Level.ROWS, BatchDim(0, 1))

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OPENED:
            with self:
                return OPENED[func](*args, **kwargs)
        # Modes around this one watch the model, and need not see what is asked and tried here.
        with torch._C.DisableTorchFunction():
            name, reads = _name(func), getattr(func, "__name__", "") in READS
            given = tensors_in(args, kwargs)
            highest = max(map(self.level, given), default=Level.PUBLIC)
            if highest and (reads or (name == "tensor_split" and len(given) > 1)):
                self._reads.read = func.__name__
                raise RecordsRead(func.__name__)
            level_of_parts = [self._level_of_list(value) for value in args]
            highest = max([highest, *level_of_parts])
            dims = self._calls[self._at].outputs if self._at < len(self._calls) else ()
            versions = [t._version for t in given]
            self._reads.harmless = reads_harmlessly(func, args, kwargs)
        out = func(*args, **kwargs)
        self._reads.paused = True  # the call is tried on numbers of no record
        with torch._C.DisableTorchFunction():
            made = tensors_in((out,), {})
            levels = []
            if counts(func, made):
                self._at += 1
                dims += (MIXED,) * (len(made) - len(dims))
                levels = [
                    self._result(name, args, kwargs, highest, dim) for dim in dims[: len(made)]
                ]
            if made and highest == Level.ROWS:
                ordered = self._tried_dims(func, name, args, kwargs, made, dims)
                if ordered is None:  # right by ``vmap``, which computes each record alone
                    levels = [max(level, Level.MOVED) for level in levels]
                dims = ordered or dims
            for tensor, level, dim in zip(made, levels, dims, strict=False):
                self._put(tensor, level, dim)
            self._note_counting(name, args, kwargs, made)
            written = (
                max(levels) if levels else max(highest, Level.MOVED) if highest else Level.PUBLIC
            )
            if name == "__setitem__":
                written = self._level_of_setitem(args, highest)
            for tensor, version in zip(given, versions, strict=True):
                if tensor._version != version:  # in place, as out=, or by one that returns none
                    self._write(tensor, written)
        self._reads.harmless = self._reads.paused = False
        return out

    def level(self, tensor: Tensor) -> Level:
        """What a tensor holds of the records."""
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            self.lost = True
            return Level.MOVED
        level, dim = self._known(tensor)
        if level == Level.PUBLIC and not self._is_put(tensor) and self._reads.holds(tensor):
            self.lost, level = True, Level.MOVED  # made by code that this mode does not see
        written = self._written.get(_storage(tensor), Level.PUBLIC)
        if written == Level.ROWS and dim is None:
            written = Level.MOVED
        return max(level, written)

    def knows(self, tensor: Tensor) -> bool:
        """Whether a call or the batch made this tensor."""
        return self._is_put(tensor) or _storage(tensor) in self._storages

    def _is_put(self, tensor: Tensor) -> bool:
        return self._tensors.get(id(tensor), (None, None))[1] == _storage(tensor)

    def _known(self, tensor: Tensor) -> tuple[Level, BatchDim | None]:
        if self._is_put(tensor):
            return self._tensors[id(tensor)][2:]
        return self._storages.get(_storage(tensor), (Level.PUBLIC, None))

    def _put(self, tensor: Tensor, level: Level, dim: BatchDim | None) -> None:
        self._tensors[id(tensor)] = tensor, _storage(tensor), level, dim
        self._storages[_storage(tensor)] = level, dim

    def _write(self, tensor: Tensor, level: Level) -> None:
        """Note that numbers of this level were written into a tensor and all that share memory."""
        at = _storage(tensor)
        self._written[at] = max(level, self._written.get(at, Level.PUBLIC))

    def _level_of_list(self, value: Any) -> Level:
        """Tensors in lists inside lists, as in an index."""
        if not isinstance(value, list | tuple):
            return Level.PUBLIC
        inner = [self.level(v) if isinstance(v, Tensor) else self._level_of_list(v) for v in value]
        return max(inner, default=Level.PUBLIC)

    def _result(
        self, name: str, args: Any, kwargs: Any, highest: Level, dim: BatchDim | None
    ) -> Level:
        """The level of a result whose records are in ``dim``."""
        name = name if name.endswith("__") else name.rstrip("_")
        if name in _MAKERS:
            highest = max(map(self.level, tensors_in(args[1:], kwargs)), default=Level.PUBLIC)
        if highest == Level.PUBLIC:
            return Level.PUBLIC
        if name == "grad":  # of a sum: refused in the pass, and right by ``vmap``
            return Level.MOVED
        if highest > Level.ROWS:
            return highest
        if dim is None:  # of the same size for any number of records
            return Level.MOVED if name in _PLACING else Level.JOINED
        if name in _ALONG and self._acts_on_rows(name, args, kwargs):
            return Level.JOINED
        if self._moves(name, args, kwargs):
            return Level.MOVED
        if dim == MIXED:
            return Level.MOVED if name in _LAYOUT else Level.JOINED
        return Level.ROWS

    def _tried_dims(
        self,
        func: Any,
        name: str,
        args: Any,
        kwargs: Any,
        made: list[Tensor],
        dims: tuple[BatchDim | None, ...],
    ) -> tuple[BatchDim | None, ...] | None:
        """The batch dimensions of a call's results, with the order of their rows; None if a
        record's rows may change the rows of others.

        The call is tried on random numbers in place of all numbers, then with others for the second
        of three records. The numbers of weights and of constants are replaced too, since training
        may change them. Results whose records have no one dimension are told by name.
        """
        if not any(map(_has_rows, dims)):
            return dims
        given = {id(t): t for t in tensors_in(args, kwargs)}
        rows = {
            key: dim
            for key, t in given.items()
            for dim in (self._known(t)[1],)
            if dim is not None and dim != MIXED and self.level(t) == Level.ROWS
        }
        if not rows or any(t.device.type == "meta" for t in given.values()):
            return dims
        moved = tensors_in(args[:1], {}) if name in _LAYOUT else ()
        few = any(not given[key].is_floating_point() for key in rows) or any(
            not t.is_floating_point() for t in made
        )
        trial = _Trial(func, args, kwargs, given, rows, {id(t) for t in moved}, few)
        precisions = tuple(autocast_dtype(t.device) for t in given.values())
        own = func if name else object()
        places = {key: i for i, key in enumerate(given)}
        case = own, dims, few, precisions, _case((args, kwargs), places, rows)
        if case not in _TRIED:
            found, remembered = trial.dims(dims)
            if not remembered:
                return found
            if len(_TRIED) == _MOST_TRIED:
                _TRIED.clear()
            _TRIED[case] = found
        return _TRIED[case]

    def _moves(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether a call on rows may put them in another order."""
        if name == "__getitem__":
            return self.level(args[0]) > Level.PUBLIC and not self._keeps(args[0], args[1])
        if name in ("embedding", "embedding_bag"):
            weight = kwargs.get("weight", args[1] if len(args) > 1 else None)
            return weight is None or self.level(weight) > Level.PUBLIC
        if name in _ANYWHERE:
            return name != "take" or self.level(args[0]) > Level.PUBLIC
        if name in _BY_INDEX:
            return self.level(args[0]) > Level.PUBLIC and self._acts_on_rows(name, args, kwargs)
        return name in _INTO and self._acts_on_rows(name, args, kwargs)

    def _acts_on_rows(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether the dimension that a call acts on holds records in any of its arguments."""
        found = [kwargs[key] for key in ("dim", "dims", "axis", "axes") if key in kwargs]
        if not found:
            at = _DIM.get(name, 1)
            rest = args[at:] if name == "flip" else args[at : at + 1]
            found = [v for v in rest if isinstance(v, int | list | tuple)]
            found = [v for v in found if not isinstance(v, bool)] or [_DIM_IF_NONE.get(name)]
        flat = [v for item in found for v in (item if isinstance(item, list | tuple) else [item])]
        for tensor in tensors_in(args, kwargs):
            _, dim = self._known(tensor)
            if dim is not None and (
                dim == MIXED or None in flat or any(v % tensor.ndim == dim.dim for v in flat)
            ):
                return True
        return False

    def _keeps(self, tensor: Tensor, index: Any) -> bool:
        """Whether an index leaves every record's rows in their place, for any batch."""
        _, dim = self._known(tensor)
        if dim is None or dim == MIXED:
            return False
        item = _item_at(index, tensor.ndim, dim.dim)
        return isinstance(item, slice) or (
            isinstance(item, Tensor) and id(item) in self._counting and dim.per_record == 1
        )

    def _level_of_setitem(self, args: Any, highest: Level) -> Level:
        """The level of what ``x[index] = value`` writes."""
        if highest != Level.ROWS:
            return highest
        target, index, value = args
        _, dim = self._known(target)
        if dim is None or dim == MIXED:
            return Level.MOVED
        item = _item_at(index, target.ndim, dim.dim)
        if _is_mask(item):  # one number wherever the mask says so: no row comes from another
            one = not isinstance(value, Tensor | list | tuple) or (
                isinstance(value, Tensor) and value.numel() == 1
            )
            return Level.ROWS if one and self._known(item)[1] == dim else Level.MOVED
        whole = (
            isinstance(item, slice)
            and item.indices(target.shape[dim.dim]) == (0, target.shape[dim.dim], 1)
        ) or (isinstance(item, Tensor) and id(item) in self._counting)
        return Level.ROWS if whole else Level.MOVED

    def _note_counting(self, name: str, args: Any, kwargs: Any, made: list[Tensor]) -> None:
        """Remember ``torch.arange(n)``, and views of it with more dimensions."""
        counts = name == "arange" and len(args) == 1 and not {"start", "end", "step"} & {*kwargs}
        views = (
            name in ("__getitem__", "unsqueeze", "view", "reshape")
            and id(args[0]) in self._counting
            and made[0].numel() == args[0].numel()
            and not isinstance(args[-1], Tensor | list)
            and not any(isinstance(v, Tensor | list) for v in _items(args[-1]))
        )
        if counts or views:
            self._counting[id(made[0])] = made[0]


def _has_rows(dim: BatchDim | None) -> bool:
    return dim is not None and dim != MIXED


def _name(func: Any) -> str:
    """The name of a function of PyTorch; empty for others, whose names mean nothing."""
    module = getattr(func, "__module__", None) or "torch"
    if module.partition(".")[0] != "torch" or module.startswith("torch._ops."):
        return func.__name__.partition(".")[0] if module == "torch._ops.aten" else ""
    return getattr(func, "__name__", "")


def _case(value: Any, places: dict[int, int], rows: dict[int, Any]) -> Any:
    """What a trial of a call depends on: shapes, types and plain settings. What depends on more
    equals nothing.
    """
    if isinstance(value, Tensor) and id(value) in places:
        return places[id(value)], value.shape, value.dtype, value.device, rows.get(id(value))
    if isinstance(value, dict):
        return tuple((key, _case(item, places, rows)) for key, item in value.items())
    if type(value) in (list, tuple):
        return tuple(_case(item, places, rows) for item in value)
    if type(value) is slice:
        return slice, _case([value.start, value.stop, value.step], places, rows)
    return (type(value), value) if type(value) in _PLAIN else object()


@dataclass(frozen=True)
class _Trial:
    """A call to be tried on random numbers."""

    func: Any
    args: Any
    kwargs: Any
    given: dict[int, Tensor]
    """Tensor arguments by id."""
    rows: dict[int, BatchDim]
    """Batch dimensions of those that hold records."""
    moved: set[int]
    """Those that are only moved, so that numbers of another type do as well."""
    few: bool
    """Whether to try numbers of few values too, which are often equal."""

    def dims(
        self, dims: tuple[BatchDim | None, ...]
    ) -> tuple[tuple[BatchDim | None, ...] | None, bool]:
        """Return the batch dimensions of the results with an order of rows in which the second
        record changes no row of others, None if there is none or the call takes no numbers tried;
        and whether this holds for any numbers of the call's own.
        """
        # 1. Numbers that a function may refuse are followed by others: normal ones by those in
        #    [0, 1) (a probability), these by positive definite matrices; integers of 0 and 1 by the
        #    call's own (an index into one row). The CPU comes first, since a GPU may not recover
        #    from a refusal; an operator may work on its own device only.
        # 2. A call that refuses all of them may do anything to rows.
        # 3. A comparison of normal numbers says nothing of equal ones: few values are tried too.
        left: list[list[BatchDim | None]] = [_orders(dim) for dim in dims]
        devices = dict.fromkeys((torch.device("cpu"), *(t.device for t in self.given.values())))
        cases = itertools.product(devices, _DRAWS, (True, False))
        whole = next((case[2] for case in cases if self._keep(left, *case)), None)
        if whole is None:
            return None, False
        for seed in range(3 if self.few else 0):
            self._keep(left, torch.device("cpu"), _coins, True, seed)
        return tuple(found[0] for found in left) if all(left) else None, whole

    def _keep(
        self,
        left: list[list[BatchDim | None]],
        device: torch.device,
        draw: Any,
        whole: bool,
        seed: int = 0,
    ) -> bool:
        """Keep those of the orders in which no row of others changes; False if the call raises."""
        generator = torch.Generator().manual_seed(seed)
        first, second = {}, {}
        try:
            for key, t in self.given.items():
                like = torch.empty(t.shape) if key in self.moved else t
                drawn = whole or _is_drawn(like)
                value = _drawn(like, draw, generator) if drawn else t.to("cpu", copy=True)
                first[key] = second[key] = value.to(device)
                if drawn and key in self.rows:
                    other = _with_other_record(value, self.rows[key], draw, generator)
                    second[key] = other.to(device)
            before, after = (
                [
                    t.cpu()
                    for t in tensors_in(
                        (self.func(*_replaced(self.args, new), **_replaced(self.kwargs, new)),), {}
                    )
                ]
                for new in (first, second)
            )
            if not len(before) == len(after) == len(left):
                return False
            kept = [
                [
                    dim
                    for dim in found
                    if dim is None
                    or dim == MIXED
                    or not _differs(_of_others(a, dim), _of_others(b, dim))
                ]
                for found, a, b in zip(left, before, after, strict=True)
            ]
        except Exception:  # whatever the function raises for numbers that it refuses
            return False
        left[:] = kept
        return True


def _orders(dim: BatchDim | None) -> list[BatchDim | None]:
    """A batch dimension with each order that its rows may have."""
    if dim is None or dim == MIXED or dim.per_record == 1:
        return [dim]
    return [replace(dim, side_by_side=True), replace(dim, side_by_side=False)]


def _by_record(value: Tensor, dim: BatchDim) -> Tensor:
    """A view of a tensor's rows, (3, ...): those of each of three records."""
    if dim.side_by_side:
        return value.unflatten(dim.dim, (3, dim.per_record)).movedim(dim.dim, 0)
    return value.unflatten(dim.dim, (dim.per_record, 3)).movedim(dim.dim + 1, 0)


def _coins(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Random numbers 0, 1 and 2."""
    return torch.randint(0, 3, shape, generator=generator).float()


def _is_drawn(value: Tensor) -> bool:
    """Whether any random numbers will do: integers may be indices."""
    return value.is_floating_point() or value.is_complex() or value.dtype == torch.bool


def _drawn(value: Tensor, draw: Any, generator: torch.Generator) -> Tensor:
    """Random numbers of a tensor's shape and type; 0 and 1 for integers and truth values."""
    if value.is_complex():
        parts = (draw(value.shape, generator=generator) for _ in range(2))
        return torch.complex(*parts).to(value.dtype)
    if value.is_floating_point():
        return draw(value.shape, generator=generator).to(value.dtype)
    if draw is _coins and value.dtype != torch.bool:
        return draw(value.shape, generator=generator).to(value.dtype)
    return torch.randint(0, 2, value.shape, generator=generator).to(value.dtype)


def _positive_definite(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Random positive definite matrices, where the last two dimensions are equal."""
    value = torch.randn(shape, generator=generator)
    square = len(shape) > 1 and shape[-1] == shape[-2]
    return value @ value.mT + torch.eye(shape[-1]) if square else value.abs()


_DRAWS: tuple[Callable[..., Tensor], ...] = (torch.randn, torch.rand, _positive_definite)


def _with_other_record(
    value: Tensor, dim: BatchDim, draw: Any, generator: torch.Generator
) -> Tensor:
    """Copy a tensor with other random numbers in the rows of the second of three records."""
    changed = value.clone()
    _by_record(changed, dim)[1] = _by_record(_drawn(value, draw, generator), dim)[1]
    return changed


def _of_others(value: Tensor, dim: BatchDim) -> Tensor:
    """Rows of the first and the third record."""
    return _by_record(value.narrow(dim.dim, 0, 3 * dim.per_record), dim)[::2]


def _differs(a: Tensor, b: Tensor) -> bool:
    """Whether shapes differ, or numbers by more than rounding."""
    if a.shape != b.shape or torch.equal(a, b):
        return a.shape != b.shape
    a, b = (value.to(torch.complex128).nan_to_num() for value in (a, b))
    return bool((a - b).abs().max() > _ROUNDING * a.abs().max())


def _replaced(value: Any, new: dict[int, Tensor]) -> Any:
    """Copy arguments with other tensors by id; all are copied, since the call may write to them."""
    if isinstance(value, Tensor):
        return new[id(value)].clone() if id(value) in new else value.clone()
    if isinstance(value, dict):
        return {key: _replaced(item, new) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, new) for item in value)
    return value


def _items(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


def _item_at(index: Any, ndim: int, dim: int) -> Any:
    """The part of an index that dimension ``dim`` of ``ndim`` gets; an empty slice if none."""

    def width(item: Any) -> int:
        if item is None or item is Ellipsis or isinstance(item, bool):
            return 0
        return item.ndim if _is_mask(item) else 1

    at = 0
    for item in _items(index):
        if item is Ellipsis:
            at += ndim - sum(map(width, _items(index)))
        elif at <= dim < at + width(item):
            return item
        else:
            at += width(item)
    return slice(None)


def _is_mask(item: Any) -> bool:
    return isinstance(item, Tensor) and item.dtype in (torch.bool, torch.uint8)


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse tensors
        return id(tensor)
