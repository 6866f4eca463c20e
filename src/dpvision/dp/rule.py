"""What a rule is: a replacement of one call of a torch function in which trained weights meet data.

It computes the same output from weights that autograd does not see, and hands what the records' gradients are made of to the
weights' slots as soon as the backward pass has it. No weight gradient is computed on the way.

Legend: B records, T places of a record, D width.
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
    """What rules need of the pass that calls them."""

    num_records: int
    anchor: Tensor
    """A leaf that requires a gradient: what hangs on it is reached by the backward pass, whatever the input."""

    def slot(self, weight: Tensor | None, rule: str) -> Slot | None:
        """The slot of a trained weight; None for a frozen one."""
        ...

    def batch_dim(self, tensor: Tensor) -> BatchDim | None:
        """Where the records lie in an argument of the call; None if it has none."""
        ...

    def output_batch_dim(self) -> BatchDim | None: ...
    @property
    def traced(self) -> bool:
        """Whether the pass is written down for a compiler, which takes no autograd function."""
        ...

    def tap(self, output: Tensor, saved: tuple[Tensor | None, ...], sink: Callable[..., None]) -> Tensor:
        """The output; the backward pass calls ``sink(*saved, g)`` with its gradient g, whether or not the input has one.

        The output comes from weights without a gradient, and from the input by torch's own operations.
        """
        ...

    def lowered(self, input: Tensor, *weights: Tensor | None) -> tuple[Tensor, ...]:
        """Operands as autocast hands them to a matrix product; an input met before is converted once."""
        ...


Rule = Callable[..., Any]


def by_record(value: Tensor, batch_dim: BatchDim, num_records: int) -> Tensor:
    """(..., D) with its records anywhere -> (B, T, D)."""
    rows = value.movedim(batch_dim.dim, 0)
    if not batch_dim.side_by_side:
        rows = rows.unflatten(0, (batch_dim.per_record, num_records)).transpose(0, 1)
    return rows.reshape(num_records, -1, value.shape[-1])


def require(ok: bool, tensors: list[Tensor | None], reason: str) -> None:
    if not ok:
        raise NoRule([t for t in tensors if t is not None], reason)


def leading(batch_dim: BatchDim) -> bool:
    return batch_dim.dim == 0 and batch_dim.side_by_side
