"""Perceptual hashes, and a search for near ones in time and memory linear in the number of images.

A hash is two times 64 bits: which low frequencies of a grey thumbnail are above their median
(imagehash.phash, after Zauner 2010), and where a smaller thumbnail gets brighter to the right
(imagehash.dhash). Recompression, resizing and small changes of colour flip a few bits of either;
unrelated images differ in about 32. The second is for scans and drawings, which are all alike in
their low frequencies.

The search (Norouzi, Punjani and Fleet 2012): if two hashes differ in at most ``radius`` bits, then
at least one of their four 16-bit pieces differs in at most radius / 4 bits. So each hash looks up a
few buckets in each of four tables of 2^16 buckets, and is compared with their content only.

Whether two images match depends on these two only. A search that took the nearest first and
examined it second would let one image hide the match of another, and matches could not be accounted
for image by image (decision 0018).

Legend: N query hashes, M base hashes, H height, W width.
"""

from itertools import combinations
from typing import Any

import numpy as np
from PIL import Image

from dpvision.errors import ConfigError

NUM_BITS = 64
LARGEST_RADIUS = 11
"""Beyond it a search opens thousands of buckets, and unrelated images begin to match."""
RADIUS = 6
"""Default number of bits by which the first hashes of matching images may differ."""
SECOND_RADIUS = 10
"""The same for the second hash."""
_PIECES, _PIECE_BITS = 4, 16
_FLAT = 3.0
"""Standard deviation of grey levels (0 to 255) below which an image is flat and its hash means
nothing.
"""
_PAIRS_AT_ONCE = 1 << 22


