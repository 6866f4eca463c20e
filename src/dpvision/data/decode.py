"""Decode image files to uint8 RGB pixels, for import, training, evaluation and prediction.

The store keeps the original bytes. These rules apply each time a record is read, and depend on its
bytes only:

- JPEG by simplejpeg, whose verdict on damage is final; HEIF by pillow-heif and DICOM by pydicom
  (dicom.py), where these are installed; everything else by Pillow, CMYK JPEG too once simplejpeg
  has found it whole. Import stores the pixels of DICOM files as PNG.
- The orientation (1 to 8) in EXIF, or else XMP, is applied once; another value, or EXIF that cannot
  be read, counts as upright.
- Of animations and of files with several pages the first frame is taken.
- Samples of other kinds than 8-bit RGB, and transparency: by ``rgb.to_rgb``.
- Decompression bombs are refused from the header.

Legend: H height, W width.
"""

import io
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import Image, ImageFile, TiffImagePlugin

from dpvision.data.dicom import is_dicom, render
from dpvision.data.jpeg import decode_jpeg, jpeg_bits, may_be_turned, plain
from dpvision.data.rgb import MAX_ASPECT as MAX_ASPECT
from dpvision.data.rgb import MAX_FILE_BYTES as MAX_FILE_BYTES
from dpvision.data.rgb import MAX_PIXELS as MAX_PIXELS
from dpvision.data.rgb import BadImage as BadImage
from dpvision.data.rgb import Window, check_size, is_deep, stated_range, to_8_bits, to_rgb
from dpvision.errors import DataError

HEAD_BYTES = 132
"""First bytes of a file by which its format is recognised: 16 by Pillow's readers, DICOM by all."""

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "PPM", "AVIF", "JPEG2000")
"""Only these of Pillow's formats are opened: some of the others start programs or are not
images.
"""

_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
"""First brands of HEIF files, which phones write and Pillow alone does not read (ISO/IEC 23008-12,
annex B).
"""
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_ORIENTATION_TAG = 0x0112
_LOW_BYTES = {
    "RGB;16B": "RGB;16L",
    "RGB;16L": "RGB;16B",
    "RGB;16N": "RGB;16B",
    "RGBX;16L": "RGBX;16B",
    "RGBX;16B": "RGBX;16L",
}
"""Pillow's readers of 16-bit colour, which keep the high bytes, and those that give the low bytes
of the same file.
"""
# registers every reader now: done lazily it is a race between the threads of the loader
Image.init()


def decode(data: bytes, *, upright: bool = True, window: Window | None = None) -> np.ndarray:
    """Return the pixels of an image, uint8 of shape (H, W, 3).

    Args:
        data: a whole image file in one of ``FORMATS``, or HEIF or DICOM where pillow-heif or
            pydicom is installed.
        upright: if False, the pixels as stored, not turned, for masks that refer to them.
        window: declared range of samples of more than 8 bits, in place of the range that the file
            states or its bits imply.

    Raises:
        BadImage: not an image, more than ``MAX_PIXELS`` pixels or more elongated than
            ``MAX_ASPECT`` to 1 (both known from the header, before any pixel is decoded), damaged
            or truncated, floating-point of unknown range, or of an unsupported kind.
    """
    if is_dicom(data):
        rendered = render(data, window).pixels
        return rendered if rendered.ndim == 3 else np.repeat(rendered[..., None], 3, axis=2)
    if data[:2] == b"\xff\xd8" and (pixels := _decode_jpeg(data, upright)) is not None:
        return pixels
    return np.asarray(_open(data, upright, window))


