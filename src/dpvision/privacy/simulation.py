"""Simulate a private run at a fraction of its compute: TAN (Sander, Stock and Sablayrolles, arXiv
2210.03403).

Batch and noise divided by one factor leave the noise on the mean gradient, in clipping norms, as it
is. At equal steps and learning rate the small run then follows the loss curve of the full one, as
far as the choice of images adds less randomness than the noise. It guarantees nothing: its noise is
that much too small.
"""

import math
from dataclasses import replace

from dpvision.config import PrivacyConfig
from dpvision.errors import ConfigError
from dpvision.privacy.plan import draft_plan

NO_GUARANTEE = "NO PRIVACY GUARANTEE: a TAN simulation"


def simulated(cfg: PrivacyConfig, factor: float) -> PrivacyConfig:
    """Settings of the simulation of a private run.

    Args:
        cfg: the private run; a target is calibrated first.
        factor: more than 1; divides the expected batch size and the noise multiplier.

    Returns:
        guarantee "simulated", Poisson batches (also where the full run takes every image in every
        step), equal steps and clipping norm.

    Raises:
        ConfigError: the run has no guarantee to simulate, the factor is out of range, or less than
            one image a step would be left.
        PrivacyError: the target cannot be reached.
    """
    if cfg.guarantee != "dp":
        raise ConfigError(
            f"simulate: guarantee={cfg.guarantee}; expected a private run to simulate. Name its "
            "recipe, or drop --simulate."
        )
    if not 1 < factor < math.inf:
        raise ConfigError(
            f"simulate: factor={factor}; expected a number above 1, which divides batch and "
            "noise. E.g. --simulate 32."
        )
    batch = cfg.expected_batch_size / factor
    if not batch >= 1:
        raise ConfigError(
            f"simulate: factor={factor:g} leaves {batch:.3g} images a step; expected 1 or more. "
            f"Use at most {cfg.expected_batch_size:g}."
        )
    return replace(
        cfg,
        guarantee="simulated",
        sampling="poisson",
        max_batch_size=None,
        expected_batch_size=batch,
        target_epsilon=None,
        target_unit_epsilon=None,
        noise_multiplier=draft_plan(cfg).noise.multiplier / factor,
    )
