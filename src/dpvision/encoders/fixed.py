"""Encoders that no private picture has shaped and that cost no budget: pixels, HOG, scattering, and a dictionary learned on textures.

They are the bar for everything trained with privacy (docs/features_free.md): all of epsilon is then left for the head.

Legend: B pictures, C channels, H height, W width, D numbers of a feature.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from dpvision.config import IMAGENET_MEAN, IMAGENET_STD
from dpvision.encoders.base import FrozenEncoder
from dpvision.encoders.dictionary import DictionarySettings, default_dictionary
from dpvision.encoders.hog import hog
from dpvision.encoders.scattering import make_scattering
from dpvision.errors import ConfigError
from dpvision.features import FeatureFunction
from dpvision.train.lineage import public_weights

PIXEL_SIDE = 16
_CELLS = 8
_MOST_SIDE = 32
_FEWEST_SIDE = 8
_LICENCE = "Apache-2.0 (procedural)"  # of the dictionary
_SCATTERING_CHUNK = 16  # pictures at once: 40 MiB of wavelets


def fixed_encoder(name: str, image_size: int, device: str | torch.device = "cpu") -> FrozenEncoder:
    """Features without training.

    ``pixels``: see ``raw_pixels``. ``hog``: ``hog.hog`` with eight cells on a side. ``scattering``: two scales and eight directions of the
    picture at up to 32 px, averaged to 4 x 4 places (3888 numbers); ``scattering.make_scattering`` gives all 8 x 8. ``dictionary``: 400
    atoms on the picture at up to 32 px, so that a patch grows with the picture; the first use learns it and keeps it in the cache folder.

    Args:
        name: "pixels", "hog", "scattering" or "dictionary".
        image_size: side of the pictures, 8 px or more (scattering: 12).

    Raises:
        ConfigError: unknown name, or the pictures are too small.
    """
    makers: dict[str, Callable[[int, str | torch.device], FeatureFunction]] = {
        "pixels": lambda size, device: raw_pixels,
        "hog": _hog,
        "scattering": _scattering,
        "dictionary": _dictionary,
    }
    if name not in makers:
        raise ConfigError(f"encoder: {name!r}; expected one of {list(makers)}. Correct it.")
    if not image_size >= _FEWEST_SIDE:
        raise ConfigError(f"encoder: image_size={image_size}; expected {_FEWEST_SIDE} px or more for {name}. Enlarge the pictures.")
    # Pixels as every run sees them; the others take 0 to 1, which their own normalisations count on.
    mean, std = (IMAGENET_MEAN, IMAGENET_STD) if name == "pixels" else ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    learned = name == "dictionary"
    return FrozenEncoder(
        name, image_size, mean, std, makers[name](image_size, device), "fixed",
        weights="trained" if learned else "none", licence=_LICENCE if learned else None,
        lineage=(public_weights(name, _LICENCE),) if learned else (),
    )  # fmt: skip


def raw_pixels(x_BCHW: Tensor) -> dict[str, Tensor]:
    """Pixels as features: pictures larger than 16 px are averaged down to 16 x 16 areas.

    On CIFAR-10 the linear probe is no worse on these 768 numbers than on all 3072 (docs/evaluation.md) and six times as fast.

    Returns:
        {"pixels": x_BD}, D = 3 x 16 x 16 or less.
    """
    if x_BCHW.shape[-1] > PIXEL_SIDE:
        x_BCHW = F.adaptive_avg_pool2d(x_BCHW, PIXEL_SIDE)
    return {"pixels": x_BCHW.flatten(1)}


def _hog(image_size: int, device: str | torch.device) -> FeatureFunction:
    cell_px = max(2, image_size // _CELLS)
    return lambda x_BCHW: {"hog": hog(x_BCHW, cell_px)}


def _scattering(image_size: int, device: str | torch.device) -> FeatureFunction:
    side = min(_MOST_SIDE, image_size) // 4 * 4
    transform = make_scattering(side, device=device)

    def poolings(x_BCHW: Tensor) -> dict[str, Tensor]:
        parts = _resized(x_BCHW, side).split(_SCATTERING_CHUNK)
        return {"4x4": torch.cat([F.adaptive_avg_pool2d(transform(part).flatten(1, 2), 4).flatten(1) for part in parts])}

    return poolings


def _dictionary(image_size: int, device: str | torch.device) -> FeatureFunction:
    # Pictures below 32 px have smaller patches; those are learned on textures of that size.
    side = min(_MOST_SIDE, image_size)
    plain = DictionarySettings()
    settings = DictionarySettings(patch_px=max(3, round(plain.patch_px * side / plain.picture_px)), picture_px=side)
    dictionary = default_dictionary(settings).to(device)
    return lambda x_BCHW: {"2x2": dictionary.encode(_resized(x_BCHW, side))}


def _resized(x_BCHW: Tensor, side: int) -> Tensor:
    if x_BCHW.shape[-1] == side:
        return x_BCHW
    return F.interpolate(x_BCHW, (side, side), mode="bilinear", antialias=True)
