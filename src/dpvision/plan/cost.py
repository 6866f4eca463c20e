"""Hours of a recommendation: from measured parts where there are some, else by arithmetic, which
the answer states.
"""

import math
from dataclasses import dataclass

from dpvision.config import RunConfig
from dpvision.errors import ConfigError
from dpvision.plan.device_table import GPUS_OF_A_NODE, UTILISATION, find_device
from dpvision.plan.parameters import count_parameters
from dpvision.plan.work import CLIPPING, work_of

FEATURE_S = 0.0055
"""Seconds an image of 64 px for patches+scattering on two cores
(benchmarks/results/2026-11-22-patch_speed.json).
"""
HEAD_S = 59.0
"""CPU seconds of a head on 50,000 records and 10 classes (docs/heads.md)."""
ENCODER_S = 1 / 4.47
"""Seconds an image of 384 px through ViT-B/16 on two cores
(benchmarks/results/2026-11-21-transfer_speed-paper.json).
"""
ENCODER_FLOPS = 1.1e11
"""Of an image of 384 px through ViT-B/16: two for each of 86 million weights and 577 tokens, and
attention.
"""


def head_hours(
    images: int,
    classes: int,
    public_encoder: bool,
    gpus: int,
    device: str | None,
    measured: tuple[float, int] | None = None,
) -> tuple[float, str]:
    """Hours of a head with its features, and how they were found.

    Args:
        measured: of the public encoder on this machine, without GPUs: seconds an image, and its
            image size in pixels.
    """
    head = HEAD_S * images / 50_000 * max(classes, 10) / 10
    if not public_encoder:
        return (images * FEATURE_S + head) / 3600, "two cores, from measured parts; images of 64 px"
    if gpus == 0 and measured is not None:
        image_s, size = measured
        return (
            images * image_s + head
        ) / 3600, f"features measured on this machine at {size} px, without decoding"
    if gpus == 0:
        return (
            images * ENCODER_S + head
        ) / 3600, "two cores, from measured parts; ViT-B/16 at 384 px"
    return (images * ENCODER_FLOPS / _speed(gpus, device) + head) / 3600, _arithmetic(
        device
    ) + "; ViT-B/16 at 384 px"


def pretraining_hours(config: RunConfig, gpus: int, device: str | None) -> tuple[float, str]:
    """Hours of a private pre-training, and how they were found."""
    cost = step_cost(config, gpus or 1, device if gpus else "cpu")
    if gpus == 0:
        return cost.hours, "one core, by the processor's measured speed"
    return cost.hours, _arithmetic(device)


@dataclass(frozen=True)
class Cost:
    """What a run takes on some devices; times in seconds a step."""

    device: str
    gpus: int
    compute_s: float
    load_s: float
    all_reduce_s: float
    noise_s: float
    optimizer_s: float
    step_s: float
    hours: float
    records_per_s: float
    """Images that each device has to be handed a second."""
    memory_gb: float
    """Peak of each rank: weights, totals, optimizer, and the activations of a physical batch."""
    physical_batch_size: int
    measured: bool
    how: str


def step_cost(config: RunConfig, gpus: int, device: str | None) -> Cost:
    """Predict time and memory of a recipe's steps.

    A step takes its records' forward and backward passes with clipping (``work.work_of``), then
    adds float64 totals over the ranks, draws the noise on every rank and updates the weights;
    nothing overlaps.

    Args:
        gpus: number of devices, 1 or more.
        device: name of a row of ``devices.DEVICES``; None: A100.

    Raises:
        ConfigError: the device is unknown, or the network has no formula.
    """
    row, work, parameters = (
        find_device(device),
        work_of(config.model),
        count_parameters(config.model),
    )
    if work is None:
        raise ConfigError(
            f"plan: --gpus with {config.recipe}, whose network has no cost formula; expected a "
            "transformer trained whole (vip.*, dpcap.*). Drop --gpus and --device, or measure "
            "it: `dpvision doctor RECIPE --measure`."
        )
    if not gpus >= 1:
        raise ConfigError(
            f"plan: gpus={gpus}; expected 1 or more with a recipe. For a processor core pass "
            "--gpus 1 --device cpu."
        )
    private = config.privacy.max_grad_norm is not None
    views = config.privacy.expected_batch_size * config.views / gpus
    compute = views * 3 * work.forward_flops * (CLIPPING if private else 1.0) / row.flops
    load = views * row.record_s
    slowest = row.link if gpus <= GPUS_OF_A_NODE else row.network
    total_bytes = 8.0 * parameters
    all_reduce = 0.0 if gpus == 1 else 2 * (gpus - 1) / gpus * total_bytes / slowest
    noise = 0.0 if config.privacy.guarantee == "none" else parameters * row.noise_s
    update = 10 * 4 * parameters / row.bandwidth
    step = compute + load + all_reduce + noise + update
    physical = (
        min(config.hardware.physical_batch_size, math.ceil(views / config.views)) * config.views
    )
    activations = physical * work.activation_bytes / (2 if row.half else 1)
    weights = 4.0 * parameters
    kept = (3 if config.optim.ema_decay is None else 4) * weights + total_bytes
    return Cost(
        device=row.name,
        gpus=gpus,
        compute_s=compute,
        load_s=load,
        all_reduce_s=all_reduce,
        noise_s=noise,
        optimizer_s=update,
        step_s=step,
        hours=step * config.privacy.num_steps / 3600,
        records_per_s=views / config.data.views / step,
        memory_gb=(kept + max(weights, activations)) / 1e9,
        physical_batch_size=physical,
        measured=row.measured,
        how="by the processor's measured speed" if row.measured else _arithmetic(device),
    )


def _speed(gpus: int, device: str | None) -> float:
    return gpus * find_device(device).flops


def _arithmetic(device: str | None) -> str:
    return (
        f"arithmetic, not measured: {device or 'A100'} at {UTILISATION:.0%} of its peak in half "
        "precision"
    )
