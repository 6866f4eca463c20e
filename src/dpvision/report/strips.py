"""Images for a page, as data: URIs: normalised tensors to pixels, pixels to a row of images, files
to one image.

Legend: B images, C channels, H height, W width.
"""

import base64
import io

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dpvision.data.decode import BadImage, decode
from dpvision.errors import DataError

_GAP = 1 / 16
_LARGEST_PX = 128
_LARGEST_ALONE_PX = 224
_PNG_UP_TO_PX = 64


def pixels_of(x_BCHW: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> np.ndarray:
    """Return the pixels of normalised images, uint8 (B, H, W, 3)."""
    mean_C11, std_C11 = (torch.tensor(values)[:, None, None] for values in (mean, std))
    return (
        ((x_BCHW * std_C11 + mean_C11).clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()
    )


def strip_of(image_BHWC: np.ndarray) -> str:
    """Return a row of images with transparent gaps, at most 128 px high, as a data: URI of a PNG.

    Args:
        image_BHWC: uint8, C = 3, or 4 with opacity.
    """
    B, H, W, C = image_BHWC.shape
    gap = max(2, round(W * _GAP))
    strip = np.zeros((H, B * (W + gap) - gap, 4), dtype=np.uint8)
    for b, image in enumerate(image_BHWC):
        here = strip[:, b * (W + gap) : b * (W + gap) + W]
        here[..., :C], here[..., 3] = image, image[..., 3] if C == 4 else 255
    picture = Image.fromarray(strip)
    if H > _LARGEST_PX:
        picture = picture.resize(
            (round(picture.width * _LARGEST_PX / H), _LARGEST_PX), Image.Resampling.LANCZOS
        )
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def image_uri(data: bytes) -> str:
    """The whole image, at most 224 px along its longer side, as a data: URI.

    Raises:
        DataError: it cannot be read.
    """
    try:
        image = Image.fromarray(decode(data))
    except BadImage as error:  # it was read a moment ago
        raise DataError(f"report: {error}") from None
    image.thumbnail((_LARGEST_ALONE_PX, _LARGEST_ALONE_PX), Image.Resampling.LANCZOS)
    small, file = max(image.size) <= _PNG_UP_TO_PX, io.BytesIO()
    image.save(
        file, "PNG" if small else "JPEG", **({"optimize": True} if small else {"quality": 88})
    )
    return (
        f"data:image/{'png' if small else 'jpeg'};base64,"
        f"{base64.b64encode(file.getvalue()).decode()}"
    )
