"""Compositional tests on procedural scenes: false captions contradict the layout, and text alone
reveals nothing.

    attribute   the scene's caption with the colours of two objects swapped
    relation    a caption about both objects of a scene of two, with the opposite relation ("left
                of" for "right of")
    object      the same caption with the two objects swapped

A false caption is a true one of another, equally likely scene, so that a model that ignores the
image is right half of the time.
"""

import re
from collections.abc import Sequence

from dpvision.errors import DataError
from dpvision.eval.captions.choice import Choice, ChoiceTest
from dpvision.eval.captions.image_source import SceneImages
from dpvision.synthetic.scene_layout import Draws
from dpvision.synthetic.scene_text import RELATION_PHRASES
from dpvision.synthetic.scenes import Scene, SceneObject, make_scene

OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
_STREAM = 0x0DDBA11  # draws of this module are not those that made the scene


def scene_compositional(numbers: Sequence[int], size_px: int = 48) -> ChoiceTest:
    """Make items from the scenes of these numbers, up to three per scene. Use numbers that no
    training used.

    Raises:
        DataError: no scene among them has two objects of different colours.
    """
    choices = []
    for place, number in enumerate(numbers):
        scene, draws = (
            make_scene(number, 16),
            Draws(number ^ _STREAM),
        )  # the layout is the same at every size
        pairs = {"attribute": swapped_colours(scene, draws)} | swapped_pair(scene, draws)
        choices += [
            Choice(place, pair, f"swapped {what}")
            for what, pair in pairs.items()
            if pair is not None
        ]
    if not choices:
        raise DataError(
            f"scenes: none of {len(numbers)} has two objects of different colours; expected "
            "some. Use more --scenes."
        )
    images = SceneImages(tuple(numbers), size_px)
    return ChoiceTest(
        "scene composition", images, tuple(choices), groups_called="kinds of swap", show_groups=True
    )


def swapped_colours(scene: Scene, draws: Draws) -> tuple[str, str] | None:
    """Return the scene's caption and a false one with the colours of two objects swapped, or None
    if no swap makes it false.
    """
    names = {(obj.colour, obj.shape) for obj in scene.objects}
    pairs = [
        (a, b)
        for i, a in enumerate(scene.objects)
        for b in scene.objects[i + 1 :]
        # At least one object that the new caption names is absent. (Two of one shape would only
        # swap places in the list.)
        if a.colour != b.colour and not {(b.colour, a.shape), (a.colour, b.shape)} <= names
    ]
    if not pairs:
        return None
    a, b = draws.choice(pairs)
    new = {
        f"{a.colour} {a.shape}": f"{b.colour} {a.shape}",
        f"{b.colour} {b.shape}": f"{a.colour} {b.shape}",
    }
    swapped = re.sub(
        "|".join(rf"\b{name}\b" for name in new), lambda found: new[found[0]], scene.caption
    )
    return scene.caption, _with_articles(swapped)


def swapped_pair(scene: Scene, draws: Draws) -> dict[str, tuple[str, str] | None]:
    """Return a true and a false caption about a scene of two objects for "relation" and "object";
    None for other scenes.
    """
    if len(scene.objects) != 2:
        return {"relation": None, "object": None}
    i, relation, j = draws.choice(scene.relations)
    a, b, place = _named(scene.objects[i]), _named(scene.objects[j]), draws.choice((0, 1))
    verb = draws.choice((" ", " is "))
    phrase, opposite = (
        RELATION_PHRASES[relation][place],
        RELATION_PHRASES[OPPOSITE[relation]][place],
    )
    true = f"{a}{verb}{phrase} {b}"
    return {
        "relation": (true, f"{a}{verb}{opposite} {b}"),
        "object": (true, f"{b}{verb}{phrase} {a}"),
    }


def _named(obj: SceneObject) -> str:
    return _with_articles(f"a {obj.colour} {obj.shape}")


def _with_articles(text: str) -> str:
    """Replace "a" and "an" to match the next word."""
    return re.sub(r"\ban? (?=(\w))", lambda found: "an " if found[1] in "aeiou" else "a ", text)
