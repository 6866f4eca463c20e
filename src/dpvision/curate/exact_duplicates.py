"""Images with equal pixels: of several the first is kept.

Which records are equal is a partition of all possible records, fixed beforehand, and the result has
one record of each class. So a source record more adds one record to the result, or takes the place
of one that comes later, or changes nothing (docs/proofs.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import ClassVar

import numpy as np

from dpvision.curate.equal_keys import find_equal
from dpvision.curate.pairs import Pairs
from dpvision.curate.record import Duplicates, Record


@dataclass(frozen=True)
class PixelDigest:
    """Compute the fact ``pixel_digest``: 128 bits of the image's size and pixels, uint64 (2,)."""

    name: ClassVar[str] = "pixel_digest"
    decodes: ClassVar[bool] = True

    def opened(self) -> Callable[[Sequence[Record]], None]:
        return _add_digests


@dataclass(frozen=True)
class ExactDuplicates:
    """Leave out an image whose size and pixels an earlier one has.

    Memory does not grow with the number of records; the disk takes 24 bytes a record, and 32 for
    each that is left out.
    """

    name: ClassVar[str] = "exact_duplicates"
    fact: ClassVar[str] = "pixel_digest"

    @property
    def stability(self) -> int:
        return 2

    def facts(self) -> PixelDigest:
        return PixelDigest()

    def duplicates(
        self,
        column_N: np.ndarray,
        alive_N: np.ndarray,
        work: Path,
        progress: Callable[[int], None],
    ) -> Duplicates:
        pairs = Pairs(len(column_N), work)
        find_equal(column_N, alive_N, lambda digest_M2: digest_M2, pairs, work, progress)
        return pairs.duplicates()


def _add_digests(records: Sequence[Record]) -> None:
    for record in records:
        pixels_HWC = record.pixels()
        data = np.array(pixels_HWC.shape, dtype="<i8").tobytes() + pixels_HWC.tobytes()
        digest = blake2b(data, digest_size=16).digest()
        record.facts[PixelDigest.name] = np.frombuffer(digest, dtype="<u8").copy()
