"""Order tests: a caption among four shuffled ones of the same words (ARO's COCO-order and
Flickr-order, from any captions).

The four shuffles of Yuksekgonul et al. (ICLR 2023): nouns among nouns and adjectives among
adjectives; all other words; words within groups of three; groups of three. The true caption is
formatted like its shuffles, in lower case and without punctuation: in the benchmark it keeps its
spacing ("man's", where a shuffle has "man 's"), which alone can distinguish it.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dpvision.data.captions import clean_caption
from dpvision.data.store import Store
from dpvision.errors import DataError
from dpvision.eval.captions.choice import Choice, ChoiceTest
from dpvision.eval.captions.image_source import StoreImages
from dpvision.eval.captions.word_classes import word_class
from dpvision.synthetic.scene_layout import Draws

MAX_WORDS = 30
"""As in the benchmark: longer captions are truncated before the shuffle."""
_TRIES = 8
_WORD = re.compile(r"[^\W_]+(?:['’.-][^\W_]+)*")


@dataclass(frozen=True)
class OrderTest:
    """The order test of a store's captions, with counts of captions left out."""

    test: ChoiceTest
    left_out: int
    """Captions without a shuffle that differs from them."""
    short_of_shuffles: int
    """Items with fewer than four shuffles, because a kind always returned the caption itself."""


def order_test(store: Store, *, max_captions: int = 5, limit: int | None = None) -> OrderTest:
    """Make one item for each caption of a store's images.

    Args:
        max_captions: use the first so many captions of an image.
        limit: use the first so many images with a caption.

    Raises:
        DataError: no caption can be shuffled.
    """
    rows: list[int] = []
    choices: list[Choice] = []
    left_out = short = 0
    for row in range(store.num_records):
        if limit is not None and len(rows) == limit:
            break
        items = []
        for caption in store.captions(row)[:max_captions]:
            shuffles = shuffled_captions(caption)
            if len(shuffles) > 1:
                items.append(Choice(len(rows), tuple(shuffles)))
                short += len(shuffles) < 1 + len(SHUFFLES)
            else:
                left_out += 1
        if items:
            rows.append(row)
            choices += items
    if not choices:
        raise DataError(
            f"order: {store.path} has no captions that can be shuffled; expected some of two "
            "words or more. Import captions."
        )
    said = f"order test, {'up to ' if short else ''}4 shuffles"
    return OrderTest(
        ChoiceTest(said, StoreImages(store, np.array(rows)), tuple(choices)), left_out, short
    )


def shuffled_captions(caption: str) -> list[str]:
    """Return the caption in the test's format, followed by one shuffle of each kind that differs
    from it.

    A shuffle equal to an earlier one is redrawn, up to eight times, then left out. Draws are keyed
    by the caption and the kind alone, so that the test does not depend on the import or the
    machine.
    """
    words = [word.lower() for word in _WORD.findall(clean_caption(caption))][:MAX_WORDS]
    found = [" ".join(words)]
    for kind, shuffle in SHUFFLES.items():
        seed = hashlib.blake2b(
            f"{found[0]}\n{kind}".encode(errors="surrogatepass"), digest_size=8
        ).digest()
        draws = Draws(int.from_bytes(seed, "little"))
        for _ in range(_TRIES):
            other = " ".join(shuffle(words, draws))
            if other not in found:
                found.append(other)
                break
    return found


def _nouns_and_adjectives(words: list[str], draws: Draws) -> list[str]:
    shuffled = list(words)
    for wanted in ("noun", "adjective"):
        shuffled = _shuffled_at(
            [i for i, word in enumerate(words) if word_class(word) == wanted], shuffled, draws
        )
    return shuffled


def _all_but_nouns_and_adjectives(words: list[str], draws: Draws) -> list[str]:
    return _shuffled_at(
        [i for i, word in enumerate(words) if word_class(word) == "other"], words, draws
    )


def _within_threes(words: list[str], draws: Draws) -> list[str]:
    return [word for three in _threes(words) for word in draws.shuffled(three)]


def _threes_among_themselves(words: list[str], draws: Draws) -> list[str]:
    return [word for three in draws.shuffled(_threes(words)) for word in three]


SHUFFLES: dict[str, Callable[[list[str], Draws], list[str]]] = {
    "nouns and adjectives": _nouns_and_adjectives,
    "all but nouns and adjectives": _all_but_nouns_and_adjectives,
    "within threes": _within_threes,
    "threes": _threes_among_themselves,
}
"""The kinds of shuffle, in the benchmark's order."""


def _threes(words: list[str]) -> list[list[str]]:
    return [words[i : i + 3] for i in range(0, len(words), 3)]


def _shuffled_at(places: list[int], words: list[str], draws: Draws) -> list[str]:
    shuffled = list(words)
    for place, word in zip(places, draws.shuffled([words[i] for i in places]), strict=True):
        shuffled[place] = word
    return shuffled
