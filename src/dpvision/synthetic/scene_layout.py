"""The layout of a scene, drawn from an integer: objects, their attributes and positions, and the
light.

Lengths are fractions of the image's side, x to the right, y downwards. Only integers, + - * / and
the square root are used (no sine, no library generator), which IEEE 754 rounds exactly: the same
integer gives the same bits everywhere.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

SHAPES = ("disc", "square", "triangle", "diamond", "ring", "cross", "star", "heart")
COLOURS = ("red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink", "white", "black")
TEXTURES = ("solid", "striped", "dotted", "checked")
SIZES = ("small", "large")
COUNTS = ("one", "two", "three", "four")
LIGHTS = ("left", "right", "top", "bottom")
BACKGROUNDS = ("pale", "dark")
RELATIONS = ("left of", "right of", "above", "below")

RADIUS = {"small": (0.085, 0.115), "large": (0.15, 0.2)}
"""Range of the radius for each size word; the ranges do not overlap."""
MAIN_MARGIN = 1.08
"""The largest object's radius is at least this many times the next one's, so that the scene's label
is visible.
"""

# Centres closer than the first would leave a pair without a clear relation: its coordinate differs
# by at least as much as the other one, so by at least 0.22 / sqrt(2) = 0.156. Centres closer than
# the second fraction of the radii's sum would let one object hide more than a small part of
# another.
_MIN_DISTANCE = 0.22
_MIN_SEPARATION = 0.86
_BORDER = 0.03
_MASK = (1 << 64) - 1
_LIGHT_TOWARDS = {
    "left": (-1.0, 0.0),
    "right": (1.0, 0.0),
    "top": (0.0, -1.0),
    "bottom": (0.0, 1.0),
}


class Draws:
    """Random numbers of one scene: splitmix64 (Steele, Lea and Flood, 2014) seeded with the hash of
    an integer.
    """

    def __init__(self, seed: int) -> None:
        # a constant of this module, so that other users of splitmix64 do not share the stream
        self._state = 0x5CE4E5
        self._state = self.bits() ^ seed
        self._state = self.bits()

    def bits(self) -> int:
        """Return an integer, uniform on [0, 2^64)."""
        self._state = z = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """Return a number, uniform on [low, high)."""
        return low + (high - low) * ((self.bits() >> 11) * 2.0**-53)

    def choice(self, options: Sequence[T]) -> T:
        """Return one of the options, all equally likely."""
        return options[(self.bits() * len(options)) >> 64]

    def shuffled(self, options: Sequence[T]) -> list[T]:
        """Return the options in a uniformly random order (Fisher and Yates)."""
        items = list(options)
        for last in range(len(items) - 1, 0, -1):
            other = (self.bits() * (last + 1)) >> 64
            items[last], items[other] = items[other], items[last]
        return items

    def direction(self, towards: tuple[float, float], spread: float) -> tuple[float, float]:
        """Return the vector ``towards`` (length 1) turned by an angle with half tangent uniform on
        (-spread, spread): no sine is needed.
        """
        t = self.uniform(-spread, spread)
        cos, sin = (1 - t * t) / (1 + t * t), 2 * t / (1 + t * t)
        x, y = towards
        return x * cos - y * sin, x * sin + y * cos


@dataclass(frozen=True, slots=True)
class SceneObject:
    """One shape. ``x``, ``y`` (centre) and ``radius`` are fractions of the image's side; y grows
    downwards.
    """

    shape: str
    """One of SHAPES."""
    colour: str
    """One of COLOURS."""
    size: str
    """One of SIZES, with ranges in RADIUS."""
    texture: str
    """One of TEXTURES."""
    x: float
    y: float
    radius: float
    turn: tuple[float, float]
    """Cosine and sine of a tilt of at most 13 degrees (a square stays a square, a diamond a
    diamond).
    """
    tint: tuple[float, float, float]
    """Added to the colour's red, green and blue; small."""
    phase: tuple[float, float]
    """Offset of the texture, in periods."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A scene before rendering; later objects are in front of earlier ones."""

    objects: tuple[SceneObject, ...]
    relations: tuple[tuple[int, str, int], ...]
    """(i, relation, j) reads "object i is `relation` object j": exactly one for each ordered
    pair.
    """
    background: str
    """One of BACKGROUNDS."""
    background_tint: tuple[float, float, float]
    light: str
    """One of LIGHTS: the side from which the light comes."""
    towards_light: tuple[float, float]
    """Vector of length 1 in the image plane."""
    shadow: bool


