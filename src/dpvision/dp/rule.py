"""Rules: replacements of torch function calls that combine trained weights with data.

A rule computes the same output from detached weights, and during the backward pass gives the
factors of the records' gradients to the weights' slots. Autograd computes no weight gradient.

Legend: B records, T positions of a record, D width.
"""

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from dpvision.dp.batch_dims import BatchDim
from dpvision.dp.weight_grads import Slot


class NoRule(Exception):
    """A parameter is used in a way for which there is no rule."""

    def __init__(self, tensors: list[Tensor], reason: str) -> None:
        super().__init__(reason)
        self.tensors = tensors
        self.reason = reason


class Pass(Protocol):
    """The interface of a pass that rules use."""

    num_records: int
    anchor: Tensor
    """A leaf that requires a gradient: the backward pass reaches everything that depends on it,
    whatever the input.
    """

    def slot(self, weight: Tensor | None, rule: str) -> Slot | None:
        """Return the slot of a trained weight, or None for a frozen one."""
        ...

    def batch_dim(self, tensor: Tensor) -> BatchDim | None:
        """Return the record dimension of an argument of the call, or None if it has none."""
        ...

    def output_batch_dim(self) -> BatchDim | None: ...
    @property
    def traced(self) -> bool:
        """bool: whether the pass is traced for a compiler, which does not support autograd
        functions.
        """
        ...

    def tap(
        self, output: Tensor, saved: tuple[Tensor | None, ...], sink: Callable[..., None]
    ) -> Tensor:
        """Return the output; the backward pass calls ``sink(*saved, g)`` with its gradient g,
        whether or not the input has one.

        The output is computed from detached weights, and from the input by ordinary torch
        operations.
        """
        ...

    def lowered(self, input: Tensor, *weights: Tensor | None) -> tuple[Tensor, ...]:
        """Convert operands as autocast does for a matrix product; each input is converted once per
        pass.
        """
        ...


Rule = Callable[..., Any]


def by_record(value: Tensor, batch_dim: BatchDim, num_records: int) -> Tensor:
    """Rearrange (..., D) with its records in any dimension to (B, T, D)."""
    rows = value.movedim(batch_dim.dim, 0)
    if not batch_dim.side_by_side:
        rows = rows.unflatten(0, (batch_dim.per_record, num_records)).transpose(0, 1)
    return rows.reshape(num_records, -1, value.shape[-1])


def require(ok: bool, tensors: list[Tensor | None], reason: str) -> None:
    if not ok:
        raise NoRule([t for t in tensors if t is not None], reason)


def leading(batch_dim: BatchDim) -> bool:
    return batch_dim.dim == 0 and batch_dim.side_by_side
