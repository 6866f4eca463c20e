"""Exponential moving average of privatized weights: post-processing, costs no privacy."""

import torch
from torch import Tensor, nn


@torch.no_grad()
def update_ema(ema: dict[str, Tensor], model: nn.Module, decay: float) -> dict[str, Tensor]:
    """ema <- decay x ema + (1 - decay) x weights, in place; returns ``ema``.

    Args:
        ema: float tensors by the names of ``model.state_dict()``.
        decay: in (0, 1).
    """
    for name, value in model.state_dict().items():
        ema[name].lerp_(value.to(ema[name].dtype), 1 - decay)
    return ema


def make_ema(model: nn.Module) -> dict[str, Tensor]:
    """Float32 copy of the weights to start the average from."""
    return {name: value.detach().float().clone() for name, value in model.state_dict().items()}
