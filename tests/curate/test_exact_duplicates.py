"""Equal pixels: against a dictionary, in files of any size; and what counts as equal."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dpvision.curate import equal_keys, pairs
from dpvision.curate.exact_duplicates import ExactDuplicates

from ..data.image_files import encode, noise
from .searches import left_out, records


@pytest.fixture(params=[1 << 20, 64])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Once as it is, once with many blocks, files and runs."""
    monkeypatch.setattr(equal_keys, "_BLOCK", request.param)
    monkeypatch.setattr(pairs, "_BUFFER", request.param // 4)
    yield


def with_dictionary(digests: np.ndarray, alive: np.ndarray) -> dict[int, int]:
    first: dict[tuple[int, ...], int] = {}
    found = {}
    for row, digest in enumerate(map(tuple, digests.tolist())):
        if alive[row]:
            if digest in first:
                found[row] = first[digest]
            first.setdefault(digest, row)
    return found


@pytest.mark.usefixtures("block")
@pytest.mark.parametrize("different", [1, 3, 200, 10**6])
def test_it_finds_what_a_dictionary_finds(different: int) -> None:
    rng = np.random.default_rng(different)
    digests = rng.integers(0, 2**64, (different, 2), dtype=np.uint64)
    digests[: different // 2, 0] = digests[0, 0]  # one word does not decide
    digests = digests[rng.integers(0, different, 1000)]
    alive = rng.random(1000) < 0.7
    assert left_out(ExactDuplicates(), digests, alive) == with_dictionary(digests, alive)


@pytest.mark.parametrize("num", [0, 1, 2])
def test_no_record_one_and_two_equal_ones(num: int) -> None:
    digests = np.ones((num, 2), dtype=np.uint64)
    assert left_out(ExactDuplicates(), digests) == ({1: 0} if num == 2 else {})
    assert left_out(ExactDuplicates(), digests, np.zeros(num, dtype=bool)) == {}


def test_progress_ends_at_the_number_of_records_and_never_falls() -> None:
    told: list[int] = []
    left_out(ExactDuplicates(), np.arange(2000, dtype=np.uint64).reshape(-1, 2), None, told.append)
    assert told[-1] == 1000 and told == sorted(told)


def test_a_memory_mapped_column_is_read_only_where_records_are_alive(tmp_path: Path) -> None:
    digests = np.random.default_rng(0).integers(0, 5, (100, 2), dtype=np.uint64)
    digests.tofile(tmp_path / "column")
    column = np.memmap(tmp_path / "column", dtype=np.uint64, mode="r").reshape(-1, 2)
    assert left_out(ExactDuplicates(), column) == left_out(ExactDuplicates(), digests)


def test_pixels_and_size_decide_not_the_file() -> None:
    wide, tall = noise(1, 4, 9), noise(1, 4, 9).reshape(9, 4, 3)
    files = [encode(wide), encode(wide, "BMP"), encode(tall), encode(noise(2, 4, 9))]
    found = records(files)
    ExactDuplicates().facts().opened()(found)
    facts = np.stack([record.facts["pixel_digest"] for record in found])
    assert facts.dtype == np.uint64 and facts.shape == (4, 2)
    assert left_out(ExactDuplicates(), facts) == {1: 0}


def test_a_digest_is_the_same_alone_and_in_company() -> None:
    files = [encode(noise(k)) for k in range(5)]
    together, alone = records(files), records(files)
    step = ExactDuplicates().facts().opened()
    step(together)
    for one, other in zip(alone, together, strict=True):
        step([one])
        assert np.array_equal(one.facts["pixel_digest"], other.facts["pixel_digest"])
