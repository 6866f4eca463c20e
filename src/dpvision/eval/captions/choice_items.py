"""Read items of compositional benchmarks: check captions and find images."""

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
    """Return a caption from an entry's fields. Raises DataError if it is missing, empty or not a
    text.
    """
    value = entry.get(name) if isinstance(entry, dict) else None
    if not isinstance(value, str) or not value.strip():
        raise DataError(
            f"{where}: {name}={value!r}; expected a caption. This is not the benchmark's file: "
            "check the path."
        )
    return value


def collect_items(
    items: Sequence[Item], what: str, visibility: Visibility, test_data: str, *, allow_missing: bool
) -> tuple[FileImages, tuple[Choice, ...], int]:
    """Return the distinct images (file, box), the items about them, and the number of items left
    out because their image is missing.

    Raises:
        DataError: there are no items; an image is missing without ``allow_missing``; all images are
            missing.
    """
    if not items:
        raise DataError(f"{what}: no items; expected the benchmark's. Check the path.")
    missing = [path for path, *_ in items if not path.is_file()]
    if len(missing) == len(items) or (missing and not allow_missing):
        say = (
            "Check the folder of images."
            if len(missing) == len(items)
            else "Restore them, or leave them out with --allow-missing."
        )
        rule = f"expected all images of {len(items):,} items"
        raise DataError(
            f"{what}: {len(set(missing)):,} images are missing, the first is {missing[0]}; "
            f"{rule}. {say}"
        )
    gone, place_of = set(missing), dict[tuple[Path, Box | None], int]()
    choices = [
        Choice(place_of.setdefault((path, box), len(place_of)), captions, group)
        for path, box, captions, group in items
        if path not in gone
    ]
    images = FileImages(
        tuple(path for path, _ in place_of),
        tuple(box for _, box in place_of),
        visibility,
        test_data,
    )
    return images, tuple(choices), len(items) - len(choices)


def with_missing(name: str, num_missing: int) -> str:
    """Return a test's name with the number of missing items."""
    return f"{name}, {num_missing:,} items without their image left out" if num_missing else name
