"""Gaussian noise, once per logical step: the only place where noise is drawn, and the wall that makes a gradient releasable.

    DPGradient = (sum of clipped gradients + N(0, noise_std^2)) / expected_batch_size     (Abadi et al. 2016)

The plan scales the noise and names the divisor, which is public. Every (step, parameter, chunk of 2^20 values) has its own
generator, keyed by the secret ``noise_key``: streams are independent, no state is carried from step to step, and the noise
does not depend on the device or on the number of processes. Numbers are drawn in float64 on the CPU and rounded once.
"""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpvision.dp.clip import ClippedSum
from dpvision.dp.hardened import hardened_normals
from dpvision.errors import PrivacyError
from dpvision.privacy.plan import DPPlan

KEY_BYTES = 32
_CHUNK = 2**20
_STATE_WORDS = 624
_STATE_OFFSET = 3
"""Position, in 64-bit words, of the Mersenne Twister's 624 words in the state of a torch CPU generator."""


@dataclass(frozen=True, eq=False)
class DPGradient:
    """Gradient that may leave: noisy, divided by the expected batch size; the only thing that an optimizer sees."""

    grads: dict[str, Tensor]
    """By parameter name, float32."""


def new_key() -> bytes:
    """A fresh secret key from the operating system: 32 bytes, one per start of a run, never written, logged or restored."""
    return os.urandom(KEY_BYTES)


def privatize(total: ClippedSum, plan: DPPlan, step: int, noise_key: bytes) -> DPGradient:
    """Release one logical step: add the plan's noise to the total over all physical batches and processes, divide.

    Args:
        total: the whole step's clipped sum.
        step: the ledger's number of this step; the same (key, step) gives the same noise, so a step is released once.
        noise_key: 32 secret bytes from ``new_key``, the same on all processes.

    Returns:
        The gradient, same names, shapes, devices and precision as ``total.grads``. Without a guarantee: no noise, only the division.

    Raises:
        PrivacyError: the sum was clipped to another norm than the plan's, the key is not 32 bytes, or a plan with a guarantee has no noise.
    """
    if len(noise_key) != KEY_BYTES:
        raise PrivacyError(f"noise: noise_key of {len(noise_key)} bytes; expected {KEY_BYTES}. Use noise.new_key().")
    if plan.guarantee == "dp" and not plan.noise_std > 0:
        raise PrivacyError(f"noise: noise_std={plan.noise_std}; expected more than 0 with a guarantee. Make a plan with noise.")
    if total.max_grad_norm != plan.max_grad_norm:
        raise PrivacyError(
            f"noise: a sum clipped to {total.max_grad_norm} under a plan with max_grad_norm={plan.max_grad_norm}; expected the plan's. "
            "Call clipped_sum with max_grad_norm=plan.max_grad_norm."
        )
    draw = {"torch": torch_normals, "hardened": hardened_normals}[plan.noise_generator]
    grads = {}
    for name, value in total.grads.items():
        summed = value.detach().double().flatten().cpu()
        if plan.noise_std > 0:
            summed = summed + plan.noise_std * _normals(draw, noise_key, step, name, value.numel())
        grads[name] = (summed / plan.expected_batch_size).to(value.device, value.dtype).view_as(value)
    return DPGradient(grads)


def torch_normals(key: bytes, count: int) -> Tensor:
    """Standard normal float64 numbers of torch's CPU generator (Mersenne Twister, Box-Muller), its whole state filled from ``key``.

    Not ``manual_seed``: on a CPU it keeps 32 bits of a seed, so that all noise could be found by trying 2^32 of them, and two of
    some ten thousand streams would be the same.
    """
    words = np.frombuffer(hashlib.shake_256(key).digest(4 * _STATE_WORDS), dtype="<u4")
    generator = torch.Generator()
    state = generator.get_state().numpy()
    state.view(np.uint64)[_STATE_OFFSET : _STATE_OFFSET + _STATE_WORDS] = words
    generator.set_state(torch.from_numpy(state))
    return torch.randn(count, dtype=torch.float64, generator=generator)


def _normals(draw: Callable[[bytes, int], Tensor], noise_key: bytes, step: int, name: str, count: int) -> Tensor:
    chunks = range(0, count, _CHUNK)
    return torch.cat([draw(_stream_key(noise_key, step, name, at // _CHUNK), min(_CHUNK, count - at)) for at in chunks])


def _stream_key(noise_key: bytes, step: int, name: str, chunk: int) -> bytes:
    """Key of one stream: a keyed hash of what names it."""
    return hashlib.blake2b(f"{step} {chunk} {name}".encode(), key=noise_key, digest_size=32, person=b"dpvision.noise").digest()
