"""Squares for the detector: images, boxes and masks move together, and what is random follows the
key and the image alone.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from dpvision.data.keys import StepKey
from dpvision.eval.dense.coco_data import CocoImage, load_coco
from dpvision.eval.dense.crops import DetectionExample, Placement, example, fitted, jittered

from .coco_shapes import COLOURS, changed, write_shapes

pytest.importorskip("faster_coco_eval", reason="needs the extra `dense`")
MEAN = (0.5, 0.4, 0.3)


def shapes(tmp_path: Path, num: int = 6, *, masks: bool = True) -> tuple[CocoImage, ...]:
    file, images = write_shapes(tmp_path, num)

    def change(given: dict) -> None:
        for mark in given["annotations"]:
            if not masks:
                del mark["segmentation"]

    return load_coco(changed(file, change), images).images


def make(image: CocoImage, place: Placement, side: int = 40) -> DetectionExample:
    return example(image, image.read(), place, side, MEAN)


@pytest.mark.parametrize("masks", [True, False])
def test_boxes_and_masks_lie_on_the_colours_wherever_the_image_is_put(
    tmp_path: Path, masks: bool
) -> None:
    """The class of each object is its colour: the pixels of each box, moved with the image, show
    it.
    """
    seen, cut = 0, 0
    for epoch in range(12):
        for image in shapes(tmp_path / f"{epoch}{masks}", 4, masks=masks):
            place = jittered(image, StepKey(0, epoch), 40, (0.5, 2.0))
            made = make(image, place)
            cut += len(made.label_N) < len(image.objects)
            for box, label, mask, has in zip(
                made.box_N4, made.label_N, made.mask_NSS, made.has_mask_N, strict=True
            ):
                left, top, right, bottom = box.tolist()
                assert 0 <= left < right <= min(40, place.width) and 0 <= top < bottom <= min(
                    40, place.height
                )
                assert bool(has) is masks and bool(mask.any()) is masks
                # One pixel at each edge mixes with what is beside it.
                inner = made.x_CSS[
                    :, round(top) + 1 : round(bottom) - 1, round(left) + 1 : round(right) - 1
                ]
                if inner.numel():
                    expected = torch.tensor(COLOURS[int(label) - 1])[:, None, None] / 255
                    torch.testing.assert_close(inner, expected.expand_as(inner), rtol=0, atol=0.02)
                    seen += 1
                if masks:
                    rows, columns = np.nonzero(mask.numpy())
                    assert [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1] == [
                        left,
                        top,
                        right,
                        bottom,
                    ]
    assert seen > 40 and cut > 3


def test_a_mirrored_image_is_the_mirrored_example(tmp_path: Path) -> None:
    image = shapes(tmp_path)[0]
    place = Placement(60, 80, 7, 11, mirrored=False)
    plain, mirrored = make(image, place), make(image, Placement(60, 80, 7, 11, mirrored=True))
    torch.testing.assert_close(mirrored.x_CSS, plain.x_CSS.flip(-1), rtol=0, atol=0)
    torch.testing.assert_close(mirrored.mask_NSS, plain.mask_NSS.flip(-1), rtol=0, atol=0)
    expected = torch.stack(
        [40 - plain.box_N4[:, 2], plain.box_N4[:, 1], 40 - plain.box_N4[:, 0], plain.box_N4[:, 3]],
        dim=1,
    )
    torch.testing.assert_close(mirrored.box_N4, expected, rtol=0, atol=0)
    assert torch.equal(mirrored.label_N, plain.label_N) and len(plain.label_N)


def test_a_cut_is_a_part_of_the_whole(tmp_path: Path) -> None:
    """Cut and resized in one go, it equals Pillow's whole resized image cut afterwards, up to
    rounding at the edges of the cut.
    """
    image = shapes(tmp_path)[1]
    place = Placement(96, 128, 20, 50, mirrored=False)
    whole = np.asarray(Image.fromarray(image.read()).resize((128, 96), Image.Resampling.BILINEAR))
    found = make(image, place).x_CSS.permute(1, 2, 0).numpy() * 255
    assert np.abs(found - whole[20:60, 50:90])[1:-1, 1:-1].max() <= 1.01


def test_what_is_smaller_is_padded_with_the_mean_and_boxes_without_masks_scale(
    tmp_path: Path,
) -> None:
    image = shapes(tmp_path, masks=False)[0]
    made = make(image, fitted(image.height, image.width, 40))
    torch.testing.assert_close(
        made.x_CSS[:, 30:], torch.tensor(MEAN)[:, None, None].expand(3, 10, 40)
    )
    assert made.x_CSS[:, :30].std() > 0.05
    expected = torch.tensor([thing.box for thing in image.objects]) * 40 / 64
    torch.testing.assert_close(made.box_N4, expected, rtol=0, atol=1e-4)


def test_jitter_follows_the_key_and_the_image_alone_and_covers_its_range(tmp_path: Path) -> None:
    first, second, *_ = shapes(tmp_path)
    assert jittered(first, StepKey(1, 2), 40, (0.1, 2.0)) == jittered(
        first, StepKey(1, 2), 40, (0.1, 2.0)
    )
    assert jittered(first, StepKey(1, 2), 40, (0.1, 2.0)) != jittered(
        second, StepKey(1, 2), 40, (0.1, 2.0)
    )
    places = [jittered(first, StepKey(0, epoch), 40, (0.1, 2.0)) for epoch in range(2000)]
    width = np.array([place.width for place in places])
    assert width.min() <= 6 and width.max() >= 78 and abs(width.mean() - 42) < 2, (
        "uniform from 4 to 80 px"
    )
    assert 0.45 < np.mean([place.mirrored for place in places]) < 0.55
    left = np.array([place.left for place in places if place.width == 80 or place.width == 79])
    assert left.min() <= 3 and left.max() >= 36
    assert all(
        0 <= p.left <= max(0, p.width - 40) and 0 <= p.top <= max(0, p.height - 40) for p in places
    )
