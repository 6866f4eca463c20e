"""Compositional benchmarks from their publishers' files: ARO, SugarCrepe and NegCLIP's negatives.

ARO (Yuksekgonul et al., ICLR 2023): the folder has visual_genome_relation.json,
visual_genome_attribution.json and images/. An item is a box of an image and two captions, one with
its two nouns (relation) or its two attributes swapped. The benchmark reports macro accuracy: over
relations, and over pairs of attributes with 25 items or more. DP-Cap's tables do not say whether
they report micro or macro accuracy; both are given.

SugarCrepe (Hsieh et al., NeurIPS 2023): false captions are plausible sentences, so that text alone
reveals less than in ARO. Seven subsets: objects, attributes and relations added, replaced or
swapped. It reads a folder of the publisher's seven files ({"0": {filename, caption,
negative_caption}, ...} in add_att.json ...), one of them, or one list whose entries name their
subset. Its images, and those of NegCLIP's negatives, are COCO's.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpvision.errors import ConfigError, DataError
from dpvision.eval.benchmark_files import Box, image_finder, read_json
from dpvision.eval.captions.choice import Choice, ChoiceTest
from dpvision.eval.captions.image_source import FileImages
from dpvision.eval.captions.settings import ChoiceFiles
from dpvision.eval.score import Visibility

RELATION_FILE, ATTRIBUTION_FILE = "visual_genome_relation.json", "visual_genome_attribution.json"
ATTRIBUTION_MIN_GROUP = 25
"""Pairs of attributes with fewer items do not count for macro accuracy, as in the benchmark's
script.
"""
SUBSETS = (
    "add_att",
    "add_obj",
    "replace_att",
    "replace_obj",
    "replace_rel",
    "swap_att",
    "swap_obj",
)
"""Of SugarCrepe."""
Item = tuple[Path, Box | None, tuple[str, ...], str]
"""Image, box, captions (the true one first), group."""


def benchmark_tests(files: ChoiceFiles) -> list[ChoiceTest]:
    """Return the tests of the benchmarks whose files are given.

    Raises:
        ConfigError: SugarCrepe or NegCLIP without the folder of COCO's images.
        DataError: as ``sugarcrepe_test``, ``negclip_test`` and ``aro_tests``.
    """
    visibility: Visibility = "public" if files.public else "private"
    missing, tests = files.allow_missing, list[ChoiceTest]()
    for path, make, name in (
        (files.sugarcrepe, sugarcrepe_test, "sugarcrepe"),
        (files.negclip, negclip_test, "negclip"),
    ):
        if path is not None:
            if files.images is None:
                raise ConfigError(
                    f"evaluate: no folder of images; expected the COCO images of --{name}. Give "
                    "--images FOLDER."
                )
            tests.append(make(path, files.images, visibility=visibility, allow_missing=missing))
    if files.aro is not None:
        out = frozenset[str]() if files.aro_leave_out is None else _relations(files.aro_leave_out)
        tests += aro_tests(files.aro, visibility=visibility, allow_missing=missing, leave_out=out)
    return tests


def _relations(path: Path) -> frozenset[str]:
    """Read names of relations, one per line."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"ARO: {path}: {error}; expected a text file with one relation per line. Give "
            "--aro-leave-out FILE."
        ) from None
    return frozenset(line.strip() for line in lines if line.strip())


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
    return replace(
        test_of(items, name, visibility, folder.name, allow_missing=allow_missing),
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


def sugarcrepe_test(
    path: str | Path,
    images: str | Path,
    *,
    visibility: Visibility = "private",
    allow_missing: bool = False,
) -> ChoiceTest:
    """Return SugarCrepe's items, grouped by subset.

    Args:
        images: folder of the COCO val2017 images (or one whose subfolders have them).

    Raises:
        DataError: not SugarCrepe's files; images are missing, or a name fits several.
    """
    find, items = image_finder(Path(images), "SugarCrepe"), list[Item]()
    for subset, entry, where in _entries(Path(path)):
        captions = caption_of(entry, "caption", where), caption_of(entry, "negative_caption", where)
        name = caption_of(entry, "filename", where)
        items.append((find(name) or Path(images) / Path(name).name, None, captions, subset))
    test = test_of(items, "SugarCrepe", visibility, Path(path).name, allow_missing=allow_missing)
    return replace(test, groups_called="subsets", show_groups=True)


def negclip_test(
    path: str | Path,
    images: str | Path,
    *,
    visibility: Visibility = "private",
    allow_missing: bool = False,
) -> ChoiceTest:
    """Return NegCLIP's hard negatives: a list of {image_id, caption, negatives: [...]}, with COCO's
    image ids.

    Raises:
        DataError: not such a file; images are missing, or a name fits several.
    """
    entries = read_json(Path(path), "NegCLIP")
    find, items = image_finder(Path(images), "NegCLIP"), list[Item]()
    if not isinstance(entries, list):
        raise DataError(
            f"NegCLIP: {path}: {type(entries).__name__}; expected a list of items. Check the path."
        )
    for number, entry in enumerate(entries):
        where = f"NegCLIP: {path}: item {number}"
        true, others, image = (
            caption_of(entry, "caption", where),
            entry.get("negatives"),
            entry.get("image_id"),
        )
        if (
            not isinstance(others, list)
            or not others
            or not all(isinstance(o, str) and o.strip() for o in others)
        ):
            raise DataError(
                f"{where}: negatives={others!r}; expected a list of captions. Check the path."
            )
        if not isinstance(image, int):
            raise DataError(
                f"{where}: image_id={image!r}; expected COCO's id of an image. Check the path."
            )
        name = f"{image:012d}.jpg"
        items.append((find(name) or Path(images) / name, None, (true, *others), ""))
    return test_of(
        items, "NegCLIP negatives", visibility, Path(path).name, allow_missing=allow_missing
    )


def _entries(path: Path) -> list[tuple[str, Any, str]]:
    """Return (subset, entry, location) of every item."""
    if path.is_dir():
        files = [
            path / f"{subset}.json" for subset in SUBSETS if (path / f"{subset}.json").is_file()
        ]
        if not files:
            raise DataError(
                f"SugarCrepe: {path} has none of {', '.join(SUBSETS)} as .json; expected its "
                "files. Check the path."
            )
        return [entry for file in files for entry in _entries(file)]
    content = read_json(path, "SugarCrepe")
    if isinstance(content, dict) and path.stem in SUBSETS:
        return [
            (path.stem, entry, f"SugarCrepe: {path}: item {number}")
            for number, entry in content.items()
        ]
    if not isinstance(content, list):
        raise DataError(
            f"SugarCrepe: {path}: not a list, and its name is not a subset; expected "
            "SugarCrepe's file. Check the path."
        )
    found = []
    for number, entry in enumerate(content):
        subset = entry.get("subset") if isinstance(entry, dict) else None
        if subset not in SUBSETS:
            raise DataError(
                f"SugarCrepe: {path}: item {number}: subset={subset!r}; expected one of "
                f"{', '.join(SUBSETS)}. Check the path."
            )
        found.append((str(subset), entry, f"SugarCrepe: {path}: item {number}"))
    return found


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


def test_of(
    items: Sequence[Item], what: str, visibility: Visibility, test_data: str, *, allow_missing: bool
) -> ChoiceTest:
    """Return a test of the distinct images (file, box) and the items about them. Its name has the
    number of items left out because their image is missing.

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
    left_out = len(items) - len(choices)
    name = f"{what}, {left_out:,} items without their image left out" if left_out else what
    return ChoiceTest(name, images, tuple(choices))
