"""Where the records lie in every tensor of a forward pass, found by running it with two and with three records.

Shapes alone do not tell a batch of 64 records from 64 tokens. Two runs do: the dimension that grows with the batch holds the
records. The pass that clips (``one_pass``) then meets the same calls in the same order, checks every shape that it relies on
against this list, and never guesses.
"""

import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

NUM_RECORDS = (2, 3)


@dataclass(frozen=True)
class Layout:
    """Dimension ``dim`` holds the records, ``per_record`` rows for each, those of one record side by side."""

    dim: int
    per_record: int


MIXED = Layout(-1, 0)
"""The shape depends on the number of records in another way."""


@dataclass(frozen=True)
class Call:
    """One call of a torch function that returns tensors: the layouts of its tensor arguments and results, None where fixed."""

    function: Callable[..., Any]
    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout | None, ...]


def _opened(function: types.FunctionType) -> Callable[..., Any]:
    """The same function without torch's override check, so that a mode sees the calls inside it rather than the function."""
    opened = types.FunctionType(
        function.__code__, {**function.__globals__, "has_torch_function": lambda _: False}, function.__name__, function.__defaults__
    )
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


OPENED: dict[Callable[..., Any], Callable[..., Any]] = {F.multi_head_attention_forward: _opened(F.multi_head_attention_forward)}
"""Functions that use parameters in several ways, with a form that shows each use."""


class Recorder(TorchFunctionMode):
    """Writes down every call that returns tensors, with its shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], list[torch.Size], list[torch.Size]]] = []

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OPENED:
            with self:
                return OPENED[func](*args, **kwargs)
        inputs = [t.shape for t in tensors_in(args, kwargs)]
        out = func(*args, **kwargs)
        outputs = [t.shape for t in tensors_in((out,), {})]
        if outputs:
            self.calls.append((func, inputs, outputs))
        return out


def find_layouts(run: Callable[[Any], object], few: Any, many: Any) -> list[Call] | str:
    """The calls of a forward pass with the layout of every tensor in them.

    Args:
        run: runs the pass over a batch.
        few, many: batches of ``NUM_RECORDS`` records.

    Returns:
        The calls, or why there are none: the pass makes other calls for two records than for three.
    """
    recorders = []
    for batch in (few, many):
        recorders.append(Recorder())
        with recorders[-1]:
            run(batch)
    first, second = (recorder.calls for recorder in recorders)
    if [call[0] for call in first] != [call[0] for call in second]:
        return "its forward pass makes other calls for two records than for three"
    return [
        Call(a[0], tuple(map(_layout, a[1], b[1])), tuple(map(_layout, a[2], b[2])))
        if len(a[1]) == len(b[1])  # a list with one tensor for each record
        else Call(a[0], (MIXED,) * len(a[1]), (MIXED,) * len(a[2]))
        for a, b in zip(first, second, strict=True)
    ]


def tensors_in(args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors among arguments, those in lists and tuples too, in a fixed order."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from (item for item in value if isinstance(item, Tensor))


def _layout(few: torch.Size, many: torch.Size) -> Layout | None:
    if few == many:
        return None
    if len(few) != len(many):
        return MIXED
    grown = [dim for dim in range(len(few)) if few[dim] != many[dim]]
    per_record = [shape[grown[0]] / num for shape, num in zip((few, many), NUM_RECORDS, strict=True)]
    if len(grown) > 1 or per_record[0] != per_record[1] or per_record[0] != int(per_record[0]):
        return MIXED
    return Layout(grown[0], int(per_record[0]))
