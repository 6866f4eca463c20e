"""Encoders without training data, which cost no privacy: pixels, HOG, scattering, and whitened
patches of textures.

They are the baseline for everything trained with privacy (docs/features_free.md): the head can
spend all of epsilon.

Legend: B images, C channels, H height, W width, D feature dimension.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpvision.config import IMAGENET_MEAN, IMAGENET_STD
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.hog import hog
from dpvision.encoders.patch_constants import SIZES, feature_orders
from dpvision.encoders.patch_features import patch_features
from dpvision.encoders.scattering import make_scattering
from dpvision.errors import ConfigError
from dpvision.runs.lineage import public_weights
from dpvision.threads import is_traced

DEFAULT_RESOLUTION = 128
"""Default maximum resolution of patches, px."""
PIXEL_SIDE = 16
_CELLS = 8
_MOST_SIDE = 32
_FEWEST_SIDE = 8
_LICENCE = "Apache-2.0 (procedural)"  # of the constants learned from textures
_SCATTERING_CHUNK = 16  # images at once: 40 MiB of wavelets


FIXED = (
    "pixels",
    "hog",
    "scattering",
    "patches",
    "patches+scattering",
    "patches+scattering+zooms",
)
"""Names of the encoders without training."""


def fixed_encoder(
    name: str, image_size: int | None = None, device: str | torch.device = "cpu"
) -> Encoder:
    """Return an encoder without training.

    ``pixels``: see ``raw_pixels``. ``hog``: ``hog.hog`` with eight cells per side. ``scattering``:
    two scales and eight directions of the image at up to 32 px, averaged to 4 x 4 positions (3,888
    dimensions). ``patches``, ``patches+scattering`` and ``patches+scattering+zooms``:
    ``patch_features`` (14,400 and twice 22,176 dimensions), each image at its own resolution.

    Args:
        name: one of ``FIXED``.
        image_size: side of the images, at least 8 px (scattering: 12), 32 by default. For patches
            the maximum resolution, 128 by default, rounded down to one of ``patch_features.SIZES``.

    Raises:
        ConfigError: unknown name, or the images are too small.
    """
    if name not in FIXED:
        raise ConfigError(
            f"encoder: {name!r}; expected one of {list(FIXED)}. Use patches+scattering."
        )
    least = 12 if name == "scattering" else _FEWEST_SIDE
    if image_size is not None and not image_size >= least:
        raise ConfigError(
            f"encoder: image_size={image_size}; expected {least} px or more for {name}. Enlarge "
            "the images."
        )
    if name.startswith("patches"):
        return _patches(name, image_size or DEFAULT_RESOLUTION, device)
    size = image_size or 32
    # Pixels are normalised as for runs; the others take values in [0, 1] and normalise them
    # themselves.
    mean, std = (
        (IMAGENET_MEAN, IMAGENET_STD) if name == "pixels" else ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    )
    if name == "pixels":
        network = FixedNetwork("pixels", lambda x_BCHW: raw_pixels(x_BCHW)["pixels"])
    elif name == "hog":
        network = FixedNetwork("hog", partial(hog, cell_px=max(2, size // _CELLS)))
    else:
        network = FixedNetwork("4x4", ScatteringCells(min(_MOST_SIDE, size) // 4 * 4))
    network.to(device)
    return Encoder(
        name, size, mean, std, network.poolings, "fixed", weights="none", network=network
    )


class FixedNetwork(nn.Module):
    """A function of images without training, under the name of its pooling."""

    def __init__(self, pooling: str, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.pooling, self.function = pooling, function

    def poolings(self, x_BCHW: Tensor) -> dict[str, Tensor]:
        """Return features, float32 (B, D), by name."""
        return {self.pooling: self.function(x_BCHW)}

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return the features, float32 (B, D)."""
        return self.function(x_BCHW)


def raw_pixels(x_BCHW: Tensor) -> dict[str, Tensor]:
    """Return pixels as features. Images larger than 16 px are averaged down to 16 x 16 areas.

    On CIFAR-10 the linear probe is no worse on these 768 dimensions than on all 3072 (docs/log,
    2026-11-23) and six times as fast.

    Returns:
        {"pixels": x_BD}, D = 3 x 16 x 16 or less.
    """
    if x_BCHW.shape[-1] > PIXEL_SIDE:
        x_BCHW = F.adaptive_avg_pool2d(x_BCHW, PIXEL_SIDE)
    return {"pixels": x_BCHW.flatten(1)}


def _patches(name: str, image_size: int, device: str | torch.device) -> Encoder:
    sizes = tuple(side for side in SIZES if side <= max(image_size, SIZES[0]))
    features = patch_features(
        scattering="scattering" in name, most_px=sizes[-1], zooms="zooms" in name
    )
    network = FixedNetwork("3x3", features.eval().to(device))
    orders_D = feature_orders(scattering="scattering" in name)
    return Encoder(
        name,
        sizes[-1],
        (0.0, 0.0, 0.0),
        (1.0, 1.0, 1.0),
        network.poolings,
        "fixed",
        network=network,
        weights="trained",
        own_sizes=sizes,
        standard_rows=True,
        licence=_LICENCE,
        order_D=orders_D,
        lineage=(public_weights(name, _LICENCE),),
    )


class ScatteringCells(nn.Module):
    """The scattering transform of images resized to ``side`` px, averaged to 4 x 4 positions."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.transform = make_scattering(side)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return coefficients, float32 (B, D)."""
        side = self.transform.side_px
        if x_BCHW.shape[-1] != side:
            x_BCHW = F.interpolate(x_BCHW, (side, side), mode="bilinear", antialias=True)
        parts = (x_BCHW,) if is_traced() else x_BCHW.split(_SCATTERING_CHUNK)
        return torch.cat(
            [
                F.adaptive_avg_pool2d(self.transform(part).flatten(1, 2), 4).flatten(1)
                for part in parts
            ]
        )
