"""Captioned scenes of one to four coloured shapes, each drawn from an integer.

    >>> scene = make_scene(7)
    >>> scene.image.shape
    (48, 48, 3)

Layout and caption do not depend on the image size. Shapes are signed distances on the pixels near
them (after Inigo Quilez, iquilezles.org/articles/distfunctions2d; negative inside), anti-aliased
over one pixel, lit from one side. All arithmetic of pixels is elementwise + - * / sqrt, floor, min
and max in float32, without reductions, so that it is the same everywhere.

Legend: C channels, H height, W width of the whole image; h, w of the box around one object.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dpvision.errors import ConfigError
from dpvision.synthetic.scene_layout import (
    BACKGROUNDS,
    COLOURS,
    COUNTS,
    LIGHTS,
    RELATIONS,
    SHAPES,
    TEXTURES,
    Draws,
    Layout,
    SceneObject,
    draw_layout,
)
from dpvision.synthetic.scene_text import make_caption

__all__ = [
    "ATTRIBUTES",
    "LABELS",
    "OBJECT_ATTRIBUTES",
    "RELATIONS",
    "Scene",
    "SceneObject",
    "make_scene",
]

LABELS = SHAPES
"""Names of the classes of ``Scene.label``."""
OBJECT_ATTRIBUTES = ("shape", "colour", "texture")
"""Attributes of an object; the others of ATTRIBUTES are of the scene."""
ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "shape": SHAPES,
    "colour": COLOURS,
    "texture": TEXTURES,
    "count": COUNTS,
    "light": LIGHTS,
    "background": BACKGROUNDS,
}
"""Vocabulary of each attribute of ``Scene.attributes``; all values are equally likely, so chance is
1 / len.

