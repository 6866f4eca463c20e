"""What our own experiments measured, for ``dpvision plan``: benchmarks/results has the files, a
test holds the rows to them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadResult:
    """Median test accuracy in percent of `dpvision adapt` by its defaults (patches+scattering,
    ``many_steps``).
    """

    data: str
    records: int
    epsilon: float
    accuracy: float
    source: str
    """benchmarks/results/SOURCE.json"""


@dataclass(frozen=True)
class EncoderResult(HeadResult):
    """The same on the last map of a public encoder, pooled by its mean."""

    image_size: int
    """Side of the encoder's images, in pixels."""


MEASURED_ENCODER = "EfficientNet-Lite0"
"""The public encoder of ENCODER_HEADS: 5 million parameters, trained on ImageNet."""
RESOLUTION_GAIN = (
    f"{MEASURED_ENCODER} gained 16 points on 222 pets at epsilon 8, and none on 1,500 satellite "
    "images"
)
PUBLIC_GAIN = (
    f"at 224 px {MEASURED_ENCODER} gained 6.6 points on 222 pets at epsilon 8, and 0.7 on 1,500 "
    "satellite images"
)
ZOOMS_GAIN = "0.5 to 1.0 points on 50,000 photographs of CIFAR-10"
CLASSES = {"cifar10": 10, "eurosat": 10, "mednist": 6, "pets_sample": 37}
NAMES = {
    "cifar10": "CIFAR-10 (photographs of objects)",
    "eurosat": "EuroSAT (satellite images)",
    "mednist": "MedNIST (kinds of scans)",
}
DELTAS = {("cifar10", 50_000): 1e-5}
"""Where it was not the default."""

# fmt: off
HEADS = (
    HeadResult("cifar10", 300, 0.1, 10.77, "2026-11-22-head_regret-frequencies"),
    HeadResult("cifar10", 300, 0.5, 15.37, "2026-11-22-head_regret-frequencies"),
    HeadResult("cifar10", 300, 1, 20.42, "2026-11-22-head_regret-frequencies"),
    HeadResult("cifar10", 300, 3, 31.36, "2026-11-22-head_regret-frequencies"),
    HeadResult("cifar10", 300, 8, 40.48, "2026-11-22-head_regret-frequencies"),
    HeadResult("cifar10", 1_500, 0.1, 16.18, "2026-11-22-head_regret-frequencies"),
    HeadResult("cifar10", 1_500, 0.5, 33.26, "2026-11-22-head_regret-frequencies"),
    HeadResult("cifar10", 1_500, 1, 42.61, "2026-11-22-head_regret-frequencies"),
    HeadResult("cifar10", 1_500, 3, 52.42, "2026-11-22-head_regret-frequencies"),
    HeadResult("cifar10", 1_500, 8, 58.25, "2026-11-22-head_regret-frequencies"),
    HeadResult("cifar10", 50_000, 0.1, 55.13, "2026-11-23-small_data-cifar10"),
    HeadResult("cifar10", 50_000, 0.5, 66.55, "2026-11-23-small_data-cifar10"),
    HeadResult("cifar10", 50_000, 1, 70.47, "2026-11-27-small_data-five_seeds"),
    HeadResult("cifar10", 50_000, 3, 74.84, "2026-11-23-small_data-cifar10"),
    HeadResult("cifar10", 50_000, 8, 76.9, "2026-11-27-small_data-five_seeds"),
    HeadResult("eurosat", 300, 0.1, 15.31, "2026-11-22-head_regret-frequencies"),
    HeadResult("eurosat", 300, 0.5, 35.39, "2026-11-22-head_regret-frequencies"),
    HeadResult("eurosat", 300, 1, 44.99, "2026-11-22-head_regret-frequencies"),
    HeadResult("eurosat", 300, 3, 61.49, "2026-11-22-head_regret-frequencies"),
    HeadResult("eurosat", 300, 8, 70.06, "2026-11-22-head_regret-frequencies"),
    HeadResult("eurosat", 1_500, 0.1, 38.04, "2026-11-22-head_regret-frequencies"),
    HeadResult("eurosat", 1_500, 0.5, 63.26, "2026-11-22-head_regret-frequencies"),
    HeadResult("eurosat", 1_500, 1, 70.49, "2026-11-22-head_regret-frequencies"),
    HeadResult("eurosat", 1_500, 3, 76.77, "2026-11-22-head_regret-frequencies"),
    HeadResult("eurosat", 1_500, 8, 80.98, "2026-11-22-head_regret-frequencies"),
    HeadResult("eurosat", 21_600, 0.5, 82.59, "2026-11-23-small_data-defaults"),
    HeadResult("eurosat", 21_600, 1, 85.35, "2026-11-27-small_data-five_seeds"),
    HeadResult("eurosat", 21_600, 3, 88.13, "2026-11-23-small_data-defaults"),
    HeadResult("eurosat", 21_600, 8, 90.09, "2026-11-27-small_data-five_seeds"),
    HeadResult("mednist", 300, 0.1, 47.27, "2026-11-22-head_regret-frequencies"),
    HeadResult("mednist", 300, 0.5, 85.13, "2026-11-22-head_regret-frequencies"),
    HeadResult("mednist", 300, 1, 95.63, "2026-11-22-head_regret-frequencies"),
    HeadResult("mednist", 300, 3, 98.88, "2026-11-22-head_regret-frequencies"),
    HeadResult("mednist", 300, 8, 99.46, "2026-11-22-head_regret-frequencies"),
    HeadResult("mednist", 1_500, 0.1, 85.07, "2026-11-22-head_regret-frequencies"),
    HeadResult("mednist", 1_500, 0.5, 98.67, "2026-11-22-head_regret-frequencies"),
    HeadResult("mednist", 1_500, 1, 99.11, "2026-11-22-head_regret-frequencies"),
    HeadResult("mednist", 1_500, 3, 99.59, "2026-11-22-head_regret-frequencies"),
    HeadResult("mednist", 1_500, 8, 99.68, "2026-11-22-head_regret-frequencies"),
    HeadResult("mednist", 9_000, 1, 99.72, "2026-11-27-small_data-five_seeds"),
    HeadResult("mednist", 9_000, 8, 99.83, "2026-11-27-small_data-five_seeds"),
    HeadResult("pets_sample", 222, 0.1, 2.97, "2026-11-22-head_regret-frequencies"),
    HeadResult("pets_sample", 222, 0.5, 3.11, "2026-11-22-head_regret-frequencies"),
    HeadResult("pets_sample", 222, 1, 3.51, "2026-11-22-head_regret-frequencies"),
    HeadResult("pets_sample", 222, 3, 4.73, "2026-11-22-head_regret-frequencies"),
    HeadResult("pets_sample", 222, 8, 6.08, "2026-11-27-small_data-five_seeds"),
    HeadResult("pets_sample", 222, 8, 6.35, "2026-11-22-head_regret-frequencies"),
)
# fmt: on


