"""Encoders that no private image has shaped and that cost no budget: pixels, HOG, scattering, and whitened patches of textures.

They are the baseline for everything trained with privacy (docs/features_free.md): all of epsilon is then left for the head.

Legend: B images, C channels, H height, W width, D feature dimensions.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from dpvision.config import IMAGENET_MEAN, IMAGENET_STD
from dpvision.encoders.encoder import Encoder, FeatureFunction
from dpvision.encoders.hog import hog
from dpvision.encoders.patch_constants import SIZES, feature_orders
from dpvision.encoders.patch_features import patch_features
from dpvision.encoders.scattering import make_scattering
from dpvision.errors import ConfigError
from dpvision.runs.lineage import public_weights

DEFAULT_RESOLUTION = 128
"""Highest resolution of patches where none is declared, px."""
PIXEL_SIDE = 16
_CELLS = 8
_MOST_SIDE = 32
_FEWEST_SIDE = 8
_LICENCE = "Apache-2.0 (procedural)"  # of the constants that textures give
_SCATTERING_CHUNK = 16  # images at once: 40 MiB of wavelets


FIXED = ("pixels", "hog", "scattering", "patches", "patches+scattering")
"""Names of the encoders without training."""


def fixed_encoder(name: str, image_size: int | None = None, device: str | torch.device = "cpu") -> Encoder:
    """Features without training.

    ``pixels``: see ``raw_pixels``. ``hog``: ``hog.hog`` with eight cells on a side. ``scattering``: two scales and eight directions of the
    image at up to 32 px, averaged to 4 x 4 places (3,888 dimensions). ``patches`` and ``patches+scattering``: ``patch_features`` (14,400
    and 22,176 dimensions), each image at its own resolution.

    Args:
        name: one of ``FIXED``.
        image_size: side of the images, 8 px or more (scattering: 12), 32 if left out; of patches the highest resolution, 128 if left out,
            brought down to one of ``patch_features.SIZES``.

    Raises:
        ConfigError: unknown name, or the images are too small.
    """
    if name not in FIXED:
        raise ConfigError(f"encoder: {name!r}; expected one of {list(FIXED)}. Name one of them.")
    least = 12 if name == "scattering" else _FEWEST_SIDE
    if image_size is not None and not image_size >= least:
        raise ConfigError(f"encoder: image_size={image_size}; expected {least} px or more for {name}. Enlarge the images.")
    if name.startswith("patches"):
        return _patches(name, image_size or DEFAULT_RESOLUTION, device)
    size = image_size or 32
    # Pixels as every run sees them; the others take 0 to 1, which their own normalisations count on.
    mean, std = (IMAGENET_MEAN, IMAGENET_STD) if name == "pixels" else ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    makers: dict[str, Callable[[], FeatureFunction]] = {
        "pixels": lambda: raw_pixels,
        "hog": lambda: _hog(size),
        "scattering": lambda: _scattering(size, device),
    }
    return Encoder(name, size, mean, std, makers[name](), "fixed", weights="none")


def raw_pixels(x_BCHW: Tensor) -> dict[str, Tensor]:
    """Pixels as features: images larger than 16 px are averaged down to 16 x 16 areas.

    On CIFAR-10 the linear probe is no worse on these 768 numbers than on all 3072 (docs/evaluation.md) and six times as fast.

    Returns:
        {"pixels": x_BD}, D = 3 x 16 x 16 or less.
    """
    if x_BCHW.shape[-1] > PIXEL_SIDE:
        x_BCHW = F.adaptive_avg_pool2d(x_BCHW, PIXEL_SIDE)
    return {"pixels": x_BCHW.flatten(1)}


def _hog(image_size: int) -> FeatureFunction:
    cell_px = max(2, image_size // _CELLS)
    return lambda x_BCHW: {"hog": hog(x_BCHW, cell_px)}


def _patches(name: str, image_size: int, device: str | torch.device) -> Encoder:
    sizes = tuple(side for side in SIZES if side <= max(image_size, SIZES[0]))
    features = patch_features(scattering="scattering" in name, most_px=sizes[-1], device=device)
    orders_D = feature_orders(scattering="scattering" in name)
    return Encoder(
        name, sizes[-1], (0.0, 0.0, 0.0), (1.0, 1.0, 1.0), lambda x_BCHW: {"3x3": features(x_BCHW)}, "fixed",
        weights="trained", own_sizes=sizes, standard_rows=True, licence=_LICENCE, order_D=orders_D,
        lineage=(public_weights(name, _LICENCE),),
    )  # fmt: skip


def _scattering(image_size: int, device: str | torch.device) -> FeatureFunction:
    side = min(_MOST_SIDE, image_size) // 4 * 4
    transform = make_scattering(side, device=device)

    def poolings(x_BCHW: Tensor) -> dict[str, Tensor]:
        parts = _resized(x_BCHW, side).split(_SCATTERING_CHUNK)
        return {"4x4": torch.cat([F.adaptive_avg_pool2d(transform(part).flatten(1, 2), 4).flatten(1) for part in parts])}

    return poolings


def _resized(x_BCHW: Tensor, side: int) -> Tensor:
    if x_BCHW.shape[-1] == side:
        return x_BCHW
    return F.interpolate(x_BCHW, (side, side), mode="bilinear", antialias=True)
