"""Convert Pillow images of every kind of sample to 8-bit RGB.

By bit depth, sign, stated range, photometric interpretation and transparency.

- 16-bit grey: the high byte, v >> 8 (what Pillow does to 16-bit colour, so that grey and colour
  agree). A file that states another range is read by that: 12 bits per sample, a TIFF's
  MaxSampleValue of 2^k - 1, a PGM's largest value. Signed samples of 8 and 16 bits map their whole
  range; 32-bit integers are first clipped to 0 ... 65535.
- Floating-point samples have no agreed range: refused, unless a TIFF states one (SMinSampleValue,
  SMaxSampleValue) or it is declared.
- A declared range, ``Window``, replaces that of 16-bit and floating-point samples in PNG and TIFF:
  its ends become 0 and 255.
- TIFF's WhiteIsZero is inverted at every depth.
- Transparency, of an alpha channel, a palette or PNG's tRNS, is composed over white. A BMP whose
  alphas are all 0 has no alpha.
- CMYK and LAB by the formulas of Pillow and littlecms; embedded colour profiles are not applied.
"""

from typing import Literal

import numpy as np
from PIL import Image, ImageCms, PngImagePlugin, TiffImagePlugin

from dpvision.errors import DataError

MAX_PIXELS = 50_000_000
MAX_ASPECT = 100
MAX_FILE_BYTES = 1 << 29
"""No image of 50 megapixels is larger than this, even uncompressed with four channels of 16
bits.
"""
Reason = Literal[
    "not an image",
    "HEIF",
    "oversized",
    "damaged",
    "float pixels",
    "unsupported",
    "DICOM",
    "DICOM: no pixels",
    "DICOM: transfer syntax",
    "DICOM: oversized",
    "DICOM: damaged",
    "DICOM: float pixels",
    "DICOM: unsupported",
]
Window = tuple[float, float]
"""Values that become black and white."""

_REMEDY: dict[str, str] = {
    "HEIF": 'Install pillow-heif (the extra "heif"), or convert it to JPEG.',
    "float pixels": "Declare their range (--window LOW HIGH), or convert it to 8 bits.",
    "unsupported": "Convert it to PNG.",
    "DICOM": "Install it: pip install 'dpvision[dicom]'.",
    "DICOM: no pixels": "Leave it out: a report, a plan or a directory is no image.",
    "DICOM: transfer syntax": "Install python-gdcm (pip install 'dpvision[dicom]') if it is "
    "missing, or decompress the file with DCMTK or gdcmconv.",
    "DICOM: float pixels": "Declare their range (--window LOW HIGH).",
}
_EXPECTED: dict[str, str] = {
    "oversized": f"at most {MAX_PIXELS} pixels",
    "float pixels": "samples whose range is stated or declared",
    "DICOM: float pixels": "samples whose range is declared",
}
_MAX_SAMPLE_VALUE, _SAMPLE_FORMAT, _SMIN, _SMAX = 281, 339, 340, 341
_SIGNED = 2
_SCALED = ("PPM", "JPEG2000")
"""Formats that state their range, which Pillow scales to 16 bits."""


class BadImage(DataError):
    """Bytes that cannot be decoded; ``reason`` is one of a fixed set, for counting."""

    def __init__(self, reason: Reason, detail: str, expected: str | None = None) -> None:
        expected = expected or _EXPECTED.get(reason, "an image file that can be decoded")
        remedy = _REMEDY.get(reason, "Leave it out or repair it.")
        super().__init__(f"image: {reason} ({detail}); expected {expected}. {remedy}")
        self.reason = reason
        self.detail = detail


def to_rgb(
    image: Image.Image, window: Window | None = None, png_bits: int | None = None
) -> Image.Image:
    """Return an image as 8-bit RGB, by the rules at the top of this file; not turned.

    Args:
        image: loaded.
        window: the declared range of grey samples of more than 8 bits.
        png_bits: bits per sample of a PNG, to which its tRNS refers.

    Raises:
        BadImage: floating-point samples without a range.
    """
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if is_deep(image):
        stated = stated_range(image)
        grey_HW = to_8_bits(
            np.asarray(image),
            (stated if image.format in _SCALED else window) or stated or _range(image),
        )
        if _tag(image, TiffImagePlugin.PHOTOMETRIC_INTERPRETATION) == 0:
            grey_HW = 255 - grey_HW
        if isinstance(clear := image.info.get("transparency"), int):
            grey_HW = np.where(np.asarray(image) == clear, np.uint8(255), grey_HW)
        return Image.fromarray(grey_HW).convert("RGB")
    if image.mode == "L" and _tag(image, _SAMPLE_FORMAT) == _SIGNED:
        return Image.fromarray(np.asarray(image) ^ np.uint8(128)).convert("RGB")
    if image.mode == "LAB":
        return (
            ImageCms.profileToProfile(
                image,
                ImageCms.createProfile("LAB"),
                ImageCms.createProfile("sRGB"),
                outputMode="RGB",
            )
            or image
        )
    if image.has_transparency_data:
        image = image.convert("LA") if image.mode == "La" else image  # Pillow goes no other way
        over = _with_scaled_trns(image, png_bits).convert("RGBA")
        if image.format == "BMP" and not np.asarray(over)[..., 3].any():
            return over.convert("RGB")
        return Image.alpha_composite(Image.new("RGBA", over.size, "white"), over).convert("RGB")
    return image.convert("RGB")


