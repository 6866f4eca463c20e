"""Near hashes among records and against public stores: against all pairs."""

from pathlib import Path

import numpy as np
import pytest

from dpvision.curate import near_duplicates as near
from dpvision.curate.near_duplicates import NearDuplicates, PublicDuplicates
from dpvision.data.importer import import_samples
from dpvision.data.overlap import Signatures
from dpvision.data.perceptual import SECOND_RADIUS
from dpvision.data.sample import Sample
from dpvision.errors import ConfigError
from dpvision.synthetic.scenes import make_scene

from ..data.image_files import encode
from .searches import earlier_matches, left_out, records

pytest.importorskip("imagehash", reason='imagehash is not installed: pip install ".[curate]"')


def turned(word: int, bits: int, rng: np.random.Generator) -> int:
    return word ^ sum(1 << int(bit) for bit in rng.choice(64, bits, replace=False))


def families(rng: np.random.Generator, num: int) -> np.ndarray:
    """Hashes near one another by 0 to 13 bits, mirrored ones, equal ones, none."""
    hash_N22 = rng.integers(0, 2**64, (num, 2, 2), dtype=np.uint64)
    for i in range(num // 10, num):
        other = hash_N22[rng.integers(0, i)].tolist()
        bits = int(rng.integers(0, 14))
        near_one = [
            [turned(p, bits, rng), turned(d, int(rng.integers(0, 14)), rng)] for p, d in other
        ]
        chosen = [None, near_one, near_one[::-1], other, other[::-1]][rng.integers(0, 5)]
        if chosen is not None:
            hash_N22[i] = np.array(chosen, dtype=np.uint64)
    hash_N22[rng.random(num) < 0.03] = 0
    return hash_N22


def all_pairs(hash_N22: np.ndarray, radius: int) -> np.ndarray:
    """The definition, bit by bit."""
    if not radius:
        least = [min(map(tuple, h)) for h in hash_N22.tolist()]
        match = np.array([[a == b for b in least] for a in least])
    else:
        first, second = (
            np.bitwise_count(hash_N22[:, None, :, None, w] ^ hash_N22[None, :, None, :, w])
            for w in (0, 1)
        )
        match = ((first <= radius) & (second <= SECOND_RADIUS)).any(axis=(2, 3))
    some = hash_N22.any(axis=(1, 2))
    return match & some & some[:, None]


@pytest.mark.parametrize("at_once", [1 << 21, 100])
@pytest.mark.parametrize("radius", range(12))
def test_it_leaves_out_what_all_pairs_leave_out(
    radius: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near, "_HASHES_AT_ONCE", at_once)
    monkeypatch.setattr(near, "_PAIRS_AT_ONCE", at_once)
    rng = np.random.default_rng(radius)
    hash_N22, alive = families(rng, 400), rng.random(400) < 0.9
    match_NN = all_pairs(hash_N22, radius)
    slow = earlier_matches(match_NN, alive)
    found = left_out(NearDuplicates(radius), hash_N22, alive)
    assert found.keys() == slow.keys() and len(found) > 20
    assert all(match_NN[row, twin] for row, twin in found.items())


def test_mirror_images_with_equal_first_words_are_of_one_class() -> None:
    one, two = [[5, 8], [5, 3]], [[5, 3], [5, 8]]
    assert left_out(NearDuplicates(0), np.array([one, two, [[5, 8], [5, 4]]], np.uint64)) == {1: 0}


@pytest.mark.parametrize("num", [10, 10**4, 10**6, 10**9])
@pytest.mark.parametrize("radius", [1, 6, 11])
def test_the_tables_find_every_pair_within_the_radius_however_many_records(
    radius: int, num: int
) -> None:
    """However the bits that differ lie, a table has none of them."""
    masks = near._masks(radius, num)
    rng = np.random.default_rng(0)
    for _ in range(300):
        differ = turned(0, radius, rng)
        assert any(differ & int(mask) == 0 for mask in masks)


@pytest.mark.parametrize("radius", [0, 6])
def test_no_record_one_equal_ones_and_none_alive(radius: int) -> None:
    step = NearDuplicates(radius)
    hashes = np.ones((4, 2, 2), dtype=np.uint64)
    assert left_out(step, hashes[:0]) == left_out(step, hashes[:1]) == {}
    assert left_out(step, hashes) == {1: 0, 2: 0, 3: 0}
    assert left_out(step, hashes, np.zeros(4, dtype=bool)) == {}
    assert left_out(step, 0 * hashes) == {}


@pytest.mark.parametrize("radius", [0, 6])
def test_progress_ends_at_the_number_of_records_and_never_falls(radius: int) -> None:
    told: list[int] = []
    left_out(NearDuplicates(radius), families(np.random.default_rng(0), 100), None, told.append)
    assert told[-1] == 100 and told == sorted(told)


def test_a_mirror_image_and_a_recompressed_one_are_found_and_a_flat_image_has_no_hash() -> None:
    scenes = [make_scene(k, 96).image for k in range(3)]
    flat = np.full((50, 60, 3), 90, dtype=np.uint8)
    pixels = [*scenes, scenes[1][:, ::-1].copy(), flat, flat]
    found = records([encode(p) for p in pixels] + [encode(scenes[2], "JPEG", quality=70)])
    step = NearDuplicates().facts().opened()
    step(found)
    hashes = np.stack([record.facts["perceptual_hashes"] for record in found])
    assert left_out(NearDuplicates(0), hashes[:6]) == {3: 1}
    assert left_out(NearDuplicates(6), hashes) == {3: 1, 6: 2}
    for one, other in zip(records([r.sample.image for r in found]), found, strict=True):
        step([one])
        assert np.array_equal(one.facts["perceptual_hashes"], other.facts["perceptual_hashes"])


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stores") / "public"
    files = [encode(make_scene(k, 64).image) for k in range(20)]
    files.append(encode(np.full((30, 30, 3), 90, dtype=np.uint8)))
    import_samples([Sample(str(k), data, {}) for k, data in enumerate(files)], path, public=True)
    return path


@pytest.mark.parametrize("radius", [0, 6])
def test_against_public_stores_a_record_is_judged_alone(public: Path, radius: int) -> None:
    """The definition for each pair of a record and a public image; nothing about other records."""
    scenes = [make_scene(k, 64).image for k in range(10, 30)]
    images = [*scenes, *(s[:, ::-1].copy() for s in scenes), np.full((9, 9, 3), 90, dtype=np.uint8)]
    files = [encode(image, "JPEG", quality=60) for image in images] + [encode(images[0])]
    step = PublicDuplicates((public,), radius)
    act = step.opened()
    together, alone, hashed = records(files), records(files), records(files)
    act(together)
    for record in alone:
        act([record])
    assert [r.reason for r in together] == [r.reason for r in alone]

    add = NearDuplicates().facts().opened()
    originals = records([encode(make_scene(k, 64).image) for k in range(20)])
    add(hashed)
    add(originals)
    for record, done in zip(hashed, together, strict=True):
        both = np.stack([r.facts["perceptual_hashes"] for r in [*originals, record]])
        assert (done.reason is not None) == bool(all_pairs(both, radius)[-1, :-1].any())
    assert together[-1].reason == "near duplicate of a public image"
    assert sum(r.reason is None for r in together) >= 15


def test_an_image_without_a_hash_matches_no_public_image(
    public: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even one whose hash is near the zeros that stand for none."""
    few = np.ones((1, 2, 2), dtype=np.uint64)
    found = Signatures(few[:, 0, 0], few[:, 0, 0], few, few[:, 0, 0] > 0, few[:, 0, 0] > 0)
    monkeypatch.setattr("dpvision.data.overlap.signatures", lambda store: found)
    flat = records([encode(np.full((30, 30, 3), 90, dtype=np.uint8))])
    PublicDuplicates((public,)).opened()(flat)
    assert flat[0].reason is None


def test_a_private_store_does_not_decide_which_records_stay(tmp_path: Path) -> None:
    sample = Sample("a", encode(make_scene(0, 64).image), {})
    import_samples([sample], tmp_path / "mine", public=False)
    with pytest.raises(ConfigError, match="is private; expected a public store"):
        PublicDuplicates((tmp_path / "mine",)).opened()


@pytest.mark.parametrize("radius", [-1, 12])
def test_a_radius_out_of_range_is_refused(radius: int) -> None:
    for make in (NearDuplicates, lambda r: PublicDuplicates((Path("x"),), r)):
        with pytest.raises(ConfigError, match=f"_duplicates: radius={radius}; expected"):
            make(radius)
