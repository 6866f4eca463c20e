"""Read images with objects from COCO's files (boxes, polygons and run-length masks), and check
them.

Needs faster-coco-eval (``pip install ".[dense]"`` in a checkout) for masks.

Legend: N objects, H height, W width.
"""

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dpvision.data.decode import BadImage, decode
from dpvision.errors import ConfigError, DataError
from dpvision.eval.benchmark_files import Box, image_finder, read_json

_WHERE = "detection"


@dataclass(frozen=True)
class CocoObject:
    """One object of an image."""

    box: Box
    """Clipped to the image."""
    label: int
    """Class, an index into ``CocoSet.classes``."""
    outline: Any
    """Polygons (a tuple of float32 arrays x1, y1, x2, y2, ...), a run-length mask (COCO's dict), or
    None for a box only.
    """
    area: float
    """Area in square pixels of the mask, or of the box if there is no mask; it determines small,
    medium or large.
    """
    crowd: bool
    """Whether it is a group, which is not trained on and is ignored in the test."""


@dataclass(frozen=True)
class CocoImage:
    """One image and its objects."""

    id: int
    path: Path
    height: int
    width: int
    objects: tuple[CocoObject, ...]

    @property
    def learned(self) -> tuple[CocoObject, ...]:
        """Objects without crowds."""
        return tuple(o for o in self.objects if not o.crowd)

    @property
    def has_masks(self) -> bool:
        """Whether every object has a mask, so that the image counts for AP of masks."""
        return all(o.outline is not None for o in self.objects)

    def read(self) -> np.ndarray:
        """Return the upright pixels, uint8 (H, W, 3).

        Raises:
            DataError: the file cannot be read, or its size differs from the annotations.
        """
        try:
            pixels = decode(self.path.read_bytes())
        except OSError as error:
            raise DataError(
                f"{_WHERE}: {self.path}: {error.strerror}; expected an image. Restore it."
            ) from None
        except BadImage as error:
            raise DataError(f"{_WHERE}: {self.path}: {error}") from None
        if pixels.shape[:2] != (self.height, self.width):
            got, said = (
                f"{pixels.shape[1]} x {pixels.shape[0]} px",
                f"{self.width} x {self.height}, as in its annotations",
            )
            raise DataError(
                f"{_WHERE}: {self.path}: {got}; expected {said}. Use the images that the "
                "annotations are for."
            )
        return pixels

    def mask(self, thing: CocoObject) -> np.ndarray | None:
        """Return an object's mask, uint8 0 or 1 (H, W), or None if it has only a box."""
        if thing.outline is None:
            return None
        return mask_tools().decode(self.runs(thing))

    def runs(self, thing: CocoObject) -> dict[str, Any]:
        """Return an object's mask as COCO's compressed run-length code; the object must have a
        mask.
        """
        tools = mask_tools()
        if isinstance(thing.outline, dict):
            given = thing.outline
            return (
                tools.frPyObjects(given, self.height, self.width)
                if isinstance(given["counts"], list)
                else given
            )
        return tools.merge(
            tools.frPyObjects(
                [polygon.tolist() for polygon in thing.outline], self.height, self.width
            )
        )


@dataclass(frozen=True)
class CocoSet:
    """A file of annotations with its images."""

    name: str
    classes: tuple[tuple[int, str], ...]
    """COCO's id and name of each class, sorted by id; labels are indices into it."""
    images: tuple[CocoImage, ...]
    notes: tuple[str, ...]
    """Counts of what was left out or changed."""

    @property
    def num_objects(self) -> int:
        return sum(len(image.objects) for image in self.images)

    @property
    def num_images(self) -> int:
        return len(self.images)

    @property
    def num_classes(self) -> int:
        return len(self.classes)


def mask_tools() -> ModuleType:
    """Return faster-coco-eval's mask functions. Raises ConfigError if it is not installed."""
    try:
        from faster_coco_eval.core import mask
    except ImportError:
        raise ConfigError(
            f"{_WHERE}: faster-coco-eval is not installed; detection needs it. In a checkout: "
            "pip install '.[dense]'"
        ) from None
    return mask


