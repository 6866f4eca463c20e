"""One image on its way through the steps of curation, and what a step is.

Legend: N records of a source, M records that a step leaves out.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from dpvision.data.decode import BadImage, decode
from dpvision.data.sample import Sample


class Record:
    """One image of a source; ``reason`` is why it is left out, and later steps do not see it."""

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.reason: str | None = None
        self.facts: dict[str, np.ndarray[Any, Any]] = {}
        self._pixels_HWC: np.ndarray | None = None

    def pixels(self) -> np.ndarray:
        """Return the pixels that a training read gives, uint8 (H, W, 3), not writable.

        Raises:
            BadImage: see ``data.decode.decode``.
        """
        if self._pixels_HWC is None:
            self._pixels_HWC = decode(self.sample.image)
            self._pixels_HWC.flags.writeable = False
        return self._pixels_HWC

    def leave_out(self, reason: str) -> None:
        self.reason = reason

    def change_image(self, data: bytes) -> None:
        """Replace the image's bytes; they are then copied to the result."""
        self.sample = self.sample._replace(image=data, place=None)
        self._pixels_HWC = None


class RecordStep(Protocol):
    """A frozen dataclass of settings. What becomes of a record depends on that record alone."""

    name: ClassVar[str]

    def opened(self) -> Callable[[Sequence[Record]], None]:
        """Load what the step needs, once a process; the result changes records in place."""


class Duplicates(NamedTuple):
    """Records to leave out."""

    rows_M: np.ndarray
    """int64 ascending."""
    twins_M: np.ndarray
    """int64: the earlier record because of which each is left out."""


class AcrossStep(Protocol):
    """A frozen dataclass of settings. A record is left out if an earlier one is its duplicate, also
    if that one is itself left out.
    """

    name: ClassVar[str]
    fact: ClassVar[str]
    """The column that it compares."""

    @property
    def stability(self) -> int | None:
        """How many records of the result one source record can change; None: no bound."""

    def facts(self) -> RecordStep | None:
        """Return the step that computes the column, where no earlier step did."""

    def duplicates(
        self,
        column_N: np.ndarray,
        alive_N: np.ndarray,
        work: Path,
        progress: Callable[[int], None],
    ) -> Duplicates:
        """Find the records to leave out.

        Args:
            column_N: the column (N, ...) in source order, memory-mapped perhaps.
            alive_N: bool, False for records that are already left out.
            work: an empty folder for temporary files, which the result may still read.
            progress: called with the number of records done.
        """


def readable(records: Sequence[Record]) -> Iterator[tuple[Record, np.ndarray]]:
    """Yield records with their pixels; leave out those that do not decode."""
    for record in records:
        try:
            yield record, record.pixels()
        except BadImage as error:
            record.leave_out(error.reason)
