"""COCO's average precision of boxes and masks, by faster-coco-eval, with intervals over the test
images.

AP is the mean over classes and over IoU 0.50, 0.55, ..., 0.95 of the interpolated precision at 101
recalls, with 100 detections per image; AP50 and AP75 are at one IoU. Small objects have less than
32^2 square pixels, large ones more than 96^2, in the given images: a resized copy of a data set has
different small and large objects. Crowds are ignored.

Legend: N detections, E matchings (class, size, image), B resamples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dpvision.eval.dense.coco_data import CocoSet, mask_tools
from dpvision.eval.dense.job import Measure
from dpvision.eval.dense.training_loop import Say

Kind = Literal["box", "mask"]
_IOU_TYPE = {"box": "bbox", "mask": "segm"}
_SIZES = ("all", "small", "medium", "large")


@dataclass(frozen=True)
class Found:
    """A detector's output for one image."""

    box_N4: np.ndarray
    """float: left, top, right, bottom in px of the image."""
    label_N: np.ndarray
    """int, indices into ``CocoSet.classes``."""
    score_N: np.ndarray
    """Confidence."""
    runs: tuple[dict[str, Any], ...]
    """Masks, COCO's compressed run-length codes."""


def average_precisions(
    test: CocoSet,
    found: Sequence[Found],
    kind: Kind,
    *,
    resamples: int = 200,
    progress: Say | None = None,
) -> list[Measure]:
    """Return COCO's six average precisions, without sizes of which the test has no object.

    faster-coco-eval matches detections to objects once, for each class, size and image. Its
    accumulation of these matchings gives the measures; the interval repeats only the accumulation,
    on the matchings of images drawn with replacement.

    For masks, only images whose objects all have masks count; if there are none, the list is empty.

    Args:
        found: one entry per image of ``test``.
        resamples: number of bootstrap resamples of the test images for the 95% interval; with 0 the
            interval is the value. Resamples repeat images and lack some of the rare classes, which
            raises AP, so their spread is centred on the value. One takes about two seconds on
            COCO's 5,000 images.

    Raises:
        ConfigError: faster-coco-eval is not installed.
    """
    mask_tools()
    from faster_coco_eval import COCOeval_faster
    from faster_coco_eval.faster_eval_api_cpp import COCOevalAccumulate

    places = [i for i, image in enumerate(test.images) if kind == "box" or image.has_masks]
    if not any(test.images[i].learned for i in places):
        return []
    truth, answers = _truth(test, places, kind), _answers(test, found, places, kind)
    judge = COCOeval_faster(
        truth, answers, _IOU_TYPE[kind], separate_eval=True, print_function=lambda *_: None
    )
    judge.evaluate()
    judge.accumulate()
    values = _measures(judge.eval["precision"])
    # One matching per class, size and image, in this order; images drawn twice occur twice.
    matching_E = judge._evalImgs_cpp
    place_KAI = np.arange(len(matching_E)).reshape(len(test.classes), len(_SIZES), len(places))
    rng = np.random.Generator(np.random.PCG64(0))
    drawn: dict[str, list[float]] = {name: [] for name in values}
    for b in range(resamples):
        order = place_KAI[:, :, rng.integers(0, len(places), len(places))].ravel()
        for name, value in _measures(
            COCOevalAccumulate(judge._paramsEval, [matching_E[e] for e in order])["precision"]
        ).items():
            drawn[name].append(value)
        if progress is not None:
            progress(f"interval of AP {kind}, {b + 1} of {resamples} resamples")
    made = []
    for name, value in values.items():
        if not math.isnan(value):
            # A resample without objects of a size has no value.
            some = [v for v in drawn[name] if not math.isnan(v)] or [value]
            low, high = (
                (value + np.percentile(some, (2.5, 97.5)) - np.mean(some)).clip(0, 1).tolist()
            )
            measure, _, size = name.partition(" ")
            made.append(
                Measure(
                    f"{measure} {kind} {size}".strip(),
                    value,
                    min(low, value),
                    max(high, value),
                    0.0,
                    len(places),
                )
            )
    return made


def _measures(precision: Any) -> dict[str, float]:
    """Return the measures from precisions (10 IoU, 101 recalls, classes, 4 sizes, 3 detection
    limits), -1 for classes without objects.
    """
    at_TRKA = np.asarray(precision)[..., -1]

    def mean(part: np.ndarray) -> float:
        part = part[part > -1]
        return float(part.mean()) if part.size else math.nan

    alone = {
        "AP": mean(at_TRKA[..., 0]),
        "AP50": mean(at_TRKA[0, ..., 0]),
        "AP75": mean(at_TRKA[5, ..., 0]),
    }
    return alone | {f"AP {size}": mean(at_TRKA[..., i]) for i, size in enumerate(_SIZES) if i}


def _truth(test: CocoSet, places: Sequence[int], kind: Kind) -> Any:
    entries: list[dict[str, Any]] = []
    for i in places:
        image = test.images[i]
        for thing in image.objects:
            entry = {
                "image_id": i,
                "category_id": thing.label + 1,
                "bbox": _wide(thing.box),
                "area": thing.area,
            }
            entry |= {"id": len(entries) + 1, "iscrowd": int(thing.crowd)} | (
                {"segmentation": image.runs(thing)} if kind == "mask" else {}
            )
            entries.append(entry)
    return _coco(test, places, entries)


def _answers(test: CocoSet, found: Sequence[Found], places: Sequence[int], kind: Kind) -> Any:
    tools, entries = mask_tools(), list[dict[str, Any]]()
    for i in places:
        one = found[i]
        for n in range(len(one.label_N)):
            box = _wide(one.box_N4[n].tolist())
            area = float(box[2] * box[3]) if kind == "box" else float(tools.area(one.runs[n]))
            entry = {
                "id": len(entries) + 1,
                "image_id": i,
                "category_id": int(one.label_N[n]) + 1,
                "bbox": box,
                "area": area,
            }
            entry |= {"score": float(one.score_N[n]), "iscrowd": 0} | (
                {"segmentation": one.runs[n]} if kind == "mask" else {}
            )
            entries.append(entry)
    return _coco(test, places, entries)


def _coco(test: CocoSet, places: Sequence[int], entries: list[dict[str, Any]]) -> Any:
    from faster_coco_eval import COCO

    made = COCO()
    made.dataset = {
        "images": [
            {"id": i, "height": test.images[i].height, "width": test.images[i].width}
            for i in places
        ],
        "categories": [
            {"id": label + 1, "name": name} for label, (_, name) in enumerate(test.classes)
        ],
        "annotations": entries,
    }
    made.createIndex()
    return made


def _wide(box: Sequence[float]) -> list[float]:
    return [box[0], box[1], box[2] - box[0], box[3] - box[1]]
