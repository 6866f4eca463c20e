"""Find images of a public store that are also in a private one.

By identical bytes, identical pixels, or near perceptual hashes.

Whether two images match does not depend on other images, so a private image without a public twin
changes nothing.

Each store is read once; 64 bytes per image stay in memory. Matches name private images and are as
confidential as these. docs/overlap.md describes how they may be used, decision 0018 why.

Legend: N images of a store, M matches.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from dpvision.data.decode import BadImage, decode
from dpvision.data.open import open_store
from dpvision.data.ordered import ordered_map
from dpvision.data.perceptual import RADIUS, nearest_within, perceptual_hashes
from dpvision.data.store import Store
from dpvision.data.store_writer import new_store_folder, write_part
from dpvision.errors import DataError

How = Literal["bytes", "pixels", "perceptual", "features"]
HOWS: tuple[How, ...] = get_args(How)
"""Strongest first: a match for several reasons keeps the first."""
SIGNED_AT_ONCE = 64
"""Images of a block of signatures."""


@dataclass(frozen=True)
class Signatures:
    """Digests and perceptual hashes of a store's images, in the order of its rows."""

    bytes_N: np.ndarray
    """uint64 digest of the file."""
    pixels_N: np.ndarray
    """uint64 digest of the decoded image, its size included."""
    hash_N22: np.ndarray
    """uint64 perceptual hashes of the image and of its mirror image (``perceptual``)."""
    readable_N: np.ndarray
    """bool: False if the image does not decode; then only its bytes are compared."""
    hashed_N: np.ndarray
    """bool: False also if the image is of one colour; then only bytes and pixels are compared."""

    @classmethod
    def of(cls, table_N8: np.ndarray) -> "Signatures":
        """Return the signatures in a table of ``signature_blocks``."""
        return cls(
            table_N8[:, 0],
            table_N8[:, 1],
            table_N8[:, 2:6].reshape(-1, 2, 2),
            table_N8[:, 6] == 1,
            table_N8[:, 7] == 1,
        )


@dataclass(frozen=True)
class Matches:
    """Images of the public store, each with one matching image of the private store."""

    public_M: np.ndarray
    """int64 rows, ascending."""
    private_M: np.ndarray
    how_M: np.ndarray
    """int64 positions in ``HOWS``."""
    distance_M: np.ndarray
    """float64: 0 for bytes and pixels, differing bits for perceptual hashes, 1 - cosine for
    features.
    """

    def joined(self, other: "Matches") -> "Matches":
        """Merge both; of two matches of a public image the stronger is kept, then the nearer."""
        parts = [
            np.concatenate(pair)
            for pair in zip(vars(self).values(), vars(other).values(), strict=True)
        ]
        public, private, how, distance = parts
        order = np.lexsort((distance, how, public))
        first = np.r_[True, np.diff(public[order]) != 0][: len(order)]
        return Matches(*(part[order[first]] for part in (public, private, how, distance)))


def signatures(
    store: Store, *, workers: int = 2, progress: Callable[[int], None] | None = None
) -> Signatures:
    """Compute the signatures of all images of a store, which is read once.

    Raises:
        DataError: the store holds textures, or a shard cannot be read. ConfigError: imagehash is
            not installed.
    """
    parts = [np.zeros((0, 8), dtype=np.uint64)]
    for part in signature_blocks(store, np.arange(store.num_records), workers=workers):
        parts.append(part)
        if progress is not None:
            progress(min((len(parts) - 1) * SIGNED_AT_ONCE, store.num_records))
    return Signatures.of(np.concatenate(parts))


def signature_blocks(
    store: Store, rows: np.ndarray, first: int = 0, *, workers: int = 2
) -> Iterator[np.ndarray]:
    """Yield the signatures of the images at ``rows[first:]`` as tables, uint64 (at most
    ``SIGNED_AT_ONCE``, 8): see ``Signatures.of``. Raises as ``signatures``.
    """
    _check_images(store)
    chunks = (rows[at : at + SIGNED_AT_ONCE] for at in range(first, len(rows), SIGNED_AT_ONCE))
    return ordered_map(
        lambda part: _signed(store, part), chunks, workers=workers, ahead=2 * workers
    )


def _check_images(store: Store) -> None:
    if store.generated:
        raise DataError(
            f"overlap: {store.path} holds generated textures; expected images. Leave it out."
        )


def _signed(store: Store, rows: np.ndarray) -> np.ndarray:
    table = np.zeros((len(rows), 8), dtype=np.uint64)
    for b, data in enumerate(store.read_many(rows)):
        table[b, 0] = _digest(data)
        try:
            pixels_HWC = decode(data)
        except BadImage:
            continue
        table[b, 1], table[b, 6] = (
            _digest(np.array(pixels_HWC.shape).tobytes() + pixels_HWC.tobytes()),
            1,
        )
        hashes = perceptual_hashes(pixels_HWC)
        if hashes is not None:
            table[b, 2:6], table[b, 7] = hashes.ravel(), 1
    return table


