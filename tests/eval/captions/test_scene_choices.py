"""Compositional tests on scenes: a judge that reads sentences back against the layout, and words
that give nothing away.
"""

import itertools
import re
from collections import Counter

import numpy as np
import pytest

from dpvision.errors import DataError
from dpvision.eval.captions.scene_choices import scene_compositional
from dpvision.synthetic.scenes import Scene, make_scene

NUMBERS = range(20_000, 21_500)
_WORDS = {
    "left of": "left of",
    "right of": "right of",
    "above": "above",
    "over": "above",
    "below": "below",
    "under": "below",
}
_RELATION = re.compile(
    r"^an? (\w+) (\w+)(?: is)? (?:to the )?"
    r"(left of|right of|above|over|below|under) an? (\w+) (\w+)$"
)


def _things(sentence: str, scene: Scene) -> list[tuple[str, str]]:
    shapes = "disc|square|triangle|diamond|ring|cross|star|heart"
    return re.findall(
        rf"(red|orange|yellow|green|cyan|blue|purple|pink|white|black) ({shapes})\b", sentence
    )


def _true_of(sentence: str, scene: Scene) -> bool:
    """Whether all coloured shapes that a sentence names are there, and the relation of a sentence
    about two.
    """
    there = {(o.colour, o.shape): o for o in scene.objects}
    if any(thing not in there for thing in _things(sentence, scene)):
        return False
    match = _RELATION.match(sentence)
    if match is None:
        return True
    a, b, word = there[match[1], match[2]], there[match[4], match[5]], _WORDS[match[3]]
    return {"left of": a.x < b.x, "right of": a.x > b.x, "above": a.y < b.y, "below": a.y > b.y}[
        word
    ]


@pytest.mark.slow
def test_the_first_caption_is_true_of_its_scene_and_the_second_is_not() -> None:
    test = scene_compositional(NUMBERS)
    kinds = Counter(choice.group for choice in test.choices)
    assert (
        set(kinds) == {"swapped attribute", "swapped relation", "swapped object"}
        and min(kinds.values()) > 300
    )
    for choice in test.choices:
        scene = make_scene(NUMBERS[choice.image], 16)
        true, false = choice.captions
        assert _true_of(true, scene) and not _true_of(false, scene), choice
        assert len(_things(false, scene)) >= 2, "the judge reads it"
        if choice.group == "swapped attribute":
            assert true == scene.caption
        else:
            assert _RELATION.match(true) and _RELATION.match(false)


@pytest.mark.slow
def test_words_alone_give_nothing_away() -> None:
    # One count of all words and pairs of words over many true and false captions, then a judge by
    # likelihood ratio on others.
    test = scene_compositional(range(40_000, 46_000))
    half = len(test.choices) // 2

    def grams(text: str) -> list[str]:
        said = ["^", *text.split(), "$"]
        return said + [f"{a} {b}" for a, b in itertools.pairwise(said)]

    counts = [Counter(g for c in test.choices[:half] for g in grams(c.captions[k])) for k in (0, 1)]

    def odds(text: str) -> float:
        return float(
            np.mean([np.log((counts[0][g] + 1) / (counts[1][g] + 1)) for g in grams(text)])
        )

    others = test.choices[half:]
    right = np.array([odds(c.captions[0]) > odds(c.captions[1]) for c in others])
    for kind in {c.group for c in others}:
        of = np.array([c.group == kind for c in others])
        # 95% of fair coins lie within 1.96 standard deviations; three kinds, and twice their number
        # of draws in mind: 3.3
        assert abs(right[of].mean() - 0.5) < 3.3 * 0.5 / np.sqrt(of.sum()), (
            kind,
            right[of].mean(),
            of.sum(),
        )


def test_articles_follow_the_new_colours() -> None:
    said = [
        caption for choice in scene_compositional(NUMBERS).choices for caption in choice.captions
    ]
    assert not [caption for caption in said if re.search(r"\ba [aeiou]|\ban [^aeiou]", caption)]
    assert any("an orange" in caption for caption in said)


def test_the_same_numbers_give_the_same_test_and_scenes_are_public() -> None:
    first, again = (scene_compositional(range(50), 32) for _ in range(2))
    assert first.choices == again.choices and first.images.visibility == "public"
    image = first.images.read(7)
    assert image is not None and np.array_equal(np.asarray(image), make_scene(7, 32).image)


def test_scenes_of_one_object_are_no_test() -> None:
    alone = [i for i in range(200) if len(make_scene(i, 16).objects) == 1]
    with pytest.raises(DataError, match="has two objects of different colours"):
        scene_compositional(alone)
