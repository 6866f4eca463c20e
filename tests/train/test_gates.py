"""Gates of a run: a small network stands for the run's at the physical batch size, and refuses what
the run's would.
"""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dpvision.config import HardwareConfig, HeadConfig, MAEConfig, RunConfig, TimmConfig, ViTConfig
from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp import route
from dpvision.errors import PrivacyError
from dpvision.models import count_parameters, layers, make_model, make_model_on_meta
from dpvision.recipes import RECIPES
from dpvision.train import gates
from dpvision.train.gates import check_gates, small_model
from dpvision.train.objectives import example_batch, loss_function

SIZES = {
    "image_size",
    "depth",
    "width",
    "num_heads",
    "decoder_depth",
    "decoder_width",
    "decoder_num_heads",
    "vocab_size",
    "last_blocks",
    "depths",
    "widths",
    "stem_width",
    "groups",
}
NETWORKS = {make().model: name for name, make in RECIPES.items()}
"""A recipe of every network."""
CASES = {
    name: cfg
    for cfg, name in NETWORKS.items()
    if not isinstance(cfg, HeadConfig) and not isinstance(cfg.encoder, TimmConfig)
}


def options(cfg: Any) -> dict[str, Any]:
    """All settings but sizes, nested configs by their path."""
    found = {"": type(cfg)}
    for field in fields(cfg):
        value = getattr(cfg, field.name)
        if is_dataclass(value):
            found |= {f"{field.name}.{name}": option for name, option in options(value).items()}
        elif field.name not in SIZES:
            found[field.name] = value
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_small_network_has_the_options_and_the_layers_of_the_runs(name: str) -> None:
    cfg = CASES[name]
    small = small_model(cfg)
    assert options(small) == options(cfg)
    kinds = [
        {type(module) for module in make_model_on_meta(each).modules()} for each in (cfg, small)
    ]
    assert kinds[0] == kinds[1]
    assert count_parameters(small) <= min(count_parameters(cfg), 300_000)


def run_of(physical: int, depth: int = 3) -> RunConfig:
    model = MAEConfig(
        encoder=ViTConfig(image_size=32, patch_size=4, depth=depth, width=32, num_heads=4),
        decoder_depth=depth,
        decoder_width=32,
        decoder_num_heads=4,
    )
    return replace(
        RECIPES["vip.micro"](),
        model=model,
        hardware=HardwareConfig(device="cpu", physical_batch_size=physical),
    )


def test_a_layer_that_mixes_at_the_size_that_runs_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = layers.Block.forward
    config = run_of(9)
    model, loss_fn = make_model(config.model, 0), loss_function(config)
    check_gates(config, model, loss_fn)
    monkeypatch.setattr(
        layers.Block,
        "forward",
        lambda self, x_BLD: real(self, x_BLD if len(x_BLD) <= 4 else x_BLD.roll(1, 0)),
    )
    check_gates(run_of(4), model, loss_fn)
    with pytest.raises(
        PrivacyError, match=r"'encoder\.blocks\.0.*' .*mixes records.* in a batch of 9"
    ):
        check_gates(config, model, loss_fn)


def test_the_runs_own_network_and_every_record_of_a_physical_batch_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, int, int]] = []
    config = run_of(40)
    real = loss_function(config)

    def losses(model: Any, batch: Batch, key: StepKey) -> Tensor:
        seen.append(
            (
                len(batch.record_id_B),
                batch.image_BVCHW.shape[-1],
                sum(p.numel() for p in model.parameters()),
            )
        )
        return real(model, batch, key)

    check_gates(config, make_model(config.model, 0), losses)
    whole, small = count_parameters(config.model), count_parameters(small_model(config.model))
    assert {(3, 32, whole), (40, 16, small), (26, 16, small)} <= set(seen)
    assert max(records for records, _, parameters in seen if parameters == whole) == 3


