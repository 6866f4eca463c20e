"""What the readers of compositional benchmarks share: JSON of the right shape, and pictures that have to be there."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from dpvision.errors import DataError
from dpvision.eval.captions.choice import Choice
from dpvision.eval.captions.image_source import Box, FilePictures

Visibility = Literal["private", "public"]
Item = tuple[Path, Box | None, tuple[str, ...], str]
"""Picture, box, captions (the true one first), group."""


def read_json(path: Path, what: str) -> Any:
    """Content of a JSON file. Raises DataError when it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise DataError(f"{what}: {path}: {error.strerror}; expected the benchmark's file. Correct the path.") from None
    except (ValueError, RecursionError):
        raise DataError(f"{what}: {path}: not JSON; expected the benchmark's file. Download it again.") from None


def caption_of(entry: Any, name: str, where: str) -> str:
    """A caption among an entry's fields. Raises DataError when it is missing, empty or no text."""
    value = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: {name}={value!r}; expected a caption. This is not the benchmark's file: correct the path.")
    return value


def picture_finder(folder: Path, what: str) -> dict[str, Path]:
    """Files of a folder and of the folders right below it, by name. Raises DataError when it is no folder."""
    if not folder.is_dir():
        raise DataError(f"{what}: {folder} is no folder; expected the pictures. Correct the path.")
    below = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    return {file.name: file for part in [*reversed(below), folder] for file in part.iterdir() if file.is_file()}


def collect_items(
    items: Sequence[Item], what: str, visibility: Visibility, test_data: str, *, allow_missing: bool
) -> tuple[FilePictures, tuple[Choice, ...], int]:
    """Pictures, each (file, box) once; items that ask about them; and how many items were left out for want of their picture.

    Raises:
        DataError: no item; a picture is missing and ``allow_missing`` is not set; no picture at all is there.
    """
    if not items:
        raise DataError(f"{what}: no items; expected the benchmark's. Correct the path.")
    missing = [path for path, *_ in items if not path.is_file()]
    if len(missing) == len(items) or (missing and not allow_missing):
        say = "Correct the folder of pictures." if len(missing) == len(items) else "Restore them, or leave them out with --allow-missing."
        rule = f"expected all pictures of {len(items):,} items"
        raise DataError(f"{what}: {len(set(missing)):,} pictures are missing, the first is {missing[0]}; {rule}. {say}")
    gone, place_of = set(missing), dict[tuple[Path, Box | None], int]()
    choices = [
        Choice(place_of.setdefault((path, box), len(place_of)), captions, group) for path, box, captions, group in items if path not in gone
    ]
    pictures = FilePictures(tuple(path for path, _ in place_of), tuple(box for _, box in place_of), visibility, test_data)
    return pictures, tuple(choices), len(items) - len(choices)


def with_missing(name: str, num_missing: int) -> str:
    """A test's name that says what is not in it."""
    return f"{name}, {num_missing:,} items without their picture left out" if num_missing else name
