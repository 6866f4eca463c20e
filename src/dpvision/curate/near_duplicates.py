"""Images whose perceptual hashes (``data.perceptual``) differ in a few bits, mirror images too.

An image has two hashes of two words, of itself and of its mirror image. Within a radius of 1 bit or
more, two images match if a hash of one and a hash of the other differ in at most ``radius`` bits of
the first word and ``SECOND_RADIUS`` of the second. At a radius of 0, they match if the smaller
hashes of both are equal: that is a partition of all images.

The search: if two words differ in at most ``radius`` of 64 bits, which are divided into more pieces
than that, the other pieces are equal. So there is a table for each choice of so many pieces, and
within it records are compared if they agree in these.

Legend: N records of a source, M records with different hashes, E = 2 M hashes of these.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import ClassVar

import numpy as np

from dpvision.curate.equal_keys import find_equal
from dpvision.curate.pairs import Pairs
from dpvision.curate.record import Duplicates, Record
from dpvision.data.perceptual import (
    NUM_BITS,
    RADIUS,
    SECOND_RADIUS,
    HashIndex,
    check_radius,
    perceptual_hashes,
)
from dpvision.errors import ConfigError
from dpvision.mixing import mix_numpy

_HASHES_AT_ONCE = 1 << 19
"""Hashes that are sorted at once, about."""
_PAIRS_AT_ONCE = 1 << 20
_PAIRS_PER_HASH = 30
"""Comparisons that take the time of sorting a hash, about; it decides the number of pieces."""


@dataclass(frozen=True)
class PerceptualHashes:
    """Compute the fact ``perceptual_hashes``: of an image and of its mirror image, uint64 (2, 2).

    Zeros for an image of (nearly) one colour, which matches nothing.
    """

    name: ClassVar[str] = "perceptual_hashes"
    decodes: ClassVar[bool] = True

    def opened(self) -> Callable[[Sequence[Record]], None]:
        return _add_hashes


@dataclass(frozen=True)
class NearDuplicates:
    """Leave out an image that matches an earlier one.

    With a radius of 0 memory does not grow with the number of records. With a larger one it is 64
    bytes for each record that is compared, about; time grows with the square of the number of
    different hashes, divided by the number of buckets of a table.

    """

    name: ClassVar[str] = "near_duplicates"
    fact: ClassVar[str] = "perceptual_hashes"
    radius: int = RADIUS
    """Differing bits of the first 64, 0 to 11; at 0 one image changes at most 2 of the store."""

    def __post_init__(self) -> None:
        check_radius(self.radius, self.name)

    @property
    def stability(self) -> int | None:
        return None if self.radius else 2

    def facts(self) -> PerceptualHashes:
        return PerceptualHashes()

    def duplicates(
        self,
        column_N: np.ndarray,
        alive_N: np.ndarray,
        work: Path,
        progress: Callable[[int], None],
    ) -> Duplicates:
        """Find the records to leave out.

        The twin is the first record with equal hashes, or else the first that matches.
        """
        num = len(column_N)
        pairs = Pairs(num, work)
        if not self.radius:
            find_equal(column_N, alive_N, canonical, pairs, work, progress)
            return pairs.duplicates()
        # Equal ones match the same others, so one of them is compared.
        find_equal(column_N, alive_N, _unordered, pairs, work, lambda done: progress(done // 4))
        equal = pairs.duplicates()
        left = alive_N.copy()
        left[equal.rows_M] = False
        row_M, hash_E2 = _different(column_N, left)
        earliest_M = _earliest(
            hash_E2,
            self.radius,
            lambda share: progress(num // 4 + int(share * (num - num // 4))),
        )
        found_M = earliest_M < np.arange(len(row_M))
        return _joined(equal, Duplicates(row_M[found_M], row_M[earliest_M[found_M]]))


@dataclass(frozen=True)
class PublicDuplicates:
    """Leave out an image that an image of a public store matches: a step of each record alone.

    Each process reads the public stores once and holds 64 bytes for each of their images.

    The guarantee then holds for the images of the source (docs/curate.md).
    """

    name: ClassVar[str] = "public_duplicates"
    decodes: ClassVar[bool] = True
    against: tuple[Path, ...] = ()
    """Public stores."""
    radius: int = RADIUS
    """Differing bits of the first 64, 0 to 11."""

    def __post_init__(self) -> None:
        check_radius(self.radius, self.name)

    def opened(self) -> Callable[[Sequence[Record]], None]:
        """Return the step.

        Raises:
            ConfigError: no store, or one that is not public. DataError: it cannot be read.
        """
        if not self.against:
            raise ConfigError(
                f"{self.name}: no store; expected public ones. Give --public-duplicates.against "
                "STORE."
            )
        from dpvision.data.open import open_store
        from dpvision.data.overlap import signatures

        parts = [np.zeros((0, 2, 2), dtype=np.uint64)]
        for path in self.against:
            store = open_store(path)
            if store.results_visibility != "public":
                raise ConfigError(
                    f"{self.name}: against={str(path)!r} is private; expected a public store: "
                    "private images must not decide which records stay. Leave it out."
                )
            found = signatures(store)
            parts.append(found.hash_N22[found.hashed_N])
        index = HashIndex(_compared(np.concatenate(parts), self.radius))
        second = SECOND_RADIUS if self.radius else 0

        def leave_out(records: Sequence[Record]) -> None:
            _add_hashes([record for record in records if PerceptualHashes.name not in record.facts])
            left = [record for record in records if record.reason is None]
            if not left:
                return
            hash_N22 = np.stack([record.facts[PerceptualHashes.name] for record in left])
            asked = _compared(hash_N22, self.radius)
            near = (index.nearest(asked, self.radius, second)[0] >= 0).reshape(len(left), -1)
            some = hash_N22.any(axis=(1, 2))
            for k in np.flatnonzero(near.any(axis=1) & some):
                left[k].leave_out("near duplicate of a public image")

        return leave_out


def canonical(hash_N22: np.ndarray) -> np.ndarray:
    """Return the smaller hash of each image and its mirror image, uint64 (N, 2)."""
    one, two = hash_N22[:, 0], hash_N22[:, 1]
    less = (one[:, 0] < two[:, 0]) | ((one[:, 0] == two[:, 0]) & (one[:, 1] <= two[:, 1]))
    return np.where(less[:, None], one, two)


def _unordered(hash_N22: np.ndarray) -> np.ndarray:
    """Return a key that is equal for equal sets of both hashes, uint64 (N, 4)."""
    smaller = canonical(hash_N22)
    return np.concatenate([smaller, hash_N22[:, 0] ^ hash_N22[:, 1] ^ smaller], axis=1)


def _compared(hash_N22: np.ndarray, radius: int) -> np.ndarray:
    """Return the hashes by which images match, uint64 (N or 2 N, 2)."""
    return hash_N22.reshape(-1, 2) if radius else canonical(hash_N22)


def _add_hashes(records: Sequence[Record]) -> None:
    for record in records:
        pixels_HWC = record.pixels()
        found = perceptual_hashes(pixels_HWC)
        record.facts[PerceptualHashes.name] = (
            np.zeros((2, 2), dtype=np.uint64) if found is None else found
        )


def _different(column_N: np.ndarray, left_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that are left and have hashes, int64 (M,), and these, uint64 (E, 2)."""
    most = int(np.count_nonzero(left_N))
    row_M, hash_M22 = np.empty(most, dtype=np.int64), np.empty((most, 2, 2), dtype=np.uint64)
    at = 0
    for start in range(0, len(column_N), _HASHES_AT_ONCE):
        here = start + np.flatnonzero(left_N[start : start + _HASHES_AT_ONCE])
        block = np.asarray(column_N[here])
        some = block.any(axis=(1, 2))
        stop = at + int(some.sum())
        row_M[at:stop], hash_M22[at:stop] = here[some], block[some]
        at = stop
    return row_M[:at], hash_M22[:at].reshape(-1, 2)


