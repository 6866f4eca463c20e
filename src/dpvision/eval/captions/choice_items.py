"""Items of compositional benchmarks: captions of the right shape, and images that have to be there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpvision.errors import DataError
from dpvision.eval.benchmark_files import Box
from dpvision.eval.captions.choice import Choice
from dpvision.eval.captions.image_source import FileImages
from dpvision.eval.score import Visibility

Item = tuple[Path, Box | None, tuple[str, ...], str]
"""Image, box, captions (the true one first), group."""


def caption_of(entry: Any, name: str, where: str) -> str:
    """A caption among an entry's fields. Raises DataError when it is missing, empty or no text."""
    value = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: {name}={value!r}; expected a caption. This is not the benchmark's file: correct the path.")
    return value


def collect_items(
    items: Sequence[Item], what: str, visibility: Visibility, test_data: str, *, allow_missing: bool
) -> tuple[FileImages, tuple[Choice, ...], int]:
    """Images, each (file, box) once; items that ask about them; and how many items were left out for want of their image.

    Raises:
        DataError: no item; an image is missing and ``allow_missing`` is not set; no image at all is there.
    """
    if not items:
        raise DataError(f"{what}: no items; expected the benchmark's. Correct the path.")
    missing = [path for path, *_ in items if not path.is_file()]
    if len(missing) == len(items) or (missing and not allow_missing):
        say = "Correct the folder of images." if len(missing) == len(items) else "Restore them, or leave them out with --allow-missing."
        rule = f"expected all images of {len(items):,} items"
        raise DataError(f"{what}: {len(set(missing)):,} images are missing, the first is {missing[0]}; {rule}. {say}")
    gone, place_of = set(missing), dict[tuple[Path, Box | None], int]()
    choices = [
        Choice(place_of.setdefault((path, box), len(place_of)), captions, group) for path, box, captions, group in items if path not in gone
    ]
    pictures = FileImages(tuple(path for path, _ in place_of), tuple(box for _, box in place_of), visibility, test_data)
    return pictures, tuple(choices), len(items) - len(choices)


def with_missing(name: str, num_missing: int) -> str:
    """A test's name that says what is not in it."""
    return f"{name}, {num_missing:,} items without their image left out" if num_missing else name
