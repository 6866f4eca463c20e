"""COCO's average precision against pycocotools on random answers, and the laws of it and of its
interval.
"""

import contextlib
import io
from pathlib import Path

import numpy as np
import pytest

from dpvision.eval.dense.coco_data import CocoSet, load_coco
from dpvision.eval.dense.coco_scores import Found, average_precisions

from .coco_shapes import changed, write_shapes

faster = pytest.importorskip("faster_coco_eval", reason="needs the extra `dense`")
NAMES = ["AP", "AP50", "AP75", "small", "medium", "large"]


def shapes(tmp_path: Path, num: int = 12) -> CocoSet:
    """Rectangles of small, medium and large sizes, one crowd, one object without mask, one image
    without objects.
    """
    file, images = write_shapes(tmp_path, num, height=160, width=320, per_image=4)

    def change(given: dict) -> None:
        for i, mark in enumerate(given["annotations"]):
            if i % 4 == 0:  # some small ones
                left, top = mark["bbox"][:2]
                mark |= {"bbox": [left, top, 20, 12], "area": 240}
                mark["segmentation"] = [
                    [left, top, left + 20, top, left + 20, top + 12, left, top + 12]
                ]
            if i % 4 == 1:
                mark |= {
                    "bbox": [0, 0, 150, 120],
                    "area": 18_000,
                    "segmentation": [[0, 0, 150, 0, 150, 120, 0, 120]],
                }
        given["annotations"][2]["iscrowd"] = 1
        del given["annotations"][9]["segmentation"]
        given["images"].append(given["images"][-1] | {"id": 99})

    return load_coco(changed(file, change), images)


def answers(coco: CocoSet, seed: int, spread: float) -> list[Found]:
    """The truth moved about, some of it twice, some not at all, some of another class, with random
    scores.
    """
    from faster_coco_eval.core import mask as tools

    rng = np.random.Generator(np.random.PCG64(seed))
    found = []
    for image in coco.images:
        boxes, labels = [], []
        for thing in image.objects:
            for _ in range(int(rng.integers(0, 3)) if spread else 1):
                box = np.array(thing.box) + spread * rng.normal(size=4)
                box = np.clip(box, 0, [image.width - 2, image.height - 2] * 2)
                boxes.append([*box[:2], *np.maximum(box[2:], box[:2] + 1)])
                labels.append(
                    int(rng.integers(0, 3)) if spread and rng.uniform() < 0.2 else thing.label
                )
        masks = np.zeros((len(boxes), image.height, image.width), dtype=np.uint8)
        for mask, (left, top, right, bottom) in zip(masks, boxes, strict=True):
            mask[round(top) : round(bottom), round(left) : round(right)] = 1
        runs = tuple(tools.encode(np.asfortranarray(mask)) for mask in masks)
        found.append(
            Found(
                np.array(boxes, dtype=float).reshape(-1, 4),
                np.array(labels, dtype=int),
                rng.uniform(size=len(boxes)),
                runs,
            )
        )
    return found


def pycocotools_stats(coco: CocoSet, found: list[Found], kind: str) -> list[float]:
    """The six figures as the original library has them, from files in its own form."""
    COCO = pytest.importorskip("pycocotools.coco", reason="needs the extra `dev`").COCO
    from pycocotools.cocoeval import COCOeval

    marks, results = [], []
    for i, (image, one) in enumerate(zip(coco.images, found, strict=True)):
        if kind == "segm" and not image.has_masks:
            continue
        for thing in image.objects:
            left, top, right, bottom = thing.box
            made = {
                "id": len(marks) + 1,
                "image_id": i,
                "category_id": coco.classes[thing.label][0],
                "area": thing.area,
            }
            made |= {"bbox": [left, top, right - left, bottom - top], "iscrowd": int(thing.crowd)}
            if kind == "segm":
                made["segmentation"] = image.runs(thing)
            marks.append(made)
        for box, label, score, run in zip(
            one.box_N4, one.label_N, one.score_N, one.runs, strict=True
        ):
            where = (
                {"segmentation": run}
                if kind == "segm"
                else {"bbox": [box[0], box[1], box[2] - box[0], box[3] - box[1]]}
            )
            results.append(
                {"image_id": i, "category_id": coco.classes[label][0], "score": float(score)}
                | where
            )
    images = [
        {"id": i, "height": image.height, "width": image.width}
        for i, image in enumerate(coco.images)
        if kind == "bbox" or image.has_masks
    ]
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = {
            "images": images,
            "annotations": marks,
            "categories": [{"id": n, "name": name} for n, name in coco.classes],
        }
        truth.createIndex()
        judge = COCOeval(truth, truth.loadRes(results), kind)
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return judge.stats[:6].tolist()


