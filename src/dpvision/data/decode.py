"""Decode image files to uint8 RGB pixels: every colour mode, EXIF orientation applied, decompression bombs refused from the header.

The store keeps the original bytes. These rules apply each time a record is read, and depend on its bytes only:

- JPEG in grey, YCbCr or RGB by simplejpeg; HEIF by pillow-heif, where it is installed; everything else, and JPEG that simplejpeg
  refuses, by Pillow.
- The EXIF orientation (1 to 8) is applied; another value, or EXIF that cannot be read, counts as upright.
- Transparency is composed over white. Of animations and of files with several pages the first frame is taken.
- 16 bits: the high byte, v >> 8 (what Pillow does to 16-bit colour, so that grey and colour agree). 32-bit integers are first clipped
  to 0 ... 65535. Floating-point pixels have no agreed range and are refused.
- CMYK and LAB by the formulas of Pillow and littlecms; embedded colour profiles are not applied.

Legend: H height, W width.
"""

import io
from typing import Literal

import numpy as np
import simplejpeg
from PIL import Image, ImageCms

from dpvision.errors import DataError

MAX_PIXELS = 50_000_000
MAX_ASPECT = 100
MAX_FILE_BYTES = 1 << 29
"""No image of 50 megapixels is larger than this, even uncompressed with four channels of 16 bits."""

HEAD_BYTES = 16
"""First bytes of a file by which Pillow's readers recognise their format."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "PPM", "AVIF", "JPEG2000")
"""Only these of Pillow's formats are opened: some of the others start programs or are not images."""

Reason = Literal["not an image", "HEIF", "oversized", "damaged", "float pixels"]
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
"""First brands of HEIF files, which phones write and Pillow alone does not read (ISO/IEC 23008-12, annex B)."""
_ORIENTATION_TAG = 0x0112
Image.init()  # registers every reader now: done lazily it is a race between the threads of the loader


class BadImage(DataError):
    """Bytes that cannot be decoded; ``reason`` is one of a fixed set, for counting."""

    def __init__(self, reason: Reason, detail: str) -> None:
        remedy = 'Install pillow-heif (the extra "heif"), or convert it to JPEG.' if reason == "HEIF" else "Leave it out or repair it."
        super().__init__(f"image: {reason} ({detail}); expected an image of at most {MAX_PIXELS} pixels. {remedy}")
        self.reason = reason


def decode(data: bytes) -> np.ndarray:
    """Return the upright pixels of an image, uint8 of shape (H, W, 3).

    Args:
        data: a whole image file in one of ``FORMATS``, or HEIF where pillow-heif is installed.

    Raises:
        BadImage: not an image, more than ``MAX_PIXELS`` pixels or more elongated than ``MAX_ASPECT`` to 1 (both known from the
            header, before any pixel is decoded), damaged or truncated, or floating-point.
    """
    if data[:2] == b"\xff\xd8":
        pixels = _decode_jpeg(data)
        if pixels is not None:
            return pixels
    return np.asarray(_open(data))


def may_be_image(head: bytes) -> bool:
    """False where ``decode`` calls a file that begins with these ``HEAD_BYTES`` bytes "not an image"."""
    readers = (Image.OPEN[name][1] for name in FORMATS if name in Image.OPEN)
    return _is_heif(head) or _looks_like_image(head) or any(accept is None or accept(head) for accept in readers)


def extension(data: bytes) -> str:
    """File name extension that fits the first bytes of an image which ``decode`` accepts, e.g. ``"jpg"``."""
    for magic, name in ((b"\xff\xd8", "jpg"), (b"\x89PNG", "png"), (b"GIF8", "gif"), (b"BM", "bmp"), (b"II", "tif"), (b"MM", "tif")):
        if data.startswith(magic):
            return name
    if data[8:12] == b"WEBP":
        return "webp"
    if data[4:12] in (b"ftypavif", b"ftypavis"):
        return "avif"
    if _is_heif(data):
        return "heic"
    return "ppm" if data[:1] == b"P" else "jp2"


def upright_rgb(image: Image.Image) -> Image.Image:
    """Upright RGB image of 8 bits from a Pillow image in any mode but F, by the rules at the top of this file.

    Raises:
        BadImage: floating-point pixels.
    """
    method = _TURN.get(_orientation(image))
    made = _rgb(image)
    return made if method is None else made.transpose(method)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "F":
        raise BadImage("float pixels", "mode F")
    if image.mode.startswith("I"):
        high_byte = np.clip(np.asarray(image), 0, 65535).astype(np.uint16) >> 8
        return Image.fromarray(high_byte.astype(np.uint8)).convert("RGB")
    if image.mode == "LAB":
        return ImageCms.profileToProfile(image, ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), outputMode="RGB") or image
    if "transparency" in image.info or image.mode in ("RGBA", "LA", "PA", "RGBa", "La"):
        over = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", over.size, "white"), over).convert("RGB")
    return image.convert("RGB")


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS or max(width, height) > MAX_ASPECT * min(width, height):
        raise BadImage("oversized", f"{width} x {height} pixels")


def _decode_jpeg(data: bytes) -> np.ndarray | None:
    """Decode with simplejpeg; None if Pillow has to try (CMYK, or a file that only a lenient reader accepts)."""
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    _check_size(width, height)
    if colours not in ("YCbCr", "Gray", "RGB"):
        return None
    try:
        pixels = simplejpeg.decode_jpeg(data)
    except ValueError:
        return None
    if b"Exif\0\0" in data:  # opening with Pillow costs several times the decoding of a small image: only where it may matter
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except (OSError, SyntaxError, ValueError):
            return pixels  # simplejpeg read the pixels; only the EXIF is broken
        method = _TURN.get(_orientation(image))
        if method is not None:
            return np.asarray(Image.fromarray(pixels).transpose(method))
    return pixels


def _open(data: bytes) -> Image.Image:
    image: Image.Image
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise BadImage("oversized", str(error)) from None
    except Exception as error:
        if not _is_heif(data):
            raise BadImage("damaged" if _looks_like_image(data) else "not an image", f"{type(error).__name__}: {error}") from error
        image = _open_heif(data)
    _check_size(*image.size)
    try:
        image.load()  # the first frame, or page
        return upright_rgb(image)
    except BadImage:
        raise
    except Exception as error:  # Pillow's readers raise a dozen types on damaged input; training must see one
        raise BadImage("damaged", f"{type(error).__name__}: {error}") from error


def _open_heif(data: bytes) -> Image.Image:
    """The primary image, turned as its file says; at 10 and 12 bits a channel the high 8."""
    try:
        import pillow_heif
    except ImportError:
        raise BadImage("HEIF", "pillow-heif is not installed") from None
    try:
        found = pillow_heif.open_heif(data)
        _check_size(*found.size)  # libheif decodes at the next line
        return found.to_pillow()
    except BadImage:
        raise
    except Exception as error:
        raise BadImage("damaged", f"{type(error).__name__}: {error}") from error


def _is_heif(data: bytes) -> bool:
    return data[4:8] == b"ftyp" and data[8:12] in _HEIF_BRANDS


def _looks_like_image(data: bytes) -> bool:
    return data.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"II*\0", b"MM\0*")) or data[8:12] == b"WEBP"


_TURN = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:  # broken EXIF raises whatever its bytes lead to; the pixels are sound, so the image counts as upright
        return 1
