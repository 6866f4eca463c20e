"""What one source record can change: at most two records with exact duplicates and equal hashes,
and all others with near hashes and embeddings (docs/proofs.md).
"""

from collections.abc import Callable
from functools import cache
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpvision.curate.exact_duplicates import ExactDuplicates
from dpvision.curate.near_duplicates import NearDuplicates
from dpvision.curate.semantic_duplicates import SemanticDuplicates

from .searches import kept

MIRRORED = np.array([[[1, 1], [2, 2]], [[2, 2], [1, 1]], [[1, 1], [3, 3]], [[0, 0], [0, 0]]])
"""Two mirror images of one another; one that shares a hash with them; one without a hash."""


@cache
def exact(classes: tuple[int, ...]) -> list[int]:
    return kept(ExactDuplicates(), np.repeat(np.uint64(classes)[:, None] + np.uint64(1), 2, axis=1))


@cache
def equal_hashes(classes: tuple[int, ...]) -> list[int]:
    return kept(NearDuplicates(0), MIRRORED[list(classes)].astype(np.uint64))


def both(classes: tuple[int, ...]) -> list[int]:
    """One step after the other: equal pixels have equal hashes, so both are one partition."""
    first = exact(classes)
    return [first[k] for k in equal_hashes(tuple(classes[row] for row in first))]


@pytest.mark.parametrize("steps", [exact, equal_hashes, both])
def test_a_record_more_changes_at_most_two_records(
    steps: Callable[[tuple[int, ...]], list[int]],
) -> None:
    """Every source of up to three records of four kinds, and every place and kind of one more."""
    worst = 0
    for size in range(4):
        for classes in product(range(4), repeat=size):
            before = set(steps(classes))
            for place, new in product(range(size + 1), range(4)):
                after = steps((*classes[:place], new, *classes[place:]))
                moved = {row - (row > place) for row in after if row != place}
                worst = max(worst, len(moved ^ before) + (place in after))
    assert worst == 2


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 30), max_size=60),
    st.integers(0, 30),
    st.integers(0, 60),
)
def test_a_record_more_adds_one_or_takes_the_place_of_one_later_of_its_class(
    classes: list[int], new: int, place: int
) -> None:
    place = min(place, len(classes))
    before = set(exact(tuple(classes)))
    after = exact((*classes[:place], new, *classes[place:]))
    moved = {row - (row > place) for row in after if row != place}
    assert moved <= before
    lost = sorted(before - moved)
    assert len(lost) <= 1 and all(row >= place and classes[row] == new for row in lost)
    assert (place in after) == (new not in classes[:place])


def hashes_around_one() -> np.ndarray:
    """A hash, then some whose first words are 6 bits from it and 7 or more from one another."""
    chosen: list[int] = []
    for bits in combinations(range(22), 6):
        word = sum(1 << bit for bit in bits)
        if all((word ^ other).bit_count() > 6 for other in chosen):
            chosen.append(word)
    words = np.array([0, *chosen], dtype=np.uint64) ^ np.uint64(1 << 63)
    both_words = np.stack([words, np.full(len(words), 1, dtype=np.uint64)], axis=1)
    # as for images that are their own mirror image
    return np.stack([both_words, both_words], axis=1)


def test_with_a_radius_one_record_removes_all_others() -> None:
    hashes = hashes_around_one()
    assert len(hashes) == 78  # the 77 blocks of the Steiner system S(3, 6, 22)
    step = NearDuplicates(6)
    assert kept(step, hashes) == [0]
    assert kept(step, hashes[1:]) == list(range(len(hashes) - 1))
    assert step.stability is None and NearDuplicates(0).stability == 2


def embeddings_around_one(cosine: float, width: int) -> np.ndarray:
    """A vector, and vectors with a cosine above the threshold with it and below it with one
    another.
    """
    inside = (cosine + cosine**0.5) / 2
    others = np.eye(width)[1:] * (1 - inside**2) ** 0.5
    others[:, 0] = inside
    return np.concatenate([np.eye(width)[:1], others]).astype(np.float16)


@pytest.mark.parametrize("cosine", [0.8, 0.95])
def test_with_embeddings_one_record_removes_all_others(cosine: float) -> None:
    x = embeddings_around_one(cosine, 512)
    step = SemanticDuplicates(cosine)
    assert kept(step, x) == [0]
    assert kept(step, x[1:]) == list(range(511))
    assert step.stability is None


def test_with_clusters_a_record_changes_what_becomes_of_those_that_it_does_not_match() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 8))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float16)
    step = SemanticDuplicates(0.9, clusters=6)
    before = kept(step, x[1:])
    cosines = x[1:].astype(float) @ x[0].astype(float)
    after = {row - 1 for row in kept(step, x) if row}
    changed = sorted(set(before) ^ after)
    assert changed and (cosines[changed] < 0.9).all()
