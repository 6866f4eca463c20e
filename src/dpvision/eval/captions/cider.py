"""CIDEr-D (Vedantam, Zitnick and Parikh, CVPR 2015): the agreement of a caption with several
reference captions of the image.

For n = 1 ... 4, captions are vectors over n-grams, weighted by their counts and their inverse
document frequency over images:

    g_n(s)[w] = count(w in s) * (log N - log max(1, images with w among their references))
    CIDEr-D_n(c, S) = 10/|S| * sum_{s in S} exp(-(l(c) - l(s))^2 / (2 * 6^2)) * (min(g_n(c), g_n(s))
    . g_n(s)) / (|g_n(c)| |g_n(s)|)

and their mean over n, from 0 to 10; papers print it times 100. N and the weights come from the
references given, so scores on different sets of images are not comparable. No stemming: the paper
mentions it, but the reference code (coco-caption) has none.

Words are those of the Penn Treebank in lower case, without punctuation. The reference pipeline runs
Stanford's PTBTokenizer 3.4.1 in Java; ``words`` implements the rules that captions need, and
docs/caption_measures.md gives the rate of differences.

Legend: N images, B images of a batch.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dpvision.data.store import Store
from dpvision.errors import DataError
from dpvision.eval.captions.choice import encoded_images
from dpvision.eval.captions.image_source import StoreImages
from dpvision.eval.captions.open_captioner import CaptionProtocol, OpenCaptioner
from dpvision.eval.captions.settings import Asking
from dpvision.eval.score import CIDER, Z_95, Score, Visibility
from dpvision.models.generate import GenerateSettings, generate

_ORDERS = 4
_SIGMA = 6.0
_Counts = Counter[tuple[str, ...]]
_Vector = tuple[list[dict[tuple[str, ...], float]], list[float], int]
"""Weights by n-gram for each n, their norms, and the length."""


def cider_d(captions: Sequence[str], references: Sequence[Sequence[str]]) -> np.ndarray:
    """Return the CIDEr-D of one caption per image.

    Args:
        captions: N texts; an empty one scores 0.
        references: one or more reference captions for each of the same N >= 2 images.

    Returns:
        float64 (N,), each in [0, 10]; their mean is the overall score.

    Raises:
        DataError: fewer than two images (every weight would be log 1 = 0), unequal numbers of
            captions and images, or an image without a reference.
    """
    if len(captions) != len(references) or len(captions) < 2:
        got = f"{len(captions)} captions for {len(references)} images"
        raise DataError(
            f"CIDEr: {got}; expected one each, of two images or more. Give more images."
        )
    bare = next((i for i, own in enumerate(references) if not own), None)
    if bare is not None:
        raise DataError(
            f"CIDEr: image {bare} has no reference; expected one or more each. Remove the image."
        )
    return cider_d_of_words(
        [words(text) for text in captions], [[words(text) for text in own] for own in references]
    )


def cider_d_of_words(
    captions: Sequence[Sequence[str]], references: Sequence[Sequence[Sequence[str]]]
) -> np.ndarray:
    """Return ``cider_d`` for texts that are already split into words.

    Count the n-grams of all references, and the images that have each. A text becomes four vectors,
    one for each n: its counts times the logarithm of N over the n-gram's images. A caption's score
    is ten times the mean over its references of ``_similarity``.
    """
    counted = [[_count(text) for text in own] for own in references]
    images_with: _Counts = Counter(gram for own in counted for gram in set().union(*own))
    log_n = math.log(len(references))

    def vector(counts: _Counts) -> _Vector:
        weights: list[dict[tuple[str, ...], float]] = [{} for _ in range(_ORDERS)]
        for gram, count in counts.items():
            weights[len(gram) - 1][gram] = count * (log_n - math.log(max(1, images_with[gram])))
        norms = [math.sqrt(sum(w * w for w in own.values())) for own in weights]
        # The reference code uses the number of bigrams as the length: the same differences, except
        # for empty captions.
        return weights, norms, sum(count for gram, count in counts.items() if len(gram) == 2)

    scores = np.zeros(len(captions))
    for i, (text, own) in enumerate(zip(captions, counted, strict=True)):
        said = vector(_count(text))
        scores[i] = 10 * np.mean([_similarity(said, vector(reference)) for reference in own])
    return scores


def _similarity(said: _Vector, reference: _Vector) -> float:
    """Return the mean over n of the clipped cosine, times a penalty for different lengths.

    Clipping counts an n-gram of the caption at most as often as the reference has it, so that
    repeating a word of the reference earns nothing.
    """
    penalty = math.exp(-((said[2] - reference[2]) ** 2) / (2 * _SIGMA**2))
    total = 0.0
    for own, other, norm, other_norm in zip(
        said[0], reference[0], said[1], reference[1], strict=True
    ):
        if norm and other_norm:
            total += sum(
                min(w, other[gram]) * other[gram] for gram, w in own.items() if gram in other
            ) / (norm * other_norm)
    return total * penalty / _ORDERS


def _count(text: Sequence[str]) -> _Counts:
    return Counter(
        tuple(text[i : i + n]) for n in range(1, _ORDERS + 1) for i in range(len(text) - n + 1)
    )


@dataclass(frozen=True)
class Cider(CaptionProtocol):
    """The CIDEr of a store's images."""

    store: Store
    settings: GenerateSettings = field(default_factory=GenerateSettings)
    """How captions are generated."""
    limit: int | None = None
    """Maximum number of images."""

    @property
    def test_data(self) -> str:
        return self.store.path.name

    @property
    def needs(self) -> Store:
        return self.store

    def run(self, askers: Sequence[OpenCaptioner], how: Asking) -> list[Score]:
        return cider_scores(askers, self.store, self.settings, how, limit=self.limit)