class Mixing(nn.Module):
    """A block whose result is mixed by ``mix``."""

    def __init__(self, block: nn.Module, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.block, self.mix = block, mix

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.mix(self.block(x_BLD))


def adds(x_BLD: Tensor) -> Tensor:
    return x_BLD + 1e-12 * x_BLD.roll(1, 0)


def adds_in_the_gradient(x_BLD: Tensor) -> Tensor:
    other = 1e-12 * x_BLD.roll(1, 0)
    return x_BLD + (other - other.detach())


def reacts_to_another(x_BLD: Tensor) -> Tensor:
    return torch.where(x_BLD.isnan().any(), 0.0, x_BLD)


def of_three(x_BLD: Tensor) -> Tensor:
    return x_BLD + 1e-3 * x_BLD.roll(1, 0) if len(x_BLD) > 2 else x_BLD


MIXES = (adds, adds_in_the_gradient, reacts_to_another, of_three)


@pytest.mark.parametrize(
    ("mix", "at", "large"),
    [(mix, 5, large) for mix in MIXES for large in (False, True)]
    + [(adds, 0, True), (adds_in_the_gradient, 11, True)],
)
def test_one_mixing_block_among_twelve_is_refused_at_any_depth(
    mix: Callable[[Tensor], Tensor], at: int, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The small network has no such block: the run's own must show it, with two records too."""
    monkeypatch.setattr(gates, "_LARGE", 0 if large else 10**9)
    config = run_of(4, depth=12)
    model, loss_fn = make_model(config.model, 0), loss_function(config)
    model.encoder.blocks[at] = Mixing(model.encoder.blocks[at], mix)
    named = f"'encoder.blocks.{at}'.*mixes records|makes other calls|mixes records"
    with pytest.raises(PrivacyError, match=named):
        check_gates(config, model, loss_fn)


def test_a_large_network_goes_through_the_gates_in_two_and_in_three_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gates, "_LARGE", 0)
    seen: list[tuple[bool, int, bool]] = []
    real = gates.check_separable
    config = run_of(9)
    own = make_model(config.model, 0)

    def noted(loss_fn: Any, model: nn.Module, batch: Batch, *args: Any, **named: Any) -> None:
        whole = len(list(model.parameters())) == len(list(own.parameters()))
        seen.append((whole, len(batch.record_id_B), bool(named)))
        real(loss_fn, model, batch, *args, **named)

    monkeypatch.setattr(gates, "check_separable", noted)
    check_gates(config, own, loss_function(config))
    assert seen == [(True, 2, True), (False, 4, False)]


def test_the_gates_and_the_run_share_one_route(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[nn.Module] = []
    real = route.make_route

    def noted(loss_fn: Any, model: nn.Module, *args: Any) -> Any:
        made.append(model)
        return real(loss_fn, model, *args)

    monkeypatch.setattr(route, "make_route", noted)
    config = run_of(9)
    model, loss_fn = make_model(config.model, 0), loss_function(config)
    check_gates(config, model, loss_fn)
    route.route_of(loss_fn, model, example_batch(config), StepKey(config.seed, 0))
    assert made[0] is model and len(made) == 2, "and that of the small network"


def test_a_timm_network_stands_for_itself() -> None:
    cfg = replace(CASES["supervised.micro"], encoder=TimmConfig(name="test_vit", image_size=32))
    assert small_model(cfg) == cfg


def test_captions_of_the_small_network_fill_several_chunks_of_its_head() -> None:
    config = RECIPES["dpcap.base"]()
    small = replace(config, model=small_model(config.model))
    batch = example_batch(small, 64)
    assert batch.token_BVL is not None and int(batch.token_BVL.max()) < small.model.vocab_size  # type: ignore[union-attr]
    assert batch.token_BVL.numel() * small.model.vocab_size > 2**22  # type: ignore[union-attr]
    assert torch.isfinite(
        loss_function(small)(make_model(small.model, 0), batch, StepKey(0, 0))
    ).all()
