"""A change of the features of fixed encoders must raise ``FEATURES_VERSION``: features that were
kept before are known by it alone.
"""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from dpvision.data.transform import preprocess_of
from dpvision.encoders.feature_cache import FEATURES_VERSION
from dpvision.encoders.fixed import FIXED
from dpvision.encoders.open import open_encoder

GOLDEN: dict[int, dict[str, tuple[float, ...]]] = {
    1: {
        "hog": (7.031956, -0.280441, 0.008219),
        "patches": (-0.023842, 0.001079, 0.000054),
        "patches+scattering": (-0.032205, 0.002759, 0.002291),
        "patches+scattering+zooms": (-0.034026, 0.001828, 0.002495),
        "pixels": (2.703400, 0.325701, -0.095337),
        "scattering": (0.679166, -0.014575, 0.013768),
    }
}
"""Version -> encoder -> sums of its features of two images, weighted by three sequences. Add an
entry, and do not change one: files of old versions are still in stores.
"""


def _images() -> list[bytes]:
    """A smooth grey scale picture as PNG, and a coloured one with another shape as JPEG."""
    row, column = np.mgrid[0:40, 0:56]
    smooth = 127 + 100 * np.sin(row / 5) * np.cos(column / 7)
    bright = np.stack([4 * row + column, 255 - 4 * column, 3 * column], axis=2)[:, :33]
    files = []
    for pixels, kind in ((smooth, "PNG"), (bright, "JPEG")):
        file = io.BytesIO()
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, kind)
        files.append(file.getvalue())
    return files


def sums(spec: str) -> tuple[float, ...]:
    encoder = open_encoder(spec, image_size=32)
    preprocess = preprocess_of(encoder.image_size, encoder.data)
    x_BCHW = torch.from_numpy(np.stack([preprocess(image) for image in _images()]))
    x_N = encoder(x_BCHW).double().flatten()
    place_N = torch.arange(len(x_N), dtype=torch.float64)
    weights = (torch.ones_like(x_N), (place_N * 0.7).sin(), (place_N * 1.9).cos())
    return tuple(float((weight_N * x_N).sum() / len(x_N) ** 0.5) for weight_N in weights)


@pytest.mark.parametrize("spec", sorted(FIXED))
def test_fixed_encoders_have_the_features_of_this_version(spec: str) -> None:
    assert sums(spec) == pytest.approx(GOLDEN[FEATURES_VERSION][spec], rel=2e-3, abs=2e-5), (
        "features changed: raise FEATURES_VERSION, and add the new sums to GOLDEN"
    )
