"""Perceptual hashes, and the search for near ones in time and memory that grow with the number of images, not with its square.

A hash is two times 64 bits: which low frequencies of a grey thumbnail are above their median (imagehash.phash, after Zauner 2010), and in
which places of a smaller one it grows brighter to the right (imagehash.dhash). Recompression, resizing and small changes of colour move
a few bits of either; other images differ in about 32. The second is for scans and drawings, all alike in their low frequencies.

The search (Norouzi, Punjani and Fleet 2012): of four pieces of 16 bits, one pair differs in at most radius / 4 bits where two hashes
differ in at most ``radius``. So each hash asks four tables of 2^16 drawers for few drawers each, and only what lies there is compared.

Whether two images are alike depends on these two only. A search that first took the nearest and then looked at it more closely would let
one image hide the match of another, and what is found could not be accounted for image by image (decision 0018).

Legend: N hashes that ask, M hashes that are asked, H height, W width.
"""

from itertools import combinations
from typing import Any

import numpy as np
from PIL import Image

from dpvision.errors import ConfigError

NUM_BITS = 64
LARGEST_RADIUS = 11
"""Beyond it a search opens thousands of drawers, and images of nothing in common begin to meet."""
RADIUS = 6
"""Bits by which hashes of like images may differ, unless asked otherwise."""
SECOND_RADIUS = 10
"""Of the second hash."""
_PIECES, _PIECE_BITS = 4, 16
_FLAT = 3.0
"""Standard deviation of grey levels (0 to 255) below which an image has no frequencies to speak of: all such hashes are alike."""
_PAIRS_AT_ONCE = 1 << 22


def perceptual_hashes(pixels_HWC: np.ndarray) -> np.ndarray | None:
    """Both hashes, unsigned 64 bits, of an image and of its mirror image: uint64 (2, 2); None for an image of one colour or nearly.

    Args:
        pixels_HWC: uint8 RGB.

    Raises:
        ConfigError: imagehash is not installed.
    """
    try:
        import imagehash
    except ImportError:
        raise ConfigError(
            "overlap: imagehash is not installed; expected it for perceptual hashes. pip install dpvision[overlap]."
        ) from None
    # The side that the first hash works on: its own resizing of the mirror image has nothing left to do.
    small = Image.fromarray(pixels_HWC).convert("L").resize((32, 32), Image.Resampling.LANCZOS)
    if np.asarray(small, dtype=np.float32).std() < _FLAT:
        return None
    both = (small, small.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    return np.array([[_number(hashed(image)) for hashed in (imagehash.phash, imagehash.dhash)] for image in both], dtype=np.uint64)


def _number(hashed: Any) -> int:
    return int.from_bytes(np.packbits(hashed.hash).tobytes(), "big")


def nearest_within(
    hash_N2: np.ndarray, base_M2: np.ndarray, radius: int, second_radius: int = SECOND_RADIUS
) -> tuple[np.ndarray, np.ndarray]:
    """For each hash, the nearest one of ``base_M2`` by the first 64 bits, of those within both radii.

    Args:
        hash_N2, base_M2: uint64; equal ones are compared once.
        radius: of the first 64 bits, 0 to 11.
        second_radius: of the second, 0 to 64.

    Returns:
        int64 (N,) positions in ``base_M2``, -1 where there is none, one of them where several are as near; int64 (N,) bits of the first 64
        that differ, 65 where there is none.

    Raises:
        ConfigError: a radius is out of range.
    """
    if not 0 <= radius <= LARGEST_RADIUS or not 0 <= second_radius <= NUM_BITS:
        raise ConfigError(f"overlap: radius={radius}; expected 0 to {LARGEST_RADIUS} bits. Use 6.")
    asked, back_N = np.unique(hash_N2, axis=0, return_inverse=True)
    base, first_M = np.unique(base_M2, axis=0, return_index=True)
    nearest, bits = np.full(len(asked), -1, dtype=np.int64), np.full(len(asked), NUM_BITS + 1, dtype=np.int64)
    if len(asked) and len(base):
        for piece in range(_PIECES):
            shift = np.uint64(piece * _PIECE_BITS)
            drawer_of = (base[:, 0] >> shift).astype(np.uint16)
            order = np.argsort(drawer_of, kind="stable")
            start = np.searchsorted(drawer_of[order], np.arange((1 << _PIECE_BITS) + 1))
            own = (asked[:, 0] >> shift).astype(np.uint16)
            for mask in _masks(radius // _PIECES):
                _look_into(asked, base, order, start, own ^ mask, radius, second_radius, nearest, bits)
        nearest[nearest >= 0] = first_M[nearest[nearest >= 0]]
    return nearest[back_N.ravel()], bits[back_N.ravel()]


def _masks(most: int) -> list[np.uint16]:
    """All changes of at most ``most`` bits of a piece."""
    return [np.uint16(sum(1 << bit for bit in chosen)) for k in range(most + 1) for chosen in combinations(range(_PIECE_BITS), k)]


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
    """Compare each asked hash with the base hashes in its drawer; updates ``nearest`` and ``bits``."""
    first, count = start[drawer], start[drawer.astype(np.int64) + 1] - start[drawer]
    ends = np.cumsum(count)
    at = 0
    while at < len(asked):
        # As many as fit at once; a drawer that is fuller than that is taken alone.
        stop = max(at + 1, int(np.searchsorted(ends, (ends[at - 1] if at else 0) + _PAIRS_AT_ONCE, side="right")))
        num = count[at:stop]
        who = np.repeat(np.arange(at, stop), num)
        inside = np.arange(len(who)) - np.repeat(np.cumsum(num) - num, num)
        found = order[np.repeat(first[at:stop], num) + inside]
        differ = np.bitwise_count(asked[who, 0] ^ base[found, 0]).astype(np.int64)
        better = (differ <= radius) & (differ < bits[who])
        who, found, differ = who[better], found[better], differ[better]
        better = np.bitwise_count(asked[who, 1] ^ base[found, 1]) <= second_radius
        who, found, differ = who[better], found[better], differ[better]
        # Of several in one drawer the nearest, then the first: the last one written stands.
        last = np.lexsort((-found, -differ, who))
        bits[who[last]], nearest[who[last]] = differ[last], found[last]
        at = stop
