"""The formulas count what the built networks have."""

from dataclasses import replace

import pytest

from dpvision import models
from dpvision.config import CaptionerConfig, CrossMAEConfig, HeadConfig, MAEConfig
from dpvision.plan.parameters import by_formula, count_parameters
from dpvision.recipes import RECIPES

MODELS = {name: recipe().model for name, recipe in RECIPES.items()}
NETWORKS = {model: name for name, model in MODELS.items() if not isinstance(model, HeadConfig)}


@pytest.mark.parametrize(
    "cfg", [cfg for cfg in NETWORKS if by_formula(cfg) is not None], ids=NETWORKS.get
)
def test_a_formula_counts_what_the_network_has(cfg: object) -> None:
    assert by_formula(cfg) == models.count_parameters(cfg)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "cfg",
    [
        replace(RECIPES["vip.micro"]().model, target="gradients"),
        replace(RECIPES["dpcap.micro"]().model, parallel_rate=0.5),
    ],
    ids=str,
)
def test_settings_that_no_recipe_has_are_counted_too(cfg: MAEConfig | CaptionerConfig) -> None:
    assert by_formula(cfg) == models.count_parameters(cfg)


def test_pre_training_recipes_need_no_network() -> None:
    for cfg, name in NETWORKS.items():
        assert by_formula(cfg) is not None or not isinstance(
            cfg, MAEConfig | CaptionerConfig | CrossMAEConfig
        ), name


def test_other_networks_are_built() -> None:
    cfg = RECIPES["supervised.micro"]().model
    assert by_formula(cfg) is None and count_parameters(cfg) == models.count_parameters(cfg)
