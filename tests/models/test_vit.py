"""The encoder against timm's transformer with the same weights, and its parts against slower
ways.
"""

import math

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from dpvision.config import ViTConfig
from dpvision.models.layers import init_weights, patchify, sincos_positions, unpatchify
from dpvision.models.vit import ViT

CONFIG = ViTConfig(image_size=16, patch_size=4, depth=3, width=24, num_heads=3)


def make_vit() -> ViT:
    with torch.random.fork_rng():
        vit = ViT(CONFIG)
    init_weights(vit, torch.Generator().manual_seed(0))
    with torch.no_grad():  # biases and LayerNorms away from 0 and 1, so that a wrong one shows
        for p in vit.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    return vit.double()


def images(num: int = 3) -> torch.Tensor:
    return torch.randn(
        num, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def timm_twin(vit: ViT) -> nn.Module:
    """timm's VisionTransformer with the weights of ``vit``."""
    twin = timm.models.vision_transformer.VisionTransformer(
        img_size=16,
        patch_size=4,
        embed_dim=24,
        depth=3,
        num_heads=3,
        num_classes=0,
        global_pool="",
        init_values=None,
    ).double()
    renamed = {
        "cls_token": vit.cls_token.view(1, 1, -1),
        "pos_embed": torch.cat([torch.zeros(1, 24, dtype=torch.float64), vit.position_LD])[None],
        "patch_embed.proj.weight": vit.patch_embed.weight.view(24, 3, 4, 4),
        "patch_embed.proj.bias": vit.patch_embed.bias,
    }
    words = {
        "attention.qkv": "attn.qkv",
        "attention.out": "attn.proj",
        "mlp.0": "mlp.fc1",
        "mlp.2": "mlp.fc2",
    }
    for name, p in vit.named_parameters():
        if name.startswith(("blocks.", "norm.")):
            for ours, theirs in words.items():
                name = name.replace(ours, theirs)
            renamed[name] = p
    twin.load_state_dict(renamed)
    return twin.eval()


def test_equals_timm_with_the_same_weights():
    vit, x = make_vit(), images()
    with torch.no_grad():
        torch.testing.assert_close(vit(x), timm_twin(vit)(x), rtol=0, atol=1e-12)


def test_blocks_end_where_the_forward_pass_does():
    vit, x = make_vit(), images()
    with torch.no_grad():
        outputs = vit.forward_blocks(x)
        assert [output.shape for output in outputs] == [(3, 17, 24)] * 3
        torch.testing.assert_close(vit.norm(outputs[-1]), vit(x), rtol=0, atol=0)
        expected = timm_twin(vit).forward_intermediates(
            x, indices=[1], intermediates_only=True, output_fmt="NLC"
        )[0]
        torch.testing.assert_close(outputs[1][:, 1:], expected, rtol=0, atol=1e-12)


def test_positions_are_maes():
    """sin and cos of the column in the first half, of the row in the second, at frequencies
    10000^(-i / (D / 4)).
    """
    grid, width = 5, 12
    table = sincos_positions(grid, width)
    for row in range(grid):
        for column in range(grid):
            parts = [
                [f(at / 10000 ** (i / 3)) for i in range(3)]
                for at in (column, row)
                for f in (math.sin, math.cos)
            ]
            np.testing.assert_allclose(table[row * grid + column], np.concatenate(parts), atol=1e-7)


def test_patches_are_a_convolutions():
    x = images()
    weight = torch.randn(
        7, 3, 4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64
    )
    expected = F.conv2d(x, weight, stride=4).flatten(2).transpose(1, 2)
    torch.testing.assert_close(patchify(x, 4) @ weight.flatten(1).T, expected, rtol=0, atol=1e-12)
    assert torch.equal(unpatchify(patchify(x, 4), 4), x)


def test_positions_are_not_parameters_and_not_saved():
    vit = make_vit()
    assert not any("position" in name for name, _ in vit.named_parameters())
    assert not any("position" in name for name in vit.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_record_is_independent_of_its_neighbours(dtype):
    vit, x = make_vit().to(dtype), images().to(dtype)
    with torch.no_grad():
        before = vit(x)[0]
        x[1:] = 100.0
        assert torch.equal(vit(x)[0], before)
