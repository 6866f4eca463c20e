"""Non-private training on public images for detection and segmentation, with the paper's batch size
on any device.

    fit(model, images, loss, groups, settings, hardware, work=Path("work/vip"), group=join("auto"),
    progress=print)

``settings`` determine the result. ``hardware`` and the number of processes under torchrun change it
only by rounding, except for BatchNorm and dropout, which depend on the images of one forward pass
(``synchronised`` extends BatchNorm to all ranks).

A batch's images depend on (seed, position in the stream) and their augmentation on (seed, epoch,
image), never on worker, rank or physical batch. Epochs follow each other without a gap, so that
every batch is full.
"""

import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dpvision.data.keys import StepKey
from dpvision.data.ordered import ordered_map
from dpvision.errors import ConfigError
from dpvision.eval.dense.settings import DenseHardware, DenseTrainSettings
from dpvision.eval.dense.training_state import DenseCheckpoint, open_checkpoint
from dpvision.privacy.printed import duration
from dpvision.train.distributed import Group, answered

REPEAT = "repeat the command"
"""What to do where another rank has ended."""
Say = Callable[[str], None]
Example = TypeVar("Example", covariant=True)
T = TypeVar("T")
Loss = Callable[[nn.Module, list[T]], Tensor]
"""From the model and the examples of one forward pass, on the CPU, to their mean loss, a scalar.
Moves the examples to the device.
"""


class Images(Protocol[Example]):
    """Training images by number."""

    def __len__(self) -> int: ...

    def load(self, number: int, epoch: int) -> Example:
        """Return an image and its truth, augmented by (seed, epoch, number) alone. Thread-safe: it
        must not use global generators.
        """
        ...


def rate_factor(settings: DenseTrainSettings, step: int, steps: int) -> float:
    """Return the factor of the learning rates in ``step`` of [0, steps).

    >>> settings = DenseTrainSettings(warmup_steps=2, warmup_start=0.0)
    >>> [round(rate_factor(settings, t, 4), 3) for t in range(4)]
    [0.0, 0.375, 0.5, 0.25]
    """
    level = 1.0
    if settings.schedule == "polynomial":
        level = (1 - step / steps) ** settings.power
    elif settings.schedule == "steps":
        level = settings.step_factor ** sum(step >= at * steps for at in settings.step_at)
    if step < settings.warmup_steps:
        level *= settings.warmup_start + (1 - settings.warmup_start) * step / settings.warmup_steps
    return level


