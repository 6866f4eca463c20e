"""SugarCrepe (Hsieh et al., NeurIPS 2023) and NegCLIP's negatives, from their files and COCO
images.

SugarCrepe's false captions are plausible sentences, so that text alone reveals less than in ARO.
Seven subsets: objects, attributes and relations added, replaced or swapped. It reads a folder of
the publisher's seven files ({"0": {filename, caption, negative_caption}, ...} in add_att.json ...),
one of them, or one list whose entries name their subset.
"""

from pathlib import Path
from typing import Any

from dpvision.errors import DataError
from dpvision.eval.benchmark_files import image_finder, read_json
from dpvision.eval.captions.choice import ChoiceTest
from dpvision.eval.captions.choice_items import Item, caption_of, collect_items, with_missing
from dpvision.eval.score import Visibility

SUBSETS = (
    "add_att",
    "add_obj",
    "replace_att",
    "replace_obj",
    "replace_rel",
    "swap_att",
    "swap_obj",
)


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
    return _test("SugarCrepe", items, Path(path).name, visibility, allow_missing)


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
    return _test("NegCLIP negatives", items, Path(path).name, visibility, allow_missing)


def _test(
    name: str, items: list[Item], test_data: str, visibility: Visibility, allow_missing: bool
) -> ChoiceTest:
    images, choices, num_missing = collect_items(
        items, name, visibility, test_data, allow_missing=allow_missing
    )
    return ChoiceTest(
        with_missing(name, num_missing), images, choices, groups_called="subsets", show_groups=True
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
