"""Clipped sum the slow, obvious way: one record at a time, plain autograd, float64. No vmap, no
chunks, no functional calls.
"""

import copy

import torch

from dpvision.data.batch import Batch
from dpvision.dp.rounding import reserve


def usable(model, max_grad_norm):
    """What a contribution of norm above C is clipped to: in float32 a public 0.5% below C, in
    float64 nothing to speak of.
    """
    return max_grad_norm * (
        1 - reserve(next(p.dtype for p in model.parameters() if p.requires_grad))
    )


def per_record_gradients(loss_fn, model, batch: Batch, key):
    """[(record's loss, {name: gradient})] of the valid records, float64."""
    model = copy.deepcopy(model).double()
    results = []
    for i in range(len(batch.record_id_B)):
        if not batch.valid_B[i]:
            continue
        one = Batch(*(None if value is None else value[i : i + 1] for value in batch))
        one = one._replace(image_BVCHW=one.image_BVCHW.double())
        model.zero_grad()
        loss = loss_fn(model, one, key)[0]
        loss.backward()
        grads = {
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for n, p in model.named_parameters()
            if p.requires_grad
        }
        results.append((loss.item(), grads))
    return results


def clipped_sum_loop(loss_fn, model, batch: Batch, key, max_grad_norm):
    """({name: sum of clipped gradients}, [norms], [losses]), float64; clipped to C less the part
    that is kept free for rounding.
    """
    limit = usable(model, max_grad_norm)
    total = {
        n: torch.zeros(p.shape, dtype=torch.float64)
        for n, p in model.named_parameters()
        if p.requires_grad
    }
    norms, losses = [], []
    for loss, grads in per_record_gradients(loss_fn, model, batch, key):
        norm = torch.cat([g.flatten() for g in grads.values()]).norm().item()
        if torch.isfinite(torch.tensor(norm)):
            factor = min(1.0, limit / norm) if norm > 0 else 1.0
            total = {n: total[n] + factor * grads[n] for n in total}
        norms.append(norm)
        losses.append(loss)
    return total, norms, losses


def flat(grads) -> torch.Tensor:
    """All gradients of a dictionary as one float64 vector, by name."""
    return torch.cat([grads[name].double().flatten() for name in sorted(grads)])


def middle_norm(loss_fn, model, batch: Batch, key) -> float:
    """A clip norm that half of the records exceed."""
    norms = sorted(
        flat(grads).norm().item() for _, grads in per_record_gradients(loss_fn, model, batch, key)
    )
    return norms[len(norms) // 2] * 0.999
