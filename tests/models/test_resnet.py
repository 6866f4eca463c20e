"""Residual networks: the published sizes to the unit, timm's own networks as oracles of the
function, clipping, initialisation.
"""

import re
from functools import partial

import pytest
import timm
import torch
from timm.layers import GroupNormAct, StdConv2d
from timm.models import nfnet
from timm.models.nfnet import NfCfg, NormFreeNet
from timm.models.resnetv2 import ResNetV2
from torch import nn

from dpvision.config import ClassifierConfig, ResNetConfig
from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.dp.clip import clipped_sum
from dpvision.errors import ConfigError
from dpvision.models import count_parameters, make_model, resnet
from dpvision.models.classifier import losses
from dpvision.models.resnet import FixedScale, ResidualBlock, ResNet, init_resnet

SMALL = ResNetConfig(image_size=16, depths=(1, 2), widths=(16, 32), groups=4)
LARGE = ResNetConfig(
    image_size=224,
    block="bottleneck",
    depths=(3, 4, 6, 3),
    widths=(256, 512, 1024, 2048),
    stem="7x7",
    stem_width=64,
)
TINY_BOTTLENECK = ResNetConfig(
    image_size=64,
    block="bottleneck",
    depths=(2, 3),
    widths=(32, 64),
    stem="7x7",
    stem_width=16,
    groups=4,
)
# Our names in timm's: convs is conv1, norm2, act2, conv2, norm3, act3, conv3.
NAMES = {
    "convs.0": "conv1",
    "convs.1": "norm2",
    "convs.3": "conv2",
    "convs.4": "norm3",
    "convs.6": "conv3",
    "shortcut.1": "downsample.conv",
}


def filled(network: nn.Module) -> nn.Module:
    """float64, every parameter moved: gains that start at zero hide what lies before them."""
    with torch.no_grad():
        for p in network.double().parameters():
            p.add_(
                0.2
                * torch.randn(
                    p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype
                )
            )
    return network


def timms_name(name: str, prefix: str) -> str:
    name = re.sub(r"^stem\.", "stem.conv.", name)
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return re.sub(r"^stages\.(\d+)\.(\d+)\.", rf"stages.\1.{prefix}\2.", name)


def images(size: int) -> torch.Tensor:
    return torch.randn(
        2, 3, size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )


def wide_resnet_parameters(depth: int, k: int, num_classes: int) -> int:
    """Zagoruyko and Komodakis 2016 by hand: n = (depth - 4) / 6 blocks a stage, two 3 x 3
    convolutions each, a norm before each.
    """
    n, channels, total = (depth - 4) // 6, 16, 3 * 16 * 9
    for width in (16 * k, 32 * k, 64 * k):
        for _ in range(n):
            total += 2 * channels + 9 * channels * width + 2 * width + 9 * width * width
            total += channels * width if channels != width else 0
            channels = width
    return total + 2 * channels + (channels + 1) * num_classes


@pytest.mark.parametrize(("depth", "k", "millions"), [(16, 4, 2.7), (28, 10, 36.5)])
def test_wide_resnets_have_the_published_sizes(depth: int, k: int, millions: float) -> None:
    n = (depth - 4) // 6
    config = ResNetConfig(depths=(n, n, n), widths=(16 * k, 32 * k, 64 * k))
    count = count_parameters(ClassifierConfig(encoder=config, num_classes=10))
    assert count == wide_resnet_parameters(depth, k, 10)
    assert round(count / 1e6, 1) == millions


@pytest.mark.parametrize(("norm", "name"), [("none", "nf_resnet50"), ("group", "resnetv2_50")])
def test_large_networks_have_as_many_parameters_as_timms(norm: str, name: str) -> None:
    config = ResNetConfig(**{**vars(LARGE), "norm": norm})
    with torch.device("meta"):
        theirs = sum(p.numel() for p in timm.create_model(name, pretrained=False).parameters())
    assert count_parameters(ClassifierConfig(encoder=config, num_classes=1000)) == theirs


def test_with_group_norm_it_is_timms_preactivation_network() -> None:
    ours = filled(ResNet(TINY_BOTTLENECK))
    theirs = ResNetV2(
        [2, 3],
        channels=(32, 64),
        stem_chs=16,
        stem_type="",
        num_classes=0,
        global_pool="",
        conv_layer=partial(StdConv2d, eps=1e-5),
        norm_layer=partial(GroupNormAct, num_groups=4),
    ).double()
    theirs.load_state_dict(
        {timms_name(name, "blocks."): value for name, value in ours.state_dict().items()}
    )
    with torch.no_grad():
        torch.testing.assert_close(ours(images(64)), theirs(images(64)), rtol=1e-9, atol=1e-9)


