"""Training views for segmentation: resize, crop, flip and colour distortion, applied to image and
mask by (seed, epoch, image) alone.

Legend: H height, W width (px of the view), C channels.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from dpvision.data.keys import StepKey
from dpvision.data.transform import normalise
from dpvision.eval.dense.semantic_data import IGNORED, Labelled, SemanticFolder
from dpvision.eval.dense.settings import SegmentationSettings

_CROP_TRIES = 10
_LONGEST = 4
"""Limit on the longer side, relative to the size of the shorter one: 2048 to 512 in ADE20K's usual
settings.
"""
_DISTORTION = v2.RandomPhotometricDistort()
Moments = tuple[tuple[float, ...], tuple[float, ...]]
"""The encoder's mean and standard deviation of a pixel, by channel."""


class View(NamedTuple):
    """One training view."""

    x_CHW: Tensor
    """Normalised float32."""
    class_HW: Tensor
    """int64 class numbers, ``IGNORED`` for pixels that do not count."""


@dataclass(frozen=True)
class TrainingViews:
    """``training_loop.Images`` of a folder."""

    folder: SemanticFolder
    settings: SegmentationSettings
    moments: Moments

    def __len__(self) -> int:
        return len(self.folder)

    def load(self, number: int, epoch: int) -> View:
        """Return the view of an image in an epoch."""
        key = StepKey(self.settings.seed, epoch)
        return draw_view(self.folder.read(number), self.settings, self.moments, key, number)


def draw_view(
    labelled: Labelled, how: SegmentationSettings, moments: Moments, key: StepKey, number: int
) -> View:
    """Draw one view. Equal masks give the same crop.

    The image is resized, and up to ten crops are drawn: the first in which no class exceeds
    ``max_class_share`` of the counted pixels is taken, or the last. It is then flipped, distorted
    in colour, normalised and padded.

    Args:
        number: the image's number, for the random draws.
    """

    def uniform(stream: str, count: int) -> np.ndarray:
        return key.uniform_numpy(np.array([number]), f"segment.{stream}", count)[0]

    image, mask = Image.fromarray(labelled.pixels_HWC), Image.fromarray(labelled.class_HW)
    factor = how.scale[0] + (how.scale[1] - how.scale[0]) * float(uniform("scale", 1)[0])
    width, height = resized(image.width, image.height, how.crop_size * factor)
    w, h = min(how.crop_size, width), min(how.crop_size, height)
    place = uniform("crop", 2 * _CROP_TRIES)
    for t in range(_CROP_TRIES):
        left, top = int(place[2 * t] * (width - w + 1)), int(place[2 * t + 1] * (height - h + 1))
        x, y = image.width / width, image.height / height
        box = (left * x, top * y, (left + w) * x, (top + h) * y)
        class_hw = np.asarray(mask.resize((w, h), Image.Resampling.NEAREST, box=box))
        if _largest_share(class_hw) <= how.max_class_share:
            break
    pixels = np.asarray(image.resize((w, h), Image.Resampling.BILINEAR, box=box))
    if how.flip and uniform("flip", 1)[0] < 0.5:
        pixels, class_hw = pixels[:, ::-1], class_hw[:, ::-1]
    if how.photometric:
        pixels = distorted(pixels, uniform("colour", 9))
    x_chw = np.empty((3, h, w), dtype=np.float32)
    normalise(np.ascontiguousarray(pixels), *moments, x_chw)
    # Padding has the mean colour and does not count.
    x_CHW = torch.zeros(3, how.crop_size, how.crop_size)
    class_HW = torch.full((how.crop_size, how.crop_size), IGNORED, dtype=torch.int64)
    x_CHW[:, :h, :w], class_HW[:h, :w] = (
        torch.from_numpy(x_chw),
        torch.from_numpy(class_hw.astype(np.int64)),
    )
    return View(x_CHW, class_HW)


def resized(width: int, height: int, side: float) -> tuple[int, int]:
    """Return the size with the shorter side ``side``, the longer one at most four times that, and
    the aspect ratio kept.
    """
    factor = min(side / min(width, height), _LONGEST * side / max(width, height))
    return max(1, round(width * factor)), max(1, round(height * factor))


def distorted(pixels_HWC: np.ndarray, uniform_N: np.ndarray) -> np.ndarray:
    """Apply torchvision's photometric distortion (SSD, Liu et al. 2016), without channel
    permutation, by nine numbers in [0, 1).

    Brightness, contrast, saturation and hue each change with probability one half, contrast before
    or after the others.
    """
    ranges = {
        "brightness_factor": _DISTORTION.brightness,
        "contrast_factor": _DISTORTION.contrast,
        "saturation_factor": _DISTORTION.saturation,
        "hue_factor": _DISTORTION.hue,
    }
    params: dict[str, float | bool | None] = {
        name: low + (high - low) * float(uniform_N[2 * i + 1])
        if uniform_N[2 * i] < _DISTORTION.p
        else None
        for i, (name, (low, high)) in enumerate(ranges.items())
    }
    params |= {"contrast_before": bool(uniform_N[8] < 0.5), "channel_permutation": None}
    x_CHW = torch.from_numpy(np.ascontiguousarray(np.moveaxis(pixels_HWC, -1, 0)))
    return np.moveaxis(_DISTORTION.transform(x_CHW, params).numpy(), 0, -1)


def _largest_share(class_hw: np.ndarray) -> float:
    counts = np.bincount(class_hw[class_hw != IGNORED].ravel())
    return float(counts.max() / counts.sum()) if counts.size and np.count_nonzero(counts) else 1.0
