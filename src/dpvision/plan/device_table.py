"""Devices of the cost model. The processor's row is measured; GPUs are data-sheet values, times a
share that an H100 reached (docs/plan.md).
"""

from dataclasses import dataclass

from dpvision.errors import ConfigError

UTILISATION = 0.16
"""Share of a GPU's peak that training reaches: an H100 16% in a private pass of ``vip.base`` and
17% in one of ``dpcap.base`` (docs/log/2026-11-27-h100-private-pass.md), DP-Cap's 128 V100 16% with
Base and 19% with Large.
"""
_NOISE_S = 0.12 / 99e6
"""As an H100 took (docs/log/2026-11-27-first-gpu.md)."""
GPUS_OF_A_NODE = 8


@dataclass(frozen=True)
class Device:
    """What one device does, in SI units."""

    name: str
    flops: float
    """Floating-point operations a second that training reaches."""
    memory_bytes: float | None
    bandwidth: float
    """Of its memory, bytes a second."""
    link: float
    """To other devices of its node, bytes a second."""
    network: float
    """To other nodes, bytes a second and device: an assumption, one 200 Gb/s adapter each (V100: a
    quarter of 100 Gb/s).
    """
    record_s: float = 0.0
    """Seconds a record for all that is not the network: reading, decoding, augmenting. 0: done by
    processors meanwhile.
    """
    noise_s: float = 0.0
    """Seconds a parameter to draw and add the noise."""
    half: bool = True
    measured: bool = False


def _gpu(
    name: str,
    tflops: float,
    memory_gb: float,
    bandwidth_gb: float,
    link_gb: float,
    network_gb: float = 25,
) -> Device:
    return Device(
        name,
        tflops * 1e12 * UTILISATION,
        memory_gb * 1e9,
        bandwidth_gb * 1e9,
        link_gb * 1e9,
        network_gb * 1e9,
        noise_s=_NOISE_S,
    )


DEVICES = {
    device.name: device
    for device in (
        Device(
            "cpu",
            7.3e10,
            None,
            1e10,
            1e9,
            1e9,
            record_s=0.9e-3,
            noise_s=0.91 / 99e6,
            half=False,
            measured=True,
        ),
        _gpu("v100", 125, 32, 900, 150, 3),
        _gpu("t4", 65, 16, 320, 16),
        _gpu("a10", 125, 24, 600, 32),
        _gpu("a100", 312, 80, 2039, 300),
        _gpu("l4", 121, 24, 300, 32),
        _gpu("l40s", 362, 48, 864, 32),
        _gpu("h100", 989, 80, 3350, 450),
        _gpu("h200", 989, 141, 4800, 450),
        _gpu("rtx4090", 165, 24, 1008, 32),
    )
}
"""Half-precision matrix products (dense), memory, its bandwidth and one direction of NVLink or
PCIe, as the makers state them. "cpu" is one core of the EPYC (Zen 3) of benchmarks/results, in
float32.
"""


def find_device(name: str | None) -> Device:
    """Return the device of a name, in any spelling; None means A100.

    Raises:
        ConfigError: there is no such row.
    """
    plain = (
        (name or "a100")
        .lower()
        .replace(" ", "")
        .replace("nvidia", "")
        .replace("-", "")
        .removesuffix("sxm")
    )
    if plain not in DEVICES:
        raise ConfigError(
            f"plan: device={name!r}; expected one of {', '.join(DEVICES)}. Name the nearest one."
        )
    return DEVICES[plain]