def test_without_norm_it_is_timms_norm_free_network(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = nfnet._nonlin_gamma["relu"]
    assert pytest.approx(estimate, rel=1e-3) == resnet._RELU_GAIN
    monkeypatch.setattr(resnet, "_RELU_GAIN", estimate)
    config = ResNetConfig(**{**vars(TINY_BOTTLENECK), "norm": "none"})
    ours = filled(ResNet(config))
    cfg = NfCfg(
        (2, 3), (32, 64), stem_type="7x7_pool", stem_chs=16, bottle_ratio=0.25, act_layer="relu"
    )
    theirs = NormFreeNet(cfg, num_classes=0, global_pool="").double()
    theirs.stem.conv.scale /= estimate  # no ReLU stands before a stem
    theirs.load_state_dict(
        {timms_name(name, ""): value for name, value in ours.state_dict().items()}
    )
    with torch.no_grad():
        torch.testing.assert_close(ours(images(64)), theirs(images(64)), rtol=1e-9, atol=1e-9)


def test_the_small_stem_keeps_the_side_and_each_further_stage_halves_it() -> None:
    with torch.no_grad():
        assert ResNet(ResNetConfig())(torch.zeros(1, 3, 32, 32)).shape == (1, 256, 8, 8)
        assert ResNet(TINY_BOTTLENECK)(torch.zeros(1, 3, 64, 64)).shape == (1, 64, 8, 8)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm": "none"},
        {"weight_standardisation": False},
        {"block": "bottleneck"},
        {"stem": "7x7", "image_size": 32},
    ],
    ids=lambda changes: "-".join(map(str, changes.values())) or "plain",
)
def test_one_pass_clips_every_variant_as_vmap_does(changes: dict) -> None:
    config = ClassifierConfig(
        encoder=ResNetConfig(**{**vars(SMALL), **changes}), num_classes=3, head_init="xavier"
    )
    model = make_model(config, 0)
    size = config.encoder.image_size
    x = torch.randn(5, 2, 3, size, size, generator=torch.Generator().manual_seed(0))
    batch = Batch(
        torch.arange(5),
        torch.tensor([True] * 4 + [False]),
        x,
        label_B=torch.tensor([0, 1, 2, 0, 1]),
    )
    fast, slow = (
        clipped_sum(
            lambda model, batch, key: losses(model, batch.image_BVCHW, batch.label_B),
            model,
            batch,
            StepKey(0, 0),
            max_grad_norm=1.0,
            method=method,
        )
        for method in ("one_pass", "vmap")
    )
    torch.testing.assert_close(fast.norms_B, slow.norms_B, rtol=1e-4, atol=0)
    for name, value in slow.grads.items():
        torch.testing.assert_close(fast.grads[name], value, rtol=0, atol=1e-5, msg=name)
    assert (slow.norms_B > 1).any(), "the clip must bite"


def test_a_record_does_not_see_its_neighbours_and_the_mode_changes_nothing() -> None:
    network = ResNet(SMALL).double()
    init_resnet(network, torch.Generator().manual_seed(0))
    x = images(16)
    with torch.no_grad():
        both, one, evaluated = network(x), network(x[:1]), network.eval()(x)
    torch.testing.assert_close(both[:1], one, rtol=1e-12, atol=1e-12)
    assert torch.equal(both, evaluated)


def test_initial_weights_follow_the_seed_and_leave_the_global_state_alone() -> None:
    config = ClassifierConfig(encoder=SMALL, num_classes=3)
    before = torch.get_rng_state()
    first, again, other = (make_model(config, seed).state_dict() for seed in (5, 5, 6))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[name], again[name]) for name in first)
    convolutions = [name for name, value in first.items() if value.ndim == 4]
    assert all(not torch.equal(first[name], other[name]) for name in convolutions)
    assert all(
        bool(value.any())
        for name, value in first.items()
        if not name.endswith("bias") and "head" not in name
    )
    assert not first["head.weight"].any() and not first["head.bias"].any()


def test_without_norms_every_block_of_a_stage_gets_a_signal_of_about_unit_variance() -> None:
    network = ResNet(ResNetConfig(depths=(6,), widths=(64,), norm="none"))
    init_resnet(network, torch.Generator().manual_seed(0))
    seen: list[float] = []
    for part in network.modules():
        if isinstance(part, ResidualBlock):
            assert isinstance(part.norm1, FixedScale)
            part.norm1.register_forward_hook(
                lambda _module, _inputs, output: seen.append(float(output.var()))
            )
    with torch.no_grad():
        network(torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1)))
    assert len(seen) == 6 and all(0.8 < variance < 1.25 for variance in seen), seen


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"groups": 5}, "divisor of all numbers of channels"),
        ({"depths": (1,)}, "one for each of depths"),
        ({"depths": ()}, "one for each of depths"),
        ({"depths": (0, 1)}, "numbers from 1"),
        ({"widths": (16, 30)}, "multiples of 4"),
        ({"norm": "none", "weight_standardisation": False}, "nothing else controls the variance"),
        ({"norm": "batch"}, "one of 'group', 'none'"),
        ({"image_size": 0}, "at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(changes: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ResNetConfig(**{**vars(SMALL), **changes})