The size word is not included, because the largest of several objects is mostly "large". It is in
``SceneObject.size``.
"""


@dataclass(frozen=True)
class Scene:
    """An image, its caption, and its contents."""

    image: np.ndarray
    """uint8 of shape (H, W, 3)."""
    caption: str
    objects: tuple[SceneObject, ...]
    """One to four, no two of the same colour and shape; later ones are in front."""
    relations: tuple[tuple[int, str, int], ...]
    """(i, relation, j) reads "object i is `relation` object j": exactly one of RELATIONS for each
    ordered pair.
    """
    light: str
    background: str

    @property
    def main(self) -> SceneObject:
        """The largest object (by a clear margin)."""
        return max(self.objects, key=lambda obj: obj.radius)

    @property
    def label(self) -> int:
        """Class of the scene: the shape of the largest object, an index into LABELS."""
        return LABELS.index(self.main.shape)

    @property
    def attributes(self) -> dict[str, int]:
        """Indices into ATTRIBUTES, for the largest object (shape, colour, texture) and the scene
        (count, light, background).
        """
        main = self.main
        words = {
            "shape": main.shape,
            "colour": main.colour,
            "texture": main.texture,
            "count": COUNTS[len(self.objects) - 1],
            "light": self.light,
            "background": self.background,
        }
        return {name: ATTRIBUTES[name].index(word) for name, word in words.items()}

    def all_of(self, attribute: str) -> list[int]:
        """Indices into ``ATTRIBUTES[attribute]`` of all objects, sorted; one for an attribute of
        the scene.
        """
        if attribute not in OBJECT_ATTRIBUTES:
            return [self.attributes[attribute]]
        return sorted(
            {ATTRIBUTES[attribute].index(getattr(thing, attribute)) for thing in self.objects}
        )


def make_scene(i: int, size_px: int = 48) -> Scene:
    """Return scene number ``i``: a pure function of the integer, bit-identical on every machine
    with IEEE 754 arithmetic.

    Args:
        i: number of the scene, 0 to 2^63 - 1.
        size_px: side of the square image, 16 to 4096 pixels (textures are distinguishable from 32).

    Raises:
        ConfigError: ``i`` or ``size_px`` is out of range.
    """
    if not 0 <= i < 1 << 63:
        raise ConfigError(
            f"scenes: i={i!r}; expected an integer from 0 to 2^63 - 1. Number the scenes from 0."
        )
    if not 16 <= size_px <= 4096:
        raise ConfigError(
            f"scenes: size_px={size_px!r}; expected 16 to 4096 pixels. Use 48, or the image size "
            "of the model."
        )
    draws = Draws(i)
    layout = draw_layout(draws)
    return Scene(
        image=render(layout, size_px),
        caption=make_caption(layout, draws),
        objects=layout.objects,
        relations=layout.relations,
        light=layout.light,
        background=layout.background,
    )


def make_scenes(numbers: range, size_px: int = 48) -> list[Scene]:
    """Return the scenes of these numbers; see ``make_scene``."""
    return [make_scene(i, size_px) for i in numbers]


_RGB = {
    "red": (0.85, 0.16, 0.17),
    "orange": (0.96, 0.53, 0.11),
    "yellow": (0.97, 0.84, 0.20),
    "green": (0.20, 0.60, 0.27),
    "cyan": (0.25, 0.78, 0.85),
    "blue": (0.16, 0.33, 0.83),
    "purple": (0.51, 0.24, 0.72),
    "pink": (0.97, 0.55, 0.74),
    "white": (0.95, 0.95, 0.94),
    "black": (0.09, 0.09, 0.10),
}
_LIGHT_COLOURS = ("yellow", "cyan", "pink", "white", "orange")
_BACKGROUND = {"pale": (0.70, 0.70, 0.69), "dark": (0.31, 0.32, 0.35)}
_REACH = 1.12  # half side of the box that contains an object, in radii
_SHADOW_OFFSET, _SHADOW_SOFTNESS, _SHADOW_STRENGTH = 0.3, 0.28, 0.45


def render(layout: Layout, size_px: int) -> np.ndarray:
    """Render the layout as an image, uint8 (size_px, size_px, 3)."""
    axis = _axis(size_px)
    lx, ly = layout.towards_light
    # Brightest on the lit side: the gradient runs over the whole image.
    glow_HW = (axis - 0.5)[None, :] * (0.3 * lx) + ((axis - 0.5) * (0.3 * ly))[:, None]
    base = [
        b + t for b, t in zip(_BACKGROUND[layout.background], layout.background_tint, strict=True)
    ]
    image_CHW = (glow_HW + 1) * _column(base)
    for obj in layout.objects:
        _paint(image_CHW, obj, axis, layout)
    image_CHW *= 255
    image_CHW += 0.5
    np.clip(image_CHW, 0, 255, out=image_CHW)
    return np.ascontiguousarray(image_CHW.astype(np.uint8).transpose(1, 2, 0))


def coverage(obj: SceneObject, size_px: int) -> np.ndarray:
    """Return the fraction of each pixel that the unoccluded object covers, float32 (size_px,
    size_px) in [0, 1].
    """
    full_HW = np.zeros((size_px, size_px), np.float32)
    rows, columns = _box(obj, size_px)
    axis = _axis(size_px)
    u_hw, v_hw = _turned(obj, axis[columns] - obj.x, axis[rows] - obj.y)
    full_HW[rows, columns] = _smooth_step(-_DISTANCE[obj.shape](u_hw, v_hw, obj.radius), size_px)
    return full_HW


@lru_cache(maxsize=8)
def _axis(size_px: int) -> np.ndarray:
    axis = ((np.arange(size_px) + 0.5) / size_px).astype(np.float32)
    axis.flags.writeable = False
    return axis


def _column(rgb: list[float]) -> np.ndarray:
    return np.array(rgb, np.float32).reshape(3, 1, 1)


def _box(obj: SceneObject, size_px: int) -> tuple[slice, slice]:
    reach = obj.radius * _REACH
    low_x, high_x = math.floor((obj.x - reach) * size_px), math.ceil((obj.x + reach) * size_px) + 1
    low_y, high_y = math.floor((obj.y - reach) * size_px), math.ceil((obj.y + reach) * size_px) + 1
    return slice(max(low_y, 0), min(high_y, size_px)), slice(max(low_x, 0), min(high_x, size_px))


def _turned(obj: SceneObject, dx_w: np.ndarray, dy_h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return coordinates in the object's frame, v upwards, each of shape (h, w)."""
    cos, sin = obj.turn
    return dx_w * cos + (dy_h * sin)[:, None], dx_w * sin - (dy_h * cos)[:, None]


