"""Whether a call of PyTorch joins records, found by trying it alone on random numbers.

No list of names is complete, and the numbers of a few records do not show what others do.
"""

import itertools
import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dpvision.dp.batch_dims import MIXED, BatchDim, tensors_in


@dataclass(frozen=True)
class Trial:
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
    sizes: bool
    """Whether to try smaller and larger numbers too."""

    def dims(
        self, dims: tuple[BatchDim | None, ...]
    ) -> tuple[tuple[BatchDim | None, ...] | None, bool]:
        """Return the batch dimensions of the results with an order of rows in which no
        record changes a row of others, None if there is none or the call takes no numbers tried;
        and whether this holds for any numbers of the call's own.
        """
        # 1. Numbers that a function may refuse are followed by others: normal ones by those in
        #    [0, 1) (a probability), these by positive definite matrices; records' integers of 0 and
        #    1 by the call's own (an index into one row), as all others are. The CPU comes first,
        #    since a GPU may not recover from a refusal; an operator may work on its own device
        #    only.
        # 2. A call that refuses all, or writes what PyTorch does not count, may do anything.
        # 3. A comparison of normal numbers says nothing of equal ones: few values are tried too.
        # 4. Nor do numbers near 1 say what much larger ones do (an eps hides what they join), nor
        #    one float of the call what others do, which it may take later (a factor of 0).
        left: list[list[BatchDim | None]] = [_orders(dim) for dim in dims]
        devices = dict.fromkeys((torch.device("cpu"), *(t.device for t in self.given.values())))
        cases = itertools.product(devices, _DRAWS, (True, False))
        taken = next((case for case in cases if self._keep(left, *case)), None)
        if taken is None:
            return None, False
        cpu, (_, draw, whole) = torch.device("cpu"), taken
        for seed in range(3 if self.few else 0):
            self._keep(left, cpu, _coins, True, seed)
        if self.sizes:
            for other in (_small(draw), _of_all_sizes(draw)):
                self._keep(left, cpu, other, False)
        if any(map(_has_float, (self.args, self.kwargs))):
            self._keep(left, cpu, draw, False, number=0.5)
        own = any(not _is_drawn(t) and key not in self.rows for key, t in self.given.items())
        return tuple(found[0] for found in left) if all(left) else None, whole and not own

    def _keep(
        self,
        left: list[list[BatchDim | None]],
        device: torch.device,
        draw: Any,
        whole: bool,
        seed: int = 0,
        number: float | None = None,
    ) -> bool:
        """Keep those of the orders in which no row of others changes; False if the call raises.

        Args:
            number: takes the place of every float of the call; what is random is then the same.
        """
        generator = torch.Generator().manual_seed(seed)
        first: dict[int, Tensor] = {}
        others: dict[int, Tensor] = {}
        try:
            for key, t in self.given.items():
                like = torch.empty(t.shape) if key in self.moved else t
                drawn = _is_drawn(like) or (whole and key in self.rows)
                value = _drawn(like, draw, generator) if drawn else t.to("cpu", copy=True)
                first[key] = value.to(device)
                if drawn and key in self.rows:
                    others[key] = _drawn(value, draw, generator).to(device)
            before = [t.cpu() for t in self._results(first, number)]
            kept = left
            for record in range(3):
                second = dict(first)
                for key, other in others.items():
                    second[key] = _with_record(first[key], other, self.rows[key], record)
                after = [t.cpu() for t in self._results(second, number)]
                if not len(before) == len(after) == len(left):
                    return False
                kept = [
                    [
                        dim
                        for dim in found
                        if dim is None
                        or dim == MIXED
                        or not differs(_of_others(a, dim, record), _of_others(b, dim, record))
                    ]
                    for found, a, b in zip(kept, before, after, strict=True)
                ]
        except Exception:  # whatever the function raises for numbers that it refuses
            return False
        left[:] = kept
        return True

    def _results(self, new: dict[int, Tensor], number: float | None) -> list[Tensor]:
        """The results with other tensors by id, and another number in place of each float."""
        args, kwargs = (_replaced(value, new, number) for value in (self.args, self.kwargs))
        given = [(t, t._version, t.clone()) for t in tensors_in(args, kwargs)]
        if number is None:
            made = tensors_in((self.func(*args, **kwargs),), {})
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                made = tensors_in((self.func(*args, **kwargs),), {})
        for tensor, version, copy in given:
            if tensor._version == version and differs(tensor, copy):
                raise ValueError("writes that PyTorch does not count, as batch_norm's statistics")
        return made


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


def _small(draw: Any) -> Callable[..., Tensor]:
    return lambda shape, generator: 1e-6 * draw(shape, generator=generator)


def _of_all_sizes(draw: Any) -> Callable[..., Tensor]:
    """From 1e-6 to 1e15 of a normal number's."""

    def drawn(shape: torch.Size, generator: torch.Generator) -> Tensor:
        return draw(shape, generator=generator) * 10 ** (
            21 * torch.rand(shape, generator=generator) - 6
        )

    return drawn


def _with_record(value: Tensor, other: Tensor, dim: BatchDim, record: int) -> Tensor:
    """Copy a tensor with another's numbers in the rows of one of three records."""
    changed = value.clone()
    _by_record(changed, dim)[record] = _by_record(other, dim)[record]
    return changed


def _of_others(value: Tensor, dim: BatchDim, record: int) -> Tensor:
    """Rows of the two records but ``record``."""
    rows = [i for i in range(3) if i != record]
    return _by_record(value.narrow(dim.dim, 0, 3 * dim.per_record), dim)[rows]


def differs(a: Tensor, b: Tensor) -> bool:
    """Whether shapes differ, or numbers."""
    return a.shape != b.shape or not bool(((a == b) | (a.isnan() & b.isnan())).all())


def _replaced(value: Any, new: dict[int, Tensor], number: float | None) -> Any:
    """Copy arguments with other tensors by id, and with another float unless it is None; all are
    copied, since the call may write to them.
    """
    if isinstance(value, Tensor):
        return new[id(value)].clone() if id(value) in new else value.clone()
    if isinstance(value, dict):
        return {key: _replaced(item, new, number) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, new, number) for item in value)
    return value if number is None or not _is_float(value) else number


def _is_float(value: Any) -> bool:
    """Whether a number of Python or NumPy is none of the integers, whose values are compared."""
    return isinstance(value, numbers.Number) and not isinstance(value, numbers.Integral)


def _has_float(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value
    return _is_float(value) or (
        isinstance(value, dict | list | tuple) and any(map(_has_float, inner))
    )
