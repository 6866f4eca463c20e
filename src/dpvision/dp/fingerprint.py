"""Fingerprints of gradients: two gradients of a large model are compared without holding either.

Taken from each parameter's gradient during the backward pass, which frees it at once. A fingerprint
has a digest of all bits, and a random projection, in which distances are those of the gradients up
to a factor near one. A small model's is its gradient.

Legend: P parameters, K numbers of a projection.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_PIECE = 2**16
"""Numbers that are read at once: they stay in a core's cache."""
_WIDTH = 64
_PIECES = 4096
_SMALL = 2**20
"""Up to so many numbers, a gradient itself is cheaper than its fingerprint."""
_ODD = 0x1E3779B97F4A7C15
"""Any odd number of many ones and zeros."""
_Taken = tuple[int, Tensor, Tensor, bool]
"""Digest of the bits, projection, square norm, and whether all is finite."""
_NOTHING: _Taken = (
    0,
    torch.zeros(_WIDTH, dtype=torch.float64),
    torch.zeros((), dtype=torch.float64),
    True,
)
"""Of zeros."""


class NotFinite(Exception):
    """A gradient that was to be finite is not."""


@dataclass(frozen=True, eq=False)
class Fingerprint:
    """Of the gradient for several parameters, in their order; zeros where the loss does not depend
    on one.
    """

    bits: Tensor
    """The same for equal numbers (-0 and 0 are), and for others with a chance of about 2^-64: a
    digest of each parameter's gradient, int64, or a small gradient.
    """
    values: Tensor
    """Projections one after the other, or a small gradient, float64; as ``values_of``."""
    norm: float
    """Norm of the gradient, exact but for rounding."""
    is_finite: bool

    def equals(self, other: "Fingerprint") -> bool:
        """Return whether the gradients are equal, bit for bit."""
        return torch.equal(self.bits, other.bits)

    def distance(self, other: "Fingerprint") -> float:
        """Return the norm of the difference, up to a factor near one."""
        return float((self.values - other.values).norm())


def fingerprint(
    loss: Tensor, params: Sequence[Tensor], *, require_finite: bool = False
) -> Fingerprint:
    """Return the fingerprint of a loss's gradient; the graph remains.

    Args:
        params: leaves that require gradients; their ``grad`` is as before afterwards.
        require_finite: stop at the first number that is not finite.

    Raises:
        NotFinite: with ``require_finite``.
    """
    if _is_small(params):
        grads = torch.autograd.grad(
            loss, list(params), retain_graph=True, allow_unused=True, materialize_grads=True
        )
        flat = _joined(grads)
        is_finite = bool(flat.isfinite().all())
        if require_finite and not is_finite:
            raise NotFinite
        return Fingerprint(flat, flat.double(), float(flat.double().norm()), is_finite)
    found = [_NOTHING] * len(params)

    def take(number: int, param: Tensor) -> None:
        grad, param.grad = param.grad, None
        assert grad is not None
        found[number] = _of_tensor(grad)
        if require_finite and not found[number][3]:
            raise NotFinite

    before = [p.grad for p in params]
    handles = []
    try:
        for number, param in enumerate(params):
            param.grad = None
            hook = functools.partial(take, number)
            handles.append(param.register_post_accumulate_grad_hook(hook))
        torch.autograd.backward(loss, inputs=list(params), retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()
        for param, grad in zip(params, before, strict=True):
            param.grad = grad
    bits, projections, squares, finite = zip(*found, strict=True)
    norm = float(torch.stack(squares).sum().sqrt())
    return Fingerprint(torch.tensor(bits), torch.cat(projections), norm, all(finite))


def values_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the ``values`` of tensors in place of gradients; they are linear in them."""
    if _is_small(tensors):
        return _joined(tensors).double()
    return torch.cat([_of_tensor(value)[1] for value in tensors])


def norms_of(values: Tensor, params: Sequence[Tensor]) -> list[float]:
    """Return the norm of each parameter's part of ``values``, up to a factor near one."""
    sizes = [p.numel() * (1 + p.is_complex()) if _is_small(params) else _WIDTH for p in params]
    return [float(part.norm()) for part in values.split(sizes)]


def _is_small(tensors: Sequence[Tensor]) -> bool:
    return sum(value.numel() for value in tensors) <= _SMALL


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    real = (torch.view_as_real(value) if value.is_complex() else value for value in tensors)
    return torch.cat([value.detach().reshape(-1) for value in real])


@torch.no_grad()
def _of_tensor(value: Tensor) -> _Taken:
    if value.is_complex():
        value = torch.view_as_real(value)
    weights, odd, piece_weights, piece_odd = _multipliers(value.device)
    bits, projections, squares = [], [], []
    for part in value.detach().reshape(-1).split(_PIECE):
        wide = part.double() + 0.0  # -0 becomes 0
        bits.append((scattered(wide.view(torch.int64)) * odd[: len(part)]).sum())
        scaled = wide * weights[: len(part)]
        missing = -len(part) % _WIDTH
        if missing:
            scaled = torch.nn.functional.pad(scaled, (0, missing))
        projections.append(scaled.view(-1, _WIDTH).sum(0))
        squares.append(torch.dot(wide, wide))
    if not bits:
        return _NOTHING
    at = torch.arange(len(bits), device=value.device) % _PIECES
    square = torch.stack(squares).sum().cpu()
    return (
        int((torch.stack(bits) * piece_odd[at]).sum()),
        (torch.stack(projections) * piece_weights[at][:, None]).sum(0).cpu(),
        square,
        bool(square.isfinite()) or bool(value.isfinite().all()),
    )


def scattered(bits: Tensor) -> Tensor:
    """Other int64 numbers, one for one, whose low bits depend on all bits of ``bits``: in a sum of
    products modulo 2^64 a sign is the highest bit, whatever the factor, and two would cancel.
    """
    mixed = (bits >> 32).bitwise_and_(2**32 - 1).bitwise_xor_(bits).mul_(_ODD)
    return (mixed >> 29).bitwise_and_(2**35 - 1).bitwise_xor_(mixed)


@functools.lru_cache(maxsize=2)
def _multipliers(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fixed random numbers for the places in a piece and for the pieces: of mean square one,
    between half and one and a half times that, of either sign; and odd integers.
    """
    generator = torch.Generator().manual_seed(0)

    def weights(num: int) -> Tensor:
        sizes = torch.rand(num, generator=generator, dtype=torch.float64) + 0.5
        signs = torch.randint(0, 2, (num,), generator=generator) * 2 - 1
        return (sizes * signs / math.sqrt(13 / 12)).to(device)

    def odd(num: int) -> Tensor:
        return (torch.randint(-(2**63), 2**63 - 1, (num,), generator=generator) | 1).to(device)

    return weights(_PIECE), odd(_PIECE), weights(_PIECES), odd(_PIECES)
