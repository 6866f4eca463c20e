"""Gaussian noise, added once per logical step: the only place where noise is drawn and a gradient
becomes releasable.

    DPGradient = round_g(sum of clipped gradients + N(0, noise_std^2)) / expected_batch_size
    (Abadi et al. 2016)

The plan sets the noise scale and the public divisor. Normals come from ``privacy.stream``, with one
subkey per (step, parameter) and one number per coordinate, so any process can draw any range of
coordinates. Sum plus noise is computed in float64 and rounded to the public grid g = 2^(floor(log2
noise_std) - 20) before anything else, so that low bits reveal nothing about the sum
(docs/clipping.md, "Noise").
"""

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dpvision.devices import send
from dpvision.dp.clipped import ClippedSum, require_seal, seal
from dpvision.dp.normals import Normals, box_muller, key_words, second_uniforms, smallest_words
from dpvision.errors import PrivacyError
from dpvision.privacy.plan import DPPlan
from dpvision.privacy.stream import WORDS_PER_BLOCK, Key, secret_of, subkey

_GRID_BITS = 20
_CPU_TASK = 2**19
"""Coordinates per task of a thread."""
_GPU_PIECE = 2**23
"""Coordinates whose words and normals a GPU holds at once: about half a GiB of float64."""


@dataclass(frozen=True, eq=False)
class DPGradient:
    """Releasable gradient: noisy, divided by the expected batch size; the only input of an
    optimizer.

    Made by ``privatize`` only: one that is made, replaced or edited by hand is refused (``seal``).
    """

    grads: dict[str, Tensor]
    """Gradient by parameter name; float32, or float64 for heads."""


