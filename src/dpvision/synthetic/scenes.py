"""Captioned scenes: an unlimited number of images of one to four coloured shapes, each with a true
caption, from an integer.

    >>> scene = make_scene(7)
    >>> scene.image.shape
    (48, 48, 3)

Layout and caption do not depend on the image size.
"""

from dataclasses import dataclass

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
    SceneObject,
    draw_layout,
)
from dpvision.synthetic.scene_render import render
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
