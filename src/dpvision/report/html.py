"""Render HTML pages from templates with one style sheet, write them atomically, and make images for
them as data: URIs.

Legend: B images, C channels, H height, W width.
"""

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image
from torch import Tensor

from dpvision.data.decode import BadImage, decode
from dpvision.errors import DataError
from dpvision.eval.score import printed
from dpvision.files import write_file
from dpvision.privacy.printed import percent_up, short, up, up_delta

_GAP = 1 / 16
_LARGEST_PX = 128
_LARGEST_ALONE_PX = 224
_PNG_UP_TO_PX = 64


def setting_rows(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Flatten nested settings to (dotted name, text) pairs."""
    rows = []
    for key, value in values.items():
        if isinstance(value, dict):
            rows += setting_rows(value, f"{prefix}{key}.")
        else:
            shown = (
                ", ".join(v if isinstance(v, str) else f"{v:g}" for v in value)
                if isinstance(value, list)
                else f"{value:,}"
                if type(value) is int
                else str(value)
            )
            rows.append((prefix + key, "none" if value is None else shown))
    return rows


def render(template: str, **values: Any) -> str:
    """Render a template of this folder. Values are escaped unless they are Markup."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        up=up,
        up_delta=up_delta,
        percent=percent_up,
        short=short,
        commas="{:,}".format,
        printed=printed,
    )
    return environment.get_template(template).render(
        css=Markup((Path(__file__).parent / "page.css").read_text()), **values
    )


def write_page(path: Path, html: str) -> Path:
    """Write a page atomically and return its path.

    Raises:
        CheckpointError: the file cannot be written.
    """
    write_file(path, html.encode())
    return path


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
