"""Published checkpoints: written here in their authors' naming with random numbers, and compared
with somebody else's model.
"""

import math
from functools import partial

import pytest
import timm
import torch
import torchvision
from timm.models.vision_transformer import VisionTransformer
from torch.nn import functional as F

from dpvision.encoders.open import open_encoder
from dpvision.encoders.released import released_encoder
from dpvision.errors import CheckpointError, ConfigError

GRID, PATCH, WIDTH, DEPTH = 3, 8, 128, 2


def _table(grid: int, width: int) -> torch.Tensor:
    """The sin-cos table entry by entry: column in the first half of the width, row in the second;
    the class token has zeros.
    """
    table = torch.zeros(1 + grid**2, width, dtype=torch.float64)
    quarter = width // 4
    for row in range(grid):
        for column in range(grid):
            for half, place in enumerate((column, row)):
                for i in range(quarter):
                    angle = place / 10000 ** (i / quarter)
                    table[1 + row * grid + column, 2 * half * quarter + i] = math.sin(angle)
                    table[1 + row * grid + column, (2 * half + 1) * quarter + i] = math.cos(angle)
    return table.float()[None]


def _timm_model() -> VisionTransformer:
    """timm's transformer of MAE's form, all numbers random but for the positions."""
    model = VisionTransformer(
        img_size=GRID * PATCH,
        patch_size=PATCH,
        embed_dim=WIDTH,
        depth=DEPTH,
        num_heads=2,
        num_classes=0,
        class_token=True,
        global_pool="token",
        norm_layer=partial(torch.nn.LayerNorm, eps=1e-6),
    )
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    model.pos_embed.data = _table(GRID, WIDTH)
    return model.eval()


def _published(model: VisionTransformer) -> dict[str, torch.Tensor]:
    decoder = {
        "mask_token": torch.zeros(1, 1, 8),
        "decoder_pos_embed": torch.zeros(1, 10, 8),
        "decoder_blocks.0.norm1.weight": torch.ones(8),
    }
    return dict(model.state_dict()) | decoder