def say_captions(
    ready: OpenCaptioner,
    store: Store,
    row_N: np.ndarray,
    settings: GenerateSettings,
    how: Asking | None = None,
) -> dict[int, str]:
    """Return the first generated caption of each image, by row. Images that do not decode are left
    out.
    """
    how, said = how or Asking(), dict[int, str]()
    for memory_BSD, place_B in encoded_images(ready, StoreImages(store, row_N), how):
        for place, captions in zip(
            place_B.tolist(), generate(ready.model, memory_BSD, settings), strict=True
        ):
            said[int(row_N[place])] = ready.tokenizer.decode(captions[0].ids)
        if how.progress is not None:
            how.progress(f"captions, {ready.name}: {len(said):,} of {len(row_N):,} images")
    return said


def cider_scores(
    askers: Sequence[OpenCaptioner],
    store: Store,
    settings: GenerateSettings | None = None,
    how: Asking | None = None,
    *,
    limit: int | None = None,
) -> list[Score]:
    """Return the mean CIDEr-D of each captioner's captions of a store's images, with the store's
    captions as references.

    Chance is the score of the same captions assigned to the next image. If images have two captions
    or more, a score named "people" is added: each caption against the others of its image, with one
    reference fewer than the captioners have.

    Args:
        settings: settings of the generation; sampling is refused.
        limit: maximum number of images, a fixed random subset.

    Raises:
        DataError: fewer than two readable images with a caption; ``method="sample"``.
        CheckpointError: a captioner's logits are not finite.
    """
    settings, how = settings or GenerateSettings(), how or Asking()
    if settings.method == "sample":
        raise DataError(
            "CIDEr: method='sample'; expected greedy or beam, which are deterministic. Use "
            "--method greedy."
        )
    row_N = _rows_with_captions(store, limit)
    scores = []
    for ready in askers:
        said = say_captions(ready, store, row_N, settings, how)
        references = [store.captions(row) for row in said]
        described = f"{_described(settings)}, {_numbers(references)} references, {how.fit}"
        visibility: Visibility = (
            "private" if ready.confidential or store.results_visibility == "private" else "public"
        )
        captions = list(said.values())
        figure_N = cider_d(captions, references)
        chance = float(cider_d([*captions[1:], captions[0]], references).mean())
        low, high = _interval(figure_N)
        scores.append(
            Score(
                ready.name,
                float(figure_N.mean()),
                low,
                high,
                len(figure_N),
                chance,
                f"{CIDER}, {described}",
                visibility,
            )
        )
    return scores + people_scores(store, row_N)


def people_scores(store: Store, row_N: np.ndarray) -> list[Score]:
    """Return the CIDEr-D of reference captions: each is held out against the others of its image,
    averaged over an image's captions.

    Only images with the most common number of captions are used, so that all have the same number
    of references; if that is one, the list is empty. Chance: the held-out captions assigned to the
    next image.
    """
    captions = [store.captions(int(row)) for row in row_N]
    counts = np.bincount([len(own) for own in captions])
    usual = int(counts.argmax())
    alike = [own for own in captions if len(own) == usual]
    if usual < 2 or len(alike) < 2:
        return []
    figures, chances = [], []
    for k in range(usual):
        others = [own[:k] + own[k + 1 :] for own in alike]
        held_out = [own[k] for own in alike]
        figures.append(cider_d(held_out, others))
        chances.append(cider_d([*held_out[1:], held_out[0]], others).mean())
    figure_N = np.mean(figures, axis=0)
    how = f"{CIDER}, people's captions held out one by one, {usual - 1} references"
    return [
        Score(
            "people",
            float(figure_N.mean()),
            *_interval(figure_N),
            len(figure_N),
            float(np.mean(chances)),
            how,
            store.results_visibility,
        )
    ]