def _smooth_step(inside: np.ndarray, size_px: int) -> np.ndarray:
    """Return the covered fraction of a pixel from the distance inside the edge, by a ramp one pixel
    wide.
    """
    inside = inside * size_px
    inside += 0.5
    return np.clip(inside, 0, 1, out=inside)


def _paint(image_CHW: np.ndarray, obj: SceneObject, axis: np.ndarray, layout: Layout) -> None:
    size_px = len(axis)
    rows, columns = _box(obj, size_px)
    dx_w, dy_h = axis[columns] - obj.x, axis[rows] - obj.y
    u_hw, v_hw = _turned(obj, dx_w, dy_h)
    distance_hw = _DISTANCE[obj.shape](u_hw, v_hw, obj.radius)
    if layout.shadow:
        _cast_shadow(image_CHW, obj, distance_hw, rows.start, columns.start, layout.towards_light)
    lx, ly = layout.towards_light
    shade_hw = dx_w * (0.2 * lx / obj.radius) + (dy_h * (0.2 * ly / obj.radius))[:, None]
    rim_hw = np.maximum(
        distance_hw / (0.3 * obj.radius) + 1, 0
    )  # 0 well inside, 1 at the edge: rounds the edge off
    shade_hw -= rim_hw * rim_hw * 0.16
    shade_hw += 1.03
    first = _column([c + t for c, t in zip(_RGB[obj.colour], obj.tint, strict=True)])
    if obj.texture == "solid":
        colour_Chw = first * shade_hw
    else:
        # The second tone is a darker or lighter version of the first, so that the object keeps its
        # colour word.
        second = first * 0.42 if obj.colour in _LIGHT_COLOURS else first + (0.97 - first) * 0.6
        colour_Chw = (first + (second - first) * _pattern(obj, u_hw, v_hw, size_px)) * shade_hw
    target_Chw = image_CHW[:, rows, columns]
    colour_Chw -= target_Chw
    colour_Chw *= _smooth_step(-distance_hw, size_px)
    target_Chw += colour_Chw


def _cast_shadow(
    image_CHW: np.ndarray,
    obj: SceneObject,
    distance_hw: np.ndarray,
    top: int,
    left: int,
    towards_light: tuple[float, float],
) -> None:
    """Darken the image behind the object, shifted away from the light by whole pixels (so that
    distances are reused).
    """
    size_px = image_CHW.shape[1]
    reach = _SHADOW_OFFSET * obj.radius * size_px
    top += math.floor(0.5 - towards_light[1] * reach)
    left += math.floor(0.5 - towards_light[0] * reach)
    soft = _SHADOW_SOFTNESS * obj.radius
    dark_hw = np.clip((soft * 0.5 - distance_hw) / soft, 0, 1) * -_SHADOW_STRENGTH
    dark_hw += 1
    h, w = dark_hw.shape
    rows, columns = (
        slice(max(top, 0), min(top + h, size_px)),
        slice(max(left, 0), min(left + w, size_px)),
    )
    image_CHW[:, rows, columns] *= dark_hw[
        rows.start - top : rows.stop - top, columns.start - left : columns.stop - left
    ]


