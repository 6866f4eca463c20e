"""Decode DICOM files to 8-bit pixels by pydicom, and take multi-frame files apart.

The pixels are a function of the file and of the declared window:

1. stored values: the lowest BitsStored bits, signed by PixelRepresentation;
2. modality values: Modality LUT, else RescaleSlope and RescaleIntercept;
3. 0 ... 255, by the first of these that there is
   - the declared window, if more than 8 bits are stored, as for other files (``rgb.to_8_bits``);
   - the file's VOI LUT, else its first window (LINEAR, LINEAR_EXACT or SIGMOID), rounded; one that
     is empty or not valid counts as none;
   - the whole range of the stored bits, or of the modality LUT, in equal steps as for other files.
     Never the image's own smallest and largest value;
4. MONOCHROME1 is inverted.

Colour (RGB, YBR, PALETTE COLOR) takes step 1, then the high 8 bits.

Sizes are checked in the header and, of compressed pixels, in the codestream, before one is decoded.

Legend: H height, W width.
"""

import contextlib
import copy
import importlib
import io
import logging
import struct
import warnings
import zlib
from collections.abc import Iterator, MutableSequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dpvision.data.jpeg import decode_jpeg, jpeg_frame
from dpvision.data.rgb import MAX_FILE_BYTES, BadImage, Window, check_size, to_8_bits

if TYPE_CHECKING:
    from pydicom import Dataset

NO_RANGE, CUT, BURNED_IN, OVERLAY = (
    "no window, full range",
    "more than half of the values beyond the window",
    "burned-in annotation",
    "overlay",
)
"""Remarks on an image, printed for the operator."""
_PIXELS = ("PixelData", "FloatPixelData", "DoubleFloatPixelData")
_KEPT = (
    "SamplesPerPixel",
    "PhotometricInterpretation",
    "PlanarConfiguration",
    "Rows",
    "Columns",
    "BitsAllocated",
    "BitsStored",
    "HighBit",
    "PixelRepresentation",
    "ModalityLUTSequence",
    "RescaleSlope",
    "RescaleIntercept",
    "VOILUTSequence",
    "WindowCenter",
    "WindowWidth",
    "VOILUTFunction",
    "BurnedInAnnotation",
    *(f"{c}PaletteColorLookupTableDescriptor" for c in ("Red", "Green", "Blue")),
    *(f"{c}PaletteColorLookupTableData" for c in ("Red", "Green", "Blue")),
    *(f"Segmented{c}PaletteColorLookupTableData" for c in ("Red", "Green", "Blue")),
)
"""Elements that pixels and remarks depend on."""
_COLOUR = ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT", "PALETTE COLOR")
_OVERLAYS = range(0x6000, 0x6100)
_CUT_SHARE = 0.5
_DEFLATED = b"1.2.840.10008.1.2.1.99"
_JPEG_8, _JPEG_12 = "1.2.840.10008.1.2.4.50", "1.2.840.10008.1.2.4.51"
_SIZ, _END = b"\xff\x4f\xff\x51", b"\xff\xd9"
"""First markers of a JPEG 2000 codestream, and the last one of every JPEG."""
_J2K, _JPEG = frozenset([0x51]), frozenset([0xC0, 0xC1, 0xC2])
_MARKERS = (
    {end: _JPEG for end in ("50", "51")}
    | {end: frozenset([0xC3]) for end in ("57", "70")}
    | {end: frozenset([0xF7]) for end in ("80", "81")}
    | {end: _J2K for end in ("90", "91", "201", "202", "203")}
)
"""Markers of the frame header (SOF; SIZ of JPEG 2000) of a transfer syntax 1.2.840.10008.1.2.4.*.
Decoders read another codestream too, in other colours.
"""
_META_BYTES = 1 << 12
"""The transfer syntax, or a codestream's size, is within these."""


class Rendered(NamedTuple):
    """Pixels of a DICOM image."""

    pixels: np.ndarray
    """uint8, (H, W) if grey, else (H, W, 3)."""
    remarks: tuple[str, ...]
    """Of ``NO_RANGE``, ``CUT``, ``BURNED_IN``, ``OVERLAY``."""


def is_dicom(head: bytes) -> bool:
    """Whether a file that begins with these bytes, 132 or more, is DICOM."""
    return head[128:132] == b"DICM"


