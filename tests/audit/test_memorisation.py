"""Deja-vu memorisation: planted in encoders and captioners, and absent from others."""

import numpy as np
import pytest

from dpvision.audit.memorisation import (
    Guesses,
    Half,
    Memorisation,
    candidate_guesses,
    memorisation,
    neighbour_guesses,
)

CLASSES, WIDTH = 10, 24


def planted(seed: int, share: float, num: int = 400) -> list[Half]:
    """Guesses of encoders that see only what is common to images (a weak hint of the class), and
    that know the class of a ``share`` of their own training images.
    """
    rng = np.random.default_rng(seed)
    mean_KD = rng.normal(size=(CLASSES, WIDTH))
    label_M = rng.integers(0, CLASSES, 600)
    truths = [rng.integers(0, CLASSES, num) for _ in range(2)]
    parts = [0.15 * mean_KD[truth] + rng.normal(size=(num, WIDTH)) for truth in truths]
    guesses = []
    for model in range(2):
        # Each model has features of its own: a rotation, and noise as of its training.
        turn_DD = np.linalg.qr(rng.normal(size=(WIDTH, WIDTH)))[0]

        def seen(x: np.ndarray, turn_DD: np.ndarray = turn_DD) -> np.ndarray:
            return (x + 0.5 * rng.normal(size=x.shape)) @ turn_DD

        public_MD = seen(mean_KD[label_M] + rng.normal(size=(600, WIDTH)))
        mine = []
        for half, (part_ND, truth) in enumerate(zip(parts, truths, strict=True)):
            known_N1 = (rng.random(num) < share * (half == model))[:, None]
            mine.append(
                neighbour_guesses(
                    seen(np.where(known_N1, 3 * mean_KD[truth], part_ND)), public_MD, label_M
                )
            )
        guesses.append(mine)
    return [Half(guesses[half][half], guesses[1 - half][half], truths[half]) for half in range(2)]


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_an_encoder_that_knows_its_images_shows_the_share_that_it_knows(share: float) -> None:
    found = memorisation(planted(0, share))
    assert found.low > 0
    # Known images are right, others as often as those of the other model.
    assert abs(found.value - share * (1 - found.other)) < 0.04
    assert found.low < share * (1 - found.other) < found.high


def test_without_memorisation_one_interval_in_twenty_leaves_out_zero() -> None:
    without = [planted(seed, 0.0, num=200) for seed in range(100)]
    for top in (1.0, 0.2):
        found = [memorisation(halves, top=top) for halves in without]
        # Binomial(100, 0.05): more than 13 have a probability of 0.0005, none of 0.006.
        assert 1 <= sum(f.low > 0 or f.high < 0 for f in found) <= 13
        assert abs(np.mean([f.value for f in found])) < 0.01


def test_confident_images_show_a_little_memorisation_better() -> None:
    halves = planted(1, 0.1)
    assert memorisation(halves, top=0.1).value > 3 * memorisation(halves).value


def of_rights(own: np.ndarray, other: np.ndarray) -> Half:
    return Half(*(Guesses(right.astype(int), np.zeros(len(right))) for right in (own, other)),
                np.ones(len(own), dtype=int))  # fmt: skip


def test_a_model_that_is_better_on_all_images_shows_nothing() -> None:
    rng = np.random.default_rng(0)
    good, bad = rng.random((2, 1000)) < 0.9, rng.random((2, 1000)) < 0.2
    found = memorisation([of_rights(good[0], bad[0]), of_rights(bad[1], good[1])])
    assert found.low < 0 < found.high and abs(found.value) < 0.05
    assert memorisation([of_rights(good[0], bad[0])]).low > 0.6  # one half alone would


def test_the_interval_of_all_images_is_that_of_paired_proportions() -> None:
    """Wald's interval of McNemar's difference, from the discordant pairs."""
    rng = np.random.default_rng(3)
    own, other = rng.random(2000) < 0.5, rng.random(2000) < 0.4
    only_own, only_other = (own & ~other).mean(), (other & ~own).mean()
    gap = only_own - only_other
    reach = 1.96 * np.sqrt((only_own + only_other - gap**2) / 2000)
    found = memorisation([of_rights(own, other)])
    assert found.value == pytest.approx(gap)
    assert (found.low, found.high) == pytest.approx((gap - reach, gap + reach), abs=0.15 * reach)


def test_neighbours_vote_by_number_and_then_by_similarity() -> None:
    public_MD = np.array([[1.0, 0.0], [0.9, 0.1], [0.8, 0.3], [0.0, 1.0]])
    part_ND = np.array([[2.0, 0.0], [0.0, 3.0]])
    found = neighbour_guesses(part_ND, public_MD, np.array([2, 1, 1, 0]), k=3)
    assert found.label_N.tolist() == [1, 1]  # two of three, although 2 and 0 are nearer
    assert found.confidence_N.tolist() == pytest.approx([2 / 3, 2 / 3])
    tie = neighbour_guesses(part_ND, public_MD, np.array([2, 1, 1, 0]), k=2)
    assert tie.label_N.tolist() == [2, 0] and tie.confidence_N.tolist() == [0.5, 0.5]


def test_neighbours_are_those_of_a_plain_sort() -> None:
    rng = np.random.default_rng(5)
    part_ND, public_MD = rng.normal(size=(50, 8)), rng.normal(size=(300, 8))
    label_M = rng.integers(0, 4, 300)
    found = neighbour_guesses(part_ND, public_MD, label_M, k=7)
    for i, x in enumerate(part_ND):
        near = sorted(range(300), key=lambda m: -(x @ public_MD[m]) / np.linalg.norm(public_MD[m]))
        count_K = np.bincount(label_M[near[:7]], minlength=4)
        assert count_K[found.label_N[i]] == count_K.max()
        assert found.confidence_N[i] == pytest.approx(count_K.max() / 7)


def test_the_likeliest_candidate_is_guessed_with_its_share() -> None:
    found = candidate_guesses(np.log([[0.2, 0.6, 1e-300], [0.1, 0.1, 0.3]]))
    assert found.label_N.tolist() == [1, 2]
    assert found.confidence_N.tolist() == pytest.approx([0.75, 0.6])


def test_two_halves_are_counted() -> None:
    half = of_rights(np.ones(30, dtype=bool), np.zeros(30, dtype=bool))
    assert memorisation([half, half], top=0.5) == Memorisation(1.0, 1.0, 1.0, 1.0, 0.0, 30)
