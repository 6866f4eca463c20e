"""Contact sheets of a curation: some records before and after each step.

Which are shown depends on the store's key and their names. They are private images.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from dpvision.strict_json import parse_json

EXAMPLES = 24
"""Records on the sheet of a step."""
_SIDE_PX, _STRIP_PX, _COLUMNS = 128, 14, 4


class Example(NamedTuple):
    """A record before and after a step: uint8 (H, W, 3), of any size."""

    before: np.ndarray
    after: np.ndarray | None
    """None if it is left out."""


class Examples:
    """The ``EXAMPLES`` records of each step that come first in an order."""

    def __init__(self) -> None:
        self._of: dict[str, dict[int, tuple[np.ndarray, str]]] = {}
        """By step and order: two thumbnails, (2, side, side, 3), and what is said below."""

    def wants(self, step: str, order: int) -> bool:
        """Whether a record with this place in the order would be kept."""
        kept = self._of.get(step, {})
        return len(kept) < EXAMPLES or order < max(kept)

    def offer(self, step: str, order: int, example: Example, words: str) -> None:
        """Keep a record if it comes early in the order."""
        if self.wants(step, order):
            after = example.before if example.after is None else example.after
            pair = np.stack([thumbnail(example.before), thumbnail(after)])
            if example.after is None:
                pair[1] = 255
            self._keep(step, order, pair, words)

    def _keep(self, step: str, order: int, pair: np.ndarray, words: str) -> None:
        kept = self._of.setdefault(step, {})
        kept[order] = (pair, words)
        if len(kept) > EXAMPLES:
            del kept[max(kept)]

    def write(self, folder: Path) -> None:
        """Write ``examples`` and ``examples.json``, which ``read`` reads; nothing if empty."""
        listed = [
            (step, order, words)
            for step, kept in self._of.items()
            for order, (_, words) in kept.items()
        ]
        if listed:
            pairs = [pair for kept in self._of.values() for pair, _ in kept.values()]
            (folder / "examples").write_bytes(np.stack(pairs).tobytes())
            (folder / "examples.json").write_text(json.dumps(listed))

    def read(self, folder: Path) -> None:
        """Add what ``write`` wrote into a folder, if it did."""
        if not (folder / "examples.json").exists():
            return
        listed = parse_json((folder / "examples.json").read_text())
        shape = (len(listed), 2, _SIDE_PX, _SIDE_PX, 3)
        pairs = np.fromfile(folder / "examples", dtype=np.uint8).reshape(shape)
        for (step, order, words), pair in zip(listed, pairs, strict=True):
            if self.wants(step, order):
                self._keep(step, order, pair, words)

    def sheets(self) -> Iterable[tuple[str, Image.Image]]:
        """Yield each step with its sheet: pairs in order, before on the left, after on the right
        and empty where the record is left out, with the reason below.
        """
        for step, kept in self._of.items():
            rows = -(-len(kept) // _COLUMNS)
            wide, high = 2 * _SIDE_PX + 8, _SIDE_PX + _STRIP_PX
            sheet = Image.new("RGB", (_COLUMNS * wide, rows * high), "white")
            draw = ImageDraw.Draw(sheet)
            for place, order in enumerate(sorted(kept)):
                pair, words = kept[order]
                left, top = place % _COLUMNS * wide, place // _COLUMNS * high
                for side, pixels in enumerate(pair):
                    sheet.paste(Image.fromarray(pixels), (left + side * (_SIDE_PX + 2), top))
                draw.text((left + 2, top + _SIDE_PX), words[:40], fill="black")
            yield step, sheet


def thumbnail(pixels_HWC: np.ndarray) -> np.ndarray:
    """Return the image within a white square, uint8 (side, side, 3)."""
    image = Image.fromarray(pixels_HWC)
    image.thumbnail((_SIDE_PX, _SIDE_PX))
    square = Image.new("RGB", (_SIDE_PX, _SIDE_PX), "white")
    square.paste(image, ((_SIDE_PX - image.width) // 2, (_SIDE_PX - image.height) // 2))
    return np.asarray(square)
