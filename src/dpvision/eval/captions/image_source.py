"""Image sources of the tests: rows of a store, files with boxes, or scenes by number, all read as
the same batches.

Legend: B images of a batch, C channels, H height, W width.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dpvision.config import DataConfig
from dpvision.data.decode import BadImage, decode
from dpvision.data.ordered import ordered_map
from dpvision.data.store import Store
from dpvision.data.transform import centre_box, cut, evaluation_view, normalise
from dpvision.errors import DataError
from dpvision.eval.benchmark_files import Box
from dpvision.eval.captions.settings import Square
from dpvision.eval.score import Visibility
from dpvision.synthetic.scenes import make_scene


class ImageSource(Protocol):
    """Images by their position, 0 ... len - 1."""

    @property
    def visibility(self) -> Visibility:
        """ "private" unless all of its images may be shown."""

    @property
    def test_data(self) -> str:
        """Name in files of scores."""

    def __len__(self) -> int: ...

    def read(self, place: int) -> Image.Image | None:
        """Return one upright RGB image, cropped to its box, or None if it does not decode."""

    def photograph(self, place: int) -> Hashable:
        """Return which photograph a place shows, the same for all boxes of one."""


@dataclass(frozen=True)
class StoreImages:
    """Rows of a store."""

    store: Store
    row_N: np.ndarray
    """int64."""

    @property
    def visibility(self) -> Visibility:
        return self.store.results_visibility

    @property
    def test_data(self) -> str:
        return self.store.path.name

    def __len__(self) -> int:
        return len(self.row_N)

    def read(self, place: int) -> Image.Image | None:
        return _opened(self.store.read(int(self.row_N[place])))

    def photograph(self, place: int) -> Hashable:
        return int(self.row_N[place])


@dataclass(frozen=True)
class FileImages:
    """Files, cropped to their boxes if given."""

    paths: tuple[Path, ...]
    boxes: tuple[Box | None, ...]
    visibility: Visibility
    test_data: str

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, place: int) -> Image.Image | None:
        try:
            image = _opened(self.paths[place].read_bytes())
        except OSError as error:
            raise DataError(
                f"images: {self.paths[place]}: {error.strerror}; expected a readable file. "
                "Restore it."
            ) from None
        box = self.boxes[place]
        return image if image is None or box is None else _cut_to(image, box)

    def photograph(self, place: int) -> Hashable:
        return self.paths[place]


@dataclass(frozen=True)
class SceneImages:
    """Captioned scenes by number."""

    numbers: Sequence[int]
    size_px: int = 48
    visibility: Visibility = "public"

    @property
    def test_data(self) -> str:
        first, last = min(self.numbers, default=0), max(self.numbers, default=0)
        return f"scenes {first} to {last}, {self.size_px} px"

    def __len__(self) -> int:
        return len(self.numbers)

    def read(self, place: int) -> Image.Image | None:
        return Image.fromarray(make_scene(self.numbers[place], self.size_px).image)

    def photograph(self, place: int) -> Hashable:
        return self.numbers[place]


def image_batches(
    source: ImageSource,
    data: DataConfig,
    image_size: int,
    fit: Square,
    *,
    batch_size: int = 32,
    workers: int = 2,
) -> Iterator[tuple[Tensor, np.ndarray]]:
    """Yield batches of images in order, without those that do not decode.

    Args:
        data: gives the normalisation.
        batch_size: at least 1.
        workers: threads that read, at least 1.

    Yields:
        x_BCHW float32, normalised; place_B int64.
    """
    starts = range(0, len(source), batch_size)
    read = _reader(source, data, image_size, fit)
    places = (np.arange(s, min(s + batch_size, len(source))) for s in starts)
    for place, x_BCHW, valid in ordered_map(read, places, workers=workers, ahead=workers):
        if valid.any():
            yield torch.from_numpy(x_BCHW[valid]), place[valid]


def _reader(
    source: ImageSource, data: DataConfig, image_size: int, fit: Square
) -> Callable[[np.ndarray], tuple[np.ndarray, ...]]:
    def read(place: np.ndarray) -> tuple[np.ndarray, ...]:
        pixels = np.zeros((len(place), image_size, image_size, 3), dtype=np.uint8)
        valid = np.zeros(len(place), dtype=bool)
        for b, p in enumerate(place.tolist()):
            image = source.read(p)
            if image is not None:
                valid[b] = True
                if fit == "own preprocessing":
                    pixels[b] = evaluation_view(image, image_size, data)[0]
                    continue
                whole = (0.0, 0.0, float(image.width), float(image.height))
                pixels[b] = cut(
                    image, whole if fit == "squash" else centre_box(*image.size), image_size
                )
        x_BCHW = np.empty((len(place), 3, image_size, image_size), dtype=np.float32)
        normalise(pixels, data.mean, data.std, x_BCHW)
        return place, x_BCHW, valid

    return read


def _opened(data: bytes) -> Image.Image | None:
    try:
        return Image.fromarray(decode(data))
    except BadImage:
        return None


def _cut_to(image: Image.Image, box: Box) -> Image.Image | None:
    """Return the image cropped to the box, or None if they do not overlap."""
    left, top, right, bottom = (
        max(0.0, box[0]),
        max(0.0, box[1]),
        min(image.width, box[2]),
        min(image.height, box[3]),
    )
    if not (round(right) > round(left) and round(bottom) > round(top)):
        return None
    return image.crop((round(left), round(top), round(right), round(bottom)))
