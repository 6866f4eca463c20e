"""Convert uint8 pixels to model inputs.

Random crops and flips for training, a centre crop for everything else.

Every resize is antialiased and bicubic. A box drawn in the pixels of the image is cut out and
resized by torch on uint8 (``resized``), as torchvision's ``RandomResizedCrop`` does, faster than
Pillow (benchmarks/loader.py). A box between pixels (``data.resize``, centre crops) is one call of
Pillow's ``resize(box=...)`` (``cut``); at its edge the filter sees the pixels just outside, as if
the whole image had been resized and then cut.

Legend: B records, V views, C channels, H height, W width, N random numbers.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dpvision.config import DataConfig
from dpvision.data.decode import BadImage, decode, read_image
from dpvision.data.keys import StepKey
from dpvision.data.rgb import Window
from dpvision.devices import send

CROP_RATIO = (3 / 4, 4 / 3)
CROP_TRIES = 10
ENLARGEMENT = 1.25
"""Largest enlargement in ``own_size``: 28 px may become 32, 56 px may become 64."""
CROP_NUMBERS = 2 * CROP_TRIES + 2
"""Uniform numbers that one crop consumes: an area and a shape for each try, then a position."""

_STRIP = 50
"""Ratio of sides above which an image is a strip."""
Filter = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]
"""Pillow's filters, in the order of their numbers."""


@dataclass(frozen=True)
class LibraryResize:
    """How another library resizes an image for evaluation, before it cuts out the centre."""

    side: int
    """In pixels; at least the side of the centre."""
    keep_aspect: bool
    """Whether only the shorter side becomes ``side``; else the whole image becomes a square."""
    filter: Filter = "bicubic"

    def view(self, image: Image.Image, image_size: int) -> np.ndarray:
        """Return the centre of an RGB image resized as the library does: to whole pixels, rounded
        down; uint8 (image_size, image_size, 3).

        Two steps, because one resampling of the centre alone rounds some pixels the other way; but
        one for a strip so long that the whole of it would not fit into memory.
        """
        short, how = min(image.size), Image.Resampling[self.filter.upper()]
        w, h = (int(self.side * n / short) if self.keep_aspect else self.side for n in image.size)
        left, top = (w - image_size) // 2, (h - image_size) // 2
        right, bottom = left + image_size, top + image_size
        if max(w, h) > _STRIP * min(w, h):
            x, y = image.width / w, image.height / h
            box = (left * x, top * y, right * x, bottom * y)
            return np.asarray(image.resize((image_size, image_size), how, box=box))
        return np.asarray(image.resize((w, h), how))[top:bottom, left:right]


@dataclass(frozen=True)
class LibraryData(DataConfig):
    """Preprocessing of a published encoder as its library does it. Frozen encoders have it; the
    config of a run cannot.
    """

    library: LibraryResize = field(kw_only=True)


