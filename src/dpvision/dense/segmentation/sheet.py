"""A contact sheet of segmentation: each test image, its truth, and every network's prediction, in
the same colours.

Legend: H height, W width, K classes.
"""

import colorsys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from dpvision.dense.segmentation.semantic_data import IGNORED

_CELL_PX = 240
_GAP_PX = 8
_LINE_PX = 20
_COVER = 0.65
"""Opacity of the class colours."""
_GOLDEN = 0.61803398875
_MOST_NAMED = 24


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
