"""Order tests: a caption among four shuffled ones of the same words (ARO's COCO-order and
Flickr-order, from any captions).

The four shuffles of Yuksekgonul et al. (ICLR 2023): nouns among nouns and adjectives among
adjectives; all other words; words within groups of three; groups of three. The true caption is
formatted like its shuffles, in lower case and without punctuation: in the benchmark it keeps its
spacing ("man's", where a shuffle has "man 's"), which alone can distinguish it.

ARO tags words with spaCy. A language model is a heavy dependency for one shuffle, and its next
version would change the test. Here a word's class comes from a small list, else from its ending,
else it is a noun. The list was made from spaCy's tags (en_core_web_sm 3.8) of 9,000 captions of
Flickr8k and COCO: words that occur three times and contradict the endings. On 3,000 other captions,
96.9% of the words have spaCy's class. English only.
"""

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dpvision.data.captions import clean_caption
from dpvision.data.store import Store
from dpvision.errors import DataError
from dpvision.eval.captions.choice import Choice, ChoiceTest
from dpvision.eval.captions.image_source import StoreImages
from dpvision.synthetic.scene_layout import Draws

MAX_WORDS = 30
"""As in the benchmark: longer captions are truncated before the shuffle."""
_TRIES = 8
_WORD = re.compile(r"[^\W_]+(?:['’.-][^\W_]+)*")

WordClass = Literal["noun", "adjective", "other"]

_ADJECTIVES = frozenset(
    """
        african aged airborne american asian asleep assorted athletic baked bald bearded beige bent
        big black blond blonde blue bright brown busy calm checkered chinese choppy clean clear
        cloudy cluttered colored commercial concrete crowded curly cute dark dead decorative deep
        different dirty distant diving double dry dusty elderly electronic empty eyed fair fake
        fashioned fat female few flat floral fluffy foggy formal fresh frozen full funny furry
        fuzzy german giant golden good grassy gravel gray green grey grown haired happy hard
        hardwood healthy heavy high historic hooded hot huge hula human husky icy identical indian
        indoor interactive japanese large larger leafy lean left little lone long low lush
        makeshift male many married martial medium merry metallic mid military mini mixed modern
        muddy multi multiple muzzled narrow natural nice old older open opposite orange ornate
        other outdoor outstretched own pale paved pine pink plastic polar potted pretty
        professional protective public purple ready rear red right rocky rough rural rusty same
        sandy second several shallow shepherd short single sized skinned skinny sliced small
        smaller smart snowy square standard steep striped sumo sunny tall teenage thick thin third
        tight uniformed unique unusual urban victorian warm wet wheeled white wide wild wooden
        yellow young younger
    """.split()  # noqa: SIM905
)
_OTHERS = frozenset(
    """
        a about above across after again against all almost alone along alongside also although
        always am among an and another any apart appear appears are around as at atop attempts away
        backlit balances barefoot be because been before behind below beneath beside between beyond
        blocks blows both broken built but by can carries carry catch catches caught chase chases
        clad climb climbs comes contains could covers crashes crawls crosses cut dance did digs do
        does down downhill drawn dribbles drive drives each eat eaten eats either embrace enjoy
        enjoys ever every everywhere fallen falls far fast features fetch fight five flies flips
        float floats fly follow follows for forward four from gather get gets gives go goes grab
        grabs grinds had hangs has have he held helps her here hers herself him himself his hit
        hits hold holds how huddle hugs i if in includes inside interact into is it its itself
        jumps just kayaks kick kicks knit laid laugh lay lays leads leans let lies like lit look
        looks made make makes may me might mine much must my myself near nearby neither never next
        no nor not of off often on once one only onstage onto or our ours out outdoors outside over
        overhead pass passes past perform performs pets picks places play plays points pokes pose
        poses pours prepares produce pull pulls pushes put puts raises reaches read reads relaxes
        rest rests return ridden ride rides run runs sat says see seen serve set seven shakes shall
        she shines should shown shows since sit sits six sleeps slides smile smokes sniffs so some
        spread stand stands start stops straddles stuck such surfs swims tackle take taken takes
        talk than that the their theirs them themselves then there these they this those though
        three through throw thrown throws tied to together too toward towards travels tries try two
        under underneath unless until up upon upside us use used uses very wade wait wake walk
        walks was watch watches we wears well were what when where which while whilst who whom
        whose why will with within without would woven wrestle written yet you your yours
    """.split()  # noqa: SIM905
)
_NOUNS = frozenset(
    """
        bathing blossoming building ceiling clothing dining family finish fishing gathering landing
        living matching netting opening painting parking railing seating shopping something speed
        swimming swing vegetable watering wedding wrestling
    """.split()  # noqa: SIM905
)
_OTHER_ENDINGS = ("ing", "ed", "ly")
_ADJECTIVE_ENDINGS = ("ful", "ous", "ish", "less", "able", "ible")


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


def word_class(word: str) -> WordClass:
    """Return the class of a word, independent of its context and case."""
    word = word.lower()
    if word in _NOUNS:
        return "noun"
    if word in _ADJECTIVES:
        return "adjective"
    if (
        word in _OTHERS
        or not word[:1].isalpha()
        or (len(word) > 4 and word.endswith(_OTHER_ENDINGS))
    ):
        return "other"
    return "adjective" if len(word) > 5 and word.endswith(_ADJECTIVE_ENDINGS) else "noun"
