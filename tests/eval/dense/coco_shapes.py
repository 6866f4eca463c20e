"""Images of coloured rectangles with COCO's annotations: known boxes, polygons and masks."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

COLOURS = ((220, 40, 40), (40, 200, 40), (50, 60, 230))
CATEGORIES = [{"id": 3, "name": "red"}, {"id": 7, "name": "green"}, {"id": 9, "name": "blue"}]


def write_shapes(
    root: Path,
    num: int,
    *,
    height: int = 48,
    width: int = 64,
    seed: int = 0,
    shuffled: bool = False,
    per_image: int = 2,
) -> tuple[Path, Path]:
    """``num`` images, one rectangle in each half; the file and the folder. ``shuffled``: each class
    is one of the other two.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    images = root / "pictures"
    images.mkdir(parents=True)
    entries, marks = [], []
    for i in range(num):
        pixels = np.full((height, width, 3), 128, dtype=np.uint8)
        for k in range(per_image):
            half = width // per_image
            w, h = (
                int(rng.integers(half // 2, half - 3)),
                int(rng.integers(height // 3, height - 6)),
            )
            left, top = (
                k * half + int(rng.integers(1, half - w - 1)),
                int(rng.integers(1, height - h - 1)),
            )
            c = int(rng.integers(0, 3))
            pixels[top : top + h, left : left + w] = COLOURS[c]
            said = (c + int(rng.integers(1, 3))) % 3 if shuffled else c
            marks.append(mark(len(marks) + 1, i + 1, CATEGORIES[said]["id"], (left, top, w, h)))
        Image.fromarray(pixels).save(images / f"{i:03d}.png")
        entries.append({"id": i + 1, "file_name": f"{i:03d}.png", "height": height, "width": width})
    file = root / "instances.json"
    file.write_text(json.dumps({"categories": CATEGORIES, "images": entries, "annotations": marks}))
    return file, images


def mark(number: int, image: int, category: int, box: tuple[float, float, float, float]) -> dict:
    """An annotation whose mask is its whole box."""
    left, top, w, h = box
    polygon = [left, top, left + w, top, left + w, top + h, left, top + h]
    return {
        "id": number,
        "image_id": image,
        "category_id": category,
        "bbox": [left, top, w, h],
        "area": w * h,
        "iscrowd": 0,
        "segmentation": [polygon],
    }


def changed(file: Path, change) -> Path:
    """The annotations after ``change`` of their content, in a file beside it."""
    given = json.loads(file.read_text())
    change(given)
    other = file.with_name(f"{file.stem}-changed.json")
    other.write_text(json.dumps(given))
    return other
