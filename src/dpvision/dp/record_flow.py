"""Where the records' numbers go in a forward pass: from call to call, whatever they are.

``batch_dims`` compares a few records, and ``separable`` too. Neither sees what those records do not
show: rows sorted by a label that they share, or a branch taken for images above 20. This module
follows every tensor that is computed from the records and asks only what each call may do to rows:
by its name and dimensions, and, since no list of names is complete, by trying it alone on random
numbers (``trial``). What Python reads of the records is seen by ``record_reads``.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dpvision.dp.batch_dims import MIXED, OPENED, READS, BatchDim, Call, counts, tensors_in
from dpvision.dp.record_reads import ReadsOfRecords, RecordsRead, reads_harmlessly
from dpvision.dp.trial import Trial
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
    """softmax log_softmax softmin gumbel_softmax normalize cumsum cumprod cummax cummin
    logcumsumexp"""
)
"""Functions that combine the numbers along a dimension and keep its size."""
_DIM = {"take_along_dim": 2, "topk": 2, "roll": 2, "rot90": 2, "normalize": 2}
"""Position of the dimension among the arguments, where it is not the second."""
_DIM_IF_NONE = {"sort": -1, "argsort": -1, "topk": -1, "normalize": 1, "gumbel_softmax": -1}
_ANYWHERE = _names("take put index index_put masked_scatter as_strided msort flipud")
"""Functions without a dimension that may move rows."""


_ACROSS = _names("renorm segment_reduce _segment_reduce prod cumprod")
"""Functions that are right for one record alone (``vmap``) and may join several: by the dimension
that they keep, by lengths that add up, or in the backward pass, where one zero among all numbers
chooses how every gradient is computed.
"""
_BILINEAR = _names("linear matmul __matmul__ mm bmm conv1d conv2d conv3d")
"""Functions that join the same numbers whatever their size."""
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
                    for tensor in given:  # a write may be one that PyTorch does not count
                        self._write(tensor, Level.MOVED)
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
        if name in _ACROSS:
            return Level.MOVED
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
        sizes = name not in _BILINEAR
        trial = Trial(func, args, kwargs, given, rows, {id(t) for t in moved}, few, sizes)
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
