"""UPerNet: the shape of every level, the same network as transformers' on the same weights, and a
loss in which images stand alone.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dpvision.eval.dense.dense_vit import dense_backbone
from dpvision.eval.dense.semantic_data import IGNORED
from dpvision.eval.dense.upernet import (
    POOLED,
    Segmenter,
    UPerHead,
    norm_maker,
    segmentation_loss,
    tapped_blocks,
)

from .semantic_shapes import tiny_encoder


def make(norm: str = "group", **more) -> Segmenter:
    torch.manual_seed(0)
    return Segmenter(dense_backbone(tiny_encoder()), 4, channels=16, norm=norm, **more)


def test_blocks_are_those_of_base_and_large_and_exist_at_every_depth() -> None:
    assert tapped_blocks(12) == (3, 5, 7, 11) and tapped_blocks(24) == (7, 11, 15, 23)
    for depth in range(1, 40):
        blocks = tapped_blocks(depth)
        assert (
            all(0 <= b < depth for b in blocks)
            and list(blocks) == sorted(blocks)
            and blocks[-1] == depth - 1
        )


@pytest.mark.parametrize("size", [(32, 32), (32, 48), (40, 24), (16, 16)])
def test_levels_have_a_quarter_half_one_and_two_patches_and_logits_the_images_size(
    size: tuple[int, int],
) -> None:
    model = make().eval()
    x = torch.randn(2, 3, *size)
    h, w = size[0] // 8, size[1] // 8
    maps = [
        level(found)
        for level, found in zip(model.levels, model.backbone(x, model.blocks), strict=True)
    ]
    assert [tuple(m.shape[-2:]) for m in maps] == [
        (4 * h, 4 * w),
        (2 * h, 2 * w),
        (h, w),
        (h // 2, w // 2),
    ]
    assert (
        model(x)[0].shape == (2, 4, 4 * h, 4 * w)
        and model(x)[1] is None
        and model.logits(x).shape == (2, 4, *size)
    )
    auxiliary = model.train()(x)[1]
    assert auxiliary is not None and auxiliary.shape == (2, 4, h, w)


def test_the_head_is_the_one_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.upernet.modeling_upernet import UperNetHead

    width, channels, classes = 8, 12, 5
    config = transformers.UperNetConfig(
        backbone_config=transformers.ResNetConfig(),
        hidden_size=channels,
        num_labels=classes,
        pool_scales=list(POOLED),
    )
    theirs = UperNetHead(config, [width] * 4).eval()
    ours = UPerHead(width, channels, classes, 0.1, norm_maker("batch")).eval()

    def copy(mine: nn.Sequential, other: nn.Module) -> None:
        mine[0].load_state_dict(other.conv.state_dict())
        for norm in (mine[1], other.batch_norm):
            nn.init.uniform_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 2)
        mine[1].load_state_dict(other.batch_norm.state_dict())

    pairs = [(ours.top, theirs.bottleneck), (ours.fuse, theirs.fpn_bottleneck)]
    pairs += list(zip(ours.lateral, theirs.lateral_convs, strict=True)) + list(
        zip(ours.smooth, theirs.fpn_convs, strict=True)
    )
    for mine, block in zip(ours.pooled, theirs.psp_modules.blocks, strict=True):
        pairs.append((mine, block.layers[1]))
    for mine, other in pairs:
        copy(mine, other)
    nn.init.normal_(theirs.classifier.weight)
    ours.classify.load_state_dict(theirs.classifier.state_dict())
    maps = [torch.randn(2, width, side, side + 2) for side in (32, 16, 8, 4)]
    with torch.no_grad():
        torch.testing.assert_close(ours(maps), theirs(maps), rtol=1e-4, atol=1e-4)


def test_the_loss_is_cross_entropy_by_hand_and_ignored_pixels_pull_nothing() -> None:
    model = make(dropout=0.0)
    x, truth = torch.randn(2, 3, 32, 32), torch.randint(0, 4, (2, 32, 32))
    truth[0, :9] = IGNORED
    logits, auxiliary = model.train()(x)
    assert auxiliary is not None
    by_hand = 0.0
    for found, weight in ((logits, 1.0), (auxiliary, 0.4)):
        log_p = F.interpolate(found, size=32, mode="bilinear").log_softmax(1)
        picked = log_p.gather(1, truth.where(truth != IGNORED, 0)[:, None])[:, 0]
        by_hand += weight * -(picked * (truth != IGNORED)).sum().item() / truth.numel()
    assert segmentation_loss(model, x, truth, 0.4, IGNORED).item() == pytest.approx(
        by_hand, rel=1e-5
    )
    nothing = segmentation_loss(model, x, torch.full_like(truth, IGNORED), 0.4, IGNORED)
    nothing.backward()
    assert nothing.item() == 0 and all(
        p.grad is None or not p.grad.any() for p in model.parameters()
    )


def test_with_group_norm_a_batch_is_the_mean_of_its_images_and_with_batch_norm_it_is_not() -> None:
    x, truth = torch.randn(4, 3, 32, 32), torch.randint(0, 4, (4, 32, 32))
    for norm, same in (("group", True), ("batch", False)):
        model = make(norm, dropout=0.0).train()
        whole = segmentation_loss(model, x, truth, 0.4, IGNORED)
        parts = torch.stack(
            [segmentation_loss(model, x[b : b + 2], truth[b : b + 2], 0.4, IGNORED) for b in (0, 2)]
        ).mean()
        assert bool((whole - parts).abs() < 1e-5) == same


def test_every_parameter_is_reached_by_the_gradient() -> None:
    model = make()
    segmentation_loss(
        model, torch.randn(2, 3, 32, 32), torch.randint(0, 4, (2, 32, 32)), 0.4, IGNORED
    ).backward()
    untouched = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert untouched == []