def read_file(data: bytes) -> "Dataset":
    """Return the elements of a DICOM file; their values are parsed when they are asked for.

    Raises:
        BadImage: pydicom is not installed, or the file is damaged.
    """
    try:
        pydicom = _quiet_pydicom()
    except ImportError:
        raise BadImage("DICOM", "pydicom is not installed") from None
    with _damage():
        _check_deflated(data)
        return pydicom.dcmread(io.BytesIO(data))


@cache
def _quiet_pydicom() -> Any:
    """Import pydicom. Values against the standard are common; those that matter are checked here.

    Raises:
        ImportError: it is not installed.
    """
    pydicom = importlib.import_module("pydicom")
    warnings.filterwarnings("ignore", module="pydicom")
    logging.getLogger("pydicom").setLevel(logging.CRITICAL)
    return pydicom


def render(data: bytes, window: Window | None = None) -> Rendered:
    """Return the pixels of a DICOM file's first frame, by the rules at the top of this file.

    Raises:
        BadImage: no pixels, oversized, damaged, of a kind or transfer syntax that cannot be read,
            or floating-point without a window.
    """
    with _damage():
        frame = _frame(read_file(data), 0)
        stored = _stored_values(frame)
        remarks = [BURNED_IN] if str(frame.get("BurnedInAnnotation")).strip() == "YES" else []
        remarks += [OVERLAY] if _overlay_tags(frame) else []
        if stored.ndim == 3:
            return Rendered(to_8_bits(stored, (0, 2**frame.BitsStored - 1)), tuple(remarks))
        grey_HW, more = _grey(stored, frame, window)
        if frame.PhotometricInterpretation == "MONOCHROME1":
            grey_HW = 255 - grey_HW
        return Rendered(grey_HW, (*remarks, *more))


def read_tag(data: "Dataset", keyword: str) -> str | int | None:
    """Return an element's value without padding, several with backslashes; None if it is empty.

    Raises:
        BadImage: its bytes are no value.
    """
    with _damage():
        value = data.get(keyword)
        if isinstance(value, int):
            return int(value)
        several = value if _is_several(value) else [] if value is None else [value]
        return "\\".join(str(one).strip(" \0") for one in several) or None


def num_frames(data: "Dataset") -> int:
    """Return the number of frames that a file declares; 1 if it declares none.

    Raises:
        BadImage: it is no number, or below 1.
    """
    with _damage():
        num = int(data.get("NumberOfFrames") or 1)
        if num < 1:
            raise ValueError(f"NumberOfFrames={num}")
        return num


def frame_file(data: "Dataset", k: int) -> bytes:
    """Return frame ``k`` as a DICOM file that holds nothing but what its pixels depend on.

    Raises:
        BadImage: as ``render``, as far as the header shows.
    """
    with _damage():
        file, frame = io.BytesIO(), _frame(data, k)
        frame.preamble = bytes(128)
        frame.save_as(file, enforce_file_format=False)
        return file.getvalue()


@contextlib.contextmanager
def _damage() -> Iterator[None]:
    """Turn what pydicom and decoders raise on damaged input, a dozen types, into BadImage."""
    try:
        yield
    except BadImage:
        raise
    except Exception as error:
        raise BadImage(
            "DICOM: damaged", " ".join(f"{type(error).__name__}: {error}".split())[:200]
        ) from error


def _check_deflated(data: bytes) -> None:
    """Refuse a deflated file that is larger than a file may be: pydicom inflates it whole."""
    if _DEFLATED not in data[:_META_BYTES]:
        return
    from pydicom.filereader import read_dataset

    file = io.BytesIO(data)
    file.seek(132)
    read_dataset(file, False, True, stop_when=lambda tag, vr, length: tag >> 16 != 2)
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    inflater.decompress(data[file.tell() :], MAX_FILE_BYTES)
    if inflater.unconsumed_tail:
        most = f"{MAX_FILE_BYTES:,} bytes inflated"
        raise BadImage("DICOM: oversized", f"above {most}", f"at most {most}")