def _earliest(hash_E2: np.ndarray, radius: int, share_done: Callable[[float], None]) -> np.ndarray:
    """Return the first record that each matches, or its own number, int64 (M,).

    Args:
        hash_E2: two hashes of each record.
        radius: 1 or more.
    """
    num = len(hash_E2) // 2
    earliest_M = np.arange(num)
    masks = _masks(radius, len(hash_E2))
    bits = (len(hash_E2) // _HASHES_AT_ONCE).bit_length()
    key_E = np.empty(len(hash_E2), dtype=np.uint64)
    blocks = [slice(at, at + _HASHES_AT_ONCE) for at in range(0, len(key_E), _HASHES_AT_ONCE)]
    for k, mask in enumerate(masks):
        for block in blocks:
            key_E[block] = mix_numpy(hash_E2[block, 0] & mask)
        for part in range(1 << bits):
            at_K = _in_part(key_E, blocks, part, bits)
            at_K = at_K[np.argsort(key_E[at_K], kind="stable")]
            for later, earlier in _pairs(key_E[at_K]):
                one, two = at_K[later], at_K[earlier]
                near = np.bitwise_count(hash_E2[one, 0] ^ hash_E2[two, 0]) <= radius
                one, two = one[near], two[near]
                near = np.bitwise_count(hash_E2[one, 1] ^ hash_E2[two, 1]) <= SECOND_RADIUS
                np.minimum.at(earliest_M, one[near] // 2, two[near] // 2)
            share_done((k + (part + 1) / (1 << bits)) / len(masks))
    return earliest_M


def _in_part(key_E: np.ndarray, blocks: list[slice], part: int, bits: int) -> np.ndarray:
    """Return the places of keys that begin with the ``bits`` bits of ``part``, ascending."""
    if not bits:
        return np.arange(len(key_E))
    begin = np.uint64(NUM_BITS - bits)
    return np.concatenate(
        [block.start + np.flatnonzero(key_E[block] >> begin == np.uint64(part)) for block in blocks]
    )


def _pairs(key_K: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield all pairs of places with equal keys, the later place first, in blocks.

    Args:
        key_K: ascending.
    """
    starts = np.r_[True, key_K[1:] != key_K[:-1]][: len(key_K)]
    first_K = np.flatnonzero(starts)[np.cumsum(starts) - 1]
    count_K = np.arange(len(key_K)) - first_K
    ends = np.cumsum(count_K)
    at = 0
    while at < len(key_K):
        before = ends[at - 1] if at else 0
        stop = max(at + 1, int(np.searchsorted(ends, before + _PAIRS_AT_ONCE, side="right")))
        num = count_K[at:stop]
        later = np.repeat(np.arange(at, stop), num)
        inside = np.arange(len(later)) - np.repeat(np.cumsum(num) - num, num)
        yield later, np.repeat(first_K[at:stop], num) + inside
        at = stop


def _masks(radius: int, num: int) -> list[np.uint64]:
    """Return the bits of each table, for ``num`` hashes: two words within the radius agree in the
    bits of one at least.

    With ``radius`` + e pieces, e of them are equal; more pieces give more tables with smaller
    buckets.
    """

    def cost(equal: int) -> float:
        pieces = radius + equal
        pairs = num * num / 2 / 2 ** (NUM_BITS * equal // pieces)
        return math.comb(pieces, equal) * (num * _PAIRS_PER_HASH + pairs)

    equal = min(range(1, 6), key=cost)
    pieces = radius + equal
    bits = [sum(1 << bit for bit in range(k, NUM_BITS, pieces)) for k in range(pieces)]
    return [np.uint64(sum(chosen)) for chosen in combinations(bits, equal)]


def _joined(one: Duplicates, two: Duplicates) -> Duplicates:
    """Return the records of both, which have none in common."""
    rows = np.concatenate([one.rows_M, two.rows_M])
    order = np.argsort(rows)
    return Duplicates(rows[order], np.concatenate([one.twins_M, two.twins_M])[order])