# fmt: off
ENCODER_HEADS: tuple[EncoderResult, ...] = (
    EncoderResult("cifar10", 300, 1, 26.25, "2026-11-27-head_regret-lite0-96-cifar10", 96),
    EncoderResult("cifar10", 300, 3, 43.75, "2026-11-27-head_regret-lite0-96-cifar10", 96),
    EncoderResult("cifar10", 300, 8, 55.05, "2026-11-27-head_regret-lite0-96-cifar10", 96),
    EncoderResult("cifar10", 1_500, 1, 56.27, "2026-11-27-head_regret-lite0-96-cifar10", 96),
    EncoderResult("cifar10", 1_500, 3, 64.04, "2026-11-27-head_regret-lite0-96-cifar10", 96),
    EncoderResult("cifar10", 1_500, 8, 67.00, "2026-11-27-head_regret-lite0-96-cifar10", 96),
    EncoderResult("cifar10", 5_000, 1, 66.56, "2026-11-28-head_regret-lite0-96-cifar10", 96),
    EncoderResult("cifar10", 5_000, 3, 70.11, "2026-11-28-head_regret-lite0-96-cifar10", 96),
    EncoderResult("cifar10", 5_000, 8, 72.03, "2026-11-28-head_regret-lite0-96-cifar10", 96),
    EncoderResult("cifar10", 50_000, 1, 73.98, "2026-11-28-head_regret-lite0-96-cifar10", 96),
    EncoderResult("cifar10", 50_000, 3, 75.99, "2026-11-28-head_regret-lite0-96-cifar10", 96),
    EncoderResult("cifar10", 50_000, 8, 76.45, "2026-11-28-head_regret-lite0-96-cifar10", 96),
    EncoderResult("cifar10", 300, 1, 26.91, "2026-11-28-head_regret-lite0-224-cifar10", 224),
    EncoderResult("cifar10", 300, 3, 48.48, "2026-11-28-head_regret-lite0-224-cifar10", 224),
    EncoderResult("cifar10", 300, 8, 59.71, "2026-11-28-head_regret-lite0-224-cifar10", 224),
    EncoderResult("cifar10", 1_500, 1, 59.49, "2026-11-28-head_regret-lite0-224-cifar10", 224),
    EncoderResult("cifar10", 1_500, 3, 67.92, "2026-11-28-head_regret-lite0-224-cifar10", 224),
    EncoderResult("cifar10", 1_500, 8, 71.26, "2026-11-28-head_regret-lite0-224-cifar10", 224),
    EncoderResult("cifar10", 20_000, 1, 74.78, "2026-11-28-head_regret-lite0-224-cifar10", 224),
    EncoderResult("cifar10", 20_000, 3, 77.46, "2026-11-28-head_regret-lite0-224-cifar10", 224),
    EncoderResult("cifar10", 20_000, 8, 78.72, "2026-11-28-head_regret-lite0-224-cifar10", 224),
    EncoderResult("cifar10", 50_000, 1, 76.75, "2026-11-28-head_regret-lite0-224-cifar10_all", 224),
    EncoderResult("cifar10", 50_000, 3, 78.64, "2026-11-28-head_regret-lite0-224-cifar10_all", 224),
    EncoderResult("cifar10", 50_000, 8, 79.05, "2026-11-28-head_regret-lite0-224-cifar10_all", 224),
    EncoderResult("eurosat", 300, 1, 40.44, "2026-11-26-head_regret-lite0-96", 96),
    EncoderResult("eurosat", 300, 3, 68.07, "2026-11-26-head_regret-lite0-96", 96),
    EncoderResult("eurosat", 300, 8, 78.80, "2026-11-26-head_regret-lite0-96", 96),
    EncoderResult("eurosat", 1_500, 1, 78.81, "2026-11-26-head_regret-lite0-96", 96),
    EncoderResult("eurosat", 1_500, 3, 84.50, "2026-11-26-head_regret-lite0-96", 96),
    EncoderResult("eurosat", 1_500, 8, 87.01, "2026-11-26-head_regret-lite0-96", 96),
    EncoderResult("eurosat", 21_600, 1, 89.55, "2026-11-26-head_regret-lite0-96", 96),
    EncoderResult("eurosat", 21_600, 3, 91.15, "2026-11-26-head_regret-lite0-96", 96),
    EncoderResult("eurosat", 21_600, 8, 92.14, "2026-11-26-head_regret-lite0-96", 96),
    EncoderResult("eurosat", 300, 1, 49.30, "2026-11-27-head_regret-lite0-224", 224),
    EncoderResult("eurosat", 300, 3, 68.87, "2026-11-27-head_regret-lite0-224", 224),
    EncoderResult("eurosat", 300, 8, 78.57, "2026-11-27-head_regret-lite0-224", 224),
    EncoderResult("eurosat", 1_500, 1, 78.31, "2026-11-27-head_regret-lite0-224", 224),
    EncoderResult("eurosat", 1_500, 3, 84.02, "2026-11-27-head_regret-lite0-224", 224),
    EncoderResult("eurosat", 1_500, 8, 86.84, "2026-11-27-head_regret-lite0-224", 224),
    EncoderResult("eurosat", 5_000, 1, 85.19, "2026-11-27-head_regret-lite0-224", 224),
    EncoderResult("eurosat", 5_000, 3, 88.43, "2026-11-27-head_regret-lite0-224", 224),
    EncoderResult("eurosat", 5_000, 8, 90.32, "2026-11-27-head_regret-lite0-224", 224),
    EncoderResult("eurosat", 21_600, 1, 89.60, "2026-11-28-head_regret-lite0-224-eurosat", 224),
    EncoderResult("eurosat", 21_600, 3, 91.57, "2026-11-28-head_regret-lite0-224-eurosat", 224),
    EncoderResult("eurosat", 21_600, 8, 92.57, "2026-11-28-head_regret-lite0-224-eurosat", 224),
    EncoderResult("mednist", 300, 1, 90.06, "2026-11-26-head_regret-lite0-96", 96),
    EncoderResult("mednist", 300, 3, 96.12, "2026-11-26-head_regret-lite0-96", 96),
    EncoderResult("mednist", 300, 8, 97.91, "2026-11-26-head_regret-lite0-96", 96),
    EncoderResult("mednist", 1_500, 1, 97.68, "2026-11-26-head_regret-lite0-96", 96),
    EncoderResult("mednist", 1_500, 3, 99.07, "2026-11-26-head_regret-lite0-96", 96),
    EncoderResult("mednist", 1_500, 8, 99.44, "2026-11-26-head_regret-lite0-96", 96),
    EncoderResult("mednist", 9_000, 1, 99.53, "2026-11-26-head_regret-lite0-96", 96),
    EncoderResult("mednist", 9_000, 3, 99.86, "2026-11-26-head_regret-lite0-96", 96),
    EncoderResult("mednist", 9_000, 8, 99.91, "2026-11-26-head_regret-lite0-96", 96),
    EncoderResult("mednist", 300, 1, 91.03, "2026-11-28-head_regret-lite0-224-mednist", 224),
    EncoderResult("mednist", 300, 3, 98.19, "2026-11-28-head_regret-lite0-224-mednist", 224),
    EncoderResult("mednist", 300, 8, 98.86, "2026-11-28-head_regret-lite0-224-mednist", 224),
    EncoderResult("mednist", 1_500, 1, 98.89, "2026-11-28-head_regret-lite0-224-mednist", 224),
    EncoderResult("mednist", 1_500, 3, 99.34, "2026-11-28-head_regret-lite0-224-mednist", 224),
    EncoderResult("mednist", 1_500, 8, 99.56, "2026-11-28-head_regret-lite0-224-mednist", 224),
    EncoderResult("mednist", 9_000, 1, 99.52, "2026-11-28-head_regret-lite0-224-mednist", 224),
    EncoderResult("mednist", 9_000, 3, 99.72, "2026-11-28-head_regret-lite0-224-mednist", 224),
    EncoderResult("mednist", 9_000, 8, 99.82, "2026-11-28-head_regret-lite0-224-mednist", 224),
)
# fmt: on


