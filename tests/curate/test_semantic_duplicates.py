"""SemDeDup in blocks: against all pairs by rational arithmetic, and against itself by pieces."""

from collections.abc import Iterator

import numpy as np
import pytest

from dpvision.curate import semantic_duplicates as semantic
from dpvision.curate.clusters import k_means, nearest_clusters
from dpvision.curate.semantic_duplicates import SemanticDuplicates
from dpvision.errors import ConfigError, DataError

from .searches import earlier_matches, left_out
from .test_clusters import units


def cosine_of_integers(x_ND: np.ndarray) -> np.ndarray:
    """All cosines: float16 numbers are integers times 2^-24, and int64 holds their dot products."""
    whole = (x_ND.astype(np.float64) * 2**24).astype(np.int64)
    dot_NN = (whole @ whole.T).astype(np.float64)
    return dot_NN / np.sqrt(np.outer(np.diag(dot_NN), np.diag(dot_NN)))


def crowd(num: int, width: int = 24, seed: int = 0) -> np.ndarray:
    """Groups of all densities, equal ones, zeros and NaN."""
    x = units(num, width, seed, groups=max(1, num // 6))
    rng = np.random.default_rng(seed)
    x[rng.integers(0, num, num // 10)] = x[0]
    x[rng.integers(0, num, num // 20)] = 0
    x[rng.integers(0, num, num // 20), 3] = np.nan
    return x


@pytest.fixture(params=[False, True])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Once as it is, once with many blocks and files, and clusters larger than a file."""
    if request.param:
        monkeypatch.setattr(semantic, "_BLOCK_BYTES", 48 * 50)
        monkeypatch.setattr(semantic, "_FILE_BYTES", 61 * 40)
        monkeypatch.setattr(semantic, "_ROWS_AT_ONCE", 7)
    yield


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("cosine", [-1.0, 0.3, 0.9, 0.99])
def test_one_cluster_is_all_pairs(cosine: float) -> None:
    x = crowd(500)
    alive = np.random.default_rng(1).random(500) < 0.9
    some = np.isfinite(x).all(axis=1) & x.any(axis=1)
    with np.errstate(invalid="ignore"):
        match = cosine_of_integers(x) > cosine
    slow = earlier_matches(match & some & some[:, None], alive)
    found = left_out(SemanticDuplicates(cosine), x, alive)
    assert found == slow and len(found) > 40


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("probes", [1, 2, 5])
def test_within_clusters_it_leaves_out_what_all_pairs_leave_out(probes: int) -> None:
    x = units(570, 24, groups=100)  # few enough that the clusters are fitted to all
    step = SemanticDuplicates(0.85, clusters=9, probes=probes)
    near = nearest_clusters(x, k_means(x, 9), probes)
    met = (near[:, None, :] == near[None, :, :1]).any(axis=2)
    alive = np.ones(570, dtype=bool)
    slow = earlier_matches((cosine_of_integers(x) > 0.85) & (met | met.T), alive)
    assert left_out(step, x) == slow
    assert len(slow) > 100


def test_with_all_clusters_as_probes_it_is_all_pairs() -> None:
    x = units(400, 16, groups=150)
    every = left_out(SemanticDuplicates(0.8, clusters=1), x)
    assert left_out(SemanticDuplicates(0.8, clusters=20, probes=20), x) == every
    assert len(left_out(SemanticDuplicates(0.8, clusters=20), x)) < len(every)


def test_a_pair_at_the_threshold_is_no_duplicate_in_a_block_of_any_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """float32 products of equal rows differ by shape: the comparison is strict on exact cosines."""
    x = units(300, 200, groups=30)
    cosine_NN = cosine_of_integers(x)
    largest = np.where(np.tri(300, k=-1, dtype=bool), cosine_NN, -1).max(axis=1)
    threshold = float(np.sort(largest)[-20])
    slow = earlier_matches(cosine_NN > threshold, np.ones(300, dtype=bool))
    for rows in (5, 64, 2048):
        monkeypatch.setattr(semantic, "_ROWS_AT_ONCE", rows)
        assert left_out(SemanticDuplicates(threshold), x) == slow
    below = float(np.nextafter(threshold, 0))
    assert len(left_out(SemanticDuplicates(below), x)) == len(slow) + 1 == 20


@pytest.mark.usefixtures("pieces")
def test_no_record_one_equal_ones_and_none_alive() -> None:
    equal = np.tile(units(1, 24), (50, 1))
    for clusters in (None, 4):
        step = SemanticDuplicates(0.99, clusters=clusters)
        assert left_out(step, equal[:0]) == left_out(step, equal[:1]) == {}
        assert left_out(step, equal) == dict.fromkeys(range(1, 50), 0)
        assert left_out(step, equal, np.zeros(50, dtype=bool)) == {}
        assert left_out(step, 0 * equal) == {}
        assert left_out(step, equal * np.float16(np.nan)) == {}


def test_two_embeddings_among_many_zeros_are_compared() -> None:
    x = np.zeros((semantic.ALL_PAIRS * 2, 4), dtype=np.float16)
    x[[20_000, 30_000]] = units(1, 4)
    assert left_out(SemanticDuplicates(0.9, clusters=1), x) == {30_000: 20_000}


def test_an_embedding_of_another_length_is_refused() -> None:
    x = units(10, 24)
    x[7] *= np.float16(2)
    with pytest.raises(DataError, match="record 7 has length 2; expected 1"):
        left_out(SemanticDuplicates(0.9), x)


def test_progress_ends_at_the_number_of_records_and_never_falls() -> None:
    for x in (crowd(200), 0 * crowd(200)):
        told: list[int] = []
        left_out(SemanticDuplicates(0.9, clusters=5, probes=2), x, None, told.append)
        assert told[-1] == 200 and told == sorted(told)


@pytest.mark.parametrize(
    "wrong", [{"cosine": 1.0}, {"cosine": float("nan")}, {"clusters": 0}, {"probes": 0}]
)
def test_settings_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"semantic_duplicates: {next(iter(wrong))}="):
        SemanticDuplicates(**wrong)


def test_as_many_clusters_as_take_least_time_beyond_the_records_of_which_all_are_compared() -> None:
    assert semantic._num_clusters(semantic.ALL_PAIRS, None) == 1
    assert semantic._num_clusters(semantic.ALL_PAIRS + 2, None) == 90
    assert semantic._num_clusters(233_804_767, None) == 10812