def load_coco(annotations: Path, images: Path, *, allow_missing: bool = False) -> CocoSet:
    """Read a file of instances and find its images, without reading pixels.

    Left out and counted in ``notes``: boxes without area or outside their image; polygons of fewer
    than three points (the object keeps its box). Boxes that exceed the image are clipped. With
    ``allow_missing``, missing images are left out too.

    Args:
        annotations: COCO's ``instances_*.json``.
        images: the folder of the images, or its parent; ``benchmark_files.image_finder`` says how
            they are found.

    Raises:
        DataError: a file is unreadable or not COCO's; no categories or images; an annotation of an
            unknown image or category; an invalid box or mask; a missing image, or one whose name
            fits several files.
        ConfigError: faster-coco-eval is not installed.
    """
    mask_tools()
    given = read_json(annotations, _WHERE)
    lists = []
    for name in ("categories", "images", "annotations"):
        part = given.get(name) if isinstance(given, dict) else None
        if not isinstance(part, list) or not all(isinstance(entry, dict) for entry in part):
            raise DataError(
                f"{_WHERE}: {annotations}: no list {name!r}; expected COCO's instances_*.json. "
                "Check the path."
            )
        lists.append(part)
    categories, entries, marks = lists
    classes = _classes(categories, annotations)
    label_of = {number: label for label, (number, _) in enumerate(classes)}
    if not entries:
        raise DataError(f"{_WHERE}: {annotations}: no images; expected some. Check the path.")
    counts: Counter[str] = Counter()
    sizes = {
        _number(e, "id", annotations): (
            _number(e, "height", annotations),
            _number(e, "width", annotations),
        )
        for e in entries
    }
    if len(sizes) < len(entries) or not all(h >= 1 and w >= 1 for h, w in sizes.values()):
        raise DataError(
            f"{_WHERE}: {annotations}: images with the same id or without size; expected COCO's "
            "file. Download it again."
        )
    objects: dict[int, list[CocoObject]] = {number: [] for number in sizes}
    for mark in marks:
        where = f"{_WHERE}: {annotations}: annotation {mark.get('id')!r}"
        number, category = mark.get("image_id"), mark.get("category_id")
        known = isinstance(number, int) and isinstance(category, int) and number in sizes
        label = label_of.get(category) if known else None  # type: ignore[arg-type]
        if label is None:
            got = f"image_id={number!r}, category_id={category!r}"
            raise DataError(
                f"{where}: {got}; expected an image and a category of the file. Download it again."
            )
        found = _object(mark, label, sizes[number], where, counts)
        if found is not None:
            objects[number].append(found)
    coco_images = _coco_images(entries, objects, sizes, images, annotations, counts, allow_missing)
    return CocoSet(
        annotations.stem,
        classes,
        coco_images,
        tuple(f"{count:,} {what}" for what, count in sorted(counts.items())),
    )


def check_apart(train: CocoSet, test: CocoSet) -> None:
    """Raise DataError unless both files have the same classes and ids, and no image in common."""
    if train.classes != test.classes:
        apart = sorted(set(train.classes) ^ set(test.classes))
        shown = ", ".join(f"{number} {name!r}" for number, name in apart[:4])
        raise DataError(
            f"{_WHERE}: {train.name} has {len(train.classes)} classes, {test.name} "
            f"{len(test.classes)}, different in {shown}; expected the same ids and names. Use "
            "files of one data set."
        )
    shared = {image.path.resolve() for image in train.images} & {
        image.path.resolve() for image in test.images
    }
    if shared:
        got = (
            f"{len(shared):,} images are in both training and test, the first is {min(shared).name}"
        )
        raise DataError(f"{_WHERE}: {got}; expected disjoint sets. Use another file, or split it.")


def _classes(categories: list[dict], where: Path) -> tuple[tuple[int, str], ...]:
    found = tuple(
        sorted(
            (_number(category, "id", where), str(category.get("name"))) for category in categories
        )
    )
    if not found or len({number for number, _ in found}) < len(found):
        what = "no categories" if not found else "categories with the same id"
        raise DataError(
            f"{_WHERE}: {where}: {what}; expected COCO's instances_*.json. Check the path."
        )
    return found


def _number(entry: dict, name: str, where: Path) -> int:
    value = entry.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise DataError(
            f"{_WHERE}: {where}: {name}={value!r} of {str(entry)[:80]}; expected a whole number. "
            "Download the file again."
        )
    return value


