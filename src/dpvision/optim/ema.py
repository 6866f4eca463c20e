"""Averages of privatized weights, exponential or of all iterates: post-processing, costs no
privacy.
"""

import torch
from torch import Tensor, nn

from dpvision.config import OptimConfig


def update_average(
    average: dict[str, Tensor], model: nn.Module, config: OptimConfig, updates: int
) -> dict[str, Tensor]:
    """Update the average that a config selects, in place; arguments and result as for
    ``update_ema``.
    """
    return (
        update_mean(average, model, updates)
        if config.ema_decay is None
        else update_ema(average, model, config.ema_decay, updates)
    )


@torch.no_grad()
def update_mean(mean: dict[str, Tensor], model: nn.Module, updates: int) -> dict[str, Tensor]:
    """mean <- mean + (weights - mean) / (t + 1), in place: the mean of the weights after each
    update (Mehta et al. 2022, algorithm 1).

    The first update discards the initial value. Arguments and result as for ``update_ema``.
    """
    return _moved(mean, model, 1 / (updates + 1))


@torch.no_grad()
def update_ema(
    ema: dict[str, Tensor], model: nn.Module, decay: float, updates: int
) -> dict[str, Tensor]:
    """ema <- d x ema + (1 - d) x weights with d = min(decay, (1 + t) / (10 + t)), in place; returns
    ``ema``.

    The warm-up (De et al. 2022, TAN) discards the initial weights in runs of any length; without it
    150 steps of decay 0.999 would keep 86% of them.

    Args:
        ema: float tensors by the names of ``model.state_dict()``.
        decay: in (0, 1).
        updates: t, number of updates before this one.
    """
    decay = min(decay, (1 + updates) / (10 + updates))
    return _moved(ema, model, 1 - decay)


def _moved(average: dict[str, Tensor], model: nn.Module, weight: float) -> dict[str, Tensor]:
    """Move every average by ``weight`` of the way to the model's value, in few kernels."""
    state = model.state_dict()
    if state:
        torch._foreach_lerp_(
            [average[name] for name in state],
            [value.to(average[name].dtype) for name, value in state.items()],
            weight,
        )
    return average


def make_ema(model: nn.Module) -> dict[str, Tensor]:
    """Float32 copy of the weights to start the average from."""
    return {name: value.detach().float().clone() for name, value in model.state_dict().items()}