def fit(
    model: nn.Module,
    images: Images[T],
    loss: Loss[T],
    groups: Sequence[dict[str, Any]],
    settings: DenseTrainSettings,
    hardware: DenseHardware | None = None,
    *,
    work: Path | None = None,
    group: Group | None = None,
    about: str = "",
    lineage: Sequence[dict[str, Any]] = (),
    progress: Say | None = None,
) -> None:
    """Train ``model`` in place with AdamW, and leave it in evaluation mode.

    With a ``work`` folder the state is saved there atomically at intervals. A call with the same
    model, number of images, settings and ``about`` resumes from it, bit for bit on one machine. All
    ranks must have access to the folder.

    Args:
        model: on ``group.device``, with the same weights on every rank.
        groups: AdamW's parameter groups, each with "lr" and "weight_decay"; every trainable
            parameter must be in exactly one.
        group: this process among torchrun's; if None, a single process on the model's device.
        about: a line that a checkpoint must match in addition (data, classes).
        lineage: lineage of the model and of the images (``runs.lineage``), stored with the state in
            ``work``.
        progress: called with a line after every step, on rank 0.

    Raises:
        ConfigError: the batch is not divisible by the ranks, the warm-up is longer than the run, or
            the loss is not finite.
        CheckpointError: ``work`` has another training's checkpoint, or cannot be written.
    """
    hardware = hardware or DenseHardware()
    group = group or Group(0, 1, next(model.parameters()).device)
    steps = checked_steps(settings, len(images), group.world_size)
    say = progress if progress is not None and group.is_main else (lambda text: None)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    listed = [p for g in groups for p in g["params"] if p.requires_grad]
    assert {id(p) for p in listed} == {id(p) for p in named.values()} and len(listed) == len(
        named
    ), "each parameter in exactly one group"
    kept = [dict(g) | {"params": [p for p in g["params"] if p.requires_grad]} for g in groups]
    optimizer = torch.optim.AdamW([g for g in kept if g["params"]], betas=settings.betas)
    rates = [g["lr"] for g in optimizer.param_groups]
    scaler = torch.amp.GradScaler(group.device.type, enabled=hardware.precision == "float16")
    checkpoint: DenseCheckpoint | None = None
    step = 0
    if work is not None:
        agreed = f"{settings}, {len(images)} images, {about}"
        checkpoint = open_checkpoint(work, model, optimizer, scaler, agreed, list(lineage))
        step = checkpoint.restore()
    counts = _micro_sizes(settings.batch_size // group.world_size, hardware.physical_batch_size)
    stream = _stream(images, settings, group, step, steps, hardware, sum(counts))
    model.train()
    began, saved, first = time.monotonic(), time.monotonic(), step
    on_gpu = [group.device] if group.device.type == "cuda" else []
    with torch.random.fork_rng(
        devices=on_gpu
    ):  # dropout and stochastic depth draw from torch's global generator
        while step < steps:
            for rate, one in zip(rates, optimizer.param_groups, strict=True):
                one["lr"] = rate * rate_factor(settings, step, steps)
            optimizer.zero_grad(set_to_none=True)
            total = 0.0
            for m, count in enumerate(counts):
                torch.manual_seed(StepKey(settings.seed, step).base(f"dense {group.rank} {m}") >> 1)
                examples = list(islice(stream, count))
                with hardware.autocast(group.device):
                    value = loss(model, examples).float() * (count / settings.batch_size)
                scaler.scale(value).backward()
                total += value.item()
            total = _sum_over_ranks(list(named.values()), model, total, group)
            if not math.isfinite(total) and not scaler.is_enabled():
                raise ConfigError(
                    f"training: loss={total} at step {step + 1}; expected a finite number. Lower "
                    "the learning rate, or use float32."
                )
            if settings.max_grad_norm > 0:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(list(named.values()), settings.max_grad_norm)
            scaler.step(optimizer)
            scaler.update()
            step += 1
            left = (time.monotonic() - began) / (step - first) * (steps - step)
            say(f"step {step:,} of {steps:,}, loss {total:.3f}, {duration(left)} left")
            due = time.monotonic() - saved >= hardware.checkpoint_every_s
            if checkpoint is not None and group.is_main and (due or step == steps):
                checkpoint.save(step)
                saved = time.monotonic()
    stream.close()
    model.eval()
    if group.world_size > 1:
        answered(dist.barrier, REPEAT)


def checked_steps(settings: DenseTrainSettings, num_images: int, world_size: int = 1) -> int:
    """Check the settings and return the number of steps.

    Raises:
        ConfigError: no images, the warm-up is as long as the run, or the batch is not divisible by
            the ranks.
    """
    if num_images < 1:
        raise ConfigError("training: no images; expected at least one. Use a folder that has some.")
    steps = settings.steps(num_images)
    if not settings.warmup_steps < steps:
        got = (
            f"warmup_steps={settings.warmup_steps} of {steps:,} steps ({settings.epochs:g} "
            f"epochs of {num_images:,} images)"
        )
        raise ConfigError(
            f"training: {got}; expected fewer than the steps. Lower warmup-steps to "
            f"{max(0, steps // 20)}, or train longer."
        )
    if settings.batch_size % world_size:
        got = f"batch_size={settings.batch_size} on {world_size} processes"
        raise ConfigError(
            f"training: {got}; expected a multiple of the processes. Change the number of "
            "processes, or the batch."
        )
    return steps


def seconds_a_step(
    model: nn.Module,
    images: Images[T],
    loss: Loss[T],
    settings: DenseTrainSettings,
    hardware: DenseHardware | None = None,
) -> float:
    """Measure the seconds of one step on this process from one forward and backward pass, after a
    warm-up pass unless that takes over ten seconds. For dry runs: it changes the model's batch
    statistics.
    """
    hardware, device = hardware or DenseHardware(), next(model.parameters()).device
    counts = _micro_sizes(settings.batch_size, hardware.physical_batch_size)
    model.train()
    seconds = 0.0
    for turn in range(2):
        if turn and seconds > 10:
            break
        began = time.monotonic()
        examples = [images.load(i % len(images), 0) for i in range(counts[0])]
        with hardware.autocast(device):
            value = loss(model, examples).float()
        value.backward()
        value.item()
        seconds = time.monotonic() - began
    model.zero_grad(set_to_none=True)
    return seconds * len(counts)


def synchronised(model: nn.Module, group: Group) -> nn.Module:
    """Convert the model to BatchNorm over all ranks' images on GPUs under torchrun; otherwise
    return it unchanged.
    """
    if group.world_size > 1 and group.device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model


def _stream(
    images: Images[T],
    settings: DenseTrainSettings,
    group: Group,
    step: int,
    steps: int,
    hardware: DenseHardware,
    share: int,
) -> Generator[T, None, None]:
    """Yield this rank's examples from ``step`` on, in training order."""
    num = len(images)

    def places() -> Iterator[tuple[int, int]]:
        epoch, order = -1, np.empty(0, dtype=np.int64)
        for t in range(step, steps):
            first = t * settings.batch_size + group.rank * share
            for place in range(first, first + share):
                if place // num != epoch:
                    epoch = place // num
                    order = np.random.Generator(
                        np.random.PCG64([settings.seed, epoch])
                    ).permutation(num)
                yield int(order[place % num]), epoch

    def load(place: tuple[int, int]) -> T:
        return images.load(*place)

    yield from ordered_map(
        load,
        places(),
        workers=hardware.workers,
        ahead=max(2 * hardware.workers, hardware.physical_batch_size),
    )


def _micro_sizes(share: int, physical: int) -> list[int]:
    """Return the sizes of the forward passes over ``share`` images, nearly equal and at most
    ``physical``.
    """
    return [len(part) for part in np.array_split(np.arange(share), math.ceil(share / physical))]


def _sum_over_ranks(
    parameters: list[nn.Parameter], model: nn.Module, total: float, group: Group
) -> float:
    """Sum gradients and loss over the ranks (each has its part of the batch's mean), and average
    running batch statistics.
    """
    if group.world_size == 1:
        return total
    for p in parameters:  # a parameter that this rank's images did not use, such as the mask head's
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
    flat = torch.cat(
        [p.grad.flatten() for p in parameters if p.grad is not None]
        + [torch.tensor([total], device=group.device)]
    )
    answered(partial(dist.all_reduce, flat), REPEAT)
    pieces = flat.split([p.numel() for p in parameters] + [1])
    for p, piece in zip(parameters, pieces[:-1], strict=True):
        p.grad = piece.view_as(p)
    for part in model.modules():
        if (
            isinstance(part, _BatchNorm)
            and part.running_mean is not None
            and part.running_var is not None
        ):
            for statistic in (part.running_mean, part.running_var):
                answered(partial(dist.all_reduce, statistic), REPEAT)
                statistic /= group.world_size
    return float(pieces[-1].item())
