"""ViP's Table 4 in miniature: an encoder under a detector and under a segmentation model, on
procedural scenes of 64 px whose boxes and masks are known.

`dpvision evaluate detection` and `... segmentation`, with the same settings for random weights, the
warm start and the private run of ``papers_trained``, on scenes that no store has. The classes are
the eight shapes (segmentation: and the background). Percent; one seed.
"""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import Work, row
from faster_coco_eval.core import mask as mask_tools
from papers_trained import Arm, vip_run
from PIL import Image

from dpvision.synthetic.scenes import LABELS, Scene, coverage, make_scene

FIRST = {"train": 30_000_000, "test": 40_000_000}
NUM, SIZE_PX, EPOCHS = {"train": 1_000, "test": 300}, 64, 12
MEASURES = {"detection": ("AP box", "AP mask"), "segmentation": ("mIoU",)}
SMALL = {
    "detection": [
        *(
            "--detection.batch-size",
            "16",
            "--detection.learning-rate",
            "5e-4",
            "--detection.warmup-steps",
            "50",
            "--detection.window",
            "0",
        ),
        *(
            "--detection.channels",
            "64",
            "--detection.hidden",
            "128",
            "--detection.anchors",
            "64",
            "--detection.proposals",
            "100",
        ),
        *(
            "--detection.regions",
            "64",
            "--detection.jitter",
            "0.8",
            "1.25",
            "--detection.resamples",
            "0",
        ),
    ],
    "segmentation": [
        *(
            "--segmentation.batch-size",
            "16",
            "--segmentation.learning-rate",
            "5e-4",
            "--segmentation.warmup-steps",
            "50",
        ),
        *(
            "--segmentation.channels",
            "64",
            "--segmentation.scale",
            "0.8",
            "1.25",
            "--segmentation.no-photometric",
        ),
    ],
}
"""What 64 px images of a few large objects and one CPU core want; everything else is the product's
default.
"""


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
    images, annotations = [], []
    for n in range(NUM[part]):
        scene = make_scene(FIRST[part] + n, SIZE_PX)
        name, semantic_HW = f"{n:06}.png", np.full((SIZE_PX, SIZE_PX), len(LABELS), np.uint8)
        for thing, mask_HW in zip(scene.objects, visible_masks(scene, SIZE_PX), strict=True):
            semantic_HW[mask_HW] = LABELS.index(thing.shape)
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
                    "category_id": LABELS.index(thing.shape) + 1,
                    "iscrowd": 0,
                    "bbox": box,
                    "area": int(mask_HW.sum()),
                    "segmentation": {**code, "counts": code["counts"].decode()},
                }
            )
        Image.fromarray(scene.image).save(root / part / "pictures" / name)
        Image.fromarray(semantic_HW).save(root / part / "masks" / name)
        images.append({"id": n, "file_name": name, "height": SIZE_PX, "width": SIZE_PX})
    categories = [{"id": i + 1, "name": name} for i, name in enumerate(LABELS)]
    text = json.dumps({"images": images, "annotations": annotations, "categories": categories})
    (root / "classes.json").write_text(
        json.dumps({str(i): name for i, name in enumerate([*LABELS, "background"])})
    )
    (root / f"{part}.json").write_text(text)


def line(task: str, spec: str, root: Path) -> list[str]:
    """Return the arguments of `dpvision evaluate` for one score."""
    parts = {part: (root / part / "pictures", root / part / "masks") for part in NUM}
    if task == "detection":
        given = {
            "train": root / "train.json",
            "train-images": parts["train"][0],
            "test": root / "test.json",
            "test-images": parts["test"][0],
            "detection.image-size": SIZE_PX,
        }
    else:
        given = {
            "train": parts["train"][0],
            "train-masks": parts["train"][1],
            "test": parts["test"][0],
            "test-masks": parts["test"][1],
            "classes": root / "classes.json",
            "segmentation.crop-size": SIZE_PX,
        }
    given |= {
        f"{task}.epochs": EPOCHS,
        "hardware.workers": 1,
        "hardware.physical-batch-size": 8,
    }
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return [task, spec, *words, *SMALL[task], "--public", "--json"]


def dense(work: Work) -> list[dict[str, Any]]:
    """Average precision and mIoU of random weights, the warm start and the private run."""
    root = work.folder / f"scenes-{SIZE_PX}px"
    for part in NUM:
        write_part(root, part)
    warm, private = (str(vip_run(work, Arm(), is_run)) for is_run in (False, True))
    rows = []
    for task, measures in MEASURES.items():
        for name, spec in (("random", f"random:{warm}"), ("warm", warm), ("private_eps8", private)):
            found = work.kept(f"dense/{task}-{name}", partial(_scores, task, spec, root))
            rows += [row(name, task, measure, [found[measure]]) for measure in measures]
    return rows


def _scores(task: str, spec: str, root: Path) -> dict[str, float]:
    words = [sys.executable, "-m", "dpvision", "evaluate", *line(task, spec, root)]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"papers: {task} of {spec}: {done.stderr[-2000:]}")
    found = {s["protocol"]: 100 * s["value"] for s in json.loads(done.stdout)["scores"]}
    return {
        measure: next(v for protocol, v in found.items() if measure in protocol.split(", "))
        for measure in MEASURES[task]
    }


MINIATURES = {"dense": dense}
