"""Files of published benchmarks: JSON, and folders of images."""

import json
from pathlib import Path
from typing import Any

from dpvision.errors import DataError

Box = tuple[float, float, float, float]
"""left, top, right, bottom in pixels of the upright image."""


def read_json(path: Path, what: str) -> Any:
    """Return the content of a JSON file. Raises DataError if it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{what}: {path}: {error.strerror}; expected the benchmark's file. Check the path.") from None
    except (ValueError, RecursionError):
        raise DataError(f"{what}: {path}: not JSON; expected the benchmark's file. Download it again.") from None


def image_finder(folder: Path, what: str) -> dict[str, Path]:
    """Return the files of a folder and its subfolders, by name. Raises DataError if it is not a folder."""
    if not folder.is_dir():
        raise DataError(f"{what}: {folder} is not a folder; expected the folder of images. Check the path.")
    below = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    return {file.name: file for part in [*reversed(below), folder] for file in part.iterdir() if file.is_file()}
