"""Exact cosines, and clusters that do not depend on the shape of a product."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dpvision.curate import clusters
from dpvision.curate.clusters import cosines, k_means, nearest_clusters, scaled, squares
from dpvision.curate.embedding import unit


def units(num: int, width: int, seed: int = 0, groups: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, width))
    if groups:
        x = 0.3 * x + rng.normal(size=(groups, width))[rng.integers(0, groups, num)]
    return np.stack([unit(row.astype(np.float32)) for row in x])


@settings(max_examples=30, deadline=None)
@given(
    hnp.arrays(np.float32, (2, 40), elements=st.floats(-1, 1, width=32).filter(lambda v: v != 0)),
    st.integers(0, 2**32),
)
def test_a_cosine_is_that_of_rational_numbers_in_any_order(x: np.ndarray, seed: int) -> None:
    one, two = (unit(row) for row in x)
    dot, n1, n2 = (
        sum(Fraction(float(a)) * Fraction(float(b)) for a, b in zip(p, q, strict=True))
        for p, q in ((one, two), (one, one), (two, two))
    )
    assert float(n1) == n1 == squares(one[None])[0]  # no bit is lost
    found = cosines(one[None], two[None])[0]
    assert found == float(dot) / math.sqrt(float(n1) * float(n2)) and float(dot) == dot
    order = np.random.default_rng(seed).permutation(40)
    assert found == cosines(one[None, order], two[None, order])[0]


@pytest.mark.parametrize("width", [3, 64, 1764])
def test_the_error_of_a_product_is_within_the_margin(width: int) -> None:
    x = units(100, width, groups=5)
    product = scaled(x) @ scaled(x).T
    one, two = np.divmod(np.arange(100 * 100), 100)
    exact = cosines(x[one], x[two]).reshape(100, 100)
    assert np.abs(product - exact).max() <= clusters.margin(width) / 2


@pytest.mark.parametrize("probes", [1, 3, 9])
def test_nearest_clusters_are_those_of_exact_cosines_in_blocks_of_any_size(
    probes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = units(500, 24, groups=7)
    centre = np.concatenate([units(6, 24, 1), units(1, 24, 1)])  # two are equal
    exact = np.stack([cosines(x, np.tile(c, (len(x), 1))) for c in centre], axis=1)
    wanted = np.argsort(-exact, axis=1, kind="stable")[:, :probes]
    assert np.array_equal(nearest_clusters(x, centre, probes), wanted)
    monkeypatch.setattr(clusters, "_VALUES_AT_ONCE", 100)
    assert np.array_equal(nearest_clusters(x, centre, probes), wanted)
    alone = np.concatenate([nearest_clusters(row[None], centre, probes) for row in x])
    assert np.array_equal(alone, wanted)


def test_centres_are_the_same_in_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    x = units(700, 16, groups=12)
    centre = k_means(x, 12)
    assert centre.dtype == np.float16 and np.abs(squares(centre) - 1).max() < 2e-3
    monkeypatch.setattr(clusters, "_VALUES_AT_ONCE", 333)
    assert np.array_equal(k_means(x, 12), centre)


def test_it_clusters_as_well_as_faiss() -> None:
    faiss = pytest.importorskip("faiss")
    x = units(4000, 32, groups=60)
    found = k_means(x, 60)
    other = faiss.Kmeans(32, 60, niter=clusters.NUM_ROUNDS, seed=1, spherical=True)
    other.train(x.astype(np.float32))
    mine, theirs = (
        (x.astype(np.float32) @ c.T.astype(np.float32)).max(axis=1).mean()
        for c in (found, other.centroids)
    )
    assert mine > theirs - 0.02


def test_a_cluster_without_vectors_and_opposite_vectors_keep_a_centre() -> None:
    one = units(1, 8)[0]
    equal = np.tile(one, (5, 1))
    assert np.array_equal(k_means(equal, 3), np.tile(one, (3, 1)))
    assert np.isfinite(k_means(np.stack([one, -one]), 1)).all()