def read_image(
    image: "str | Path | bytes | Image.Image | np.ndarray", window: Window | None = None
) -> np.ndarray:
    """Return the upright pixels of an image, uint8 (H, W, 3), as ``decode`` does for a file.

    Args:
        image: path, bytes of a file, Pillow image, or uint8 RGB pixels (H, W, 3), taken as they
            are. A Pillow image that is not loaded is read from its file; of one that is loaded or
            made, what Pillow knows of its samples is used.
        window: as in ``decode``.

    Raises:
        BadImage: see ``decode``.
        DataError: the file cannot be read, or an array of another type or shape.
    """
    if isinstance(image, str | Path):
        image = _file_bytes(Path(image))
    elif isinstance(image, Image.Image):
        image = _unread_bytes(image) or image
    if isinstance(image, bytes | bytearray | memoryview):
        return decode(bytes(image), window=window)
    if isinstance(image, Image.Image):
        return np.asarray(_loaded(image, True, window))
    if not isinstance(image, np.ndarray):
        got = f"{type(image).__module__}.{type(image).__name__}"
        raise DataError(
            f"preprocess: image={got}; expected a path, bytes of a file, a PIL image or a uint8 "
            "array. Pass the path."
        )
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
        what = "the range of its values" if image.dtype != np.uint8 else "three channels of RGB"
        raise DataError(
            f"preprocess: image={image.dtype} {image.shape}, an array without {what}; expected "
            "uint8 of shape (H, W, 3). Pass the path or the bytes of its file, or a PIL image."
        )
    return image


def stored_size(data: bytes) -> tuple[int, int]:
    """Return width and height of the stored pixels, from the header. Raises BadImage."""
    image = _opened(data)
    if isinstance(image, TiffImagePlugin.TiffImageFile) and _orientation(image) >= 5:
        return image.size[1], image.size[0]  # Pillow gives a TIFF's size as turned
    return image.size


def stored_ids(data: bytes) -> np.ndarray:
    """Return the samples of a one-channel image, or its palette indices, as they are stored.

    Integers (H, W), for masks of ids.

    Raises:
        BadImage: see ``decode``, or several channels.
    """
    image = _opened(data)
    if image.mode not in ("1", "L", "P", "I", "I;16", "I;16B", "I;16L"):
        raise BadImage("unsupported", f"mode {image.mode}, {len(image.getbands())} channels")
    id_HW = _samples(image)
    bits = _png_bits(data)
    if image.mode == "L" and bits in (2, 4):  # Pillow scales them to 0 ... 255
        return id_HW // (255 // (2**bits - 1))
    return id_HW


def largest_undeclared(data: bytes) -> int | None:
    """Return the largest sample of a 16-bit image whose file does not state a range, else None.

    Raises:
        BadImage: see ``decode``.
    """
    if not (_png_bits(data) == 16 or data[:4] in _TIFF):
        return None
    image = _opened(data)
    if (
        image.mode == "F"
        or stated_range(image) is not None
        or (not is_deep(image) and max(_png_bits(data) or 0, _tiff_bits(image)) < 16)
    ):
        return None
    if is_deep(image):
        return max(0, int(_samples(image).max()))
    values_HWC = _colour_of_16_bits(data)
    if values_HWC is None:  # with alpha: Pillow gives the high bytes only
        return int(_samples(image)[..., :3].max()) << 8 | 255
    return int(values_HWC.max())


def in_8_bits(data: bytes, window: Window) -> bytes:
    """Return an image of more than 8 bits as an upright 8-bit PNG of ``window``.

    Other images are returned unchanged.

    Raises:
        BadImage: see ``decode``, or 16-bit colour of a kind that Pillow reads in 8 bits only.
    """
    pixels_HWC = decode(data, window=window)
    if _png_bits(data) != 16 and data[:4] not in _TIFF:
        return data
    image = _opened(data)
    if not is_deep(image) and _colour_of_16_bits(data) is None:
        if _png_bits(data) == 16 or _tiff_bits(image) > 8:
            raise BadImage("unsupported", f"a window for {image.mode} of 16 bits")
        return data
    return as_png(pixels_HWC)


