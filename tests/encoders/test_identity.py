"""Encoders that look at more than one image are refused by name; one that has changed is not taken
for the old one.
"""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from dpvision.encoders.encoder import Encoder
from dpvision.encoders.fixed import fixed_encoder
from dpvision.encoders.identity import check_alone, check_places, check_same, describe
from dpvision.errors import CheckpointError, ConfigError

from ..eval.labelled import MEAN, STD, conv_encoder, vit_encoder


def _of(net: nn.Module) -> Encoder:
    def poolings(x_BCHW: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"mean": net(x_BCHW)}

    return Encoder("made", 8, MEAN, STD, poolings, "convnet", lambda: copy.deepcopy(net).train())


def _net(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


@pytest.mark.parametrize(
    "encoder", [vit_encoder(), conv_encoder(), fixed_encoder("pixels", 8), fixed_encoder("hog", 16)]
)
def test_honest_encoders_pass_and_their_width_is_found(encoder: Encoder) -> None:
    pooling, width = check_alone(encoder)
    x_BCHW = torch.randn(2, 3, encoder.image_size, encoder.image_size)
    assert encoder.poolings(x_BCHW)[pooling].shape == (2, width)


def _foreign(library: str) -> Encoder:
    net: nn.Module
    if library == "timm":
        net = pytest.importorskip("timm").models.VisionTransformer(
            32, 8, num_classes=0, embed_dim=48, depth=1, num_heads=3
        )
    else:
        net = pytest.importorskip("torchvision").models.resnet18(num_classes=10)
    return replace(_of(net.eval()), image_size=32)


@pytest.mark.parametrize("rows", [5, 16, 32])
@pytest.mark.parametrize(
    "make",
    [
        vit_encoder,
        conv_encoder,
        lambda: fixed_encoder("hog", 16),
        lambda: _foreign("timm"),
        lambda: _foreign("torchvision"),
    ],
    ids=["our transformer", "our convnet", "hog", "timm", "torchvision"],
)
def test_features_have_the_same_bits_at_every_place_of_a_pass(
    make: Callable[[], Encoder], rows: int
) -> None:
    """One image fewer in a store moves all later ones by a place."""
    encoder = make()
    check_places(encoder, check_alone(encoder)[0], rows)


def test_an_encoder_whose_last_bits_depend_on_the_place_is_refused() -> None:
    base = vit_encoder()

    def uneven(x_BCHW: Tensor) -> dict[str, Tensor]:
        up_B1 = 1 + 2.0**-23 * (torch.arange(len(x_BCHW)) == 6).float()[:, None]
        return {name: x_BD * up_B1 for name, x_BD in base.poolings(x_BCHW).items()}

    check_alone(replace(base, poolings=uneven))
    check_places(replace(base, poolings=uneven), "mean", 6)
    with pytest.raises(
        ConfigError, match=r"change in their last bits with an image's place among 8; .*Use another"
    ):
        check_places(replace(base, poolings=uneven), "mean", 8)


def test_batch_statistics_are_refused_and_the_layer_is_named() -> None:
    frozen = _net(nn.BatchNorm2d(8)).eval()
    assert check_alone(_of(frozen)) == ("mean", 8), (
        "with running statistics, in evaluation mode, it is a function of one image"
    )
    with pytest.raises(
        ConfigError, match=r"depend on the other images of a batch \(1 without running statistics\)"
    ):
        check_alone(_of(_net(nn.BatchNorm2d(8, track_running_stats=False)).eval()))
    with pytest.raises(ConfigError, match=r"made (differ from one pass|depend on the other)"):
        check_alone(_of(frozen.train()))


def test_a_neighbour_that_shows_in_any_other_way_is_refused() -> None:
    base = vit_encoder()

    def centred(x_BCHW: Tensor) -> dict[str, Tensor]:
        return {
            name: x_BD - 0.01 * x_BD.mean(dim=0) for name, x_BD in base.poolings(x_BCHW).items()
        }

    with pytest.raises(ConfigError, match="function of one image"):
        check_alone(replace(base, poolings=centred))
    with pytest.raises(ConfigError, match="differ from one pass to the next"):
        check_alone(replace(base, poolings=lambda x: {"mean": torch.randn(len(x), 4)}))
    with pytest.raises(ConfigError, match="not finite"):
        check_alone(replace(base, poolings=lambda x: {"mean": torch.full((len(x), 4), torch.nan)}))
    with pytest.raises(ConfigError, match=r"pooling='cls'; expected one of \['mean'\]"):
        check_alone(base, "cls")


def test_an_encoder_is_recognised_whatever_its_name_and_another_is_not() -> None:
    encoder = vit_encoder()
    about = describe(encoder, "mean", 32)
    check_same(replace(encoder, name="moved"), about, "here")
    assert encoder.backbone is not None
    nudged = encoder.backbone()
    with torch.no_grad():
        next(nudged.parameters())[0] += 1e-6
    others = [
        (replace(encoder, backbone=lambda: nudged), "other weights"),
        (vit_encoder(seed=1), "other weights"),
        (replace(encoder, image_size=12), "image_size=12.*expected 8"),
        (replace(encoder, mean=(0.4, 0.5, 0.5)), "mean="),
        (replace(encoder, poolings=lambda x: {"2x2": x.flatten(1)}), "has no features 'mean'"),
        (
            replace(
                encoder,
                backbone=None,
                poolings=lambda x: {n: 1.1 * f for n, f in encoder.poolings(x).items()},
            ),
            "other features",
        ),
    ]
    for other, said in others:
        with pytest.raises(CheckpointError, match=said):
            check_same(other, about, "here")
