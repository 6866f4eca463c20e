"""One image of a source before it is read, and sources as streams of them."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

from dpvision.data.beside import is_nifti
from dpvision.data.decode import HEAD_BYTES, MAX_FILE_BYTES, may_be_image
from dpvision.data.folders import Missed
from dpvision.errors import DataError, remedy_for


class Sample(NamedTuple):
    """One image of a source with its metadata."""

    key: str
    """The image's name in the source."""
    image: bytes
    """The image file; empty when ``problem`` is set."""
    fields: dict[str, Any]
    """Everything that ``--unit-from`` and ``--label-from`` can name; ``label`` and the
    ``CAPTION_FIELDS`` are used by default.
    """
    place: tuple[Path, int] | None = None
    """Tar and offset at which the bytes stay; if None, the importer copies them to a shard of the
    store.
    """
    problem: str | None = None
    """Reason to leave the image out, found before decoding."""


class SourceFile(Protocol):
    """What a process of its own can read: one file of several, or a piece of a store."""

    @property
    def name(self) -> str:
        """Which file it is: its absolute path, say. Different for all parts of a source."""

    @property
    def stamp(self) -> list[Any]:
        """What ``now`` was when the source was listed."""

    @property
    def shared(self) -> bool:
        """Whether other processes can read it."""

    def now(self) -> list[Any]:
        """What another file, or other bytes, of that name would change, in types of JSON; first the
        size in bytes.
        """

    @property
    def settings(self) -> list[Any]:
        """What decides its samples besides the file, in types of JSON."""


class SourcePart(SourceFile, Protocol):
    """One file of a source of several."""

    def samples(self, noted: dict[str, Any], scratch: Path) -> Iterator[Sample]:
        """Yield the samples of the file.

        Args:
            noted: gets what ``check`` needs, in JSON types.
            scratch: folder for a copy of the file, closed to others; the copy is removed.
        """

    def check(self, noted: dict[str, Any], seen: set[str]) -> None:
        """Raise DataError if the file does not go with those before, of which ``seen`` is kept."""


@runtime_checkable
class StoredPart(SourceFile, Protocol):
    """Rows of a store."""

    def write(self, folder: Path, key: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
        """Write the files of ``import_part`` with ids under ``key``; return the entries of its two
        JSON files.
        """


def stamp_of(path: Path) -> list[int]:
    """Return what another file, or other bytes, at this path would change.

    The size in bytes first, then the inode and the times of the last change of bytes and of inode.
    Copies can keep the former time, never the latter.

    Raises:
        DataError: the file is missing.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise DataError(
            f"source: {path}: {error.strerror}; expected a file, which was there when the source "
            f"was listed. {remedy_for(error, 'Restore it, or import the others alone.')}"
        ) from None
    return [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]


def check_unchanged(parts: Iterable[SourceFile]) -> None:
    """Raise DataError if a file is not as it was when the source was listed."""
    for part in parts:
        if part.now() != part.stamp:
            raise DataError(
                f"source: {part.name}: changed while it was read; expected a file at rest. Import "
                "again once it is written."
            )


class Source(NamedTuple):
    """Samples in a fixed order."""

    samples: Iterator[Sample]
    label_names: list[str] | None = None
    """Names of integer labels, if the source has them."""
    counts: Mapping[str, int] = MappingProxyType({})
    """Further counts for the import's summary, final when the samples are at their end."""
    missed: Missed = Missed()
    """Rows and files that the join of a table with the files did not match."""
    licence: str | None = None
    """Licence of the images, if the source has one."""
    unit_from: str | None = None
    """Field that names the person where none is declared."""
    metric: str | None = None
    """How scores on the labels are computed, "accuracy" or "mean_per_class"; if None, the
    evaluation's setting.
    """
    parts: tuple[SourcePart, ...] = ()
    """The files that ``samples`` reads one after the other, if each can be read by itself."""
    remote: bool = False
    """Whether the files are elsewhere: ``samples`` is empty, and images of tars are copied too."""


def file_sample(path: Path, key: str, fields: dict[str, Any]) -> Sample:
    """Read a file as a sample.

    One that is not a file, oversized or unreadable gets a ``problem`` instead of bytes.
    """
    try:
        if not path.is_file():
            return Sample(key, b"", fields, problem="not a file")
        if path.stat().st_size > MAX_FILE_BYTES:
            return Sample(key, b"", fields, problem="oversized")
        with path.open(
            "rb"
        ) as file:  # a folder of photos has videos too, which need not be read whole
            head = file.read(HEAD_BYTES)
            return (
                Sample(key, head + file.read(), fields)
                if may_be_image(head)
                else Sample(key, b"", fields, problem=_other(path))
            )
    except OSError:
        return Sample(key, b"", fields, problem="cannot be read")


def _other(path: Path) -> str:
    return "NIfTI volume" if is_nifti(path.name) else "not an image"
