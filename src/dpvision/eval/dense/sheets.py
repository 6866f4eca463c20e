"""Contact sheets: test images with truth and predictions.

Legend: H height, W width, K classes.
"""

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor, to_pil_image
from torchvision.utils import draw_bounding_boxes, draw_segmentation_masks

from dpvision.errors import DataError
from dpvision.eval.dense.coco_data import CocoImage, CocoSet, mask_tools
from dpvision.eval.dense.coco_scores import Found
from dpvision.eval.dense.semantic_data import IGNORED
from dpvision.files import replacing

# Of a sheet of detections: eight images, two across, each beside its predictions.
_SHOWN, _SIDE_PX, _BETWEEN_PX, _ACROSS = 8, 360, 6, 2
_COLOURS = ("#e6194b", "#3cb44b", "#4363d8", "#f58231", "#911eb4", "#008080", "#9a6324", "#808000")
# Of a sheet of segmentations.
_CELL_PX, _GAP_PX, _LINE_PX = 240, 8, 20
_COVER = 0.65
"""Opacity of the class colours."""
_GOLDEN = 0.61803398875
_MOST_NAMED = 24


def save_sheet(sheet: Image.Image, path: Path) -> None:
    """Write the sheet atomically. Raises DataError if the path cannot be written."""
    try:
        with replacing(path) as partial:
            sheet.save(partial, "PNG")
    except OSError as error:
        raise DataError(
            f"image: {path} ({error.strerror or error}); expected a writable path with free "
            "space. Choose another."
        ) from None


def shown_images(test: CocoSet) -> list[int]:
    """Return up to eight images with objects, evenly spread over the test set."""
    places = [i for i, image in enumerate(test.images) if image.learned]
    places = places or list(range(len(test.images)))
    return [places[round(k)] for k in np.linspace(0, len(places) - 1, min(_SHOWN, len(places)))]


def detection_sheet(
    test: CocoSet, found: Sequence[Found], *, threshold: float = 0.5
) -> Image.Image:
    """Draw the images of ``shown_images`` twice: truth on the left, ``found`` in them on the right.

    Predictions with a score below ``threshold`` are not drawn. Each class has a fixed colour;
    classes may share one.
    """
    chosen = shown_images(test)
    tiles = [
        tile
        for i, own in zip(chosen, found, strict=True)
        for tile in (_truth(test, test.images[i]), _answer(test, test.images[i], own, threshold))
    ]
    columns, step = 2 * min(_ACROSS, len(chosen)), _SIDE_PX + _BETWEEN_PX
    sheet = Image.new("RGB", (columns * step, -(-len(tiles) // columns) * step), "white")
    for k, tile in enumerate(tiles):
        sheet.paste(tile, (k % columns * step, k // columns * step))
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
    scale = _SIDE_PX / max(image.height, image.width)
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


@dataclass(frozen=True)
class SheetRow:
    """One test image."""

    pixels_HWC: np.ndarray
    """uint8."""
    truth_HW: np.ndarray
    """uint8 class numbers, ``IGNORED`` for pixels that do not count."""
    said: tuple[np.ndarray, ...]
    """Class numbers predicted by each encoder's network, uint8 (H, W)."""


def class_colours(num_classes: int) -> np.ndarray:
    """Return class colours, uint8 (K, 3): hues by the golden ratio, so that consecutive classes
    differ, in three shades.
    """
    shades = ((0.85, 0.95), (0.6, 0.75), (0.95, 0.6))
    rgb = [colorsys.hsv_to_rgb((k * _GOLDEN) % 1, *shades[k % 3]) for k in range(num_classes)]
    return np.round(255 * np.array(rgb)).astype(np.uint8)


def painted(pixels_HWC: np.ndarray, class_HW: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """Return the grey image under its class colours, uint8 (H, W, 3); pixels that do not count are
    black.
    """
    grey = pixels_HWC.mean(axis=-1, keepdims=True)
    counted = class_HW != IGNORED
    colour = colours[np.where(counted, class_HW, 0)]
    mixed = (1 - _COVER) * grey + _COVER * colour
    return np.where(counted[..., None], mixed, 0).round().astype(np.uint8)


def render_sheet(
    rows: Sequence[SheetRow], names: Sequence[str], encoders: Sequence[str]
) -> Image.Image:
    """Render the sheet: a row per image, columns for image, truth and encoders, and a legend of the
    classes, largest first.

    Args:
        names: names of the K classes.
        encoders: headings of the columns of ``SheetRow.said``.
    """
    colours, font = class_colours(len(names)), ImageFont.load_default(size=13)
    heads = ["image", "truth", *encoders]
    width = len(heads) * (_CELL_PX + _GAP_PX) + _GAP_PX
    heights = [
        max(1, round(_CELL_PX * row.truth_HW.shape[0] / row.truth_HW.shape[1])) for row in rows
    ]
    counts = sum(
        (
            np.bincount(part[part != IGNORED].ravel(), minlength=len(names))
            for row in rows
            for part in (row.truth_HW, *row.said)
        ),
        start=np.zeros(len(names), dtype=np.int64),
    )
    named = [int(k) for k in np.argsort(-counts, kind="stable")[:_MOST_NAMED] if counts[k]]
    columns = max(1, width // 190)
    legend = -(-len(named) // columns) * _LINE_PX
    made = Image.new(
        "RGB", (width, _LINE_PX + sum(h + _GAP_PX for h in heights) + legend + _GAP_PX), "white"
    )
    pen = ImageDraw.Draw(made)
    for i, head in enumerate(heads):
        pen.text(
            (_GAP_PX + i * (_CELL_PX + _GAP_PX), 3),
            _short(head, font, _CELL_PX),
            fill="black",
            font=font,
        )
    top = _LINE_PX
    for row, height in zip(rows, heights, strict=True):
        cells = [
            row.pixels_HWC,
            *(painted(row.pixels_HWC, part, colours) for part in (row.truth_HW, *row.said)),
        ]
        for i, cell in enumerate(cells):
            small = Image.fromarray(cell).resize(
                (_CELL_PX, height), Image.Resampling.BICUBIC if i == 0 else Image.Resampling.BOX
            )
            made.paste(small, (_GAP_PX + i * (_CELL_PX + _GAP_PX), top))
        top += height + _GAP_PX
    for n, k in enumerate(named):
        x, y = _GAP_PX + (n % columns) * 190, top + (n // columns) * _LINE_PX
        pen.rectangle((x, y + 3, x + 14, y + 16), fill=tuple(colours[k].tolist()))
        pen.text((x + 20, y + 2), _short(names[k], font, 160), fill="black", font=font)
    return made


def _short(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, most_px: int) -> str:
    while font.getlength(text) > most_px:
        text = text[:-2].rstrip() + "…"
    return text
