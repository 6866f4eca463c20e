"""Claims about scenes that could be false, read back from the layout, the sentence and the
pixels.
"""

import hashlib
import itertools
import math
from collections import Counter

import numpy as np
import pytest
from scipy.stats import chisquare

from dpvision.errors import ConfigError
from dpvision.synthetic import scene_layout
from dpvision.synthetic.scene_layout import COLOURS, SHAPES, SIZES, TEXTURES, SceneObject
from dpvision.synthetic.scenes import ATTRIBUTES, LABELS, RELATIONS, Scene, coverage, make_scene

# What people call these colours, not what the generator uses (CSS and X11 values).
NAMED_RGB = {
    "red": (220, 40, 40), "orange": (255, 140, 20), "yellow": (255, 220, 60),
    "green": (40, 150, 60), "cyan": (60, 210, 220), "blue": (40, 80, 220),
    "purple": (128, 50, 180), "pink": (255, 140, 190),
    "white": (255, 255, 255), "black": (10, 10, 10),
}  # fmt: skip


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return [make_scene(i, 16) for i in range(10_000)]


def test_the_first_scenes_have_the_same_bits_everywhere() -> None:
    digest = hashlib.sha256()
    for i in itertools.chain(range(64), [1 << 40, (1 << 63) - 1]):
        scene = make_scene(i)
        digest.update(scene.image.tobytes())
        digest.update(
            repr(
                (scene.caption, scene.objects, scene.relations, scene.light, scene.background)
            ).encode()
        )
    assert digest.hexdigest() == "1c80d13af9ef2bf3bb2ec59568e22f86c39010c4bf03e0c7d8b02a81b9acade5"


def test_splitmix_matches_the_published_sequence() -> None:
    draws = scene_layout.Draws(0)
    draws._state = 1234567
    # The values that Rosetta Code gives for the reference implementation at this seed.
    assert [draws.bits() for _ in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


@pytest.mark.parametrize("size_px", [16, 33, 48, 96])
def test_size_changes_the_pixels_only(size_px: int) -> None:
    for i in range(20):
        scene, other = make_scene(i, size_px), make_scene(i, 48)
        assert scene.image.shape == (size_px, size_px, 3) and scene.image.dtype == np.uint8
        assert (scene.caption, scene.objects, scene.relations) == (
            other.caption,
            other.objects,
            other.relations,
        )


def test_a_larger_image_shows_the_same_scene() -> None:
    for i in range(50):
        large = make_scene(i, 192).image.reshape(48, 4, 48, 4, 3).mean(axis=(1, 3))
        assert np.abs(large - make_scene(i, 48).image).mean() < 2.0


@pytest.mark.slow
@pytest.mark.parametrize("attribute", sorted(ATTRIBUTES))
def test_scene_attributes_are_uniform(scenes: list[Scene], attribute: str) -> None:
    counts = np.bincount(
        [scene.attributes[attribute] for scene in scenes], minlength=len(ATTRIBUTES[attribute])
    )
    assert len(counts) == len(ATTRIBUTES[attribute])
    assert chisquare(counts).pvalue > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attribute", "words"),
    [("shape", SHAPES), ("colour", COLOURS), ("texture", TEXTURES), ("size", SIZES)],
)
def test_object_attributes_are_uniform(
    scenes: list[Scene], attribute: str, words: tuple[str, ...]
) -> None:
    counts = Counter(getattr(obj, attribute) for scene in scenes for obj in scene.objects)
    assert set(counts) == set(words)
    assert chisquare(list(counts.values())).pvalue > 1e-3


@pytest.mark.parametrize(("a", "b"), list(itertools.combinations(sorted(ATTRIBUTES), 2)))
def test_attributes_tell_nothing_about_each_other(scenes: list[Scene], a: str, b: str) -> None:
    table = np.zeros((len(ATTRIBUTES[a]), len(ATTRIBUTES[b])))
    for scene in scenes:
        table[scene.attributes[a], scene.attributes[b]] += 1
    assert chisquare(table.ravel()).pvalue > 1e-3


def test_label_is_the_shape_of_the_clearly_largest_object(scenes: list[Scene]) -> None:
    for scene in scenes:
        radii = sorted((obj.radius for obj in scene.objects), reverse=True)
        assert LABELS[scene.label] == next(
            obj.shape for obj in scene.objects if obj.radius == radii[0]
        )
        assert len(radii) == 1 or radii[0] >= 1.08 * radii[1]


def test_every_pair_has_one_relation_and_its_converse(scenes: list[Scene]) -> None:
    converse = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    for scene in scenes:
        found = {(i, j): relation for i, relation, j in scene.relations}
        assert len(found) == len(scene.relations) == len(scene.objects) * (len(scene.objects) - 1)
        for (i, j), relation in found.items():
            assert relation in RELATIONS and found[j, i] == converse[relation]