def is_deep(image: Image.Image) -> bool:
    """Whether an image has one channel of more than 8 bits, as Pillow opens it."""
    return image.mode.startswith("I") or image.mode == "F"


def to_8_bits(values: np.ndarray, window: Window) -> np.ndarray:
    """Map ``window`` to 0 ... 255, uint8.

    Equal steps of integers (v >> 8 for 0 ... 65535), rounded for floats.
    """
    low, high = window
    if np.issubdtype(values.dtype, np.integer) and low == int(low) and high == int(high):
        return (
            (np.clip(values.astype(np.int64), int(low), int(high)) - int(low))
            * 256
            // (int(high) - int(low) + 1)
        ).astype(np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = np.clip((values.astype(np.float64) - low) / (high - low), 0, 1)
    return np.nan_to_num(scaled * 255, nan=0.0).round().astype(np.uint8)


def stated_range(image: Image.Image) -> Window | None:
    """Return the range of samples that the file states, or None.

    16 bits alone state none, as 12-bit cameras write them too.
    """
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return (0, 65535) if image.format in _SCALED and image.mode != "F" else None
    if image.mode == "F":
        low, high = _tag(image, _SMIN), _tag(image, _SMAX)
        return (
            (float(low), float(high))
            if low is not None and high is not None and low < high
            else None
        )
    bits = _tag(image, TiffImagePlugin.BITSPERSAMPLE)
    if bits is not None and bits < 16:
        return 0, 2**bits - 1
    if bits == 16 and _tag(image, _SAMPLE_FORMAT) == _SIGNED:
        return None
    most = _tag(
        image, _MAX_SAMPLE_VALUE
    )  # of other values it may be the largest of this image, which states no range
    return (
        (0, most)
        if isinstance(most, int) and 255 <= most < 65535 and most & (most + 1) == 0
        else None
    )


def check_size(width: int, height: int, reason: Reason = "oversized") -> None:
    """Raise BadImage unless an image has at most ``MAX_PIXELS`` and ``MAX_ASPECT``."""
    sides = f"{width} x {height} pixels"
    if not 0 < width * height <= MAX_PIXELS:
        raise BadImage(reason, sides, f"1 to {MAX_PIXELS} pixels")
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise BadImage(reason, sides, f"sides of at most {MAX_ASPECT} to 1")


def check_window(window: Window, where: str) -> None:
    """Raise DataError unless ``window`` is two finite numbers in ascending order."""
    low, high = window
    if not -np.inf < low < high < np.inf:
        raise DataError(
            f"{where}: window={low:g} {high:g}; expected two finite numbers, the lower first. "
            "Swap or correct them."
        )


def _range(image: Image.Image) -> Window:
    if image.mode == "F":
        raise BadImage("float pixels", "mode F, no range stated")
    signed_16 = (
        _tag(image, _SAMPLE_FORMAT) == _SIGNED and _tag(image, TiffImagePlugin.BITSPERSAMPLE) == 16
    )
    return (-32768, 32767) if signed_16 else (0, 65535)


def _tag(image: Image.Image, number: int) -> float | None:
    """Return a TIFF's tag, the first of several values, or None."""
    if not isinstance(image, TiffImagePlugin.TiffImageFile):
        return None
    value = image.tag_v2.get(number)
    value = value[0] if isinstance(value, tuple) and value else value
    return value if isinstance(value, int | float) else None


def _with_scaled_trns(image: Image.Image, png_bits: int | None) -> Image.Image:
    """Return a PNG with its transparent colour in the pixels' 8 bits.

    Pillow scales the pixels of 2 and 4 bits but not the colour.
    """
    clear = image.info.get("transparency")
    if (
        not isinstance(image, PngImagePlugin.PngImageFile)
        or clear is None
        or image.mode not in ("L", "RGB")
    ):
        return image
    if png_bits is None:
        raise BadImage(
            "unsupported",
            "a PNG with a transparent colour, loaded by Pillow, which forgets its bits per sample",
        )
    if png_bits < 8:
        made = image.copy()
        made.info["transparency"] = clear * 255 // (2**png_bits - 1)
        return made
    return image
