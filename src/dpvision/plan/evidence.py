"""What our own experiments measured, for ``dpvision plan``: benchmarks/results has the files, a test holds the rows to them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class HeadResult:
    """Median test accuracy in percent of `dpvision adapt` by its defaults (patches+scattering, ``many_steps``)."""

    data: str
    records: int
    epsilon: float
    accuracy: float
    source: str
    """benchmarks/results/2026-11-22-SOURCE.json"""


CLASSES = {"cifar10": 10, "eurosat": 10, "mednist": 6, "pets_sample": 37}
NAMES = {"cifar10": "CIFAR-10 (photographs of objects)", "eurosat": "EuroSAT (satellite images)", "mednist": "MedNIST (kinds of scans)"}
DELTAS = {("cifar10", 50_000): 1e-5}
"""Where it was not the default."""

# fmt: off
HEADS = (
    HeadResult("cifar10", 300, 0.1, 10.77, "head_regret-frequencies"),
    HeadResult("cifar10", 300, 0.5, 15.37, "head_regret-frequencies"),
    HeadResult("cifar10", 300, 1, 20.42, "head_regret-frequencies"),
    HeadResult("cifar10", 300, 3, 31.36, "head_regret-frequencies"),
    HeadResult("cifar10", 300, 8, 40.48, "head_regret-frequencies"),
    HeadResult("cifar10", 1_500, 0.1, 16.18, "head_regret-frequencies"),
    HeadResult("cifar10", 1_500, 0.5, 33.26, "head_regret-frequencies"),
    HeadResult("cifar10", 1_500, 1, 42.61, "head_regret-frequencies"),
    HeadResult("cifar10", 1_500, 3, 52.42, "head_regret-frequencies"),
    HeadResult("cifar10", 1_500, 8, 58.25, "head_regret-frequencies"),
    HeadResult("cifar10", 50_000, 0.1, 53.77, "small_data"),
    HeadResult("cifar10", 50_000, 0.5, 66.87, "small_data"),
    HeadResult("cifar10", 50_000, 1, 70.82, "small_data"),
    HeadResult("cifar10", 50_000, 3, 74.57, "small_data"),
    HeadResult("cifar10", 50_000, 8, 76.91, "small_data"),
    HeadResult("eurosat", 300, 0.1, 15.31, "head_regret-frequencies"),
    HeadResult("eurosat", 300, 0.5, 35.39, "head_regret-frequencies"),
    HeadResult("eurosat", 300, 1, 44.99, "head_regret-frequencies"),
    HeadResult("eurosat", 300, 3, 61.49, "head_regret-frequencies"),
    HeadResult("eurosat", 300, 8, 70.06, "head_regret-frequencies"),
    HeadResult("eurosat", 1_500, 0.1, 38.04, "head_regret-frequencies"),
    HeadResult("eurosat", 1_500, 0.5, 63.26, "head_regret-frequencies"),
    HeadResult("eurosat", 1_500, 1, 70.49, "head_regret-frequencies"),
    HeadResult("eurosat", 1_500, 3, 76.77, "head_regret-frequencies"),
    HeadResult("eurosat", 1_500, 8, 80.98, "head_regret-frequencies"),
    HeadResult("eurosat", 21_600, 0.5, 80.67, "small_data"),
    HeadResult("eurosat", 21_600, 1, 84.11, "small_data"),
    HeadResult("eurosat", 21_600, 3, 88.11, "small_data"),
    HeadResult("eurosat", 21_600, 8, 90.15, "small_data"),
    HeadResult("mednist", 300, 0.1, 47.27, "head_regret-frequencies"),
    HeadResult("mednist", 300, 0.5, 85.13, "head_regret-frequencies"),
    HeadResult("mednist", 300, 1, 95.63, "head_regret-frequencies"),
    HeadResult("mednist", 300, 3, 98.88, "head_regret-frequencies"),
    HeadResult("mednist", 300, 8, 99.46, "head_regret-frequencies"),
    HeadResult("mednist", 1_500, 0.1, 85.07, "head_regret-frequencies"),
    HeadResult("mednist", 1_500, 0.5, 98.67, "head_regret-frequencies"),
    HeadResult("mednist", 1_500, 1, 99.11, "head_regret-frequencies"),
    HeadResult("mednist", 1_500, 3, 99.59, "head_regret-frequencies"),
    HeadResult("mednist", 1_500, 8, 99.68, "head_regret-frequencies"),
    HeadResult("mednist", 9_000, 1, 99.61, "small_data"),
    HeadResult("mednist", 9_000, 8, 99.83, "small_data"),
    HeadResult("pets_sample", 222, 0.1, 2.97, "head_regret-frequencies"),
    HeadResult("pets_sample", 222, 0.5, 3.11, "head_regret-frequencies"),
    HeadResult("pets_sample", 222, 1, 3.51, "head_regret-frequencies"),
    HeadResult("pets_sample", 222, 3, 4.73, "head_regret-frequencies"),
    HeadResult("pets_sample", 222, 8, 3.38, "small_data"),
    HeadResult("pets_sample", 222, 8, 6.35, "head_regret-frequencies"),
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
        "MAE, 0.2 M parameters, scenes of 32 px", False, 1_000_000, 8, 0.0407, 59.05, 58.75, "attributes, quadrants", "2026-11-22-vip_sizes"
    ),
    Pretraining(
        "MAE, 0.9 M parameters, scenes of 32 px", False, 1_000_000, 8, 0.0943, 62.65, 61.02, "attributes, quadrants", "2026-11-22-vip_sizes"
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