def as_png(pixels: np.ndarray) -> bytes:
    """Return uint8 pixels, (H, W) or (H, W, 3), as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def may_be_image(head: bytes) -> bool:
    """Whether a file that begins with these ``HEAD_BYTES`` bytes may be an image.

    If False, ``decode`` calls it "not an image".
    """
    readers = (Image.OPEN[name][1] for name in FORMATS if name in Image.OPEN)
    return (
        _is_heif(head)
        or is_dicom(head)
        or _looks_like_image(head)
        or any(accept is None or accept(head) for accept in readers)
    )


def extension(data: bytes) -> str:
    """Return the file name extension of an image that ``decode`` accepts, e.g. ``"jpg"``."""
    for magic, name in (
        (b"\xff\xd8", "jpg"),
        (b"\x89PNG", "png"),
        (b"GIF8", "gif"),
        (b"BM", "bmp"),
        (b"II", "tif"),
        (b"MM", "tif"),
    ):
        if data.startswith(magic):
            return name
    if data[8:12] == b"WEBP":
        return "webp"
    if data[4:12] in (b"ftypavif", b"ftypavis"):
        return "avif"
    if _is_heif(data):
        return "heic"
    return "ppm" if data[:1] == b"P" else "jp2"


def _loaded(
    image: Image.Image, upright: bool, window: Window | None, png_bits: int | None = None
) -> Image.Image:
    """Return an opened image as RGB, upright or as stored.

    Pillow turns a TIFF while it loads it, and nothing else.
    """
    stored_as = _orientation(image) if image.format == "TIFF" else 1
    try:
        image.load()  # the first frame, or page
        made = to_rgb(image, window, png_bits)
    except BadImage:
        raise
    except (
        Exception
    ) as error:  # Pillow's readers raise a dozen types on damaged input; training must see one
        raise BadImage("damaged", f"{type(error).__name__}: {error}") from error
    turn = (
        _TURN.get(_orientation(image)) if upright else _TURN.get(_INVERSE.get(stored_as, stored_as))
    )
    return made if turn is None else made.transpose(turn)


def _decode_jpeg(data: bytes, upright: bool) -> np.ndarray | None:
    """Decode with simplejpeg; None for CMYK, once it is found whole."""
    file = data
    try:
        try:
            height, width, colours, _ = simplejpeg.decode_jpeg_header(file)
        except ValueError:
            file = plain(data)
            height, width, colours, _ = simplejpeg.decode_jpeg_header(file)
        check_size(width, height)
        pixels = decode_jpeg(file)
    except ValueError as error:
        if (bits := jpeg_bits(data)) not in (None, 8):
            raise BadImage("unsupported", f"JPEG of {bits} bits") from None
        raise BadImage(
            "damaged" if _looks_like_image(data) else "not an image", str(error)
        ) from None
    if colours not in ("YCbCr", "Gray", "RGB"):
        return None
    if (
        upright and may_be_turned(data)
        # opening with Pillow costs several times the decoding of a small image: only where it may
        # matter
    ):
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
        except (OSError, SyntaxError, ValueError):
            return pixels  # simplejpeg read the pixels; only the EXIF is broken
        method = _TURN.get(_orientation(image))
        if method is not None:
            return np.asarray(Image.fromarray(pixels).transpose(method))
    return pixels


def _open(data: bytes, upright: bool, window: Window | None) -> Image.Image:
    image = _opened(data)
    clear = image.info.get("transparency")
    if (
        image.mode == "RGB"
        and image.format == "TIFF"
        and window is None
        and _tiff_bits(image) == 16
    ):
        window = stated_range(image)
    if image.mode == "RGB" and (
        window is not None or (clear is not None and _png_bits(data) == 16)
    ):
        values_HWC = _colour_of_16_bits(data)
        if values_HWC is not None:
            image.info.pop("transparency", None)
            rgb_HWC = to_8_bits(values_HWC, window or (0, 65535))
            if clear is not None:
                rgb_HWC = np.where(
                    (values_HWC == np.array(clear)).all(axis=2, keepdims=True),
                    np.uint8(255),
                    rgb_HWC,
                )
            made = Image.fromarray(rgb_HWC)
            turn = _TURN.get(_orientation(image)) if upright else None
            return made if turn is None else made.transpose(turn)
    return _loaded(image, upright, window, None if clear is None else _png_bits(data))


def _opened(data: bytes) -> Image.Image:
    """Open an image, not loaded; its size is checked."""
    image: Image.Image
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise BadImage("oversized", str(error)) from None
    except Exception as error:
        if not _is_heif(data):
            raise _unopened(data, error) from error
        image = _open_heif(data)
    check_size(*image.size)
    return image


def _unopened(data: bytes, error: Exception) -> BadImage:
    if not data:
        return BadImage("not an image", "an empty file")
    if data[:4] in _TIFF:
        try:
            TiffImagePlugin.TiffImageFile(io.BytesIO(data))
        except Exception as cause:
            if "unknown pixel mode" in str(cause) or "unknown data organization" in str(cause):
                return BadImage("unsupported", f"TIFF of {cause}")
    said = str(error).partition(" <_io.")[0]  # without the address of the buffer
    return BadImage(
        "damaged" if _looks_like_image(data) else "not an image", f"{type(error).__name__}: {said}"
    )


def _tiff_bits(image: Image.Image) -> int:
    """Return a TIFF's bits per sample; 8 for every other image."""
    return (
        max(image.tag_v2.get(TiffImagePlugin.BITSPERSAMPLE, (8,)))
        if isinstance(image, TiffImagePlugin.TiffImageFile)
        else 8
    )


