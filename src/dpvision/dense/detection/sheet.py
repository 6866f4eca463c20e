"""A contact sheet of detections: test images with true and predicted objects."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor, to_pil_image
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from dpvision.dense.detection.coco_data import CocoImage, CocoSet, mask_tools
from dpvision.dense.detection.coco_scores import Found

_COLOURS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#808000")
_SIDE, _GAP, _ACROSS = 360, 6, 2


def detection_sheet(
    test: CocoSet, found: Sequence[Found], *, most: int = 8, threshold: float = 0.5
) -> Image.Image:
    """Draw up to ``most`` images with objects, spread over the test, each twice: truth on the left,
    predictions on the right.

    Predictions with a score below ``threshold`` are not drawn. Each class has a fixed colour;
    classes may share one.
    """
    places = [i for i, image in enumerate(test.images) if image.learned] or list(
        range(len(test.images))
    )
    chosen = [places[round(k)] for k in np.linspace(0, len(places) - 1, min(most, len(places)))]
    tiles = [
        tile
        for i in chosen
        for tile in (
            _truth(test, test.images[i]),
            _answer(test, test.images[i], found[i], threshold),
        )
    ]
    columns = 2 * min(_ACROSS, len(chosen))
    sheet = Image.new(
        "RGB", (columns * (_SIDE + _GAP), -(-len(tiles) // columns) * (_SIDE + _GAP)), "white"
    )
    for k, tile in enumerate(tiles):
        sheet.paste(tile, (k % columns * (_SIDE + _GAP), k // columns * (_SIDE + _GAP)))
    return sheet


def _truth(test: CocoSet, image: CocoImage) -> Image.Image:
    things = image.learned
    masks = [image.mask(thing) for thing in things]
    empty = np.zeros((image.height, image.width), dtype=np.uint8)
    names = [test.classes[thing.label][1] for thing in things]
    return _drawn(
        image,
        np.array([thing.box for thing in things]),
        [empty if m is None else m for m in masks],
        [t.label for t in things],
        names,
    )


def _answer(test: CocoSet, image: CocoImage, found: Found, threshold: float) -> Image.Image:
    keep = np.flatnonzero(found.score_N >= threshold)
    masks = [mask_tools().decode(found.runs[n]) for n in keep]
    labels = [int(found.label_N[n]) for n in keep]
    names = [
        f"{test.classes[label][1]} {found.score_N[n]:.2f}"
        for label, n in zip(labels, keep, strict=True)
    ]
    return _drawn(image, found.box_N4[keep], masks, labels, names)


def _drawn(
    image: CocoImage,
    box_N4: np.ndarray,
    masks: list[np.ndarray],
    labels: list[int],
    names: list[str],
) -> Image.Image:
    scale = _SIDE / max(image.height, image.width)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    x_CHW: Tensor = pil_to_tensor(
        Image.fromarray(image.read()).resize(size, Image.Resampling.BILINEAR)
    )
    if labels:
        colours = [_COLOURS[label % len(_COLOURS)] for label in labels]
        resized = [np.asarray(Image.fromarray(mask * 255).resize(size)) > 127 for mask in masks]
        x_CHW = draw_segmentation_masks(
            x_CHW, torch.from_numpy(np.stack(resized)), alpha=0.4, colors=colours
        )
        x_CHW = draw_bounding_boxes(
            x_CHW,
            torch.from_numpy(box_N4 * scale),
            labels=names,
            colors=colours,
            width=2,
            label_colors="white",
            label_background_colors=colours,
            fill_labels=True,
        )
    return to_pil_image(x_CHW)
