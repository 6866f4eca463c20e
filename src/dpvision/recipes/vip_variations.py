"""The ViP paper's variations of ViP-Base: each is ``vip.base`` with the settings of its row
replaced.

Where the paper keeps the number of sample-gradients (batch sizes), steps follow from it; where a
row states no steps, they are the main run's 6100.
"""

from collections.abc import Callable
from typing import Any

from dpvision.config import RunConfig
from dpvision.recipes import vip
from dpvision.recipes.variation import Variation

_GRADIENTS = 98304 * 6100
_IMAGENET_RECORDS = 1_281_167


def _row(doc: str, **changes: Any) -> Variation:
    return Variation(doc, vip.base, **changes)


def _random(size: str, of: Callable[[], RunConfig]) -> Variation:
    return Variation(
        f"ViP-{size} from random weights (Figures 5 and 7).", of, run={"init_from": None}
    )


def _batch(size: int, noise_multiplier: float, score: str) -> Variation:
    return _row(
        f"Batch {size:,}, the same number of sample-gradients (Table 10): noise "
        f"{noise_multiplier}; the paper's ImageNet probe is {score}.",
        privacy={
            "expected_batch_size": size,
            "noise_multiplier": noise_multiplier,
            "steps": round(_GRADIENTS / size),
        },
    )


def _decoder(depth: int, score: str) -> Variation:
    doc = f"{depth} decoder block{'s' if depth > 1 else ''} instead of 4 (Table 11): {score}%."
    return _row(
        doc,
        model={"decoder_depth": depth},
        run={"init_from": f"runs/synthetic.vip_base_decoder{depth}"},
    )


VARIATIONS: dict[str, Variation] = {
    "vip.base_eps4": _row(
        "Epsilon 4 (Table 8): 53.8%.", privacy={"noise_multiplier": 0.603, "steps": 3000}
    ),
    "vip.base_eps2": _row(
        "Epsilon 2 (Table 8): 51.4%.", privacy={"noise_multiplier": 0.787, "steps": 1500}
    ),
    "vip.base_non_private": _row(
        "Non-private (Tables 6 and 8): no noise, batch 4096, 60,000 steps, clipping kept; 60.5%.",
        privacy={
            "guarantee": "none",
            "noise_multiplier": None,
            "expected_batch_size": 4096,
            "steps": 60_000,
        },
    ),
    "vip.base_23m": _row(
        "A tenth of the records (Table 10): 53.7%.",
        privacy={"dataset_size": 23_380_476, "noise_multiplier": 0.66},
    ),
    "vip.base_2m": _row(
        "A hundredth of the records (Table 10): 52.6%.",
        privacy={"dataset_size": 2_338_047, "noise_multiplier": 2.5},
    ),
    "vip.base_imagenet": _row(
        "ViP-ImageNet (Table 1): 52.6%. The paper states no noise: calibrated to epsilon 8 (PLD).",
        privacy={
            "dataset_size": _IMAGENET_RECORDS,
            "noise_multiplier": None,
            "target_epsilon": 8.0,
        },
    ),
    "vip.base_dedup": _row(
        "De-duplicated LAION-2B (Table 6), 245 million records: 55.5%.",
        privacy={"dataset_size": 245_000_000},
    ),
    "vip.base_batch8k": _batch(8192, 0.41, "43.9%"),
    "vip.base_batch32k": _batch(32768, 0.45, "53.0%"),
    "vip.base_mask25": _row("A quarter masked (Table 11): 53.5%.", model={"mask_ratio": 0.25}),
    "vip.base_mask50": _row("Half masked (Table 11): 54.7%.", model={"mask_ratio": 0.5}),
    "vip.base_decoder1": _decoder(1, "43.4"),
    "vip.base_decoder2": _decoder(2, "51.7"),
    "vip.base_decoder8": _decoder(8, "50.1"),
    "vip.base_warm20": _row(
        "After 20 epochs of warm start (Figure 3b).",
        run={"init_from": "runs/synthetic.vip_base_20_epochs"},
    ),
    "vip.base_warm900": _row(
        "After 900 epochs of warm start (Figure 3b).",
        run={"init_from": "runs/synthetic.vip_base_900_epochs"},
    ),
    "vip.base_arxiv": _row(
        "The arXiv version's setting: batch 81,920, noise 0.5, 6000 steps (not stated there); "
        "rate 3.84e-4 as printed in its A.2.",
        privacy={"expected_batch_size": 81920, "noise_multiplier": 0.5, "steps": 6000},
    ),
    "vip.nano_random_start": _random("Nano", vip.nano),
    "vip.tiny_random_start": _random("Tiny", vip.tiny),
    "vip.small_random_start": _random("Small", vip.small),
    "vip.base_random_start": _random("Base", vip.base),
    "vip.large_random_start": _random("Large", vip.large),
}
