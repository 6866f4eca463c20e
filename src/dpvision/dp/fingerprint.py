"""Fingerprints of gradients: two gradients of a whole model are compared without holding either.

Taken from each parameter's gradient during the backward pass, which frees it at once. A fingerprint
has a digest of all bits, and a random projection, in which distances are those of the gradients up
to a factor near one.

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
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
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

    bits_P: Tensor
    """Digests, int64: equal for equal numbers (-0 and 0 are), and for others with a chance of about
    2^-64.
    """
    projection_PK: Tensor
    """float64."""
    square_norm_P: Tensor
    """float64."""
    is_finite: bool

    def equals(self, other: "Fingerprint") -> bool:
        """Return whether the gradients are equal, bit for bit."""
        return torch.equal(self.bits_P, other.bits_P)

    def distance(self, other: "Fingerprint") -> float:
        """Return the norm of the difference, up to a factor near one."""
        return float((self.projection_PK - other.projection_PK).norm())

    @property
    def norm(self) -> float:
        """float: the norm, exact but for rounding."""
        return float(self.square_norm_P.sum().sqrt())


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
    return Fingerprint(
        torch.tensor(bits), torch.stack(projections), torch.stack(squares), all(finite)
    )


def projection(value: Tensor) -> Tensor:
    """Return a tensor's projection as in a fingerprint, float64 (K,) on the CPU."""
    return _of_tensor(value)[1]


@torch.no_grad()
def _of_tensor(value: Tensor) -> _Taken:
    if value.is_complex():
        value = torch.view_as_real(value)
    weights, odd, piece_weights, piece_odd = _multipliers(value.device)
    bits, projections, squares = [], [], []
    for part in value.detach().reshape(-1).split(_PIECE):
        part = part + 0.0  # -0 becomes 0
        whole = part.view(_BITS[part.element_size()]).long()
        bits.append((whole * odd[: len(part)]).sum())
        wide = part.double()
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
