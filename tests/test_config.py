"""Settings: ranges that NaN cannot pass, JSON there and back, unknown names refused."""

import dataclasses
import json
import math

import pytest

from dpvision.config import (
    DataConfig,
    HardwareConfig,
    MAEConfig,
    OptimConfig,
    PrivacyConfig,
    RunConfig,
    ViTConfig,
    from_dict,
    to_dict,
)
from dpvision.errors import ConfigError
from dpvision.recipes import RECIPES

GOOD = {"dataset_size": 1000, "expected_batch_size": 100.0, "steps": 10, "noise_multiplier": 1.0}


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_survives_json(name: str) -> None:
    config = RECIPES[name]()
    assert config.recipe == name
    assert from_dict(RunConfig, json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize(
    "changes",
    [
        {"dataset_size": 0},
        {"expected_batch_size": 0.0},
        {"expected_batch_size": 1001.0},
        {"steps": 0},
        {"max_grad_norm": 0.0},
        {"max_grad_norm": None},
        {"noise_multiplier": 0.0},
        {"noise_multiplier": -1.0},
        {"noise_multiplier": None},
        {"target_epsilon": 8.0},
        {"noise_multiplier": None, "target_epsilon": 0.0},
        {"delta": 0.0},
        {"delta": 1.0},
        {"max_records_per_unit": 0},
        {"sampling": "full_batch"},
        {"sampling": "truncated_poisson"},
        {"max_batch_size": 10},
        {"guarantee": "none"},
    ],
)
def test_privacy_settings_out_of_range_are_refused_with_a_remedy(changes: dict) -> None:
    with pytest.raises(ConfigError, match=r"^privacy: .*; expected .*\. .+\.$"):
        PrivacyConfig(**{**GOOD, **changes})


@pytest.mark.parametrize(
    ("cls", "base"),
    [
        (PrivacyConfig, GOOD),
        (ViTConfig, {}),
        (MAEConfig, {}),
        (DataConfig, {}),
        (OptimConfig, {}),
        (HardwareConfig, {}),
    ],
)
def test_nan_and_infinity_pass_no_float_setting(cls: type, base: dict) -> None:
    floats = [f.name for f in dataclasses.fields(cls) if f.type in (float, float | None)]
    for name in floats:
        for value in (math.nan, math.inf):
            rest = {**base, **({"noise_multiplier": None} if name == "target_epsilon" else {})}
            with pytest.raises(ConfigError):
                cls(**{**rest, name: value})


@pytest.mark.parametrize(
    ("cls", "values"),
    [
        (PrivacyConfig, {**GOOD, "sampling": "fixed"}),
        (PrivacyConfig, {**GOOD, "guarantee": "yes"}),
        (HardwareConfig, {"precision": "float8"}),
        (OptimConfig, {"name": "lion"}),
        (MAEConfig, {"kind": "gan"}),
    ],
)
def test_a_choice_that_does_not_exist_is_refused_in_python_too(cls: type, values: dict) -> None:
    with pytest.raises(ConfigError, match="expected one of"):
        cls(**values)


def test_unknown_missing_and_mistyped_settings_name_the_place() -> None:
    good = to_dict(RECIPES["vip.micro"]())
    with pytest.raises(ConfigError, match="sample_rate"):
        from_dict(RunConfig, {**good, "privacy": {**good["privacy"], "sample_rate": 0.1}})
    with pytest.raises(ConfigError, match=r"config\.privacy\.steps"):
        from_dict(RunConfig, {**good, "privacy": {**good["privacy"], "steps": "many"}})
    with pytest.raises(ConfigError, match="dataset_size"):
        from_dict(RunConfig, {**good, "privacy": {"steps": 3}})
    with pytest.raises(ConfigError, match=r"config\.model\.kind"):
        from_dict(RunConfig, {**good, "model": {**good["model"], "kind": "gan"}})


def test_a_run_has_no_resolutions_of_its_own() -> None:
    run = RECIPES["vip.micro"]()
    with pytest.raises(ConfigError, match=r"data\.own_sizes=\(32, 64\); expected none"):
        dataclasses.replace(run, data=dataclasses.replace(run.data, own_sizes=(32, 64)))


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="patch_size"):
        ViTConfig(image_size=224, patch_size=15)
    with pytest.raises(ConfigError, match="num_heads"):
        ViTConfig(width=100, num_heads=12)
