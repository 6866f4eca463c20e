"""Fit images and their objects into squares of a fixed side: large-scale jitter in training, the
longer side fitted in the test.

Large-scale jitter (Ghiasi et al. 2021; ViTDet): the image, randomly mirrored, is resized to fit
into a square of side u S, with u uniform in ``jitter``. A larger image is randomly cropped to S; a
smaller one is placed at the top left and padded with the mean colour.

Legend: N objects, C channels, S side of the square, H height, W width (px).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dpvision.data.keys import StepKey
from dpvision.eval.dense.coco_data import CocoImage

Colour = tuple[float, float, float]


@dataclass(frozen=True)
class Placement:
    """Placement of a resized image in its square."""

    height: int
    """Of the resized image, px."""
    width: int
    top: int
    """First row of the resized image that is kept."""
    left: int
    mirrored: bool
    """Whether left and right are swapped, after the crop."""


class DetectionExample(NamedTuple):
    """One image for the detector, with its objects."""

    x_CSS: Tensor
    """float32 in [0, 1], not yet normalised."""
    box_N4: Tensor
    """float32: left, top, right, bottom in px of the square."""
    label_N: Tensor
    """int64, the class counted from 1: 0 is the background."""
    mask_NSS: Tensor
    """uint8; zeros for objects that have only a box."""
    has_mask_N: Tensor
    """bool."""


def fitted(height: int, width: int, side: int) -> Placement:
    """Place the whole image with its longer side equal to the square's."""
    scale = side / max(height, width)
    return Placement(max(1, round(height * scale)), max(1, round(width * scale)), 0, 0, False)


def jittered(image: CocoImage, key: StepKey, side: int, jitter: tuple[float, float]) -> Placement:
    """Place the image by large-scale jitter, a function of ``key`` and the image's id alone."""
    scale_u, top_u, left_u, flip_u = key.uniform_numpy(
        np.array([image.id]), "large-scale jitter", 4
    )[0].tolist()
    target = max(1.0, side * (jitter[0] + (jitter[1] - jitter[0]) * scale_u))
    scale = target / max(image.height, image.width)
    height, width = max(1, round(image.height * scale)), max(1, round(image.width * scale))
    top, left = (
        int(u * (max(0, full - side) + 1)) for u, full in ((top_u, height), (left_u, width))
    )
    return Placement(height, width, top, left, flip_u < 0.5)


def square(pixels_HWC: np.ndarray, place: Placement, side: int, mean: Colour) -> Tensor:
    """Return the placed image, float32 (3, S, S) in [0, 1], padded with ``mean``."""
    x_CSS = torch.tensor(mean, dtype=torch.float32)[:, None, None].expand(3, side, side).clone()
    part = _resized(Image.fromarray(pixels_HWC), place, side)
    x_CSS[:, : part.shape[0], : part.shape[1]] = (
        torch.from_numpy(part).permute(2, 0, 1).float() / 255
    )
    return x_CSS


def example(
    image: CocoImage,
    pixels_HWC: np.ndarray,
    place: Placement,
    side: int,
    mean: tuple[float, float, float],
) -> DetectionExample:
    """Return the placed image and its objects, without crowds. Boxes of objects with masks are
    recomputed from the cropped mask.

    Objects with less than a pixel left in either direction are dropped.
    """
    boxes, labels, masks, has_mask = [], [], [], []
    for thing in image.learned:
        mask, mask_SS = image.mask(thing), np.zeros((side, side), dtype=np.uint8)
        if mask is None:
            box = _placed_box(thing.box, image, place, side)
        else:
            part = _resized(Image.fromarray(mask * 255), place, side) > 127
            mask_SS[: part.shape[0], : part.shape[1]] = part
            box = _box_of(part)
        if box is not None:
            boxes.append(box)
            labels.append(thing.label + 1)
            masks.append(mask_SS)
            has_mask.append(mask is not None)
    return DetectionExample(
        square(pixels_HWC, place, side, mean),
        torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        torch.tensor(labels, dtype=torch.int64),
        torch.from_numpy(np.stack(masks))
        if masks
        else torch.zeros(0, side, side, dtype=torch.uint8),
        torch.tensor(has_mask, dtype=torch.bool),
    )


def _kept(place: Placement, side: int) -> tuple[int, int]:
    return min(place.height - place.top, side), min(place.width - place.left, side)


def _resized(image: Image.Image, place: Placement, side: int) -> np.ndarray:
    """Return the kept part of the image, cropped and resized in one step: uint8 (H, W) or (H, W,
    C).
    """
    (rows, columns), down, across = (
        _kept(place, side),
        image.height / place.height,
        image.width / place.width,
    )
    box = (
        place.left * across,
        place.top * down,
        (place.left + columns) * across,
        (place.top + rows) * down,
    )
    # Rounding may move the last edge slightly outside, which Pillow refuses.
    box = (box[0], box[1], min(box[2], float(image.width)), min(box[3], float(image.height)))
    part = np.array(image.resize((columns, rows), Image.Resampling.BILINEAR, box=box))
    return np.ascontiguousarray(part[:, ::-1]) if place.mirrored else part


def _placed_box(
    box: tuple[float, float, float, float], image: CocoImage, place: Placement, side: int
) -> list[float] | None:
    (rows, columns), down, across = (
        _kept(place, side),
        place.height / image.height,
        place.width / image.width,
    )
    left, right = (min(max(x * across - place.left, 0.0), columns) for x in (box[0], box[2]))
    top, bottom = (min(max(y * down - place.top, 0.0), rows) for y in (box[1], box[3]))
    if place.mirrored:
        left, right = columns - right, columns - left
    return [left, top, right, bottom] if right - left >= 1 and bottom - top >= 1 else None


def _box_of(mask_HW: np.ndarray) -> list[float] | None:
    rows, columns = np.flatnonzero(mask_HW.any(axis=1)), np.flatnonzero(mask_HW.any(axis=0))
    if not len(rows):
        return None
    return [float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)]