@pytest.mark.parametrize(("kind", "theirs"), [("box", "bbox"), ("mask", "segm")])
@pytest.mark.parametrize("seed", [0, 1])
def test_it_is_pycocotools_on_random_answers(tmp_path: Path, kind, theirs: str, seed: int) -> None:
    coco = shapes(tmp_path)
    found = answers(coco, seed, spread=4.0)
    made = average_precisions(coco, found, kind, resamples=0)
    expected = pycocotools_stats(coco, found, theirs)
    assert [p.name.replace(f" {kind}", "").removeprefix("AP ") for p in made] == NAMES
    np.testing.assert_allclose([p.value for p in made], expected, atol=1e-12)
    assert 0.05 < made[0].value < 0.9, "neither nothing nor all: the comparison says something"
    assert {p.num_images for p in made} == {13 if kind == "box" else 12}


@pytest.mark.parametrize("kind", ["box", "mask"])
def test_the_truth_gets_all_and_nothing_gets_nothing(tmp_path: Path, kind) -> None:
    coco = shapes(tmp_path)
    perfect = average_precisions(coco, answers(coco, 0, spread=0.0), kind, resamples=10)
    assert [(p.value, p.low, p.high) for p in perfect] == [(1.0, 1.0, 1.0)] * 6
    none = Found(np.zeros((0, 4)), np.zeros(0, dtype=int), np.zeros(0), ())
    nothing = average_precisions(coco, [none] * len(coco.images), kind, resamples=3)
    assert [(p.value, p.low, p.high) for p in nothing] == [(0.0, 0.0, 0.0)] * 6


def test_the_interval_is_the_spread_of_images_drawn_again_about_the_value(tmp_path: Path) -> None:
    """Each resample, made by hand as a test of its own with images standing there twice, has the
    value that the interval is from.
    """
    coco = shapes(tmp_path, num=6)
    found = answers(coco, 3, spread=4.0)
    rng, values = np.random.Generator(np.random.PCG64(0)), []
    for _ in range(8):
        order = rng.integers(0, len(coco.images), len(coco.images))
        again = CocoSet("again", coco.classes, tuple(coco.images[i] for i in order), ())
        values.append(
            average_precisions(again, [found[i] for i in order], "box", resamples=0)[0].value
        )
    [made] = [p for p in average_precisions(coco, found, "box", resamples=8) if p.name == "AP box"]
    low, high = made.value + np.percentile(values, [2.5, 97.5]) - np.mean(values)
    assert (made.low, made.high) == pytest.approx((low, high), abs=1e-12)
    assert made.low < made.value < made.high


def test_without_masks_there_is_no_ap_of_masks_and_without_large_objects_none_of_those(
    tmp_path: Path,
) -> None:
    file, images = write_shapes(tmp_path, 3)

    def change(given: dict) -> None:
        for mark in given["annotations"]:
            del mark["segmentation"]

    coco = load_coco(changed(file, change), images)
    found = answers(coco, 0, spread=0.0)
    assert average_precisions(coco, found, "mask") == []
    assert [p.name for p in average_precisions(coco, found, "box", resamples=0)] == [
        "AP box",
        "AP50 box",
        "AP75 box",
        "AP box small",
    ]
