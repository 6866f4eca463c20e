"""Recipes as documents: their numbers are the paper's, and give the epsilon that the paper prints
(by RDP, which it used).
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dpvision import load
from dpvision.checkpoint import load_checkpoint, save_checkpoint
from dpvision.config import MAEConfig, RunConfig, from_dict
from dpvision.errors import CheckpointError
from dpvision.models import count_parameters, make_model
from dpvision.privacy.plan import make_plan
from dpvision.recipes import RECIPES, dpcap_micro, dpcap_variations, vip_variations
from dpvision.train.parent import start_from

# Paper's printed epsilon; how far ours is by RDP: rounding of a printed noise multiplier, and steps
# that a row does not state.
PRINTED = {
    "vip.base": (8, 0.01),
    "vip.base_eps4": (4, 0.01),
    "vip.base_eps2": (2, 0.01),
    "vip.base_23m": (8, 0.2),
    "vip.base_2m": (8, 0.05),
    "vip.base_batch8k": (8, 0.3),
    "vip.base_batch32k": (8, 0.2),
    "vip.base_dedup": (8, 0.1),
    "dpcap.base": (8, 0.06),
    "dpcap.base_eps2": (2, 0.02),
    "dpcap.base_eps1": (1, 0.03),
    "dpcap.base_batch98k": (8, 0.08),
    "dpcap.base_batch200k": (8, 0.08),
    "dpcap.base_batch400k": (8, 0.08),
    "dpcap.base_64_epochs": (8, 0.05),
    "dpcap.base_128_epochs": (8, 0.05),
}


@pytest.mark.parametrize("name", PRINTED)
def test_settings_give_the_printed_epsilon(name: str) -> None:
    epsilon, margin = PRINTED[name]
    plan = make_plan(RECIPES[name]().privacy)
    assert plan.epsilon_rdp == pytest.approx(epsilon, abs=margin)
    assert plan.epsilon is not None and plan.epsilon < plan.epsilon_rdp, (
        "the bound that is stated is the tighter one"
    )


def test_fewer_pairs_at_the_same_noise_cost_less_than_printed() -> None:
    """DP-Cap's Table 4 prints epsilon 8 for a tenth and a hundredth of the pairs at the same noise
    and sample rate; the larger delta = 1/N makes it less.
    """
    whole, tenth, hundredth = (
        make_plan(RECIPES[name]().privacy).epsilon_rdp
        for name in ("dpcap.base", "dpcap.base_23m", "dpcap.base_2m")
    )
    assert hundredth < tenth < 8 < whole < 8.06


def test_simulations_divide_batch_and_noise_alike_and_promise_nothing() -> None:
    for name in ("dpcap.base_tan", "dpcap.base_tan_64_epochs", "dpcap.base_tan_128_epochs"):
        small, large = RECIPES[name]().privacy, RECIPES[name.replace("_tan", "")]().privacy
        assert small.guarantee == "simulated" and small.steps == large.steps
        assert small.noise_multiplier / small.expected_batch_size == pytest.approx(
            large.noise_multiplier / large.expected_batch_size
        )


def test_batch_sizes_keep_the_number_of_sample_gradients() -> None:
    base = RECIPES["vip.base"]().privacy
    for name in ("vip.base_batch8k", "vip.base_batch32k"):
        privacy = RECIPES[name]().privacy
        ratio = (
            privacy.expected_batch_size * privacy.steps / (base.expected_batch_size * base.steps)
        )
        assert ratio == pytest.approx(1, abs=1e-4)


def test_a_variation_differs_from_its_base_in_what_it_names() -> None:
    for name, row in (
        vip_variations.VARIATIONS | dpcap_variations.VARIATIONS | dpcap_micro.VARIATIONS
    ).items():
        made, base = RECIPES[name](), row.of()
        parts = {"privacy": row.privacy, "model": row.model, "data": row.data, "optim": row.optim}
        kept = {part: getattr(base, part) for part in parts} | {
            key: getattr(base, key) for key in row.run
        }
        assert replace(made, recipe=base.recipe, **kept) == base and made.recipe == name
        assert replace(made, recipe=base.recipe) != base
        for part, changes in parts.items():
            assert replace(
                getattr(made, part), **{key: getattr(getattr(base, part), key) for key in changes}
            ) == getattr(base, part)


def test_every_private_start_has_a_recipe_that_makes_it() -> None:
    """runs/NAME is where `dpvision train NAME` puts a run; start and run have the same network."""
    started = {
        name: config for name, make in RECIPES.items() if (config := make()).init_from is not None
    }
    assert {"vip.base", "vip.micro", "vip.base_decoder8"} <= set(started)
    for name, config in started.items():
        parent = config.init_from.removeprefix("runs/")
        assert parent in RECIPES, f"{name} starts from {config.init_from}, which no recipe makes"
        start = RECIPES[parent]()
        assert start.recipe == parent
        if isinstance(config.model, MAEConfig) and isinstance(start.model, MAEConfig):
            assert replace(start.model, mask_ratio=config.model.mask_ratio) == config.model


def test_warm_starts_are_public_and_of_the_papers_length() -> None:
    warm = {name: make() for name, make in RECIPES.items() if name.startswith("synthetic.")}
    assert {
        f"synthetic.dpcap_{size}" for size in ("tiny", "small", "base", "large", "micro")
    } <= set(warm)
    assert all(
        c.data.images == "textures" and c.privacy.guarantee == "none" and c.init_from is None
        for c in warm.values()
    )
    base, short = warm["synthetic.vip_base"], warm["synthetic.vip_base_20_epochs"]
    assert base.privacy.steps * 4096 / 1_300_000 == pytest.approx(
        1000, abs=0.01
    ) and short.privacy.steps * 50 == pytest.approx(base.privacy.steps, rel=0.001)
    assert base.optim.learning_rate == pytest.approx(
        2.4e-3
    ) and base.optim.warmup_steps / base.privacy.steps == pytest.approx(0.04, abs=1e-4)


def test_names_are_the_keys() -> None:
    assert all(make().recipe == name for name, make in RECIPES.items())


def test_variations_keep_the_size_but_for_the_decoder() -> None:
    base = count_parameters(RECIPES["vip.base"]().model)
    for name in ("vip.base_mask25", "vip.base_2m", "vip.base_random_start"):
        assert count_parameters(RECIPES[name]().model) == base
    assert count_parameters(RECIPES["vip.base_decoder8"]().model) - base == 2 * (
        base - count_parameters(RECIPES["vip.base_decoder2"]().model)
    )


OLD_CONFIG = """{
 "recipe": "synthetic.vip_nano",
 "privacy": {"dataset_size": 1300000, "expected_batch_size": 4096, "steps": 317383,
  "max_grad_norm": null, "guarantee": "none"},
 "model": {"kind": "mae", "encoder": {"kind": "vit", "image_size": 32, "patch_size": 16, "depth": 1,
  "width": 192, "num_heads": 3, "mlp_ratio": 4.0, "qkv_bias": true, "train_cls": true},
  "decoder_depth": 1, "decoder_width": 64, "decoder_num_heads": 16,
  "mask_ratio": 0.75, "target": "pixels"},
 "data": {"store": null, "images": "textures", "crop_scale": [0.2, 1.0], "horizontal_flip": true},
 "optim": {"name": "adamw", "learning_rate": 0.0024, "betas": [0.9, 0.95], "weight_decay": 0.05,
  "decayed": "matrices"},
 "seed": 0, "init_from": null
}"""
"""A small vip.nano as versions before saved it, with heads of width 64."""


def test_a_run_saved_before_keeps_its_number_of_heads(tmp_path: Path) -> None:
    assert [
        RECIPES[f"vip.{size}"]().model.encoder.num_heads
        for size in ("nano", "tiny", "small", "base", "large")
    ] == [12, 12, 12, 12, 16]
    saved = json.loads(OLD_CONFIG)
    old = from_dict(RunConfig, saved).model
    assert isinstance(old, MAEConfig) and old.encoder.num_heads == 3
    new = replace(old, encoder=replace(old.encoder, num_heads=12))
    model = make_model(old, 7)
    manifest = {
        "run_id": "old",
        "ledger_steps": 0,
        "updates": 0,
        "config": saved,
        "plan": {},
        "ledger_digest": "",
        "lineage": [],
    }
    save_checkpoint(
        tmp_path / "run" / "checkpoints" / "step-00000001", manifest, model.state_dict()
    )
    x_BCHW = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    other = make_model(new, 7)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        own_BLD, wrong_BLD = (m.encoder.forward_blocks(x_BCHW)[-1] for m in (model, other))
        [found_BLD] = load(tmp_path / "run").blocks(x_BCHW)
    torch.testing.assert_close(found_BLD, own_BLD)
    assert not torch.allclose(found_BLD, wrong_BLD, atol=1e-3), (
        "shapes do not show the heads: other ones give other features"
    )
    parent = load_checkpoint(tmp_path / "run")
    start_from(make_model(old, 0), old, parent)
    with pytest.raises(
        CheckpointError, match=r"encoder.num_heads=3; expected 12.*--model.encoder.num-heads"
    ):
        start_from(make_model(new, 0), new, parent)


def test_the_arxiv_version_has_its_printed_rate() -> None:
    assert (
        RECIPES["vip.base_arxiv"]().optim == RECIPES["vip.base"]().optim
        and RECIPES["vip.base"]().optim.learning_rate == 3.84e-4
    )