def _object(
    mark: dict, label: int, size: tuple[int, int], where: str, counts: Counter[str]
) -> CocoObject | None:
    box, (height, width) = mark.get("bbox"), size
    if not isinstance(box, list) or len(box) != 4 or not _finite(box):
        raise DataError(
            f"{where}: bbox={box!r}; expected left, top, width, height. Download the file again."
        )
    left, top, right, bottom = box[0], box[1], box[0] + box[2], box[1] + box[3]
    inside = (max(left, 0.0), max(top, 0.0), min(right, float(width)), min(bottom, float(height)))
    if not (box[2] > 0 and box[3] > 0):
        counts["boxes without area left out"] += 1
        return None
    if not (inside[2] > inside[0] and inside[3] > inside[1]):
        counts["boxes outside their image left out"] += 1
        return None
    # COCO's own boxes are rounded to hundredths of a pixel.
    if (
        max(
            a - b
            for a, b in zip(
                (inside[0], inside[1], right, bottom),
                (left, top, inside[2], inside[3]),
                strict=True,
            )
        )
        > 0.05
    ):
        counts["boxes that stood out of their image cut"] += 1
    outline = _outline(mark.get("segmentation"), size, where, counts)
    area: Any = mark.get("area")
    if not _finite([area]) or not area > 0:
        area = (inside[2] - inside[0]) * (inside[3] - inside[1])
    return CocoObject(inside, label, outline, float(area), bool(mark.get("iscrowd", 0)))


def _outline(given: Any, size: tuple[int, int], where: str, counts: Counter[str]) -> Any:
    if given is None or given == []:
        return None
    if isinstance(given, dict):
        code = given.get("counts")
        whole = (
            isinstance(code, list)
            and all(isinstance(c, int) and c >= 0 for c in code)
            and sum(code) == size[0] * size[1]
        )
        if given.get("size") != list(size) or not (whole or (isinstance(code, str) and code)):
            raise DataError(
                f"{where}: a run-length mask of size {given.get('size')!r}; expected "
                f"{list(size)}. Download the file again."
            )
        return given
    if not isinstance(given, list) or not all(
        isinstance(p, list) and len(p) % 2 == 0 and _finite(p) for p in given
    ):
        raise DataError(
            f"{where}: segmentation={str(given)[:60]}; expected polygons or a run-length mask. "
            "Download the file again."
        )
    polygons = tuple(
        np.asarray(polygon, dtype=np.float32) for polygon in given if len(polygon) >= 6
    )
    if not polygons:
        counts["objects with a mask of fewer than three points, which keep their box"] += 1
    return polygons or None


def _finite(values: Iterable[Any]) -> bool:
    # isfinite raises an error for a whole number beyond floats
    return all(isinstance(v, int | float) and abs(v) <= sys.float_info.max for v in values)


def _coco_images(
    entries: list[dict],
    objects: dict[int, list[CocoObject]],
    sizes: dict[int, tuple[int, int]],
    images: Path,
    annotations: Path,
    counts: Counter[str],
    allow_missing: bool,
) -> tuple[CocoImage, ...]:
    find, missing, found, names = (
        image_finder(images, _WHERE),
        [],
        list[CocoImage](),
        dict[Path, str](),
    )
    for entry in entries:
        name, number = str(entry.get("file_name")), entry["id"]
        path = find(name)
        if path is None:
            missing.append(name)
            continue
        if names.setdefault(path, name) != name:
            got = f"{names[path]!r} and {name!r} of {annotations.name} are both {path}"
            raise DataError(
                f"{_WHERE}: {got}; expected a file for each. Give the folder that the names "
                "start from."
            )
        found.append(CocoImage(number, path, *sizes[number], tuple(objects[number])))
    if missing and (not found or not allow_missing):
        say = (
            "Check the folder of images."
            if not found
            else "Restore them, or leave them out with --allow-missing."
        )
        got = (
            f"{len(missing):,} of {len(entries):,} images of {annotations.name} are not in "
            f"{images}, the first is {missing[0]}"
        )
        raise DataError(f"{_WHERE}: {got}; expected all. {say}")
    if missing:
        counts["images whose file is missing left out"] = len(missing)
    return tuple(found)