def test_no_two_objects_share_colour_and_shape(scenes: list[Scene]) -> None:
    for scene in scenes:
        assert len({(obj.colour, obj.shape) for obj in scene.objects}) == len(scene.objects)


def test_small_is_smaller_than_anything_large(scenes: list[Scene]) -> None:
    radii = {
        size: [obj.radius for scene in scenes for obj in scene.objects if obj.size == size]
        for size in SIZES
    }
    assert max(radii["small"]) < 0.12 and min(radii["large"]) >= 0.15


def test_every_object_is_mostly_visible_and_whole() -> None:
    least = 1.0
    for i in range(600):
        masks = [coverage(obj, 64) for obj in make_scene(i, 16).objects]
        for j, mask in enumerate(masks):
            assert (
                not mask[0].any()
                and not mask[-1].any()
                and not mask[:, 0].any()
                and not mask[:, -1].any()
            )
            in_front = np.zeros_like(mask)
            for other in masks[j + 1 :]:
                in_front = np.maximum(in_front, other)
            least = min(least, float((mask * (1 - in_front)).sum() / mask.sum()))
    assert least > 0.8


AREAS = {
    "disc": math.pi * 0.95**2,
    "ring": math.pi * (0.99**2 - 0.45**2),
    "square": 1.6**2,
    "diamond": 2 * (0.62 / 0.8) * (0.62 / 0.6),
    "cross": 2 * 1.94 * 0.66 - 0.66**2,
    # Apex at 0.84 and base at -0.62; the sides fall off at slope sqrt(3).
    "triangle": 1.46**2 / math.sqrt(3),
}


@pytest.mark.parametrize("shape", sorted(AREAS))
def test_area_of_a_shape_is_that_of_geometry(shape: str) -> None:
    assert coverage(_object(shape), 400).sum() / (0.2 * 400) ** 2 == pytest.approx(
        AREAS[shape], rel=0.01
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_are_mirror_symmetric_and_lie_within_their_radius(shape: str) -> None:
    mask = coverage(_object(shape), 201)
    assert np.abs(mask - mask[:, ::-1]).max() < 1e-3
    rows, columns = np.nonzero(mask)
    distance = np.sqrt((rows + 0.5 - 100.5) ** 2 + (columns + 0.5 - 100.5) ** 2) / 201
    assert (
        0.15 < distance.max() < 0.2 * 1.17
    )  # a square's corners stick out by 13%, plus half a pixel


def test_a_star_has_five_points() -> None:
    mask = coverage(_object("star"), 400)
    angle = np.linspace(0, 2 * np.pi, 720, endpoint=False)
    ring = (
        mask[
            np.round(199.5 + 0.16 * 400 * np.sin(angle)).astype(int),
            np.round(199.5 + 0.16 * 400 * np.cos(angle)).astype(int),
        ]
        > 0.5
    )
    assert (ring & ~np.roll(ring, 1)).sum() == 5


def test_solid_objects_look_like_their_colour_word() -> None:
    checked = 0
    for i in range(400):
        scene = make_scene(i, 64)
        masks = [coverage(obj, 64) for obj in scene.objects]
        for j, obj in enumerate(scene.objects):
            if obj.texture == "solid":
                seen = (
                    masks[j] * (1 - np.maximum.reduce([np.zeros((64, 64)), *masks[j + 1 :]])) > 0.99
                )
                rgb = np.median(scene.image[seen], axis=0)
                assert (
                    min(NAMED_RGB, key=lambda name: float(np.square(rgb - NAMED_RGB[name]).sum()))
                    == obj.colour
                ), (i, obj, rgb)
                checked += 1
    assert checked > 200


def test_the_lit_side_of_the_background_is_the_brightest() -> None:
    for i in range(300):
        scene = make_scene(i)
        grey = scene.image.sum(axis=2, dtype=float)
        sides = {"left": grey[:, 0], "right": grey[:, -1], "top": grey[0], "bottom": grey[-1]}
        assert max(sides, key=lambda side: float(np.median(sides[side]))) == scene.light


def test_pale_backgrounds_are_brighter_than_dark_ones() -> None:
    brightness = {"pale": [], "dark": []}
    for i in range(300):
        image = make_scene(i).image
        border = np.concatenate([image[0], image[-1], image[:, 0], image[:, -1]])
        brightness[make_scene(i).background].append(float(np.median(border.mean(axis=1))))
    assert min(brightness["pale"]) > max(brightness["dark"])


@pytest.mark.parametrize(("i", "size_px"), [(-1, 48), (1 << 63, 48), (0, 15), (0, 5000)])
def test_out_of_range_is_refused_with_a_remedy(i: int, size_px: int) -> None:
    with pytest.raises(ConfigError, match=r"expected .*\. \w+"):
        make_scene(i, size_px)


def _object(shape: str) -> SceneObject:
    return SceneObject(
        shape, "red", "large", "solid", 0.5, 0.5, 0.2, (1.0, 0.0), (0.0, 0.0, 0.0), (0.0, 0.0)
    )
