"""Files of published benchmarks: JSON, and folders of images."""

import json
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

from dpvision.data.beside import is_hidden
from dpvision.errors import DataError

Box = tuple[float, float, float, float]
"""left, top, right, bottom in pixels of the upright image."""


def read_json(path: Path, what: str) -> Any:
    """Return the content of a JSON file. Raises DataError if it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(
            f"{what}: {path}: {error.strerror}; expected the benchmark's file. Check the path."
        ) from None
    except (ValueError, RecursionError):
        raise DataError(
            f"{what}: {path}: not JSON; expected the benchmark's file. Download it again."
        ) from None


def image_finder(folder: Path, what: str) -> Callable[[str], Path | None]:
    """Return a function from the name of an image in a benchmark's file to its path, or None if
    there is no such file.

    First ``folder / name``; else the file of the folder or of its subfolders that has the last part
    of the name. Files outside the folder are not found.

    Raises:
        DataError: it is not a folder. The function raises it too, if several files have the last
            part.
    """
    if not folder.is_dir():
        raise DataError(
            f"{what}: {folder} is not a folder; expected the folder of images. Check the path."
        )
    below = sorted(
        entry for entry in folder.iterdir() if entry.is_dir() and not is_hidden(entry.name)
    )
    having: dict[str, list[Path]] = defaultdict(list)
    for part in (folder, *below):
        for file in part.iterdir():
            if file.is_file():
                having[file.name].append(file)

    def find(name: str) -> Path | None:
        given, files = PurePath(name), having.get(PurePath(name).name, [])
        inside = not given.is_absolute() and ".." not in given.parts
        # Deeper files are not listed. os.path.isfile is False for a name that the file system
        # refuses, Path.is_file raises.
        if inside and (
            folder / given in files or (len(given.parts) > 2 and os.path.isfile(folder / given))
        ):
            return folder / given
        if len(files) > 1:
            shown = " and ".join(str(file) for file in files[:2])
            raise DataError(
                f"{what}: {name!r} may be {shown}; expected one file of this name. Give the "
                "folder that has only the right one."
            )
        return files[0] if files else None

    return find
