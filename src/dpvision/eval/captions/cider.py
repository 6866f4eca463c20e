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
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from dpvision.errors import DataError
from dpvision.eval.captions.ptb import words

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
    """Return ``cider_d`` for texts that are already split into words."""
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
    """Return the mean over n of the clipped cosine, times a penalty for different lengths."""
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
