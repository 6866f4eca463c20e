"""ARO's relation and attribution tests from the benchmark's own files (Yuksekgonul et al., ICLR
2023).

The folder has visual_genome_relation.json, visual_genome_attribution.json and images/. An item is a
box of an image and two captions, one with its two nouns (relation) or its two attributes swapped.
The benchmark reports macro accuracy: over relations, and over pairs of attributes with 25 items or
more. DP-Cap's tables do not say whether they report micro or macro accuracy; both are given.
"""

import math
from pathlib import Path
from typing import Any

from dpvision.errors import DataError
from dpvision.eval.benchmark_files import Box, read_json
from dpvision.eval.captions.choice import ChoiceTest
from dpvision.eval.captions.choice_items import Item, caption_of, collect_items, with_missing
from dpvision.eval.score import Visibility

RELATION_FILE, ATTRIBUTION_FILE = "visual_genome_relation.json", "visual_genome_attribution.json"
ATTRIBUTION_MIN_GROUP = 25
"""Pairs of attributes with fewer items do not count for macro accuracy, as in the benchmark's
script.
"""


def aro_tests(
    folder: str | Path,
    *,
    visibility: Visibility = "private",
    allow_missing: bool = False,
    leave_out: frozenset[str] = frozenset(),
) -> list[ChoiceTest]:
    """Return the tests whose file is in the folder: relation, attribution.

    Args:
        leave_out: names of relations to leave out; the benchmark's notebook leaves out those that
            may hold both ways.

    Raises:
        DataError: both files are missing; one is not the benchmark's; images are missing.
    """
    folder = Path(folder)
    files = [file for file in (RELATION_FILE, ATTRIBUTION_FILE) if (folder / file).is_file()]
    if not files:
        raise DataError(
            f"ARO: {folder} has neither {RELATION_FILE} nor {ATTRIBUTION_FILE}; expected the "
            "benchmark's folder. Give --aro FOLDER."
        )
    return [_read_test(folder, file, visibility, allow_missing, leave_out) for file in files]


def _read_test(
    folder: Path, file: str, visibility: Visibility, allow_missing: bool, leave_out: frozenset[str]
) -> ChoiceTest:
    of_relation = file == RELATION_FILE
    entries = read_json(folder / file, "ARO")
    if not isinstance(entries, list):
        raise DataError(
            f"ARO: {folder / file}: {type(entries).__name__}; expected a list of items. Download "
            "it again."
        )
    items: list[Item] = []
    for number, entry in enumerate(entries):
        where = f"ARO: {folder / file}: item {number}"
        captions = (
            caption_of(entry, "true_caption", where),
            caption_of(entry, "false_caption", where),
        )
        group = (
            caption_of(entry, "relation_name", where) if of_relation else _attributes(entry, where)
        )
        if group not in leave_out:
            items.append(
                (_image_path(folder / "images", entry, where), _box(entry, where), captions, group)
            )
    name = "ARO relation" if of_relation else "ARO attribution"
    images, choices, num_missing = collect_items(
        items, name, visibility, folder.name, allow_missing=allow_missing
    )
    return ChoiceTest(
        with_missing(name, num_missing),
        images,
        choices,
        groups_called="relations" if of_relation else "pairs of attributes",
        min_group=1 if of_relation else ATTRIBUTION_MIN_GROUP,
    )


def _image_path(images: Path, entry: Any, where: str) -> Path:
    name = entry.get("image_path")
    if not isinstance(name, str) or not name or Path(name).name != name:
        raise DataError(
            f"{where}: image_path={name!r}; expected the name of an image in images/. Download "
            "the file again."
        )
    return images / name


def _box(entry: Any, where: str) -> Box:
    numbers = [entry.get(f"bbox_{side}") for side in "xywh"]
    if not all(isinstance(v, int | float) and math.isfinite(v) for v in numbers) or not (
        numbers[2] > 0 and numbers[3] > 0
    ):
        raise DataError(
            f"{where}: box={numbers}; expected bbox_x, bbox_y, bbox_w and bbox_h in pixels. "
            "Download the file again."
        )
    x, y, width, height = map(float, numbers)
    return x, y, x + width, y + height


def _attributes(entry: Any, where: str) -> str:
    pair = entry.get("attributes")
    if (
        not isinstance(pair, list)
        or len(pair) != 2
        or not all(isinstance(name, str) for name in pair)
    ):
        raise DataError(
            f"{where}: attributes={pair!r}; expected two words. Download the file again."
        )
    return "_".join(pair)
