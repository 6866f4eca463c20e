"""Find the images of folders, refuse what cannot be read, and join tables with files."""

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from dpvision.data.beside import is_hidden
from dpvision.data.table_files import METADATA_NAMES, Row, join_names
from dpvision.errors import DataError

IMAGE_EXTENSIONS = frozenset(
    [
        "jpg",
        "jpeg",
        "jpe",
        "jfif",
        "png",
        "webp",
        "gif",
        "tif",
        "tiff",
        "bmp",
        "ppm",
        "pgm",
        "avif",
        "jp2",
        "heic",
        "heif",
    ]
)


class Missed(NamedTuple):
    """Names of a table that has no file for some rows, and no row for some files."""

    table: str = ""
    rows: Collection[str] = ()
    files: Collection[str] = frozenset()


def join_rows(root: Path, rows: dict[str, Row]) -> tuple[dict[str, Row], Missed]:
    """Return the rows under the names of their files (``join_names``), and unmatched names."""
    if not rows:
        return rows, Missed()
    files = []
    for folder, below, names in os.walk(root, onerror=refuse_unless_hidden(root), followlinks=True):
        inside = Path(folder).relative_to(root)
        if not is_hidden(inside.as_posix()):
            refuse_cycles(Path(folder), below)
        files += [(inside / name).as_posix() for name in names]
    file_of = join_names(rows, files)
    found = set(file_of.values())
    missed = Missed(
        table=next(name for name in METADATA_NAMES if (root / name).exists()),
        rows=[name for name in rows if name not in file_of],
        files=frozenset(file for file in files if is_image(file) and file not in found),
    )
    return {file_of.get(name, name): row for name, row in rows.items()}, missed


def refuse_cycles(folder: Path, below: list[str]) -> None:
    """Raise DataError for a link to a folder that contains it.

    Other links to folders are followed, like links to files: their images would be silently
    missing.
    """
    for name in below:
        link = folder / name
        if link.is_symlink() and folder.resolve().is_relative_to(link.resolve()):
            raise DataError(
                f"source: {link} leads back to {link.resolve()}; expected no cycle of links. "
                "Remove the link."
            )


def is_image(name: str) -> bool:
    """Return whether a file name is an image's."""
    return os.path.splitext(name)[1].lower().removeprefix(".") in IMAGE_EXTENSIONS


def image_stems(names: list[str]) -> set[str]:
    """Return the names of images without their endings."""
    return {os.path.splitext(name)[0] for name in names if is_image(name)}


def refuse_unless_hidden(root: Path) -> Callable[[OSError], None]:
    """Return an ``onerror`` of os.walk that passes over hidden folders."""

    def check(error: OSError) -> None:
        if not is_hidden(Path(error.filename).relative_to(root).as_posix()):
            refuse_unreadable(error)

    return check


def refuse_unreadable(error: OSError) -> None:
    """Raise DataError for a folder that cannot be read."""
    raise DataError(
        f"source: {error.filename}: {error.strerror}; expected a readable folder. Check its "
        "permissions."
    ) from None
