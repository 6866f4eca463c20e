"""What a step of curation is.

A record step decides on each record alone, so the curated store has the neighbours of its source: a
source with one record more gives a store with at most one record more. A step across records
compares records with each other, which changes that (``AcrossStep.stability``, docs/curate.md).

Legend: N records that are still in, M records to leave out.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np

from dpvision.data.captions import CAPTION_FIELDS
from dpvision.data.decode import decode
from dpvision.data.rgb import Window
from dpvision.data.sample import Sample
from dpvision.errors import DataError
from dpvision.strict_json import parse_json


@dataclass
class Record:
    """One image on its way through the steps, which change it in place."""

    sample: Sample
    reason: str | None = None
    """Why it is left out; later steps do not see it."""
    facts: dict[str, np.ndarray] = field(default_factory=dict)
    """What steps across records need: of one type and shape in each column."""
    captions: tuple[str, ...] | None = None
    """Those that replace the source's; None if these stay."""
    dropped: list[tuple[str, str]] = field(default_factory=list)
    """Captions that are dropped, with the reason; of one that is no text, nothing of it."""
    window: Window | None = None
    """Declared range of samples of more than 8 bits, as for ``decode``."""
    before: np.ndarray | None = None
    """The pixels before the last change, for the contact sheet."""
    _pixels: np.ndarray | None = None

    def pixels(self) -> np.ndarray:
        """Return the image as training reads it: uint8 (H, W, 3), oriented, not writable.

        Raises:
            BadImage: it does not decode; a step that ``decodes`` does not get such a record.
        """
        if self._pixels is None:
            self._pixels = decode(self.sample.image, window=self.window)
            self._pixels.flags.writeable = False
        return self._pixels

    def leave_out(self, reason: str) -> None:
        """Leave the record out."""
        self.reason = reason

    def change_image(self, data: bytes) -> None:
        """Replace the image file. A record that is not changed keeps its bytes."""
        self.before, self._pixels = self.pixels(), None
        self.sample = self.sample._replace(image=data, place=None)

    def change_captions(self, captions: Sequence[str]) -> None:
        """Replace the captions."""
        self.captions = tuple(captions)
        self.sample = with_captions(self.sample, self.captions)


def with_captions(sample: Sample, captions: Sequence[str]) -> Sample:
    """Return the sample with these captions in place of its own."""
    fields = {name: one for name, one in sample.fields.items() if name not in CAPTION_FIELDS}
    return sample._replace(fields=fields | {"captions": list(captions)})


@runtime_checkable
class RecordStep(Protocol):
    """Settings of a step of one record: a frozen dataclass of types of JSON and paths."""

    name: ClassVar[str]
    decodes: ClassVar[bool]
    """Whether it needs pixels: it does not get records whose image cannot be read."""

    def __hash__(self) -> int:
        """Of the settings."""

    def opened(self) -> Callable[[Sequence[Record]], None]:
        """Load what it needs; the result changes records, and threads may call it at once.

        What becomes of a record depends on that record alone, to the bit.
        """


class Duplicates(NamedTuple):
    """Records to leave out."""

    rows_M: np.ndarray
    """int64, ascending."""
    twins_M: np.ndarray
    """int64: the earlier record because of which each is left out."""


@runtime_checkable
class AcrossStep(Protocol):
    """Settings of a step that compares records: a frozen dataclass like those of record steps.

    A record is left out if an earlier one is its duplicate, also if that one is left out itself, so
    the result does not depend on the order of the work.
    """

    name: ClassVar[str]
    fact: ClassVar[str]
    """The column that it compares."""

    @property
    def stability(self) -> int | None:
        """How many records of the result one record of the source changes; None for no bound."""

    def facts(self) -> RecordStep:
        """The step that computes the column."""

    def duplicates(
        self,
        column_N: np.ndarray,
        alive_N: np.ndarray,
        work: Path,
        progress: Callable[[int], None],
    ) -> Duplicates:
        """Compare the rows that are still in.

        Args:
            column_N: (N, ...), memory-mapped, in the order of the source.
            alive_N: bool.
            work: empty closed folder for files, which the result may still read.
            progress: called with the number of rows done.
        """


@runtime_checkable
class StatesFiles(Protocol):
    """A step that says itself what is stated of files."""

    def stated(self) -> dict[str, str]:
        """Return texts, by setting, in place of digests of paths."""


def about(step: Any) -> dict[str, Any]:
    """Return the settings of a step in types of JSON: a digest for a file, the id of a store."""
    stated = step.stated() if isinstance(step, StatesFiles) else {}
    settings = asdict(step).items()
    return {n: stated[n] if n in stated else _plain(v, step.name) for n, v in settings}


def _plain(value: Any, step: str) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(one, step) for one in value]
    if not isinstance(value, Path):
        return value
    try:
        if value.is_dir():
            store_id = parse_json((value / "store.json").read_text())["store_id"]
            index = sha256((value / "index.npy").read_bytes()).hexdigest()  # halves share the id
            return f"store {store_id}, index sha256 {index}"
        return f"sha256 {sha256(value.read_bytes()).hexdigest()}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"data curate: {step}: {value}: {getattr(error, 'strerror', None) or 'no store'}; "
            "expected a file, or the folder of a store. Check the path."
        ) from None