def _png_bits(data: bytes) -> int | None:
    return data[24] if data[:4] == b"\x89PNG" and len(data) > 24 else None


def _colour_of_16_bits(data: bytes) -> np.ndarray | None:
    """Return the samples of 16-bit RGB, uint16 (H, W, 3) as stored; None for every other image.

    Pillow alone keeps the high bytes.
    """
    parts = []
    for low in (False, True):
        image = _opened(data)
        if image.mode != "RGB" or not isinstance(image, ImageFile.ImageFile) or not image.tile:
            return None
        tiles = []
        for tile in image.tile:
            raw, *rest = tile.args if isinstance(tile.args, tuple) else (tile.args,)
            if raw not in _LOW_BYTES:
                return None
            raw = _LOW_BYTES[raw] if low else raw
            tiles.append(tile._replace(args=(raw, *rest) if isinstance(tile.args, tuple) else raw))
        image.tile = tiles
        try:
            image.load()
        except Exception as error:
            raise BadImage("damaged", f"{type(error).__name__}: {error}") from error
        parts.append(np.asarray(image).astype(np.uint16))
    return parts[0] << 8 | parts[1]


def _samples(image: Image.Image) -> np.ndarray:
    """Return the samples of an opened image. Raises BadImage if they are damaged."""
    try:
        return np.asarray(image)
    except Exception as error:
        raise BadImage("damaged", f"{type(error).__name__}: {error}") from error


def _file_bytes(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise BadImage(
                "oversized",
                f"{path}, {path.stat().st_size:,} bytes",
                f"at most {MAX_FILE_BYTES:,} bytes",
            )
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"preprocess: {path}: {error.strerror}; expected an image file. Check the path."
        ) from None


def _unread_bytes(image: Image.Image) -> bytes | None:
    """Return the bytes of a Pillow image's file without loading the image, or None."""
    if (
        not isinstance(image, ImageFile.ImageFile)
        or image.format not in (*FORMATS, "MPO")
        or not image.tile
        or image.tell() != 0
    ):
        return None
    try:
        place = image.fp.tell()  # type: ignore[union-attr]
        image.fp.seek(0)  # type: ignore[union-attr]
        data: bytes = image.fp.read()  # type: ignore[union-attr]
        image.fp.seek(place)  # type: ignore[union-attr]
    except (AttributeError, OSError, ValueError):
        return None
    return data


def _open_heif(data: bytes) -> Image.Image:
    """The primary image, turned as its file says; at 10 and 12 bits a channel the high 8."""
    try:
        import pillow_heif
    except ImportError:
        raise BadImage("HEIF", "pillow-heif is not installed") from None
    try:
        found = pillow_heif.open_heif(data)
        check_size(*found.size)  # libheif decodes at the next line
        return found.to_pillow()
    except BadImage:
        raise
    except Exception as error:
        raise BadImage("damaged", f"{type(error).__name__}: {error}") from error


def _is_heif(data: bytes) -> bool:
    return data[4:8] == b"ftyp" and data[8:12] in _HEIF_BRANDS


def _looks_like_image(data: bytes) -> bool:
    return (
        data.startswith((b"\xff\xd8\xff", b"\x89PNG\r\n", b"GIF8", b"II*\0", b"MM\0*"))
        or data[8:12] == b"WEBP"
    )


_INVERSE = {6: 8, 8: 6}
"""Orientations that are not their own inverse."""
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
    # broken EXIF raises whatever its bytes lead to; the pixels are sound, so the image counts as
    # upright
    except Exception:
        return 1