def _frame(data: "Dataset", k: int) -> "Dataset":
    """Return frame ``k`` alone, with the elements of ``_KEPT``; header and size are checked."""
    from pydicom import Dataset
    from pydicom.encaps import encapsulate, get_frame
    from pydicom.pixels import get_decoder

    name = next((name for name in _PIXELS if name in data), None)
    if name is None:
        raise BadImage("DICOM: damaged" if "Rows" in data else "DICOM: no pixels", "no pixel data")
    frame, num = Dataset(), num_frames(data)
    frame.file_meta, syntax = data.file_meta, data.file_meta.TransferSyntaxUID
    frame.set_original_encoding(*data.original_encoding)
    groups = [
        group[name][0]
        for sequence, at in (
            ("SharedFunctionalGroupsSequence", 0),
            ("PerFrameFunctionalGroupsSequence", k),
        )
        for group in data.get(sequence, [])[at : at + 1]
        for name in ("PixelValueTransformationSequence", "FrameVOILUTSequence")
        if name in group
    ]
    kept = [part[keyword] for part in (data, *groups) for keyword in _KEPT if keyword in part]
    for element in (*kept, *map(data.__getitem__, _overlay_tags(data))):
        frame.add(copy.copy(element))
    bits, pixels, kind = _checked_bits(frame, name), data[name].value, data[name].VR
    if syntax.is_compressed and not syntax.is_deflated:
        try:
            available = get_decoder(syntax).is_available and not (
                syntax == _JPEG_12 and frame.BitsStored > 8
            )
        except NotImplementedError:
            available = False
        if not available:
            raise BadImage("DICOM: transfer syntax", f"{syntax.name} of {frame.BitsStored} bits")
        offsets = [data.get(f"ExtendedOffsetTable{end}") for end in ("", "Lengths")]
        code = get_frame(
            pixels,
            k,
            number_of_frames=num,
            extended_offsets=(offsets[0], offsets[1]) if all(offsets) else None,
        )
        _check_code(code, frame)
        frame.add_new(data[name].tag, "OB", encapsulate([code]))
        return frame
    if data[name].is_undefined_length:
        raise BadImage("DICOM: damaged", f"compressed pixels, and transfer syntax {syntax.name}")
    if len(pixels) * 8 < bits * num:
        raise BadImage("DICOM: damaged", f"{len(pixels):,} bytes for {num:,} frames")
    if kind == "OW" and frame.BitsAllocated == 8 and not syntax.is_little_endian:
        # bytes of big-endian words
        pixels, kind = np.frombuffer(pixels, ">u2").astype("<u2").tobytes(), "OB"
    if bits % 8:  # frames of 1-bit images follow one another without padding
        start = bits * k // 8
        part = np.frombuffer(pixels[start : start + bits // 8 + 2], np.uint8)
        bit_N = np.unpackbits(part, bitorder="little")[bits * k % 8 :][:bits]
        pixels = np.packbits(bit_N, bitorder="little").tobytes()
    else:
        pixels = pixels[bits // 8 * k : bits // 8 * (k + 1)]
    frame.add_new(data[name].tag, kind, pixels + b"\0" * (len(pixels) % 2))
    return frame


def _overlay_tags(data: "Dataset") -> list[Any]:
    tags = data.keys()  # iterating over the data itself would parse all its values
    return [tag for tag in tags if tag.group in _OVERLAYS]


def _checked_bits(frame: "Dataset", name: str) -> int:
    """Return the number of bits of a frame that is not compressed, once its header is checked."""
    width, height, samples = frame.Columns, frame.Rows, frame.SamplesPerPixel
    check_size(width, height, "DICOM: oversized")
    kind, allocated = frame.PhotometricInterpretation, frame.BitsAllocated
    if name != "PixelData":  # BitsStored and the like are absent
        frame.BitsStored, frame.HighBit, frame.PixelRepresentation = allocated, allocated - 1, 1
    stored, high = frame.BitsStored, frame.get("HighBit", frame.BitsStored - 1)
    frame.HighBit, grey = high, kind in ("MONOCHROME1", "MONOCHROME2")
    if (
        not (grey or kind in _COLOUR)
        or samples != (1 if grey or kind == "PALETTE COLOR" else 3)
        or allocated not in (1, 8, 16, 32, 64)
        or not 0 < stored == high + 1 <= allocated
        or frame.PixelRepresentation not in (0, 1)
    ):
        raise BadImage(
            "DICOM: unsupported",
            f"{kind}, {samples} samples, {stored} of {allocated} bits, high bit {high}",
        )
    bits = width * height * samples * allocated
    return bits // 3 * 2 if kind == "YBR_FULL_422" else bits


def _check_code(code: bytes, frame: "Dataset") -> None:
    """Refuse a codestream of another size than the header's, which decoders would allocate, of
    another kind, or one that is cut.
    """
    syntax = frame.file_meta.TransferSyntaxUID
    if "RLE" in syntax.name:
        return
    if not code.rstrip(b"\0\xff").endswith(_END):  # decoders fill what is missing
        raise BadImage("DICOM: damaged", "a codestream without its end")
    if syntax == _JPEG_8:
        decode_jpeg(code)  # refuses damage, which pydicom's decoders do not
    marker, size = jpeg_frame(code) or (0, None)
    if (at := code.find(_SIZ, 0, _META_BYTES)) >= 0:
        right, low, left, top = struct.unpack_from(">IIII", code, at + 8)
        marker, size = _SIZ[-1], (right - left, low - top)
    if marker not in _MARKERS[syntax.rpartition(".")[2]]:
        raise BadImage("DICOM: damaged", f"a codestream that is not {syntax.name}")
    if size != (frame.Columns, frame.Rows):
        raise BadImage("DICOM: damaged", f"a codestream of {size} pixels")


def _stored_values(frame: "Dataset") -> np.ndarray:
    """Return the samples as stored, (H, W), or those of RGB, (H, W, 3)."""
    from pydicom.pixels import apply_color_lut, pixel_array

    values = pixel_array(frame, index=0)
    if frame.PhotometricInterpretation == "PALETTE COLOR":
        values = apply_color_lut(values, frame)
        frame.BitsStored = values.dtype.itemsize * 8
    return values


def _grey(
    stored: np.ndarray, frame: "Dataset", window: Window | None
) -> tuple[np.ndarray, list[str]]:
    """Return grey values before MONOCHROME1 is inverted, uint8 (H, W), and remarks."""
    from pydicom.pixels import apply_modality_lut, apply_voi

    whole, bits = np.issubdtype(stored.dtype, np.integer), frame.BitsStored
    if frame.get("ModalityLUTSequence"):
        values = apply_modality_lut(stored, frame)
        bits, signed, slope = frame.ModalityLUTSequence[0].LUTDescriptor[2], False, 1.0
        stored = values
    else:
        signed = frame.PixelRepresentation == 1
        slope = float(_number(frame, "RescaleSlope", 1.0))
        shift = float(_number(frame, "RescaleIntercept", 0.0))
        kind = np.int64 if whole and slope.is_integer() and shift.is_integer() else np.float64
        values = stored.astype(kind) * kind(slope) + kind(shift)
    declared = window if bits > 8 else None
    ends = declared or _own_window(frame)
    if declared is None and frame.get("VOILUTSequence") and whole:
        depth = frame.VOILUTSequence[0].LUTDescriptor[2]
        made = apply_voi(np.rint(values).astype(np.int64), frame)
        return to_8_bits(made.astype(np.float64), (0, 2**depth - 1)), []
    if ends is None:
        if not whole:
            raise BadImage("DICOM: float pixels", "no window")
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
        made = to_8_bits(stored if bits >= 8 else stored.astype(np.float64), (low, high))
        return (made if slope > 0 else 255 - made), [NO_RANGE] if bits > 8 else []
    cut = np.mean((values < ends[0]) | (values > ends[1])) > _CUT_SHARE
    if declared is None and _function(frame) == "SIGMOID":
        centre, width = (ends[0] + ends[1]) / 2, ends[1] - ends[0]
        with np.errstate(over="ignore"):
            made = to_8_bits(1 / (1 + np.exp(-4 * (values - centre) / width)), (0, 1))
        return made, [CUT] if cut else []
    return to_8_bits(values if declared else values.astype(np.float64), ends), [CUT] if cut else []


def _own_window(frame: "Dataset") -> Window | None:
    """Return the values that a file's first window makes black and white, if it has a valid one."""
    centre, width = (_number(frame, name, np.nan) for name in ("WindowCenter", "WindowWidth"))
    function = _function(frame)
    if function == "LINEAR":  # PS3.3 C.11.2.1.2.1
        centre, width = centre - 0.5, width - 1
    known = function in ("LINEAR", "LINEAR_EXACT", "SIGMOID")
    found = centre - width / 2, centre + width / 2
    return found if known and -np.inf < found[0] < found[1] < np.inf else None


def _function(frame: "Dataset") -> str:
    return str(frame.get("VOILUTFunction") or "LINEAR").strip().upper()


def _number(frame: "Dataset", keyword: str, default: float) -> float:
    """Return an element's number, the first of several, or ``default`` where it is empty."""
    value: Any = frame.get(keyword)
    if _is_several(value):
        value = value[0] if len(value) else None
    return default if value in (None, "") else float(value)


def _is_several(value: Any) -> bool:
    return isinstance(value, MutableSequence | tuple)