class Owners(Protocol):
    """The processes among which the coordinates are divided; ``train.distributed.Group`` is one."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def add_up(self, values: Tensor) -> None:
        """Replace ``values`` by their sum over all processes, bitwise the same on each."""


def privatize(
    total: ClippedSum,
    plan: DPPlan,
    step: int,
    noise_key: Key,
    *,
    owners: Owners | None = None,
    dtype: torch.dtype = torch.float32,
) -> DPGradient:
    """Release one logical step: add the plan's noise to the total over all physical batches and
    processes, round to the grid, divide.

    Uses as many CPU threads as torch does.

    Args:
        total: the whole step's clipped sum, the same on all processes.
        step: the ledger's number of this step, whose batch ``plan.draw`` drew; released once by a
            plan, and once under a key.
        noise_key: from ``stream.new_key``, the same on all processes.
        owners: the processes, each of which draws the noise of its share of every parameter; all
            get the whole gradient.
        dtype: dtype of the gradient, float32 or float64.

    Returns:
        The gradient, same names, shapes and devices as ``total.grads``. Without a guarantee: no
        noise, only the division.

    Raises:
        PrivacyError: the sum was clipped to another norm than the plan's, made by ``clipped_sum``
            without ``rows``, or made or edited by hand; the plan has no such step, did not draw its
            batch, was changed, or has a guarantee and no noise; the key is not one of this process;
            or the plan or the key released this step before.
    """
    secret_of(noise_key)  # refuses anything but a key of this process, even without noise
    if not (isinstance(step, int) and 0 <= step < plan.steps):
        raise PrivacyError(
            f"noise: step={step}; expected an integer from 0 to {plan.steps - 1}, a step of the "
            "plan. Plan more steps."
        )
    noise_std = plan.noise.std(step)
    if plan.guarantee == "dp" and not noise_std > 0:
        raise PrivacyError(
            f"noise: noise_std={noise_std}; expected more than 0 with a guarantee. Make a "
            "plan with noise."
        )
    if total.max_grad_norm != plan.max_grad_norm:
        raise PrivacyError(
            f"noise: a sum clipped to {total.max_grad_norm} under a plan with "
            f"max_grad_norm={plan.max_grad_norm}; expected the plan's. Call clipped_sum with "
            "max_grad_norm=plan.max_grad_norm."
        )
    require_seal(total, "noise", "Give privatize the sum of clipped_sum or ClippedSum.add_up.")
    plan.require_true()
    if plan.guarantee == "dp" and total.rows is None:
        raise PrivacyError(
            "noise: a sum of clipped_sum without rows=; expected the rows of a pass, at which a "
            "record's bits were checked. Call clipped_sum(..., rows=64), with the same number "
            "in all steps."
        )
    if plan.guarantee == "dp" and total.step not in (None, step):
        raise PrivacyError(
            f"noise: step={step} with a sum of step {total.step}; expected the sum of this "
            "step's draw: a batch that is released again is not accounted for. After an error, "
            "release ClippedSum.zeros or stop."
        )
    plan.release(step, total.num_records, total.record_id_B)
    if not noise_std > 0:
        return seal(
            DPGradient(
                {
                    name: (value.double() / plan.expected_batch_size).to(dtype)
                    for name, value in total.grads.items()
                }
            )
        )
    noise_key.spend(step)
    rank, world_size = (owners.rank, owners.world_size) if owners else (0, 1)
    grads, shares = {}, []
    for name, value in total.grads.items():
        # The other processes' shares are zero until all are added up.
        grads[name] = (torch.zeros if world_size > 1 else torch.empty)(
            value.shape, dtype=dtype, device=value.device
        )
        terms = tuple(
            (subkey(noise_key, "noise", step=of, parameter=name), std)
            for of, std in plan.noise.terms(step)
        )
        summed, out = value.detach().contiguous().view(-1), grads[name].view(-1)
        shares.append(
            _Share(summed, out, terms, *plan.noise.owned(value.numel(), rank, world_size))
        )
    _Release(noise_std, plan.expected_batch_size).run(shares)
    if owners and world_size > 1:
        for gradient in grads.values():
            owners.add_up(gradient)
    return seal(DPGradient(grads))


@dataclass(frozen=True)
class _Share:
    """Coordinates [first, stop) of one parameter, with its sum and the gradient to fill."""

    summed: Tensor
    out: Tensor
    terms: tuple[tuple[Key, float], ...]
    """The noise: standard normals of each key, scaled to a standard deviation, and added up."""
    first: int
    stop: int

    def pieces(self, size: int) -> "Iterator[_Share]":
        for at in range(self.first, self.stop, size):
            yield _Share(self.summed, self.out, self.terms, at, min(at + size, self.stop))


class _Release:
    """Computes round_g(sum + noise) / divisor for ranges of coordinates."""

    def __init__(self, noise_std: float, divisor: float) -> None:
        self._grid = grid_of(noise_std)
        # After rounding, numbers are multiples of the grid, a power of two: folding it into the
        # divisor is exact and saves a pass.
        self._divisor = divisor / self._grid

    def run(self, shares: list[_Share]) -> None:
        """Fill the shares' gradients, block by block in float64."""
        if away := [share for share in shares if share.summed.device.type != "cpu"]:
            self._away(away)
        tasks = deque(
            piece
            for share in shares
            if share.summed.device.type == "cpu"
            for piece in share.pieces(_CPU_TASK)
        )
        num_threads = min(torch.get_num_threads(), len(tasks))
        if num_threads <= 1:  # one thread needs no pool
            self._on_cpu(tasks)
            return
        with ThreadPoolExecutor(num_threads) as pool:
            for done in [pool.submit(self._on_cpu, tasks) for _ in range(num_threads)]:
                done.result()

    def _on_cpu(self, tasks: deque[_Share]) -> None:
        """Work on tasks until none is left; NumPy, torch and the cipher let other threads run
        meanwhile.
        """
        arrays = [Normals()]
        while True:
            try:
                task = tasks.popleft()
            except IndexError:
                return
            summed, out = task.summed.numpy(), task.out.numpy()
            arrays += [Normals() for _ in task.terms[len(arrays) :]]
            terms = [
                normals.blocks(key, task.first, task.stop, std)
                for normals, (key, std) in zip(arrays, task.terms, strict=True)
            ]
            for (at, normal), *others in zip(*terms, strict=True):
                end = at + len(normal)
                for _, other in others:
                    normal += other
                normal += summed[at:end]
                normal *= 1 / self._grid
                np.rint(normal, out=normal)
                normal /= self._divisor
                out[at:end] = normal

    def _away(self, shares: list[_Share]) -> None:
        """Fill the shares on a GPU. The host waits once: for the words of all pieces that may have
        second words, which it draws.
        """
        device = shares[0].summed.device
        key_words_8 = iter(
            send(key_words([key for share in shares for key, _ in share.terms]), device)
        )
        pieces = []
        for share in shares:
            keys_8 = [next(key_words_8) for _ in share.terms]
            pieces += [(piece, keys_8) for piece in share.pieces(_GPU_PIECE)]
        found = [
            smallest_words(_words(piece, key_8)) for piece, keys_8 in pieces for key_8 in keys_8
        ]
        sizes = [len(found_K2) for found_K2 in found]
        here = torch.cat(found).cpu().split(sizes)
        of = [(key, _first_block(piece)) for piece, _ in pieces for key, _ in piece.terms]
        uniform = torch.cat(
            [
                second_uniforms(found_K2, key, block * WORDS_PER_BLOCK // 2)
                for found_K2, (key, block) in zip(here, of, strict=True)
            ]
        )
        seconds = iter(zip(found, send(uniform, device).split(sizes), strict=True))
        for piece, keys_8 in pieces:
            self._on_gpu(piece, keys_8, [next(seconds) for _ in keys_8])

    def _on_gpu(
        self, piece: _Share, keys_8: list[Tensor], seconds: list[tuple[Tensor, Tensor]]
    ) -> None:
        (normal, *others) = (
            box_muller(_words(piece, key_8), std, (found_K2[:, 0], uniform_K))
            for key_8, (_, std), (found_K2, uniform_K) in zip(
                keys_8, piece.terms, seconds, strict=True
            )
        )
        for other in others:
            normal += other
        skipped = piece.first - _first_block(piece) * WORDS_PER_BLOCK
        normal = normal[skipped : skipped + piece.stop - piece.first]
        noisy = (
            normal.add_(piece.summed[piece.first : piece.stop])
            .mul_(1 / self._grid)
            .round_()
            .div_(self._divisor)
        )
        piece.out[piece.first : piece.stop] = noisy.to(piece.out.dtype)


def _first_block(piece: _Share) -> int:
    """Number of the cipher's first block of a piece."""
    return piece.first // WORDS_PER_BLOCK


def _words(piece: _Share, key_8: Tensor) -> Tensor:
    """Return the words of a piece's blocks, on the device of the key."""
    from dpvision.dp.chacha_triton import chacha_words  # Triton is not installed everywhere

    block = _first_block(piece)
    return chacha_words(key_8, block, -(-piece.stop // WORDS_PER_BLOCK) - block)


def grid_of(noise_std: float) -> float:
    """Return the public grid g = 2^(floor(log2 noise_std) - 20), of which noisy sums are
    multiples.
    """
    return math.ldexp(1.0, math.frexp(noise_std)[1] - 1 - _GRID_BITS)