def crop_box(
    height: int,
    width: int,
    uniform_N: Sequence[float],
    scale: tuple[float, float],
    ratio: tuple[float, float] = CROP_RATIO,
) -> tuple[int, int, int, int]:
    """Box (left, top, right, bottom) of a random resized crop, in pixels.

    torchvision's ``RandomResizedCrop.get_params`` (area uniform in ``scale``, log-uniform
    ``ratio``, up to ten tries, then the largest centred box of an allowed ratio), with the random
    numbers as an argument.

    Args:
        height, width: size of the image.
        uniform_N: ``CROP_NUMBERS`` numbers in [0, 1).
        scale: range of the crop's area as a fraction of the image's.
        ratio: range of width / height.
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for t in range(CROP_TRIES):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * uniform_N[2 * t])
        shape = math.exp(low + (high - low) * uniform_N[2 * t + 1])
        w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < w <= width and 0 < h <= height:
            top = int(uniform_N[-2] * (height - h + 1))
            left = int(uniform_N[-1] * (width - w + 1))
            return left, top, left + w, top + h
    w, h = width, height
    if width / height < ratio[0]:
        h = round(width / ratio[0])
    elif width / height > ratio[1]:
        w = round(height * ratio[1])
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def cut(
    image: Image.Image, box: tuple[float, float, float, float], image_size: int, flip: bool = False
) -> np.ndarray:
    """Resize a box of an RGB image to a square; mirror it left to right if ``flip``.

    uint8 of shape (image_size, image_size, 3).
    """
    pixels = np.asarray(image.resize((image_size, image_size), Image.Resampling.BICUBIC, box=box))
    return pixels[:, ::-1] if flip else pixels


def resized(pixels_HWC: np.ndarray, box: tuple[int, int, int, int], image_size: int) -> np.ndarray:
    """Resize a box of uint8 pixels (H, W, 3) to a square, uint8 (image_size, image_size, 3).

    By torch's antialiased bicubic filter.

    One image at a time: torch then starts no threads of its own, and the pixels depend on nothing
    else.
    """
    left, top, right, bottom = box
    crop_1HWC = np.array(pixels_HWC[None, top:bottom, left:right], order="C")
    if crop_1HWC.shape[1:3] == (image_size, image_size):
        return crop_1HWC[0]
    x_1CHW = torch.from_numpy(crop_1HWC).permute(0, 3, 1, 2)  # channels last: torch copies nothing
    y_1CHW = torch.nn.functional.interpolate(
        x_1CHW, (image_size, image_size), mode="bicubic", antialias=True
    )
    return y_1CHW.numpy()[0].transpose(1, 2, 0)


def centre_box(width: int, height: int) -> tuple[float, float, float, float]:
    """The centred square over the shorter side.

    What a resize of that side and a centre crop keep.
    """
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def training_box(
    width: int, height: int, image_size: int, data: DataConfig, uniform_N: Sequence[float]
) -> tuple[float, float, float, float]:
    """Box (left, top, right, bottom) of a training view in pixels of the image.

    With ``data.resize`` the box is drawn, or centred, in a square of that side to which the whole
    image would be resized, and then mapped back to the image: one resampling instead of the two of
    papers that resize and then crop.

    Args:
        uniform_N: ``CROP_NUMBERS`` numbers in [0, 1), for crop="random".
    """
    if data.crop == "centre":
        return evaluation_box(width, height, image_size, data)
    if data.resize is None:
        return crop_box(height, width, uniform_N, data.crop_scale)
    left, top, right, bottom = crop_box(data.resize, data.resize, uniform_N, data.crop_scale)
    x, y = width / data.resize, height / data.resize
    return left * x, top * y, right * x, bottom * y


def training_view(
    pixels_HWC: np.ndarray, image_size: int, data: DataConfig, uniform_N: Sequence[float]
) -> np.ndarray:
    """``training_box`` of uint8 pixels (H, W, 3), resized to uint8 (image_size, image_size, 3)."""
    height, width = pixels_HWC.shape[:2]
    box = training_box(width, height, image_size, data, uniform_N)
    if data.crop == "centre" or data.resize is not None:
        return cut(Image.fromarray(pixels_HWC), box, image_size)
    left, top, right, bottom = map(int, box)
    return resized(pixels_HWC, (left, top, right, bottom), image_size)


def random_views(
    files: Sequence[bytes], record_id_B: np.ndarray, key: StepKey, data: DataConfig, image_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Draw a step's training views of image files.

    uint8 pixels (B, V, C, H, W), and bool (B,), False and zeros if a file does not decode.

    Crop (``training_box``, bicubic) and flip are drawn from ``key`` and the record's id in the
    streams "crop.V" and "flip.V".
    """
    views = range(data.views)
    crops = [key.uniform_numpy(record_id_B, f"crop.{v}", CROP_NUMBERS).tolist() for v in views]
    flips = [
        (
            key.uniform_numpy(record_id_B, f"flip.{v}", 1)[:, 0] < 0.5
            if data.horizontal_flip
            else [False] * len(files)
        )
        for v in views
    ]
    pixels = np.zeros((len(files), data.views, 3, image_size, image_size), dtype=np.uint8)
    valid = np.zeros(len(files), dtype=bool)
    for b, file in enumerate(files):
        try:
            image_HWC = decode(file)
        except BadImage:
            continue
        valid[b] = True
        for v in views:
            view_HWC = training_view(image_HWC, image_size, data, crops[v][b])
            # A flip costs nothing here, as the channels are parted anyway; mirroring interleaved
            # pixels takes as long as decoding.
            pixels[b, v] = (view_HWC[:, ::-1] if flips[v][b] else view_HWC).transpose(2, 0, 1)
    return pixels, valid


def decoded(files: Iterable[bytes]) -> Iterator[Image.Image | None]:
    """Yield each image file as RGB, or None if it does not decode."""
    for file in files:
        try:
            yield Image.fromarray(decode(file))
        except BadImage:
            yield None


def evaluation_box(
    width: int, height: int, image_size: int, data: DataConfig
) -> tuple[float, float, float, float]:
    """Return the box of an image for evaluation: the centred square over the shorter side.

    If ``data.resize`` is set, the whole image, or with crop="centre" the centre of side
    ``image_size`` of the resized square.
    """
    if data.resize is None:
        return centre_box(width, height)
    share = kept_share(image_size, data)
    left, top = width * (1 - share) / 2, height * (1 - share) / 2
    return left, top, width - left, height - top


def in_use(settings: Any) -> dict[str, Any]:
    """Return the settings of a DataConfig, or the fields of an encoder, that evaluation reads."""
    names = ("mean", "std", "own_sizes", "resize", "crop")
    return {name: getattr(settings, name) for name in names}


def kept_share(image_size: int, data: DataConfig) -> float:
    """Return the share of each side of a resized image that evaluation keeps."""
    if data.resize is None or data.crop != "centre":
        return 1.0
    return min(1.0, image_size / data.resize)


