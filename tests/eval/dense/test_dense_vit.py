"""The transformer over images of any size: against the plain one, against slow loops, and against
the terms written out.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpvision.config import ViTConfig
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.pooled import pooled_network
from dpvision.errors import ConfigError
from dpvision.eval.dense.dense_vit import (
    DenseBlock,
    DenseViT,
    dense_backbone,
    layer_decay_groups,
    relative_table,
)
from dpvision.models.layers import init_weights
from dpvision.models.vit import ViT

CONFIG = ViTConfig(image_size=16, patch_size=4, depth=3, width=24, num_heads=3)
HEADS, HEAD_WIDTH = 3, 8


def make_vit() -> ViT:
    with torch.random.fork_rng():
        vit = ViT(CONFIG)
    init_weights(vit, torch.Generator().manual_seed(0))
    return shaken(vit)


def shaken(module: nn.Module) -> nn.Module:
    """Biases, norms and relative positions away from 0 and 1, so that a wrong one shows;
    float64.
    """
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    return module.double()


def images(height: int = 16, width: int = 16, num: int = 2) -> torch.Tensor:
    return torch.randn(
        num, 3, height, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


@pytest.mark.parametrize("relative", [False, True])
def test_at_the_size_of_pre_training_it_is_the_plain_transformer(relative: bool) -> None:
    """Relative positions start at zero, so they change nothing."""
    vit, x = make_vit(), images()
    dense = DenseViT(vit, relative_positions=relative).double().eval()
    with torch.no_grad():
        maps, outputs = dense(x, (0, 1, 2)), vit.forward_blocks(x)
    for map_BDhw, token_BLD in zip(maps, outputs, strict=True):
        expected = token_BLD[:, 1:].transpose(1, 2).unflatten(-1, (4, 4))
        torch.testing.assert_close(map_BDhw, expected, rtol=0, atol=1e-12)


def test_maps_come_in_the_order_asked_for_and_without_class_token_nothing_of_it_is_left() -> None:
    vit, x = make_vit(), images()
    dense = DenseViT(vit, class_token=False).double().eval()
    with torch.no_grad():
        last, first = dense(x, (2, 0))
        torch.testing.assert_close(dense(x, (0,))[0], first, rtol=0, atol=0)
        token_BLD = vit.embed(*_patches_and_positions(vit, x))[:, 1:]
        for block in vit.blocks:
            token_BLD = block(token_BLD)
    torch.testing.assert_close(
        last, token_BLD.transpose(1, 2).unflatten(-1, (4, 4)), rtol=0, atol=1e-12
    )
    assert not any("cls" in name for name, _ in dense.named_parameters())


def _patches_and_positions(vit: ViT, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    unfolded = F.unfold(x, CONFIG.patch_size, stride=CONFIG.patch_size).transpose(1, 2)
    return unfolded, vit.position_LD


def test_positions_are_resized_bicubically_as_torch_does() -> None:
    dense = DenseViT(make_vit()).double()
    table = dense.position_LD.T.unflatten(-1, (4, 4))[None]
    expected = (
        F.interpolate(table, size=(6, 9), mode="bicubic", align_corners=False)[0].flatten(1).T
    )
    torch.testing.assert_close(
        dense.positions((6, 9)), expected, rtol=0, atol=1e-6
    )  # timm's resizes in float32
    torch.testing.assert_close(dense.positions((4, 4)), dense.position_LD, rtol=0, atol=0)


def slow_attention(
    block: DenseBlock,
    x_LD: torch.Tensor,
    places: list[tuple[int, int] | None],
    grid: tuple[int, int],
) -> torch.Tensor:
    """One window or image, query by query and key by key; ``places`` are rows and columns, None for
    a class token.
    """
    q, k, v = block.qkv(x_LD).unflatten(-1, (3, HEADS, HEAD_WIDTH)).unbind(1)
    mixed = torch.zeros_like(q)
    for n in range(HEADS):
        for i, at in enumerate(places):
            logits = []
            for j, other in enumerate(places):
                logit = q[i, n] @ k[j, n] / HEAD_WIDTH**0.5
                if block.row_RK is not None and at is not None and other is not None:
                    tables = zip((block.row_RK, block.column_RK), grid, strict=True)
                    row, column = (
                        t if len(t) == 2 * side - 1 else resized(t, side) for t, side in tables
                    )
                    logit = (
                        logit
                        + q[i, n] @ row[at[0] - other[0] + grid[0] - 1]
                        + q[i, n] @ column[at[1] - other[1] + grid[1] - 1]
                    )
                logits.append(logit)
            mixed[i, n] = torch.stack(logits).softmax(0) @ v[:, n]
    return block.out(mixed.flatten(1))


def resized(table_RK: torch.Tensor, side: int) -> torch.Tensor:
    """Linear interpolation at pixel centres, ends held: entry by entry."""
    old, new = len(table_RK), 2 * side - 1
    rows = []
    for i in range(new):
        at = min(max((i + 0.5) * old / new - 0.5, 0.0), old - 1.0)
        low = int(at)
        rows.append(table_RK[low] * (1 - at + low) + table_RK[min(low + 1, old - 1)] * (at - low))
    return torch.stack(rows)


@pytest.mark.parametrize("class_token", [True, False])
def test_relative_positions_are_the_terms_written_out_on_any_grid(class_token: bool) -> None:
    dense = shaken(DenseViT(make_vit(), relative_positions=True, class_token=class_token)).eval()
    block, grid = dense.blocks[0], (3, 5)
    places: list[tuple[int, int] | None] = [(i, j) for i in range(3) for j in range(5)]
    if class_token:
        places.insert(0, None)
    x_LD = torch.randn(
        len(places), 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    with torch.no_grad():
        torch.testing.assert_close(
            block._attention(x_LD[None], grid)[0],
            slow_attention(block, x_LD, places, grid),
            rtol=0,
            atol=1e-12,
        )


def test_windows_are_a_loop_over_windows_of_the_padded_grid() -> None:
    dense = shaken(
        DenseViT(
            make_vit(), window=2, global_blocks=(1,), relative_positions=True, class_token=False
        )
    ).eval()
    assert [block.window for block in dense.blocks] == [2, 0, 2]
    block, (h, w) = dense.blocks[0], (3, 5)
    x_hwD = torch.randn(h, w, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    padded = torch.zeros(4, 6, 24, dtype=torch.float64)
    padded[:h, :w] = x_hwD
    expected = torch.zeros_like(padded)
    places: list[tuple[int, int] | None] = [(0, 0), (0, 1), (1, 0), (1, 1)]
    with torch.no_grad():
        for top in range(0, 4, 2):
            for left in range(0, 6, 2):
                part = slow_attention(
                    block, padded[top : top + 2, left : left + 2].reshape(4, 24), places, (2, 2)
                )
                expected[top : top + 2, left : left + 2] = part.reshape(2, 2, 24)
        found = block._mixed(x_hwD.reshape(1, h * w, 24), (h, w))[0].reshape(h, w, 24)
    torch.testing.assert_close(found, expected[:h, :w], rtol=0, atol=1e-12)


def test_a_window_sees_nothing_outside_and_a_global_block_does() -> None:
    x, changed = images(16, 16, 1), images(16, 16, 1)
    changed[:, :, :, 8:] += 1.0
    for global_blocks, moves in (((), False), ((2,), True)):
        dense = (
            DenseViT(make_vit(), window=2, global_blocks=global_blocks, class_token=False)
            .double()
            .eval()
        )
        with torch.no_grad():
            left = [dense(each, (2,))[0][..., :2] for each in (x, changed)]
        assert torch.equal(*left) is not moves


def test_stochastic_depth_drops_whole_blocks_and_grows_with_depth() -> None:
    dense = DenseViT(make_vit(), drop_path=0.5).double().train()
    assert [block.drop_path.p for block in dense.blocks] == [0.0, 0.25, 0.5]
    x, dropped = images(num=1), []
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        token_BLD = torch.randn(1, 17, 24, dtype=torch.float64)
        for _ in range(400):
            dropped.append(torch.equal(dense.blocks[2](token_BLD, (4, 4)), token_BLD))
        first = [dense(x, (0,))[0] for _ in range(2)]
    assert torch.equal(*first), "the first block is never dropped"
    assert 0.18 < sum(dropped) / 400 < 0.32, "attention and MLP, each with probability one half"


def test_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for checkpointing in (False, True):
        dense = (
            DenseViT(
                make_vit(), drop_path=0.3, relative_positions=True, checkpointing=checkpointing
            )
            .double()
            .train()
        )
        with torch.random.fork_rng():
            torch.manual_seed(4)
            dense(images(20, 12), (2,))[0].square().sum().backward()
        gradients.append({name: p.grad for name, p in dense.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    assert all(gradient.abs().max() > 0 for gradient in gradients[0].values())


def test_layer_decay_falls_towards_the_input_and_every_parameter_stands_once() -> None:
    dense = DenseViT(make_vit(), relative_positions=True)
    head = nn.Linear(24, 5)
    model = nn.ModuleList([dense, head])
    groups = layer_decay_groups(
        dense, model.parameters(), learning_rate=1e-2, layer_decay=0.5, weight_decay=0.1
    )
    at = {id(p): (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(at) == len(list(model.parameters()))
    expected = {
        dense.position_LD: (1e-2 / 16, 0.0),
        dense.cls_token: (1e-2 / 16, 0.0),
        dense.patch_embed.weight: (1e-2 / 16, 0.1),
        dense.blocks[0].qkv.weight: (1e-2 / 8, 0.1),
        dense.blocks[0].norm1.weight: (1e-2 / 8, 0.0),
        dense.blocks[2].row_RK: (1e-2 / 2, 0.0),
        dense.blocks[2].mlp[0].bias: (1e-2 / 2, 0.0),
        head.weight: (1e-2, 0.1),
        head.bias: (1e-2, 0.0),
    }
    assert {p: at[id(p)] for p in expected} == expected


def test_what_it_took_over_is_a_copy_that_trains() -> None:
    vit = make_vit().requires_grad_(False)
    encoder = Encoder(
        "e",
        16,
        (0.5,) * 3,
        (0.5,) * 3,
        lambda x: {},
        "transformer",
        backbone=lambda: pooled_network(vit),
    )
    dense = dense_backbone(encoder, class_token=False)
    before = vit.patch_embed.weight.clone()
    with torch.no_grad():
        for p in dense.parameters():
            assert p.requires_grad
            p.zero_()
    assert torch.equal(vit.patch_embed.weight, before)


@pytest.mark.parametrize("backbone", [None, nn.Identity, lambda: pooled_network(nn.Identity())])
def test_what_is_no_plain_transformer_is_refused(backbone) -> None:
    with pytest.raises(
        ConfigError, match="expected a run of one, random:RUN, vip:FILE or mae:FILE"
    ):
        dense_backbone(
            Encoder("pixels", 16, (0.5,) * 3, (0.5,) * 3, lambda x: {}, "fixed", backbone=backbone)
        )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"window": -1}, "window=-1"),
        ({"window": 2}, "class_token=True; expected False with windows"),
        ({"global_blocks": (3,)}, "blocks from 0 to 2"),
        ({"drop_path": float("nan")}, "drop_path=nan"),
        ({"relative_grid": 0}, "relative_grid=0"),
    ],
)
def test_values_that_do_not_fit_are_refused(wrong: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        DenseViT(make_vit(), **wrong)


def test_images_that_patches_do_not_tile_are_refused() -> None:
    dense = DenseViT(make_vit()).double()
    with pytest.raises(ConfigError, match="18 x 16 px; expected multiples of the patch, 4 px"):
        dense(images(18, 16), (0,))
    with pytest.raises(ConfigError, match="expected some of 0 to 2"):
        dense(images(), (3,))


def test_a_relative_table_holds_differences() -> None:
    place_RK = torch.arange(-2.0, 3.0)[:, None]
    assert torch.equal(
        relative_table(place_RK, 3)[..., 0], torch.tensor([[0.0, -1, -2], [1, 0, -1], [2, 1, 0]])
    )
