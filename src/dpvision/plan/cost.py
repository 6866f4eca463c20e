"""Hours of a recommendation: from measured parts where there are some, else by arithmetic, which the answer states."""

from dpvision.errors import ConfigError

FEATURE_S = 0.0055
"""Seconds an image of 64 px for patches+scattering on two cores (benchmarks/results/2026-11-22-patch_speed.json)."""
HEAD_S = 59.0
"""CPU seconds of a head on 50,000 records and 10 classes (docs/heads.md)."""
ENCODER_S = 1 / 4.47
"""Seconds an image of 384 px through ViT-B/16 on two cores (benchmarks/results/2026-11-21-transfer_speed-paper.json)."""
MICRO_S = 2899 / 1_300_000
"""Seconds a sample-gradient of dpcap.micro on one core (docs/log.md, 2026-11-22)."""
PEAK_TFLOPS = {"v100": 125, "a100": 312, "h100": 989, "h200": 989, "l4": 121, "l40s": 362, "a10": 125, "t4": 65, "rtx4090": 165}
"""Half-precision matrix products, dense, as the makers state them."""
UTILISATION = 0.3
TOKENS = 197
ENCODER_FLOPS = 1.1e11
"""Of an image of 384 px through ViT-B/16: two for each of 86 million weights and 577 tokens, and attention."""


def head_hours(images: int, classes: int, public_encoder: bool, gpus: int, device: str | None) -> tuple[float, str]:
    """Hours of a head with its features, and how they were found."""
    head = HEAD_S * images / 50_000 * max(classes, 10) / 10
    if not public_encoder:
        return (images * FEATURE_S + head) / 3600, "two cores, from measured parts; images of 64 px"
    if gpus == 0:
        return (images * ENCODER_S + head) / 3600, "two cores, from measured parts; ViT-B/16 at 384 px"
    return (images * ENCODER_FLOPS / _speed(gpus, device) + head) / 3600, _arithmetic(device) + "; ViT-B/16 at 384 px"


def pretraining_hours(recipe: str, gradients: int, parameters: int, gpus: int, device: str | None) -> tuple[float, str]:
    """Hours of a private pre-training, and how they were found."""
    if gpus == 0:
        return gradients * MICRO_S / 3600, "one core, from dpcap.micro's measured speed"
    return gradients * 6 * parameters * TOKENS / _speed(gpus, device) / 3600, _arithmetic(device)


def _speed(gpus: int, device: str | None) -> float:
    name = (device or "a100").lower().replace(" ", "").replace("nvidia", "").replace("-", "")
    if name not in PEAK_TFLOPS:
        raise ConfigError(f"plan: device={device!r}; expected one of {', '.join(PEAK_TFLOPS)}. Name the nearest one.")
    return gpus * PEAK_TFLOPS[name] * 1e12 * UTILISATION


def _arithmetic(device: str | None) -> str:
    return f"arithmetic, not measured: {device or 'A100'} at {UTILISATION:.0%} of its peak"