def _rows_with_captions(store: Store, limit: int | None) -> np.ndarray:
    row_N = np.arange(store.num_records)
    row_N = row_N[store.has_captions(row_N)]
    if len(row_N) < 2:
        raise DataError(
            f"CIDEr: {store.path}: {len(row_N)} images with a caption; expected two or more. "
            "Import captions with them."
        )
    if limit is not None and limit < len(row_N):
        row_N = np.sort(np.random.Generator(np.random.PCG64(0)).permutation(row_N)[:limit])
    return row_N


def _described(settings: GenerateSettings) -> str:
    if settings.method == "greedy":
        return "greedy captions"
    return (
        f"{settings.method} captions ({settings.beams} beams, length penalty "
        f"{settings.length_penalty:g})"
    )


def _numbers(references: Sequence[Sequence[str]]) -> str:
    counts = sorted({len(own) for own in references})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _interval(figure_N: np.ndarray) -> tuple[float, float]:
    """Return the 95% interval of the mean over images, for fixed word weights."""
    half = Z_95 * float(figure_N.std(ddof=1)) / math.sqrt(len(figure_N))
    return max(0.0, float(figure_N.mean()) - half), min(10.0, float(figure_N.mean()) + half)


_ABBREVIATIONS = (
    "mr|mrs|ms|dr|prof|st|jr|sr|vs|etc|inc|co|corp|ltd|dept|ave|blvd|rd|ky|"
    "jan|feb|mar|apr|aug|sept|sep|oct|nov|dec|mon|tue|tues|wed|thu|thurs|fri|"
    "gen|sgt|lt|capt|col|gov|sen|rep|rev|hon|fig|est|ft|mt|ph\\.d"
)
_TOKEN = re.compile(
    rf"""
      https?://\S*[\w/] | www\.\S*\w
    | [\w.+-]+@[\w-]+(?:\.[\w-]+)+                         # addresses
    | [@\#](?=[^\W\d_])\w+                                 # names of users, hash tags
    | (?:[^\W\d_]\.)+[^\W\d_]\.? | (?<!\w)(?:{_ABBREVIATIONS})\.
    | no\.(?=\s*\d) | [^\W\d_]\.(?=\s+\S)                  # u.s. d.c; mr.; an initial
    | 'n' | n't(?!\w) | '(?:s|m|d|re|ve|ll)(?!\w)          # clitics on their own
    | '\d\ds?(?!\w)                                        # '90s
    | \d+(?::\d+)+ | \d+(?:[.,/]\d+)+(?:[^\W_]+)? | \.\d+  # 1,000  10:30  1/2  .5
    | [^\W_]+(?:[-_/.'][^\W_]+)*                           # words, also close-up, and/or, o'clock
    | \.{{2,}} | -{{2,}} | [–—] | ``|'' | \S
    """,
    re.VERBOSE,
)
_CLITIC = re.compile(r"^(.+?)(n't|'(?:s|m|d|re|ve|ll))$")
_KEPT = re.compile(r"^(?:o'\w+|d'\w+|c'mon|ma'am)$")
_PAIRS = {
    "cannot": ("can", "not"),
    "gonna": ("gon", "na"),
    "gotta": ("got", "ta"),
    "wanna": ("wan", "na"),
    "gimme": ("gim", "me"),
    "lemme": ("lem", "me"),
    "'twas": ("'t", "was"),
    "'tis": ("'t", "is"),
}
_BRACKETS = {"(": "-lrb-", ")": "-rrb-", "[": "-lsb-", "]": "-rsb-", "{": "-lcb-", "}": "-rcb-"}
_DROPPED = frozenset(
    [
        "''",
        "'",
        "``",
        "`",
        ".",
        "?",
        "!",
        ",",
        ":",
        "-",
        "--",
        "...",
        ";",
        '"',
        "–",
        "—",
        "…",
        "‘",
        "’",
        "“",
        "”",
    ]
)


def words(caption: str) -> list[str]:
    """Return the words of a caption as the reference passes them to CIDEr.

    >>> words("The dog's ball isn't red.")
    ['the', 'dog', "'s", 'ball', 'is', "n't", 'red']

    Brackets remain, as "-lrb-" and the like: the reference lower-cases them before it looks for
    "-LRB-" to drop.
    """
    found: list[str] = []
    for token in _TOKEN.findall(caption.lower().replace("’", "'").replace("‘", "'")):
        found += _split(token)
    return [
        word for word in found if word not in _DROPPED and not re.fullmatch(r"\.{2,}|-{2,}", word)
    ]


def _split(token: str) -> list[str]:
    if token in _BRACKETS:
        return [_BRACKETS[token]]
    if token in _PAIRS:
        return list(_PAIRS[token])
    clitic = None if _KEPT.match(token) else _CLITIC.match(token)
    return [token] if clitic is None else [*_split(clitic[1]), clitic[2]]
