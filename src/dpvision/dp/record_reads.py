"""Which operators give Python something that depends on the records: a number, or a size.

Python may then do anything: take a branch, make a tensor of that size, write text. Names of
functions (``batch_dims.READS``) tell some of them. This mode sees the operators below, whoever
called them: ``torch.zeros(x.amax())``, the ``item`` inside ``F.one_hot``, a scripted function.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpvision.models.head import linear_cross_entropy

_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Of operators whose result is a number for Python, or has a size that depends on the numbers."""
_UNTAGGED = {torch.ops.aten._pack_padded_sequence.default}
_MASKABLE = {torch.ops.aten.index.Tensor}
"""Has such a size for masks only: those are refused by name (``batch_dims``)."""
_LEAF = {type(None), bool, int, float, torch.dtype, torch.device, torch.layout}
"""Types of what operators are given beside tensors."""


class RecordsRead(Exception):
    """Python code reads numbers of records."""


class ReadsOfRecords(TorchDispatchMode):
    """Follows what is computed from a batch, and raises ``RecordsRead`` where Python gets some.

    ``read`` stays where the model catches the exception.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled under this mode: PyTorch need not import its compiler (4 s)."""
        return False

    def __init__(self, batch: Iterable[Tensor | None]) -> None:
        super().__init__()
        self.read: str | None = None
        """Name of the first operator that read."""
        self.harmless = False
        """Whether the next call reads harmlessly."""
        self.paused = False
        """Whether the calls to come are trials, on numbers of no record."""
        self._held: dict[int, torch.UntypedStorage] = {}
        self._hold(batch)

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or not any(map(self.holds, _leaves((args, kwargs)))):
            return func(*args, **kwargs)
        sized = func in _UNTAGGED or (_TAGS & {*func.tags} and func not in _MASKABLE)
        if sized and not self.harmless:
            self._note(func)
        out = func(*args, **kwargs)
        if _makes_new(func):
            return out  # of the shape alone
        made = [value for value in _leaves(out) if isinstance(value, Tensor)]
        if any(value.layout != torch.strided or value.is_nested for value in made):
            self._note(func)  # a sparse or nested tensor's size depends on its numbers
        self._hold([*made, *_written(func, args, kwargs)])
        return out

    def _note(self, func: Any) -> None:
        self.read = self.read or func._schema.name.partition("::")[2]
        raise RecordsRead(self.read)

    def _hold(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor) and value.layout == torch.strided:
                storage = value.untyped_storage()
                self._held[storage._cdata] = storage  # kept, so that no other gets its address

    def holds(self, value: Any) -> bool:
        """Return whether a value is a tensor in memory that the records were written into."""
        return (
            isinstance(value, Tensor)
            and value.layout == torch.strided
            and value.untyped_storage()._cdata in self._held
        )


def _leaves(value: Any) -> list[Any]:
    """``tree_leaves``, without its registry for what operators are given in most calls: tensors,
    numbers, lists and dicts of them.
    """
    kind = type(value)
    if kind is Tensor or kind in _LEAF:
        return [value]
    if kind is tuple or kind is list:
        return [leaf for item in value for leaf in _leaves(item)]
    if kind is dict:
        return [leaf for item in value.values() for leaf in _leaves(item)]
    return tree_leaves(value)


def _makes_new(func: Any) -> bool:
    name = func._schema.name.partition("::")[2]
    return name.endswith("_like") or name.startswith("new_")


def reads_harmlessly(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether what a function reads decides no result for others: ``one_hot`` for a given
    number of classes and ``gaussian_nll_loss`` only raise by it, ``ctc_loss`` keeps a size of its
    own to itself, and our own head only saves time.
    """
    num_classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
    one_hot = func is F.one_hot and isinstance(num_classes, int) and num_classes >= 0
    return one_hot or func in (F.gaussian_nll_loss, F.ctc_loss, linear_cross_entropy)


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operator writes into."""
    written: list[Any] = []
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += _leaves(args[at] if at < len(args) else kwargs.get(argument.name))
    return written