def draw_layout(draws: Draws) -> Layout:
    """Draw the layout of a scene; every attribute is uniform on its vocabulary and independent of
    the others.
    """
    num = 1 + draws.choice(range(len(COUNTS)))
    kinds: list[tuple[str, str]] = []
    while (
        len(kinds) < num
    ):  # colour and shape together name an object, so no two objects share both
        kind = (draws.choice(SHAPES), draws.choice(COLOURS))
        if kind not in kinds:
            kinds.append(kind)
    sizes = [draws.choice(SIZES) for _ in kinds]
    radii = _draw_radii(draws, sizes)
    centres = _draw_centres(draws, radii)
    light = draws.choice(LIGHTS)
    objects = tuple(
        SceneObject(
            shape=shape,
            colour=colour,
            size=sizes[i],
            texture=draws.choice(TEXTURES),
            x=centres[i][0],
            y=centres[i][1],
            radius=radii[i],
            turn=draws.direction((1.0, 0.0), 0.115),
            tint=_draw_tint(draws, 0.035),
            phase=(draws.uniform(), draws.uniform()),
        )
        for i, (shape, colour) in enumerate(kinds)
    )
    return Layout(
        objects=objects,
        relations=tuple(
            (i, relation(a, b), j)
            for i, a in enumerate(objects)
            for j, b in enumerate(objects)
            if i != j
        ),
        background=draws.choice(BACKGROUNDS),
        background_tint=_draw_tint(draws, 0.09),
        light=light,
        towards_light=draws.direction(_LIGHT_TOWARDS[light], 0.3),
        shadow=draws.choice((True, False)),
    )


def relation(a: SceneObject, b: SceneObject) -> str:
    """Return the relation of ``a`` to ``b``, one of RELATIONS, along the coordinate in which they
    differ most.
    """
    dx, dy = b.x - a.x, b.y - a.y
    if abs(dx) >= abs(dy):
        return "left of" if dx > 0 else "right of"
    return "above" if dy > 0 else "below"


def _draw_tint(draws: Draws, spread: float) -> tuple[float, float, float]:
    return (
        draws.uniform(-spread, spread),
        draws.uniform(-spread, spread),
        draws.uniform(-spread, spread),
    )


def _draw_radii(draws: Draws, sizes: list[str]) -> list[float]:
    while True:
        radii = [draws.uniform(*RADIUS[size]) for size in sizes]
        ordered = sorted(radii)
        if len(radii) == 1 or ordered[-1] >= MAIN_MARGIN * ordered[-2]:
            return radii


def _draw_centres(draws: Draws, radii: list[float]) -> list[tuple[float, float]]:
    """Draw centres uniformly among arrangements that keep the distances, by rejection of whole
    arrangements.
    """
    while True:
        centres: list[tuple[float, float]] = []
        for radius in radii:
            margin = radius + _BORDER
            x, y = draws.uniform(margin, 1 - margin), draws.uniform(margin, 1 - margin)
            for (other_x, other_y), other_radius in zip(centres, radii, strict=False):
                if math.sqrt((x - other_x) ** 2 + (y - other_y) ** 2) < max(
                    _MIN_DISTANCE, _MIN_SEPARATION * (radius + other_radius)
                ):
                    break
            else:
                centres.append((x, y))
                continue
            break
        if len(centres) == len(radii):
            return centres