def perceptual_hashes(pixels_HWC: np.ndarray) -> np.ndarray | None:
    """Compute both hashes of an image and of its mirror image, uint64 (2, 2).

    None for an image of (nearly) one colour.

    Args:
        pixels_HWC: uint8 RGB.

    Raises:
        ConfigError: imagehash is not installed.
    """
    imagehash = _imagehash()
    # phash works at this size, so it resizes neither the image nor its mirror image again.
    small = Image.fromarray(pixels_HWC).convert("L").resize((32, 32), Image.Resampling.LANCZOS)
    if np.asarray(small, dtype=np.float32).std() < _FLAT:
        return None
    both = (small, small.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    return np.array(
        [
            [_number(hashed(image)) for hashed in (imagehash.phash, imagehash.dhash)]
            for image in both
        ],
        dtype=np.uint64,
    )


def hashes_version() -> str:
    """Return the version of the library that hashes. Raises as ``perceptual_hashes``."""
    return str(_imagehash().__version__)


def _imagehash() -> Any:
    try:
        import imagehash
    except ImportError:
        raise ConfigError(
            "overlap: imagehash is not installed; expected it for perceptual hashes. In a "
            "checkout: pip install '.[overlap]'."
        ) from None
    return imagehash


def _number(hashed: Any) -> int:
    return int.from_bytes(np.packbits(hashed.hash).tobytes(), "big")


def check_radius(radius: int, where: str = "overlap") -> None:
    """Raise ConfigError for a number of differing bits that is out of range.

    Args:
        where: the command or step that takes it, for the error.
    """
    if not 0 <= radius <= LARGEST_RADIUS:
        raise ConfigError(f"{where}: radius={radius}; expected 0 to {LARGEST_RADIUS} bits. Use 6.")


def nearest_within(
    hash_N2: np.ndarray, base_M2: np.ndarray, radius: int, second_radius: int = SECOND_RADIUS
) -> tuple[np.ndarray, np.ndarray]:
    """Find the nearest of ``base_M2``; see ``HashIndex.nearest``."""
    return HashIndex(base_M2).nearest(hash_N2, radius, second_radius)


class HashIndex:
    """Tables of hashes to search in, made once for several searches.

    Args:
        base_M2: uint64; equal ones are compared once.
    """

    def __init__(self, base_M2: np.ndarray) -> None:
        self._base, self._first = np.unique(base_M2, axis=0, return_index=True)
        self._tables = []
        for piece in range(_PIECES):
            drawer_of = (self._base[:, 0] >> np.uint64(piece * _PIECE_BITS)).astype(np.uint16)
            order = np.argsort(drawer_of, kind="stable")
            edges = np.arange((1 << _PIECE_BITS) + 1)
            self._tables.append((order, np.searchsorted(drawer_of[order], edges)))

    def nearest(
        self, hash_N2: np.ndarray, radius: int, second_radius: int = SECOND_RADIUS
    ) -> tuple[np.ndarray, np.ndarray]:
        """Find the nearest of the base by the first 64 bits, among those within both radii.

        Args:
            hash_N2: uint64.
            radius: largest number of differing bits in the first 64, 0 to 11.
            second_radius: the same for the second 64, 0 to 64.

        Returns:
            int64 (N,) positions in the base, -1 for none (one of them if several are equally near),
            and int64 (N,) differing bits of the first 64, 65 for none.

        Raises:
            ConfigError: a radius is out of range.
        """
        check_radius(radius)
        if not 0 <= second_radius <= NUM_BITS:
            raise ConfigError(
                f"overlap: second_radius={second_radius}; expected 0 to {NUM_BITS} bits. Use "
                f"{SECOND_RADIUS}."
            )
        asked, back_N = np.unique(hash_N2, axis=0, return_inverse=True)
        nearest, bits = (
            np.full(len(asked), -1, dtype=np.int64),
            np.full(len(asked), NUM_BITS + 1, dtype=np.int64),
        )
        if len(asked) and len(self._base):
            for piece, (order, start) in enumerate(self._tables):
                own = (asked[:, 0] >> np.uint64(piece * _PIECE_BITS)).astype(np.uint16)
                for mask in _masks(radius // _PIECES):
                    _look_into(
                        asked,
                        self._base,
                        order,
                        start,
                        own ^ mask,
                        radius,
                        second_radius,
                        nearest,
                        bits,
                    )
            nearest[nearest >= 0] = self._first[nearest[nearest >= 0]]
        return nearest[back_N.ravel()], bits[back_N.ravel()]


def _masks(most: int) -> list[np.uint16]:
    """All masks of at most ``most`` bits of a piece."""
    return [
        np.uint16(sum(1 << bit for bit in chosen))
        for k in range(most + 1)
        for chosen in combinations(range(_PIECE_BITS), k)
    ]


def _look_into(
    asked: np.ndarray,
    base: np.ndarray,
    order: np.ndarray,
    start: np.ndarray,
    drawer: np.ndarray,
    radius: int,
    second_radius: int,
    nearest: np.ndarray,
    bits: np.ndarray,
) -> None:
    """Compare each query hash with the base hashes in its bucket.

    Updates ``nearest`` and ``bits`` in place.
    """
    first, count = start[drawer], start[drawer.astype(np.int64) + 1] - start[drawer]
    ends = np.cumsum(count)
    at = 0
    while at < len(asked):
        # As many queries as fit at once; a larger bucket is processed alone.
        stop = max(
            at + 1,
            int(np.searchsorted(ends, (ends[at - 1] if at else 0) + _PAIRS_AT_ONCE, side="right")),
        )
        num = count[at:stop]
        who = np.repeat(np.arange(at, stop), num)
        inside = np.arange(len(who)) - np.repeat(np.cumsum(num) - num, num)
        found = order[np.repeat(first[at:stop], num) + inside]
        differ = np.bitwise_count(asked[who, 0] ^ base[found, 0]).astype(np.int64)
        better = (differ <= radius) & (differ < bits[who])
        who, found, differ = who[better], found[better], differ[better]
        better = np.bitwise_count(asked[who, 1] ^ base[found, 1]) <= second_radius
        who, found, differ = who[better], found[better], differ[better]
        # Of several in one bucket keep the nearest, then the first: the last write wins.
        last = np.lexsort((-found, -differ, who))
        bits[who[last]], nearest[who[last]] = differ[last], found[last]
        at = stop