@pytest.mark.parametrize("kind", [pytest.param("mae", marks=pytest.mark.slow), "vip"])
def test_a_masked_autoencoders_file_gives_timms_features(tmp_path, kind):
    model = _timm_model()
    torch.save({"model": _published(model), "epoch": 800}, tmp_path / "mae_pretrain.pth")
    encoder = open_encoder(f"{kind}:{tmp_path / 'mae_pretrain.pth'}")
    assert (encoder.name, encoder.image_size, encoder.family) == (
        f"{kind}:mae_pretrain.pth",
        GRID * PATCH,
        "transformer",
    )
    x_BCHW = torch.randn(
        4, 3, GRID * PATCH, GRID * PATCH, generator=torch.Generator().manual_seed(6)
    )
    with torch.no_grad():
        token_BLD = model.forward_features(x_BCHW)
        block_BLD = model.forward_intermediates(x_BCHW, intermediates_only=True, output_fmt="NLC")
        assert token_BLD.std() > 0.1
        torch.testing.assert_close(
            encoder.poolings(x_BCHW)["mean"], token_BLD[:, 1:].mean(1), atol=1e-5, rtol=1e-5
        )
        for ours, theirs in zip(encoder.blocks(x_BCHW), block_BLD, strict=True):
            torch.testing.assert_close(ours[:, 1:], theirs, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(
            encoder.backbone().eval()(x_BCHW), token_BLD[:, 1:].mean(1), atol=1e-5, rtol=1e-5
        )
    assert all(p.requires_grad for p in encoder.backbone().parameters())


@pytest.mark.parametrize(
    ("kind", "width", "heads"),
    [
        ("mae", 768, 12),
        ("mae", 1024, 16),
        ("mae", 1280, 16),
        ("vip", 192, 12),
        ("vip", 384, 12),
        ("vip", 576, 12),
        ("vip", 768, 12),
    ],
)
def test_published_encoders_have_their_published_heads(tmp_path, kind, width, heads):
    """A width of 1280 has heads of 80 (He et al. 2022), and ViP's small encoders have 12 heads; the
    shapes do not show it.
    """
    model = VisionTransformer(
        img_size=2 * PATCH,
        patch_size=PATCH,
        embed_dim=width,
        depth=1,
        num_heads=heads,
        num_classes=0,
        global_pool="token",
        mlp_ratio=1,
        norm_layer=partial(torch.nn.LayerNorm, eps=1e-6),
    )
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.data = width**-0.5 * 2 * torch.randn(parameter.shape, generator=generator)
    model.pos_embed.data = _table(2, width)
    torch.save({"model": model.state_dict()}, tmp_path / "published.pth")
    x_BCHW = torch.randn(2, 3, 2 * PATCH, 2 * PATCH, generator=generator)
    with torch.no_grad():
        (found_BLD,) = open_encoder(f"{kind}:{tmp_path / 'published.pth'}").blocks(x_BCHW)
        (truth_BLD,) = model.eval().forward_intermediates(
            x_BCHW, intermediates_only=True, output_fmt="NLC"
        )
    torch.testing.assert_close(found_BLD[:, 1:], truth_BLD, atol=1e-4, rtol=1e-4)


def test_what_is_no_masked_autoencoder_is_refused_with_the_first_tensor(tmp_path):
    from safetensors.torch import save_file

    good = {n: t.contiguous() for n, t in _published(_timm_model()).items()}
    trained = good["pos_embed"] + 0.01
    cases = {
        "positions": (
            good | {"pos_embed": trained},
            "pos_embed differs from the fixed sin-cos table by 0.01",
        ),
        "norm": ({n: t for n, t in good.items() if n != "norm.weight"}, "norm.weight=nothing"),
        "block": (
            good | {"blocks.1.attn.qkv.weight": torch.ones(3, 3)},
            r"blocks.1.attn.qkv.weight=\(3, 3\); expected shape \(384, 128\)",
        ),
        "more": (
            good | {"blocks.1.ls1.gamma": torch.ones(3)},
            "blocks.1.ls1.gamma is not a tensor",
        ),
        "gap": (
            {n.replace("blocks.1.", "blocks.2."): t for n, t in good.items()},
            "blocks.1.*=nothing",
        ),
        "oblong": (good | {"pos_embed": torch.zeros(1, 11, WIDTH)}, "expected RGB, square patches"),
        "flat": (
            good | {"pos_embed": torch.zeros(10, WIDTH)},
            r"pos_embed=\(10, 128\); expected 3 dimensions",
        ),
        "other": ({"conv1.weight": torch.ones(2)}, "no tensor 'patch_embed.proj.weight'"),
        "no blocks": (
            {n: t for n, t in good.items() if not n.startswith("blocks")},
            "mlp.fc1.weight=nothing",
        ),
    }
    for name, (tensors, words) in cases.items():
        save_file({n: t.clone() for n, t in tensors.items()}, tmp_path / f"{name}.safetensors")
        with pytest.raises(CheckpointError, match=words):
            released_encoder("mae", tmp_path / f"{name}.safetensors")
    with pytest.raises(ConfigError, match="expected vip, mae, simclr or tan"):
        released_encoder("dino", tmp_path / "block.safetensors")


_SLOW_PREFIXES = [
    pytest.param(prefix, marks=pytest.mark.slow) for prefix in ("", "module.", "backbone.")
]


@pytest.mark.parametrize("prefix", ["state_dict.module.encoder.", *_SLOW_PREFIXES])
def test_simclr_is_a_resnet50_whatever_wraps_it(tmp_path, prefix):
    from safetensors.torch import save_file

    torch.manual_seed(7)
    model = torchvision.models.resnet50(weights=None).eval()
    tensors = {
        prefix + n: t.clone() for n, t in model.state_dict().items() if not n.startswith("fc.")
    }
    save_file(
        tensors | {"projector.0.weight": torch.ones(2)} if prefix else tensors,
        tmp_path / "r50.safetensors",
    )
    encoder = open_encoder(f"simclr:{tmp_path / 'r50.safetensors'}")
    x_BCHW = torch.randn(1, 3, 224, 224)
    model.fc = torch.nn.Identity()
    with torch.no_grad():
        torch.testing.assert_close(
            encoder.poolings(x_BCHW)["mean"], model(x_BCHW), atol=1e-4, rtol=1e-4
        )
    assert encoder.family == "convnet" and encoder.image_size == 224


def _tan_convolution(conv: torch.nn.Conv2d, x_BCHW: torch.Tensor) -> torch.Tensor:
    """A convolution as TAN's code standardises it: variance with n - 1, epsilon beside n times the
    variance, no further scale.
    """
    w = conv.weight
    n = w[0].numel()
    standard = (w - w.mean((1, 2, 3), keepdim=True)) / (
        w.var((1, 2, 3), keepdim=True) * n + 1e-6
    ).sqrt()
    return F.conv2d(
        x_BCHW,
        standard * conv.gain,
        conv.bias,
        conv.stride,
        conv.padding,
        conv.dilation,
        conv.groups,
    )


@pytest.mark.slow
def test_tans_blocks_become_timms_with_the_same_function(tmp_path):
    from safetensors.torch import save_file

    torch.manual_seed(8)
    model = timm.create_model("nf_resnet26", pretrained=False, skipinit=True).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    names = {n: n.replace("skipinit_gain", "expand.weight") for n in model.state_dict()}
    save_file(
        {f"_module.{names[n]}": t.clone() for n, t in model.state_dict().items()},
        tmp_path / "tan.safetensors",
    )
    encoder = open_encoder(f"tan:{tmp_path / 'tan.safetensors'}@nf_resnet26")
    x_BCHW = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        timms = model.forward_features(x_BCHW).mean((2, 3))
        for conv in [m for m in model.modules() if hasattr(m, "gain")]:
            conv.forward = partial(_tan_convolution, conv)
        tans = model.forward_features(x_BCHW).mean((2, 3))
        found = encoder.poolings(x_BCHW)["mean"]
    assert (found - tans).norm() < 1e-4 * tans.norm() < 0.1 * (timms - tans).norm()


@pytest.mark.slow
def test_tan_takes_other_resnets_by_name(tmp_path):
    from safetensors.torch import save_file

    model = torchvision.models.resnet18(weights=None)
    save_file(model.state_dict(), tmp_path / "a.safetensors")
    assert (
        open_encoder(f"tan:{tmp_path / 'a.safetensors'}@resnet18").name
        == "tan:a.safetensors@resnet18"
    )
    with pytest.raises(CheckpointError, match=r"stem.conv.weight"):
        open_encoder(f"tan:{tmp_path / 'a.safetensors'}")
