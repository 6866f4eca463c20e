"""Training views: image and mask stay together under every change, and the draws follow the image
and the epoch alone.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torchvision.transforms import v2

from dpvision.data.keys import StepKey
from dpvision.eval.dense import semantic_augment
from dpvision.eval.dense.semantic_augment import View, distorted, resized
from dpvision.eval.dense.semantic_data import IGNORED, Labelled
from dpvision.eval.dense.settings import SegmentationSettings

from .semantic_shapes import draw

PLAIN = SegmentationSettings(
    crop_size=32, scale=(0.5, 2.0), flip=False, photometric=False, max_class_share=1.0
)


def draw_view(labelled: Labelled, how: SegmentationSettings, key: StepKey, number: int) -> View:
    moments = ((0.5,) * 3, (0.25,) * 3)
    return semantic_augment.draw_view(labelled, how, moments, key, number)


def coded(height: int = 48, width: int = 64) -> Labelled:
    """An image of blocks of 16 px whose colours say their classes: class k has red 40 k."""
    rng = np.random.default_rng(0)
    blocks = np.kron(
        rng.integers(0, 6, (height // 16, width // 16)), np.ones((16, 16), int)
    ).astype(np.uint8)
    return Labelled(
        np.stack([40 * blocks, 0 * blocks, 255 - 40 * blocks], axis=-1).astype(np.uint8), blocks
    )


def test_image_and_mask_are_cut_resized_and_mirrored_together() -> None:
    labelled, how = coded(), replace(PLAIN, flip=True)
    for number in range(30):
        x_CHW, class_HW = draw_view(labelled, how, StepKey(0, 0), number)
        counted = class_HW != IGNORED
        around = F.max_pool2d(torch.stack([class_HW, -class_HW])[None].float(), 5, 1, 2)[0]
        inside = F.pad(
            (counted & (around[0] == -around[1]))[2:-2, 2:-2], (2, 2, 2, 2)
        )  # edges, also just outside, blur the image
        red = (x_CHW[0] * 0.25 + 0.5) * 255
        assert inside.any() and ((red - 40 * class_HW).abs() < 2)[inside].all()
        assert counted.any() and (x_CHW[:, ~counted] == 0).all(), (
            "what is beyond the image is grey and does not count"
        )


def test_without_resizing_a_view_is_a_part_of_the_image() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (32, 80, 3), dtype=np.uint8)
    labelled, places = Labelled(pixels, (pixels[..., 0] // 64).astype(np.uint8)), set()
    for number in range(60):
        x_CHW, class_HW = draw_view(
            labelled, replace(PLAIN, scale=(1.0, 1.0)), StepKey(0, 0), number
        )
        shown = ((x_CHW * 0.25 + 0.5) * 255).round().numpy().astype(np.uint8).transpose(1, 2, 0)
        found = [left for left in range(49) if (pixels[:, left : left + 32] == shown).all()]
        assert (
            len(found) == 1
            and (labelled.class_HW[:, found[0] : found[0] + 32] == class_HW.numpy()).all()
        )
        places.add(found[0])
    assert min(places) < 8 and max(places) > 40


def test_a_mirrored_image_has_the_mirrored_mask() -> None:
    labelled, key = coded(), StepKey(3, 1)
    mirrored = 0
    for number in range(20):
        plain, flipped = (
            draw_view(labelled, replace(PLAIN, scale=(1.0, 2.0), flip=flip), key, number)
            for flip in (False, True)
        )
        turned = torch.equal(flipped.x_CHW, plain.x_CHW.flip(-1)) and torch.equal(
            flipped.class_HW, plain.class_HW.flip(-1)
        )
        assert turned or (
            torch.equal(flipped.x_CHW, plain.x_CHW)
            and torch.equal(flipped.class_HW, plain.class_HW)
        )
        mirrored += turned
    assert 4 <= mirrored <= 16


def test_views_follow_seed_epoch_and_number_alone() -> None:
    labelled, how = coded(), replace(PLAIN, flip=True, photometric=True)
    one = draw_view(labelled, how, StepKey(0, 0), 3)
    torch.manual_seed(9)
    np.random.seed(9)
    again = draw_view(labelled, how, StepKey(0, 0), 3)
    assert torch.equal(one.x_CHW, again.x_CHW) and torch.equal(one.class_HW, again.class_HW)
    for key, number in ((StepKey(0, 1), 3), (StepKey(1, 0), 3), (StepKey(0, 0), 4)):
        assert not torch.equal(one.x_CHW, draw_view(labelled, how, key, number).x_CHW)


def test_sizes_keep_the_shape_and_the_longer_side_is_bounded() -> None:
    assert resized(683, 512, 512) == (683, 512) and resized(1366, 1024, 512) == (683, 512)
    assert resized(300, 600, 512) == (512, 1024)
    assert resized(100, 1000, 512) == (205, 2048), (
        "2048 x 512 at most, as ADE20K's usual settings have it"
    )
    assert resized(1, 5000, 8) == (1, 32)


def test_scales_are_uniform_over_their_range() -> None:
    labelled = coded(64, 64)
    shares = [
        (
            draw_view(labelled, replace(PLAIN, scale=(0.25, 1.0)), StepKey(0, e), 0).class_HW
            != IGNORED
        )
        .float()
        .mean()
        for e in range(300)
    ]
    side = torch.stack(shares).sqrt()
    assert 0.24 < side.min() < 0.28 and 0.95 < side.max() <= 1
    assert side.mean().item() == pytest.approx(0.625, abs=0.05)


def test_crops_of_nearly_one_class_are_drawn_again_nine_times() -> None:
    ids = np.zeros((64, 64), np.uint8)
    ids[:32, :32] = 1
    labelled = Labelled(np.zeros((64, 64, 3), np.uint8), ids)
    how = replace(PLAIN, scale=(2.0, 2.0))

    def nearly_one(view: np.ndarray) -> bool:
        return max((view == 0).mean(), (view == 1).mean()) > 0.75

    def share(most: float) -> float:
        views = [
            draw_view(
                labelled, replace(how, max_class_share=most), StepKey(0, e), 0
            ).class_HW.numpy()
            for e in range(1000)
        ]
        return float(np.mean([nearly_one(view) for view in views]))

    every = np.mean(
        [
            nearly_one(ids[top : top + 32, left : left + 32])
            for top in range(33)
            for left in range(33)
        ]
    )
    assert (
        share(1.0) == pytest.approx(every, abs=0.05)
        and every > 0.3
        and share(0.75) == pytest.approx(every**10, abs=0.02)
    )


def test_colours_are_changed_as_torchvision_changes_them() -> None:
    pixels = draw(0)[0]
    numbers = np.array([0.1, 0.7, 0.1, 0.2, 0.1, 0.9, 0.1, 0.8, 0.1])
    x = torch.from_numpy(pixels).permute(2, 0, 1)
    f = v2.functional
    expected = f.adjust_brightness(x, 0.875 + 0.25 * 0.7)
    expected = f.adjust_contrast(expected, 0.5 + 0.2)
    expected = f.adjust_saturation(expected, 0.5 + 0.9)
    expected = f.adjust_hue(expected, -0.05 + 0.1 * 0.8)
    np.testing.assert_array_equal(distorted(pixels, numbers), expected.permute(1, 2, 0).numpy())
    np.testing.assert_array_equal(distorted(pixels, np.full(9, 0.5)), pixels)