def _pattern(obj: SceneObject, u_hw: np.ndarray, v_hw: np.ndarray, size_px: int) -> np.ndarray:
    """Return the weight of the second tone, (h, w) in [0, 1]. A period is at least 3.8 pixels in an
    image of 48.
    """
    period = max(0.6 * obj.radius, 0.08)
    sharpness = period * size_px  # a ramp of one pixel, as at the edge of a shape
    across_hw = _wave(v_hw, period, obj.phase[0])
    if obj.texture == "striped":
        return np.clip(
            (across_hw - 0.29) * sharpness + 0.5, 0, 1
        )  # 0.21 of 0.5: the object's colour keeps the larger part
    along_hw = _wave(u_hw, period, obj.phase[1])
    if obj.texture == "dotted":
        return np.clip(
            (0.31 - np.sqrt(across_hw * across_hw + along_hw * along_hw)) * sharpness + 0.5, 0, 1
        )
    return np.clip(
        np.minimum((across_hw - 0.25) * sharpness, 0.5)
        * np.minimum((along_hw - 0.25) * sharpness, 0.5)
        * 2
        + 0.5,
        0,
        1,
    )


def _wave(x: np.ndarray, period: float, phase: float) -> np.ndarray:
    """Return a triangle wave between 0 and 0.5: the distance to the nearest multiple of the period,
    in periods.
    """
    turns = x / period + phase
    turns -= np.floor(turns + 0.5)
    return np.abs(turns, out=turns)


def _disc(u: np.ndarray, v: np.ndarray, radius: float) -> np.ndarray:
    return np.sqrt(u * u + v * v) - 0.95 * radius


def _ring(u: np.ndarray, v: np.ndarray, radius: float) -> np.ndarray:
    return np.abs(np.sqrt(u * u + v * v) - 0.72 * radius) - 0.27 * radius


def _square(u: np.ndarray, v: np.ndarray, radius: float) -> np.ndarray:
    return np.maximum(np.abs(u), np.abs(v)) - 0.8 * radius


def _diamond(u: np.ndarray, v: np.ndarray, radius: float) -> np.ndarray:
    return np.abs(u) * 0.8 + np.abs(v) * 0.6 - 0.62 * radius


def _triangle(u: np.ndarray, v: np.ndarray, radius: float) -> np.ndarray:
    return np.maximum(np.abs(u) * 0.8660254 + v * 0.5 - 0.42 * radius, -0.62 * radius - v)


def _cross(u: np.ndarray, v: np.ndarray, radius: float) -> np.ndarray:
    u, v = np.abs(u), np.abs(v)
    return np.maximum(np.maximum(u, v) - 0.97 * radius, np.minimum(u, v) - 0.33 * radius)


def _star(u: np.ndarray, v: np.ndarray, radius: float) -> np.ndarray:
    """Pentagram, rounded: the points outside at most one of the five lines that bound the inner
    pentagon.
    """
    u = np.abs(u)
    sides = (
        v * 1.0,
        u * 0.9510565 + v * 0.3090170,
        v * 0.3090170 - u * 0.9510565,
        u * 0.5877853 - v * 0.8090170,
        u * -0.5877853 - v * 0.8090170,
    )
    most, second = sides[0], np.full_like(v, -1.0)
    for side in sides[1:]:
        second = np.maximum(second, np.minimum(most, side))
        most = np.maximum(most, side)
    return second - 0.31 * radius


def _heart(u: np.ndarray, v: np.ndarray, radius: float) -> np.ndarray:
    u, v = np.abs(u), v + 0.9 * radius
    unit = 1.62 * radius
    lobe = np.sqrt((u - 0.25 * unit) ** 2 + (v - 0.75 * unit) ** 2) - 0.3535534 * unit
    half = np.maximum(u + v, 0) * 0.5
    below = np.sqrt(np.minimum(u * u + (v - unit) ** 2, (u - half) ** 2 + (v - half) ** 2))
    return np.where(u + v > unit, lobe, np.where(u > v, below, -below))


_DISTANCE = {
    "disc": _disc,
    "square": _square,
    "triangle": _triangle,
    "diamond": _diamond,
    "ring": _ring,
    "cross": _cross,
    "star": _star,
    "heart": _heart,
}
