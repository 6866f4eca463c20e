"""Memory of a run on a GPU: tried for a physical batch before a step is charged."""

import gc
from collections.abc import Callable

import torch
from torch import nn

from dpvision.config import RunConfig
from dpvision.data.keys import StepKey
from dpvision.dp.clip import ClippedSum, LossFn, clipped_sum
from dpvision.errors import ConfigError
from dpvision.train.objectives import example_batch
from dpvision.train.step import autocast, to_device


def require_fit(config: RunConfig, model: nn.Module, loss_fn: LossFn, device: torch.device) -> None:
    """Run one pass over random images at the physical batch size, uncompiled, with room for all
    else that a step holds.

    Raises:
        ConfigError: out of memory; names a size that was tried and fits.
    """
    norm, key = (
        config.privacy.max_grad_norm if config.privacy.guarantee != "none" else None,
        StepKey(config.seed, 0),
    )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)

    def run(num: int) -> None:
        room = torch.empty(held_bytes(config, model), dtype=torch.uint8, device=device)
        batch = to_device(example_batch(config, num), device)
        with autocast(config.hardware.precision, device):
            parts = (
                clipped_sum(
                    loss_fn, model, batch, key, max_grad_norm=norm, check_separability=False
                )
                for _ in range(1)
            )
            total = ClippedSum.add_up(model, norm, parts)
        del batch
        # After the passes, beside the total: the gradient.
        torch.empty(trained, dtype=torch.float32, device=device)
        del room, total

    size = config.hardware.physical_batch_size
    num = largest(run, size)
    if num < size:
        raise ConfigError(too_large(size, num, device))


def held_bytes(config: RunConfig, model: nn.Module) -> int:
    """Bytes that a session keeps from step to step beside the model: the optimizer's moments and
    the averaged weights, float32.
    """
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    moments = {"adamw": 2, "lamb": 2, "sgd": int(config.optim.momentum > 0)}[config.optim.name]
    averaged = (
        sum(value.numel() for value in model.state_dict().values()) if config.optim.averages else 0
    )
    return 4 * (moments * trained + averaged)


def largest(run: Callable[[int], None], size: int) -> int:
    """Return ``size``, or the first of its halves (rounded down) for which ``run`` has memory
    enough; 0 if there is none.
    """
    while size:
        try:
            run(size)
            return size
        except torch.OutOfMemoryError:
            size //= 2
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return 0


def too_large(size: int, fits: int, device: torch.device) -> str:
    """The message for a physical batch of ``size`` records on a device where ``fits`` records have
    memory enough.
    """
    what = f"hardware: physical_batch_size={size}; out of memory on {device}"
    if not fits:
        return (
            f"{what}, even with one record; expected a model that fits. Use a smaller model or "
            "image_size, or a larger GPU."
        )
    return (
        f"{what}, where {fits} fits. Pass --hardware.physical-batch-size {fits}: the guarantee "
        "and the result stay the same."
    )
