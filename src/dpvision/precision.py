"""Which precision autocast gives a matrix product."""

import torch
from torch import Tensor


def lowered_dtype(value: Tensor) -> torch.dtype:
    """The precision in which autocast would multiply ``value``; its own without autocast, and on
    the ``meta`` device.
    """
    low = autocast_dtype(value.device)
    return (
        low
        if low is not None and value.dtype in (torch.float32, torch.float16, torch.bfloat16)
        else value.dtype
    )


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Autocast's precision on a device; None where it is off, or unknown there."""
    known = torch.amp.is_autocast_available(device.type)
    return (
        torch.get_autocast_dtype(device.type)
        if known and torch.is_autocast_enabled(device.type)
        else None
    )
