"""Decode JPEG by simplejpeg, strictly.

Damaged pixel data are refused; oddities of the header that do not touch pixels are not.

libjpeg reports only its first warning. A harmless one would hide damage, so its cause is removed
and the file is read again.
"""

from collections.abc import Iterator

import numpy as np
import simplejpeg

_HARMLESS = (
    "unknown JFIF revision",
    "bad ICC marker",
    "Invalid SOS parameters",
    "Unknown Adobe color transform",
)
_SOS, _APP0, _APP1, _APP14, _COM = 0xDA, 0xE0, 0xE1, 0xEE, 0xFE
_LS = 0xF7
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SHORTEST_FRAME = 10
"""Bytes from a frame's marker to its number of components."""


def decode_jpeg(data: bytes) -> np.ndarray:
    """Return the pixels as stored, uint8 RGB (H, W, 3).

    Raises:
        ValueError: libjpeg finds damage, even such as it can continue after.
    """
    try:
        return simplejpeg.decode_jpeg(data)
    except ValueError as error:
        if not any(text in str(error) for text in _HARMLESS):
            raise
    return simplejpeg.decode_jpeg(plain(data))


def jpeg_bits(data: bytes) -> int | None:
    """Return the bits per sample, or None if there is no frame header."""
    return next((data[at + 2] for marker, at, _ in _segments(data) if marker in _FRAMES), None)


def jpeg_frame(data: bytes) -> tuple[int, tuple[int, int]] | None:
    """Return the marker's second byte, and (width, height), of the first frame header of JPEG,
    lossless JPEG or JPEG-LS; None without one.
    """
    frames = ((marker, at) for marker, at, _ in _segments(data) if marker in {*_FRAMES, _LS})
    marker, at = next(frames, (0, len(data)))
    size = data[at + 3 : at + 7]
    return (marker, (size[2] << 8 | size[3], size[0] << 8 | size[1])) if len(size) == 4 else None


def may_be_turned(data: bytes) -> bool:
    """Whether its EXIF, or its XMP, may state an orientation."""
    at, last = 2, len(data) - 4
    while at < last and data[at] == 0xFF:  # the loop of ``_segments``; it runs for every image
        marker = data[at + 1]
        if marker == _SOS:
            break
        end = at + 1 if marker == 0xFF else at + 2 + (data[at + 2] << 8 | data[at + 3])
        if marker == _APP1 and (
            data[at + 4 : at + 8] == b"Exif" or data.find(b"tiff:Orientation", at, end) >= 0
        ):
            return True
        at = end
    return False


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield marker, start and end of each segment up to the first scan's header.

    The start is that of its length field.
    """
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # fill
            at += 1
            continue
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if end > len(data) or (marker in _FRAMES and end < at + _SHORTEST_FRAME):
            return
        yield marker, at + 2, end
        if marker == _SOS:
            return
        at = end


def plain(data: bytes) -> bytes:
    """Return the file without application data.

    The JFIF revision, Adobe transform and scan parameters are the usual ones.
    """
    made, end, components, sequential = bytearray(b"\xff\xd8"), 2, 3, False
    for marker, start, end in _segments(data):
        segment = bytearray(data[start:end])
        if marker in _FRAMES:
            components, sequential = segment[7], marker in (0xC0, 0xC1, 0xC9)
        if marker == _APP0 and segment[2:6] == b"JFIF":
            segment[7:9] = b"\x01\x01"
        elif (
            marker == _APP14 and segment[2:7] == b"Adobe" and len(segment) > 13 and segment[13] > 2
        ):
            segment[13] = 2 if components == 4 else 1
        elif marker == _SOS and sequential:
            segment[-3:] = b"\x00\x3f\x00"
        elif _APP1 <= marker < _APP14 or marker in (0xEF, _COM):
            continue
        made += bytes([0xFF, marker]) + segment
    return bytes(made) + data[end:]
