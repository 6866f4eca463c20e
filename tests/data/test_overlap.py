"""Images that two stores share: against an exhaustive search, and after what people do to images;
what is left out, and said.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dpvision.data import perceptual
from dpvision.data.importer import import_samples
from dpvision.data.open import open_store
from dpvision.data.overlap import HOWS, find_matches, signatures, write_pairs, write_without
from dpvision.data.perceptual import nearest_within, perceptual_hashes
from dpvision.data.sources import Sample
from dpvision.data.store import Store
from dpvision.errors import ConfigError, DataError
from dpvision.synthetic.scenes import make_scene

from .image_files import encode, noise

pytest.importorskip("imagehash", reason='imagehash is not installed: pip install ".[overlap]"')


def scene(number: int, size: int = 96) -> np.ndarray:
    return make_scene(number, size).image


def make_store(path: Path, files: dict[str, bytes], *, public: bool) -> Store:
    return import_samples(
        [Sample(key, data, {}) for key, data in files.items()], path, public=public
    )


def exhaustive(asked: np.ndarray, base: np.ndarray, radius: int, second: int = 64) -> np.ndarray:
    """The fewest of the first bits by which each differs from any within both radii, 65 where there
    is none: the slow way.
    """
    best = []
    for a in asked.tolist():
        bits = [((a[0] ^ b[0]).bit_count(), (a[1] ^ b[1]).bit_count()) for b in base.tolist()]
        best.append(
            min((first for first, other in bits if first <= radius and other <= second), default=65)
        )
    return np.array(best)


def pairs_of(first: np.ndarray, second: np.ndarray | None = None) -> np.ndarray:
    return np.stack([first, np.zeros_like(first) if second is None else second], axis=1)


@pytest.mark.parametrize("radius", [0, 3, 4, 6, 8, 11])
def test_the_search_finds_what_an_exhaustive_one_finds(radius: int) -> None:
    rng = np.random.default_rng(radius)
    base = rng.integers(0, 2**64, 300, dtype=np.uint64)
    # Near ones with 0 to 14 bits turned, equal ones, and strangers.
    turned = [
        int(base[i % 300]) ^ sum(1 << int(b) for b in rng.choice(64, i % 15, replace=False))
        for i in range(300)
    ]
    asked = np.concatenate(
        [np.array(turned, dtype=np.uint64), base[:20], rng.integers(0, 2**64, 80, dtype=np.uint64)]
    )
    # Second hashes of three kinds that differ in 0, 4 or 12 bits: the nearest by the first may not
    # be the one.
    kinds = np.array([0, 15, 2**12 - 1], dtype=np.uint64)
    asked, base = (
        pairs_of(asked, rng.choice(kinds, len(asked))),
        pairs_of(np.r_[base, base ^ np.uint64(1)], rng.choice(kinds, 600)),
    )
    near, bits = nearest_within(asked, base, radius, 4)
    assert np.array_equal(bits, exhaustive(asked, base, radius, 4))
    hit = near >= 0
    assert np.array_equal(hit, bits <= radius) and hit.sum() >= 8 * (radius + 1)
    assert np.array_equal(np.bitwise_count(asked[hit, 0] ^ base[near[hit], 0]), bits[hit])
    assert (np.bitwise_count(asked[hit, 1] ^ base[near[hit], 1]) <= 4).all()


def test_an_image_that_is_no_twin_changes_nothing() -> None:
    """Decision 0018: what is found with one more image, less what that image matches itself, is
    what is found without it.
    """
    rng = np.random.default_rng(5)
    asked, base = (pairs_of(*rng.integers(0, 2**8, (2, n), dtype=np.uint64)) for n in (80, 25))
    for left_out in range(len(base)):
        rest = np.delete(base, left_out, axis=0)
        with_it, without, own = (
            nearest_within(asked, part, 2, 2)[0] >= 0
            for part in (base, rest, base[left_out : left_out + 1])
        )
        assert np.array_equal(with_it, without | own)


def test_a_hundred_thousand_equal_hashes_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blank pages, logos, frames of one film: a search that pairs them all would need ten thousand
    million comparisons.
    """
    compared = []
    real = perceptual._look_into
    monkeypatch.setattr(
        perceptual,
        "_look_into",
        lambda asked, base, *rest: (
            compared.append(len(asked) * len(base)),
            real(asked, base, *rest),
        ),
    )
    near, bits = nearest_within(
        pairs_of(np.full(100_000, 7, dtype=np.uint64)),
        pairs_of(np.full(100_000, 6, dtype=np.uint64)),
        6,
    )
    assert (bits == 1).all() and (near >= 0).all() and set(compared) == {1}


def test_a_full_drawer_is_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perceptual, "_PAIRS_AT_ONCE", 64)
    rng = np.random.default_rng(1)
    base = rng.integers(0, 2**64, 200, dtype=np.uint64) & np.uint64(
        2**64 - 2**16
    )  # one drawer of the first table holds them all
    asked = base[:50] ^ np.uint64(1 << 40)
    asked, base = pairs_of(asked), pairs_of(base)
    _, bits = nearest_within(asked, base, 4)
    assert np.array_equal(bits, exhaustive(asked, base, 4)) and (bits == 1).all()


def test_searches_without_hashes_find_nothing() -> None:
    none, three = np.zeros((0, 2), dtype=np.uint64), np.ones((3, 2), dtype=np.uint64)
    assert nearest_within(none, three, 6)[0].shape == (0,)
    assert nearest_within(three, none, 6)[0].tolist() == [-1, -1, -1]
    for radius in (-1, 12):
        with pytest.raises(ConfigError, match="radius"):
            nearest_within(none, none, radius)


