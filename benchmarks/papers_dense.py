"""ViP's Table 4 in miniature: an encoder under a detector and under a segmentation model, on
procedural scenes of 32 px whose boxes and masks are known.

`dpvision evaluate detection` and `... segmentation`, with the same settings for random weights, the
warm start, the private run and that without privacy of ``papers_trained``, on scenes that no store
has. The classes are the ten colours (segmentation: and the background): at this size shapes are not
told apart (docs/log), and every AP is near zero. Percent; one seed.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import Work, row
from faster_coco_eval.core import mask as mask_tools
from papers_encoders import evaluated
from papers_trained import CONTROLS, Arm, vip_run
from PIL import Image

from dpvision.synthetic.scenes import ATTRIBUTES, Scene, coverage, make_scene

COLOURS = ATTRIBUTES["colour"]
FIRST = {"train": 30_000_000, "test": 40_000_000}
NUM, SIZE_PX, EPOCHS = {"train": 600, "test": 200}, 32, {"detection": 5, "segmentation": 6}
MEASURES = {"detection": ("AP box", "AP mask"), "segmentation": ("mIoU",)}
SMALL = {
    "detection": "--detection.batch-size 8 --detection.learning-rate 1e-3 --detection.window 0 "
    "--detection.warmup-steps 30 --detection.channels 32 --detection.hidden 64 "
    "--detection.anchors 64 --detection.proposals 50 --detection.regions 32 "
    "--detection.jitter 0.8 1.25 --detection.resamples 0 --detection.image-size 32",
    "segmentation": "--segmentation.batch-size 8 --segmentation.learning-rate 1e-3 "
    "--segmentation.warmup-steps 30 --segmentation.channels 32 --segmentation.scale 0.8 1.25 "
    "--segmentation.no-photometric --segmentation.max-class-share 1 --segmentation.crop-size 32",
}
"""What small images of a few large objects and one CPU core want; everything else is the product's
default.
"""
ENCODERS = {
    "random weights": None,
    "warm start": CONTROLS["warm start"],
    "private": Arm(),
    "without privacy": CONTROLS["without privacy"],
}


def visible_masks(scene: Scene, size_px: int) -> list[np.ndarray]:
    """Pixels of each object that are more than half its own, bool (size_px, size_px): later objects
    lie in front.
    """
    masks: list[np.ndarray] = []
    for thing in scene.objects:
        covered = coverage(thing, size_px) > 0.5
        masks = [mask & ~covered for mask in masks] + [covered]
    return masks


def write_part(root: Path, part: str) -> None:
    """Images, COCO's annotations and semantic masks of one part, unless they are there."""
    if (root / f"{part}.json").exists():
        return
    for folder in ("pictures", "masks"):
        (root / part / folder).mkdir(parents=True, exist_ok=True)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for n in range(NUM[part]):
        scene = make_scene(FIRST[part] + n, SIZE_PX)
        name, semantic_HW = f"{n:06}.png", np.full((SIZE_PX, SIZE_PX), len(COLOURS), np.uint8)
        for thing, mask_HW in zip(scene.objects, visible_masks(scene, SIZE_PX), strict=True):
            semantic_HW[mask_HW] = COLOURS.index(thing.colour)
            ys, xs = np.nonzero(mask_HW)
            box = [
                int(xs.min()),
                int(ys.min()),
                int(xs.max() - xs.min() + 1),
                int(ys.max() - ys.min() + 1),
            ]
            code = mask_tools.encode(np.asfortranarray(mask_HW.astype(np.uint8)))
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": n,
                    "category_id": COLOURS.index(thing.colour) + 1,
                    "iscrowd": 0,
                    "bbox": box,
                    "area": int(mask_HW.sum()),
                    "segmentation": {**code, "counts": code["counts"].decode()},
                }
            )
        Image.fromarray(scene.image).save(root / part / "pictures" / name)
        Image.fromarray(semantic_HW).save(root / part / "masks" / name)
        images.append({"id": n, "file_name": name, "height": SIZE_PX, "width": SIZE_PX})
    categories = [{"id": i + 1, "name": name} for i, name in enumerate(COLOURS)]
    text = json.dumps({"images": images, "annotations": annotations, "categories": categories})
    (root / "classes.json").write_text(
        json.dumps({str(i): name for i, name in enumerate([*COLOURS, "background"])})
    )
    (root / f"{part}.json").write_text(text)


def scores(task: str, spec: str, root: Path) -> dict[str, float]:
    """Return the measures of one encoder, in percent."""
    given: dict[str, Any] = {}
    for part in NUM:
        images, truth = root / part / "pictures", root / f"{part}.json"
        if task == "segmentation":
            given |= {part: images, f"{part}-masks": root / part / "masks"}
        else:
            given |= {part: truth, f"{part}-images": images}
    if task == "segmentation":
        given["classes"] = root / "classes.json"
    given |= {f"{task}.epochs": EPOCHS[task], "hardware.workers": 1}
    given["hardware.physical-batch-size"] = 8
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    found = {
        score["protocol"]: 100 * score["value"]
        for score in evaluated(task, spec, *words, *SMALL[task].split(), "--public")
    }
    return {
        measure: next(v for protocol, v in found.items() if measure in protocol.split(", "))
        for measure in MEASURES[task]
    }


def dense(work: Work, task: str) -> list[dict[str, Any]]:
    """Average precision or mIoU by encoder."""
    root = work.folder / f"scenes-{SIZE_PX}px"
    for part in NUM:
        write_part(root, part)
    rows = []
    for name, arm in ENCODERS.items():
        spec = f"random:{vip_run(work, Arm())}" if arm is None else str(vip_run(work, arm))
        found = work.kept(f"dense/{task}-{name}", partial(scores, task, spec, root))
        rows += [row(name, task, measure, [found[measure]]) for measure in MEASURES[task]]
    return rows


MINIATURES = {task: partial(dense, task=task) for task in MEASURES}
