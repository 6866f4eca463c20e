"""Order tests: what each shuffle may change, that it is the same everywhere, and that captions and
shuffles are laid out alike.
"""

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpvision.data.open import open_store
from dpvision.data.store import Store
from dpvision.data.synthetic_store import write_scenes
from dpvision.errors import DataError
from dpvision.eval.captions.order import (
    MAX_WORDS,
    SHUFFLES,
    order_test,
    shuffled_captions,
    word_class,
)
from dpvision.synthetic.scene_layout import Draws

from ..labelled import write_colours

CAPTION = (
    "A large brown dog with a red collar runs through the tall green grass near two small "
    "children ."
)
FLICKR = Path(__file__).parents[4] / "shared" / "data" / "flickr8k"


def test_each_shuffle_keeps_the_words_and_what_it_is_not_about() -> None:
    words = CAPTION.lower().removesuffix(" .").split()
    classes = [word_class(word) for word in words]
    threes = [words[i : i + 3] for i in range(0, len(words), 3)]
    seen = Counter()
    for seed in range(40):
        for kind, shuffle in SHUFFLES.items():
            other = shuffle(words, Draws(seed))
            assert Counter(other) == Counter(words), kind
            seen[kind, " ".join(other)] += 1
            if kind == "nouns and adjectives":
                assert [word_class(word) for word in other] == classes
                assert [w for w, c in zip(other, classes, strict=True) if c == "other"] == [
                    w for w in words if word_class(w) == "other"
                ]
            elif kind == "all but nouns and adjectives":
                assert all(
                    o == w for o, w, c in zip(other, words, classes, strict=True) if c != "other"
                )
            elif kind == "within threes":
                assert [Counter(other[i : i + 3]) for i in range(0, len(words), 3)] == [
                    Counter(three) for three in threes
                ]
            else:
                rest = list(other)
                for three in sorted(threes, key=len, reverse=True):
                    i = next(i for i in range(len(rest)) if rest[i : i + len(three)] == three)
                    del rest[i : i + len(three)]
                assert not rest
    assert {kind for kind, _ in seen} == set(SHUFFLES) and len(seen) > 100, "and they do shuffle"


def test_shuffles_hang_on_the_words_alone() -> None:
    found = []
    for seed, caption in enumerate(
        (
            "Two dogs play with a red ball.",
            "two dogs  play with a red ball",
            "TWO DOGS, play with a red ball!",
        )
    ):
        random.seed(seed)
        np.random.seed(seed)
        found.append(shuffled_captions(caption))
    assert found[0] == found[1] == found[2] and found[0][0] == "two dogs play with a red ball"
    assert (
        len(
            {
                tuple(shuffled_captions(f"{colour} dogs play with a ball")[1].split())
                for colour in ("red", "big", "old", "wet")
            }
        )
        == 4
    )


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.text(max_size=80))
def test_no_shuffle_is_the_caption_or_stands_twice_and_all_are_laid_out_alike(caption: str) -> None:
    found = shuffled_captions(caption)
    assert len(set(found)) == len(found) <= 1 + len(SHUFFLES)
    assert all(sorted(other.split()) == sorted(found[0].split()) for other in found)
    assert all(other == other.lower() and len(other.split()) <= MAX_WORDS for other in found)


@pytest.mark.parametrize("caption", ["", "...", "dog", "dog dog dog", "  ball "])
def test_captions_without_two_different_words_have_no_shuffle(caption: str) -> None:
    assert len(shuffled_captions(caption)) == 1


def test_a_store_gives_an_item_for_each_caption_and_counts_the_rest(tmp_path: Path) -> None:
    store = write_scenes(tmp_path / "scenes", 30, 16)
    made = order_test(store)
    assert len(made.test.choices) + made.left_out == 30 and made.test.images.visibility == "public"
    short = [c for c in made.test.choices if len(c.captions) < 5]
    assert made.short_of_shuffles == len(short)
    for choice in made.test.choices:
        [caption] = store.captions(int(made.test.images.row_N[choice.image]))  # type: ignore[attr-defined]
        assert choice.captions == tuple(shuffled_captions(caption))
    assert len(order_test(store, limit=4).test.images) == 4
    with pytest.raises(DataError, match="has no captions that can be shuffled"):
        order_test(write_colours(tmp_path / "colours", 3, 0))


def test_word_classes_of_plain_captions() -> None:
    caption = "A man in a blue shirt is riding an old bicycle quickly past 3 beautiful houses"
    classes = {word: word_class(word) for word in caption.split()}
    assert [w for w, c in classes.items() if c == "noun"] == ["man", "shirt", "bicycle", "houses"]
    assert [w for w, c in classes.items() if c == "adjective"] == ["blue", "old", "beautiful"]


def test_flickr8k_has_four_shuffles_for_nearly_every_caption(tmp_path: Path) -> None:
    if not FLICKR.exists():
        pytest.skip("no ../shared/data/flickr8k")
    import tarfile

    captions = []
    with tarfile.open(FLICKR / "test-000000.tar") as tar:
        for member in tar:
            if member.name.endswith(".json") and (file := tar.extractfile(member)) is not None:
                captions += json.load(file)["captions"]
    counts = Counter(len(shuffled_captions(caption)) for caption in captions)
    assert counts[5] / len(captions) > 0.95 and counts[1] == 0, (
        counts
    )  # the rest has one adjective and two other words, and the like


def test_store_type_is_what_the_suite_hands_over(tmp_path: Path) -> None:
    assert isinstance(write_scenes(tmp_path / "s", 5, 16, public=False), Store)
    assert order_test(open_store(tmp_path / "s")).test.images.visibility == "private"