def _digest(data: bytes) -> int:
    """64-bit digest.

    Among 10^12 pairs of different images the chance of a collision is about 1 in 10^7.
    """
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def find_matches(
    public: Signatures, private: Signatures, *, radius: int | None = RADIUS
) -> Matches:
    """Match images by bytes, pixels and perceptual hashes, mirror images included.

    Args:
        radius: bits by which perceptual hashes may differ, 0 to 11; if None, only identical bytes
            and pixels match.

    Raises:
        ConfigError: the radius is out of range.
    """
    found = _equal(
        public.bytes_N,
        private.bytes_N,
        np.ones_like(public.readable_N),
        np.ones_like(private.readable_N),
        "bytes",
    )
    found = found.joined(
        _equal(public.pixels_N, private.pixels_N, public.readable_N, private.readable_N, "pixels")
    )
    if radius is None:
        return found
    ours, theirs = np.flatnonzero(public.hashed_N), np.flatnonzero(private.hashed_N)
    for mirrored in (0, 1):
        near, bits = nearest_within(
            public.hash_N22[ours, mirrored], private.hash_N22[theirs, 0], radius
        )
        hit = near >= 0
        found = found.joined(matches_of(ours[hit], theirs[near[hit]], "perceptual", bits[hit]))
    return found


def _equal(
    public_N: np.ndarray,
    private_N: np.ndarray,
    public_ok: np.ndarray,
    private_ok: np.ndarray,
    how: How,
) -> Matches:
    ours, theirs = np.flatnonzero(public_ok), np.flatnonzero(private_ok)
    value, first = np.unique(private_N[theirs], return_index=True)
    if not len(value):
        return matches_of(ours[:0], ours[:0], how, np.zeros(0))
    at = np.minimum(np.searchsorted(value, public_N[ours]), len(value) - 1)
    hit = value[at] == public_N[ours]
    return matches_of(ours[hit], theirs[first[at[hit]]], how, np.zeros(int(hit.sum())))


def matches_of(
    public_M: np.ndarray, private_M: np.ndarray, how: How, distance_M: np.ndarray
) -> Matches:
    """Make ``Matches`` of one kind."""
    how_M = np.full(len(public_M), HOWS.index(how), dtype=np.int64)
    return Matches(
        public_M.astype(np.int64), private_M.astype(np.int64), how_M, distance_M.astype(np.float64)
    )


def write_pairs(path: Path, public: Store, private: Store, found: Matches) -> None:
    """Write one JSON line per match: names and rows in both stores, kind, distance.

    Confidential: it names private images.
    """
    with path.open("w", encoding="utf-8") as file:
        for ours, theirs, how, distance in zip(
            *(part.tolist() for part in vars(found).values()), strict=True
        ):
            line = {
                "public": public.record(ours).key,
                "private": private.record(theirs).key,
                "how": HOWS[how],
                "distance": distance,
            }
            file.write(json.dumps(line | {"public_row": ours, "private_row": theirs}) + "\n")


def check_out(public: Store, out: str | Path) -> Path:
    """Return the folder that ``write_without`` would make; raise DataError if it would refuse."""
    _check_images(public)
    target, home = Path(out).resolve(), public.path.resolve()
    if public.visibility != "public":
        raise DataError(
            f"overlap: {public.path} is private; expected a public store to leave images out of. "
            "Import it with --public."
        )
    if target.parent != home.parent:
        raise DataError(
            f"overlap: {target}; expected a folder in {home.parent}, beside the public store. "
            "Choose one there."
        )
    if target.exists():
        raise DataError(f"overlap: {target} exists; expected a new folder. Choose another name.")
    return target


def write_without(
    public: Store, out: str | Path, rows: np.ndarray, private: Store, methods: list[str]
) -> Store:
    """Write a store of the public images except ``rows``.

    The removal is recorded for the lineage of runs trained on it.

    It reads the public store's shards in place and keeps its id, like the halves of a split. Which
    images are missing, and how many, depends on the private store: the folder is readable by its
    owner only, the record has no count of them, and results computed from the remaining images are
    private (``Store.results_visibility``). ``cleared_from`` is the public store's number of
    records.

    Args:
        out: folder to make, next to the public store.
        methods: descriptions of how the rows were found.

    Raises:
        DataError: the store is not public, ``out`` exists or lies elsewhere, or nothing would be
            left.
    """
    target = check_out(public, out)
    keep = np.ones(public.num_records, dtype=bool)
    keep[rows] = False
    if not keep.any():
        raise DataError(
            f"overlap: every image of {public.path} is in {private.path}; expected some that are "
            "not. Use another store."
        )
    before = public.meta.get("deduplicated") or {"against": [], "methods": []}
    record = {
        "against": list(dict.fromkeys([*before["against"], private.store_id])),
        "methods": list(dict.fromkeys([*before["methods"], *methods])),
    }
    with new_store_folder(target, private=True) as folder:
        cleared = public.meta.get("cleared_from", public.num_records)
        write_part(public, folder, keep, {"deduplicated": record, "cleared_from": cleared})
    return open_store(target)