def test_a_mirror_image_has_the_mirrored_hash_and_a_blank_page_none() -> None:
    image = scene(3)
    hashes, turned = perceptual_hashes(image), perceptual_hashes(image[:, ::-1].copy())
    assert (
        hashes is not None
        and turned is not None
        and np.array_equal(turned, hashes[::-1])
        and (hashes[0] != hashes[1]).all()
    )
    assert perceptual_hashes(np.full((50, 60, 3), 200, dtype=np.uint8)) is None


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Store]:
    """40 public scenes; 30 private ones of which the first are copies of public ones, and one blank
    page in each.
    """
    root = tmp_path_factory.mktemp("overlap")
    blank = {f"blank{i}": encode(np.full((40 + i, 40, 3), 250, dtype=np.uint8)) for i in range(2)}
    public = {f"p{i}": encode(scene(i)) for i in range(40)}
    half = np.asarray(Image.fromarray(scene(3)).resize((48, 48), Image.Resampling.BICUBIC))
    copies = {
        "file": public["p0"],
        "again": encode(scene(1), "BMP"),
        "jpeg": encode(scene(2), "JPEG", quality=75),
        "half": encode(half),
        "mirror": encode(scene(4)[:, ::-1].copy()),
    }
    others = {f"q{i}": encode(scene(1000 + i)) for i in range(25)}
    return (
        make_store(root / "public", public | {"blank": blank["blank0"]}, public=True),
        make_store(root / "mine", copies | others | {"blank": blank["blank1"]}, public=False),
    )


def found_by(stores: tuple[Store, Store], radius: int | None = 6) -> dict[str, tuple[str, str]]:
    public, private = stores
    found = find_matches(
        signatures(public, workers=1), signatures(private, workers=2), radius=radius
    )
    return {
        public.record(p).key: (private.record(q).key, HOWS[how])
        for p, q, how in zip(
            found.public_M.tolist(), found.private_M.tolist(), found.how_M.tolist(), strict=True
        )
    }


def test_copies_are_found_by_what_was_done_to_them_and_others_are_not(
    stores: tuple[Store, Store],
) -> None:
    assert found_by(stores) == {
        "p0": ("file", "bytes"),
        "p1": ("again", "pixels"),
        "p2": ("jpeg", "perceptual"),
        "p3": ("half", "perceptual"),
        "p4": ("mirror", "perceptual"),
    }
    assert set(found_by(stores, radius=None)) == {"p0", "p1"}


def test_an_image_that_cannot_be_decoded_is_compared_by_its_bytes(tmp_path: Path) -> None:
    """It is in the store because it could be read at the import."""
    same = encode(noise(1))
    made = []
    for name in ("a", "b"):
        store = make_store(
            tmp_path / name,
            {"x": same, "y": encode(noise(2 if name == "a" else 3))},
            public=name == "a",
        )
        shard = store.shard_paths[0]
        data = bytearray(shard.read_bytes())
        at = int(store.index["offset"][0])
        data[at : at + 8] = b"\0" * 8
        shard.write_bytes(bytes(data))
        made.append(open_store(tmp_path / name))
    signed = signatures(made[0], workers=1)
    assert signed.readable_N.tolist() == [False, True]
    found = find_matches(signed, signatures(made[1], workers=1))
    assert found.public_M.tolist() == [0] and HOWS[int(found.how_M[0])] == "bytes"


def test_the_cleared_store_says_what_was_done_and_no_count(
    stores: tuple[Store, Store], tmp_path: Path
) -> None:
    public, private = stores
    out = public.path.parent / "clean"
    clean = write_without(public, out, np.array([0, 2, 2]), private, ["identical bytes"])
    assert (
        clean.num_records == 39
        and clean.store_id == public.store_id
        and clean.visibility == "public"
    )
    kept = [clean.record(row).key for row in range(clean.num_records)]
    assert "p0" not in kept and "p2" not in kept and clean.read(kept.index("p7")) == public.read(7)
    assert clean.meta["deduplicated"] == {
        "against": [private.store_id],
        "methods": ["identical bytes"],
    }
    assert out.stat().st_mode & 0o077 == 0, (
        "what is missing from it tells who is in the private store"
    )
    assert (
        "deduplicated" not in open_store(public.path).meta
        and open_store(private.path).num_records == private.num_records
    )
    other = make_store(tmp_path / "other", {"z": encode(scene(77))}, public=False)
    twice = write_without(
        clean,
        public.path.parent / "cleaner",
        np.array([0]),
        other,
        ["identical bytes", "identical pixels"],
    )
    assert twice.meta["deduplicated"] == {
        "against": [private.store_id, other.store_id],
        "methods": ["identical bytes", "identical pixels"],
    }


def test_what_cannot_be_cleared_is_refused(stores: tuple[Store, Store], tmp_path: Path) -> None:
    public, private = stores
    with pytest.raises(DataError, match="is private"):
        write_without(private, private.path.parent / "no", np.zeros(0, dtype=np.int64), public, [])
    with pytest.raises(DataError, match="beside the public store"):
        write_without(public, tmp_path / "no", np.zeros(0, dtype=np.int64), private, [])
    with pytest.raises(DataError, match="every image"):
        write_without(public, public.path.parent / "no", np.arange(public.num_records), private, [])
    assert not (public.path.parent / "no").exists()


def test_pairs_name_both_images(stores: tuple[Store, Store], tmp_path: Path) -> None:
    public, private = stores
    found = find_matches(signatures(public, workers=1), signatures(private, workers=1), radius=None)
    write_pairs(tmp_path / "pairs.jsonl", public, private, found)
    lines = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    assert [(line["public"], line["private"], line["how"]) for line in lines] == [
        ("p0", "file", "bytes"),
        ("p1", "again", "pixels"),
    ]
