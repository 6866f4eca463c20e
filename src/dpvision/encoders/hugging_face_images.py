"""Preprocessing of transformers' image processors as fields of ``Encoder``."""

import math
from typing import Any, get_args

from dpvision.data.transform import Filter, LibraryResize
from dpvision.errors import ConfigError

_CROPPED_BELOW = 384
"""Side in px from which ConvNeXt's processor resizes to a square without a crop."""
_PROCESSORS = ("ViT", "Bit", "CLIP", "Siglip", "ConvNext", "DINOv3ViT")
"""Processors whose steps are resize, centre crop, scaling and normalisation, in that order."""
_STEPS = {"do_resize": True, "do_rescale": True, "do_pad": False}


def image_fields(settings: dict[str, Any], where: str) -> dict[str, Any]:
    """Return image_size, mean, std and library of an image processor.

    Args:
        settings: from its ``to_dict``.
        where: the folder, for errors.

    Raises:
        ConfigError: a setting cannot be expressed (names it).
    """

    def require(expressible: bool, name: str, rule: str) -> None:
        if not expressible:
            raise ConfigError(
                f"encoder: {where}: preprocessor_config.json: {name}={settings.get(name)!r}; "
                f"expected {rule}. Choose another model, or give pixels that are prepared so."
            )

    kind = str(settings.get("image_processor_type")).removesuffix("Fast").removesuffix("Pil")
    kind = kind.removesuffix("ImageProcessor")
    named = ", ".join(f"{name}ImageProcessor" for name in _PROCESSORS)
    require(kind in _PROCESSORS, "image_processor_type", f"one of {named}")
    for name, wanted in _STEPS.items():
        require(bool(settings.get(name)) == wanted, name, str(wanted).lower())
    factor = settings.get("rescale_factor")
    require(isinstance(factor, float) and abs(255 * factor - 1) < 1e-6, "rescale_factor", "1 / 255")
    for name in ("image_mean", "image_std"):
        require(_colour(settings.get(name), name == "image_std"), name, "a number for each of RGB")
    number: Any = settings.get("resample")
    filters = get_args(Filter)
    require(number in range(len(filters)), "resample", "the number of one of Pillow's filters")
    side, keep_aspect, centre = _sides(settings, kind, require)
    plain = not settings.get("do_normalize", True)
    return {
        "image_size": centre,
        "mean": (0.0,) * 3 if plain else tuple(map(float, settings["image_mean"])),
        "std": (1.0,) * 3 if plain else tuple(map(float, settings["image_std"])),
        "library": LibraryResize(side, keep_aspect, filters[int(number)]),
    }


def _sides(settings: dict[str, Any], kind: str, require: Any) -> tuple[int, bool, int]:
    """Return the side to resize to, whether only the shorter one, and the side of the crop."""
    given, rule = settings.get("size"), "a square, or shortest_edge"
    require(isinstance(given, dict), "size", rule)
    size = {name: value for name, value in dict(given or {}).items() if value is not None}
    require(all(type(side) is int and side >= 1 for side in size.values()), "size", rule)
    sides = set(size.values())
    keep_aspect = set(size) == {"shortest_edge"}
    require(keep_aspect or (set(size) == {"height", "width"} and len(sides) == 1), "size", rule)
    side = sides.pop()
    if kind == "ConvNext":
        require(keep_aspect, "size", "shortest_edge")
        keep_aspect = side < _CROPPED_BELOW
        share: Any = settings.get("crop_pct")
        whole = type(share) in (int, float) and 0.1 <= share <= 1
        require(whole or not keep_aspect, "crop_pct", "0.1 to 1")
        return int(side / share) if keep_aspect else side, keep_aspect, side
    if not settings.get("do_center_crop"):
        require(not keep_aspect, "do_center_crop", "true where size has shortest_edge")
        return side, keep_aspect, side
    crop = dict(settings.get("crop_size") or {})
    centre: Any = crop.get("height")
    square = type(centre) is int and centre == crop.get("width")
    require(square and 1 <= centre <= side, "crop_size", f"a square of at most {side} px")
    return side, keep_aspect, centre


def _colour(values: Any, positive: bool) -> bool:
    return (
        isinstance(values, list | tuple)
        and len(values) == 3
        and all(isinstance(v, int | float) and math.isfinite(v) for v in values)
        and (not positive or all(v > 0 for v in values))
    )