@dataclass(frozen=True)
class Pretraining:
    """What private training added to its warm start, in points of a probe on the features."""

    what: str
    captions: bool
    records: int
    epsilon: float
    rho_star: float
    """At the executed settings (``planner.signal``)."""
    start: float
    trained: float
    probe: str
    source: str


PRETRAINING = (
    Pretraining(
        "MAE, 0.9 M parameters, photographs of 32 px",
        False,
        50_000,
        2,
        0.133,
        55.38,
        55.04,
        "CIFAR-10, ridge, quadrants",
        "2026-11-22-vip_table",
    ),
    Pretraining(
        "MAE, 0.9 M parameters, photographs of 32 px",
        False,
        50_000,
        8,
        0.073,
        55.38,
        55.09,
        "CIFAR-10, ridge, quadrants",
        "2026-11-22-vip_table",
    ),
    Pretraining(
        "MAE, 0.3 M parameters, scenes of 32 px",
        False,
        1_000_000,
        8,
        0.0138,
        54.06,
        55.82,
        "attributes, quadrants",
        "2026-11-22-dpcap_lab-million",
    ),
    Pretraining(
        "MAE, 0.2 M parameters, scenes of 32 px",
        False,
        1_000_000,
        8,
        0.0407,
        59.05,
        58.75,
        "attributes, quadrants",
        "2026-11-22-vip_sizes",
    ),
    Pretraining(
        "MAE, 0.9 M parameters, scenes of 32 px",
        False,
        1_000_000,
        8,
        0.0943,
        62.65,
        61.02,
        "attributes, quadrants",
        "2026-11-22-vip_sizes",
    ),
    Pretraining(
        "captioner, 1.5 M parameters, scenes of 32 px",
        True,
        300_000,
        8,
        0.0743,
        57.26,
        58.45,
        "attributes, quadrants",
        "2026-11-21-dpcap_lab",
    ),
    Pretraining(
        "captioner, 0.4 M parameters, scenes of 32 px",
        True,
        1_000_000,
        1,
        0.0284,
        54.06,
        58.23,
        "attributes, quadrants",
        "2026-11-22-dpcap_lab-million",
    ),
    Pretraining(
        "captioner, 0.4 M parameters, scenes of 32 px",
        True,
        1_000_000,
        8,
        0.0167,
        54.06,
        60.28,
        "attributes, quadrants",
        "2026-11-22-dpcap_lab-million",
    ),
)
