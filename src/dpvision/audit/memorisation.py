"""Deja-vu memorisation: what a model says of an object that it is not shown.

Two halves of one set, one model trained on each by one recipe. Each model names an object that is
hidden in an image: by the nearest public images of what is left of it (encoders: Meehan et al.
2023, "Do SSL models have deja vu?"), or by the likelihood of captions (captioners, after Jayaraman,
Guo and Chaudhuri 2024, "Deja vu memorization in vision-language models"). The model that was not
trained on the image is right as often as what images have in common allows. So

    memorisation = accuracy of the model trained on the image - accuracy of the other one,

the mean of both halves, so that a model that is better on all images shows nothing.

Legend: N images of a half, M public images, D feature dimension, K classes, C candidates, R
draws of the bootstrap.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import softmax

_DRAWS = 1000


@dataclass(frozen=True)
class Guesses:
    """What a model says of the hidden objects of N images."""

    label_N: np.ndarray
    """int64."""
    confidence_N: np.ndarray
    """float64; comparable between the images of one model only."""


@dataclass(frozen=True)
class Half:
    """The images of a half, with the guesses of both models."""

    own: Guesses
    """Of the model trained on these images."""
    other: Guesses
    """Of the model trained on the other half."""
    truth_N: np.ndarray
    """The hidden objects, int64."""


@dataclass(frozen=True)
class Memorisation:
    """Accuracies of the models on what they are not shown, and their difference."""

    value: float
    """``own - other``, in [-1, 1]; 0 without memorisation."""
    low: float
    """Lower end of the 95% interval over images; it leaves out the chance of the training runs."""
    high: float
    own: float
    other: float
    n: int
    """Number of images that each accuracy is of, both halves together."""


def neighbour_guesses(
    part_ND: np.ndarray, public_MD: np.ndarray, label_M: np.ndarray, *, k: int = 20
) -> Guesses:
    """Return the majority label of the ``k`` public images nearest by cosine similarity; the
    confidence is the share of them that has it. Of equal numbers the more similar ones win.

    Args:
        part_ND: features of images without their objects, finite.
        public_MD: features of whole public images, from the same encoder; at least ``k``.
        label_M: their objects, int64 from 0.
    """
    unit_ND, unit_MD = (
        x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
        for x in (np.asarray(part_ND, np.float64), np.asarray(public_MD, np.float64))
    )
    similarity_NM = unit_ND @ unit_MD.T
    near_Nk = np.argpartition(-similarity_NM, k - 1, axis=1)[:, :k]
    vote_NK = np.zeros((len(part_ND), int(label_M.max()) + 1))
    # The similarities of k neighbours add less than one vote.
    weight_Nk = 1 + (1 + np.take_along_axis(similarity_NM, near_Nk, 1)) / (2 * k + 1)
    np.add.at(vote_NK, (np.arange(len(part_ND))[:, None], label_M[near_Nk]), weight_Nk)
    return Guesses(vote_NK.argmax(1), np.floor(vote_NK.max(1)) / k)


def candidate_guesses(log_likelihood_NC: np.ndarray) -> Guesses:
    """Return the candidate of the greatest likelihood; the confidence is its share of all.

    Args:
        log_likelihood_NC: of the caption with each candidate in place of the hidden object's word,
            given the image without the object, in nats; minus infinity for no candidate. The
            candidates' prior is uniform.
    """
    share_NC = softmax(np.asarray(log_likelihood_NC, np.float64), axis=1)
    return Guesses(share_NC.argmax(1), share_NC.max(1))


def memorisation(halves: Sequence[Half], *, top: float = 1.0) -> Memorisation:
    """Return how much more often models name hidden objects of their own training images.

    The interval is of a paired bootstrap over the images of each half: an image counts a Poisson
    number of times, mean 1, the same for both models.

    Args:
        halves: both halves, so that each model is once the one trained on the images.
        top: share of the images of a half, in (0, 1], on which each model is counted: those of
            which it is the most confident, chosen for each model by itself. (The images of which
            one model is the most confident favour that model, even if it has memorised nothing.)
    """
    own, other, n = np.zeros(1 + _DRAWS), np.zeros(1 + _DRAWS), 0
    for seed, half in enumerate(halves):
        num = len(half.truth_N)
        counted = max(1, round(top * num))
        drawn_RN = np.random.default_rng(seed).poisson(1.0, (_DRAWS, num))
        weight_RN = np.concatenate([np.ones((1, num)), drawn_RN])
        own += _accuracy(half.own, half.truth_N, counted, weight_RN) / len(halves)
        other += _accuracy(half.other, half.truth_N, counted, weight_RN) / len(halves)
        n += counted
    low, high = np.quantile((own - other)[1:], (0.025, 0.975)).tolist()
    return Memorisation(float(own[0] - other[0]), low, high, float(own[0]), float(other[0]), n)


def _accuracy(
    guesses: Guesses, truth_N: np.ndarray, counted: int, weight_RN: np.ndarray
) -> np.ndarray:
    """Share of right guesses of the ``counted`` most confident, for each row of weights."""
    taken = np.argsort(-guesses.confidence_N, kind="stable")[:counted]
    right_N = guesses.label_N[taken] == truth_N[taken]
    return (weight_RN[:, taken] @ right_N) / np.maximum(weight_RN[:, taken].sum(1), 1)