def normalise(
    pixels_HWC: np.ndarray, mean: Sequence[float], std: Sequence[float], out_CHW: np.ndarray
) -> None:
    """Write (pixels / 255 - mean) / std of uint8 (..., H, W, 3) into float32 (..., 3, H, W).

    One multiplication and one addition per value, in separate calls so that they are not fused: a
    record's bits do not depend on how many others are converted with it.
    """
    scale, shift = _scale_and_shift(mean, std)
    pixels_CHW = np.moveaxis(pixels_HWC, -1, -3)
    for i in np.ndindex(out_CHW.shape[:-3]):  # one image at a time stays in the cache
        x_CHW = out_CHW[i]
        np.copyto(x_CHW, pixels_CHW[i])
        np.multiply(x_CHW, scale, out=x_CHW)
        np.add(x_CHW, shift, out=x_CHW)


def normalise_tensor(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """``normalise`` of uint8 (..., 3, H, W) on the tensor's device.

    The same float32 numbers bit for bit.
    """
    scale, shift = (
        send(torch.from_numpy(constant), pixels.device) for constant in _scale_and_shift(mean, std)
    )
    return pixels.to(torch.float32, memory_format=torch.contiguous_format).mul_(scale).add_(shift)


def _scale_and_shift(mean: Sequence[float], std: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """1 / (255 std) and -mean / std, float32 (3, 1, 1)."""
    centre, spread = np.asarray(mean, dtype=np.float64), np.asarray(std, dtype=np.float64)
    return (1 / (255 * spread)).astype(np.float32)[:, None, None], (-centre / spread).astype(
        np.float32
    )[:, None, None]


def evaluation_view(
    image: Image.Image, image_size: int, data: DataConfig
) -> tuple[np.ndarray, int]:
    """``evaluation_box`` of an RGB image, uint8 (image_size, image_size, 3), and the side in px of
    the square that it fills; for ``LibraryData`` the library's view of the image.
    """
    side = own_size(*image.size, data.own_sizes) if data.own_sizes else image_size
    if isinstance(data, LibraryData):
        return data.library.view(image, image_size), image_size
    pixels = cut(image, evaluation_box(*image.size, side, data), side)
    margin = image_size - side
    return np.pad(pixels, ((0, margin), (0, margin), (0, 0))) if margin else pixels, side


def own_size(width: int, height: int, sizes: Sequence[int]) -> int:
    """The resolution at which an image is encoded.

    The largest of ``sizes`` (ascending) that enlarges its shorter side by at most a quarter, or the
    smallest. A function of this image alone.
    """
    return max(
        (size for size in sizes if size <= ENLARGEMENT * min(width, height)), default=sizes[0]
    )


def normalise_canvas(
    pixels_HWC: np.ndarray,
    side: int,
    mean: Sequence[float],
    std: Sequence[float],
    out_CHW: np.ndarray,
) -> None:
    """``normalise`` a uint8 image that fills the upper left ``side`` pixels of its canvas.

    The rest becomes NaN.
    """
    normalise(pixels_HWC, mean, std, out_CHW)
    out_CHW[:, side:], out_CHW[:, :, side:] = np.nan, np.nan


def blank_margin(x_BCHW: Tensor) -> Tensor:
    """Number of blank columns of each canvas, int64 (B,)."""
    return x_BCHW[:, 0, 0].isnan().sum(dim=1)


@dataclass(frozen=True)
class Preprocess:
    """The evaluation transform: ``evaluation_box`` resized to ``image_size``, normalised.

    Made by ``preprocess`` or ``preprocess_of``.

    With ``data.own_sizes`` the image keeps its own resolution, in the upper left corner of a canvas
    of ``image_size``.
    """

    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    data: DataConfig = field(default_factory=DataConfig)
    """Settings of resize and crop."""
    window: Window | None = None
    """Declared range of samples of more than 8 bits, of the store that a run was trained on."""

    def __call__(
        self, image: str | Path | bytes | Image.Image | np.ndarray, window: Window | None = None
    ) -> np.ndarray:
        """Transform an image to float32 x_CHW.

        The path, or the bytes, of a file give what training and evaluation see of it.

        Args:
            image: path, bytes, Pillow image, or uint8 RGB pixels (H, W, 3); see
                ``decode.read_image``. An array has no orientation, no transparency and no range of
                values other than 0 ... 255, so they must have been applied.
            window: the values that become black and white, for grey of more than 8 bits, as at the
                import (``--window``); if None, those declared for the images that the run was
                trained on.

        Raises:
            DataError: the image cannot be read, or an array of another type or shape.
        """
        image = Image.fromarray(read_image(image, self.window if window is None else window))
        pixels_HWC, side = evaluation_view(image, self.image_size, self.data)
        x_CHW = np.empty((3, self.image_size, self.image_size), dtype=np.float32)
        normalise_canvas(pixels_HWC, side, self.mean, self.std, x_CHW)
        return x_CHW


def preprocess(
    image_size: int, mean: Sequence[float], std: Sequence[float], own_sizes: tuple[int, ...] = ()
) -> Preprocess:
    """Make the evaluation transform of a model.

    Shorter side to ``image_size``, centre crop, normalised.
    """
    return Preprocess(image_size, tuple(mean), tuple(std), DataConfig(own_sizes=own_sizes))


def preprocess_of(image_size: int, data: DataConfig, window: Window | None = None) -> Preprocess:
    """Make the evaluation transform of a run, equal to that of ``loader.image_batches``."""
    return Preprocess(image_size, data.mean, data.std, data, window)
