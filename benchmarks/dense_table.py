"""ViP's Table 4 in miniature: what an encoder is worth to a detector and to a segmenter, on
procedural scenes.

    python benchmarks/dense_table.py --work DIR --encoders NAME=SPEC [NAME=SPEC ...] [--tasks
    detection,segmentation] [--seeds 0]
                                     [--num-train 1000] [--num-test 300] [--size-px 64] [--epochs N]
                                     [--set ARGUMENT ...] [--json FILE]

SPEC is what `dpvision evaluate` takes: a run, random:RUN, ... Runs the product itself, `dpvision
evaluate detection` and `... segmentation` with the same settings for every encoder, on scenes that
no store has, whose boxes and masks are known; a score that is in DIR is not made again. The classes
are the eight shapes (segmentation: and the background). Value, low and high in the JSON are median,
least and greatest over seeds.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from common import row, write_result
from faster_coco_eval.core import mask as mask_tools
from PIL import Image

from dpvision.synthetic.scenes import LABELS, Scene, coverage, make_scene

FIRST = {"train": 30_000_000, "test": 40_000_000}
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


def write_part(root: Path, part: str, num: int, size_px: int) -> None:
    """Images, COCO's annotations and semantic masks of one part, unless they are there."""
    if (root / f"{part}.json").exists():
        return
    for folder in ("pictures", "masks"):
        (root / part / folder).mkdir(parents=True, exist_ok=True)
    images, annotations = [], []
    for n in range(num):
        scene = make_scene(FIRST[part] + n, size_px)
        name, semantic_HW = f"{n:06}.png", np.full((size_px, size_px), len(LABELS), np.uint8)
        for thing, mask_HW in zip(scene.objects, visible_masks(scene, size_px), strict=True):
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
        images.append({"id": n, "file_name": name, "height": size_px, "width": size_px})
    categories = [{"id": i + 1, "name": name} for i, name in enumerate(LABELS)]
    text = json.dumps({"images": images, "annotations": annotations, "categories": categories})
    (root / "classes.json").write_text(
        json.dumps({str(i): name for i, name in enumerate([*LABELS, "background"])})
    )
    (root / f"{part}.json").write_text(text)


def command(task: str, spec: str, seed: int, args: argparse.Namespace) -> list[str]:
    """The arguments of `dpvision evaluate` for one score."""
    root = args.work / f"scenes-{args.size_px}"
    train, test = root / "train" / "pictures", root / "test" / "pictures"
    if task == "detection":
        data = [
            "--train",
            str(root / "train.json"),
            "--train-images",
            str(train),
            "--test",
            str(root / "test.json"),
        ]
        data += ["--test-images", str(test), "--detection.image-size", str(args.size_px)]
    else:
        data = [
            "--train",
            str(train),
            "--train-masks",
            str(root / "train" / "masks"),
            "--test",
            str(test),
        ]
        data += [
            "--test-masks",
            str(root / "test" / "masks"),
            "--classes",
            str(root / "classes.json"),
        ]
        data += ["--segmentation.crop-size", str(args.size_px)]
    run = [
        f"--{task}.epochs",
        str(args.epochs),
        f"--{task}.seed",
        str(seed),
        "--hardware.workers",
        "1",
        "--hardware.physical-batch-size",
        "8",
    ]
    return [task, spec, *data, *SMALL[task], *run, "--public", *args.set, "--json"]


def scores(
    task: str, name: str, spec: str, seed: int, args: argparse.Namespace
) -> dict[str, float]:
    """Percent by measure, kept in DIR."""
    kept = args.work / f"{task}-{name}-{seed}.json"
    if not kept.exists():
        line = [sys.executable, "-m", "dpvision", "evaluate", *command(task, spec, seed, args)]
        done = subprocess.run(line, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{kept.stem}: {done.stderr[-2000:]}")
        found = {s["protocol"]: 100 * s["value"] for s in json.loads(done.stdout)["scores"]}
        kept.write_text(json.dumps(found))
    found = json.loads(kept.read_text())
    wanted = {}
    for measure in MEASURES[task]:
        (wanted[measure],) = [
            value
            for protocol, value in found.items()
            if measure in [part.strip() for part in protocol.split(",")]
        ]
    return wanted


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--encoders", nargs="+", required=True, metavar="NAME=SPEC")
    parser.add_argument("--tasks", default=",".join(MEASURES))
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--num-train", type=int, default=1000)
    parser.add_argument("--num-test", type=int, default=300)
    parser.add_argument("--size-px", type=int, default=64)
    parser.add_argument("--epochs", type=float, default=12)
    parser.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        help="further arguments of every evaluation",
    )
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.work = args.work.resolve()
    root = args.work / f"scenes-{args.size_px}"
    write_part(root, "train", args.num_train, args.size_px)
    write_part(root, "test", args.num_test, args.size_px)
    rows = []
    for task in args.tasks.split(","):
        for name, spec in (given.split("=", 1) for given in args.encoders):
            found = [
                scores(task, name, spec, seed, args) for seed in map(int, args.seeds.split(","))
            ]
            print(f"{task}, {name}: {found}", flush=True)
            rows += [
                row(name, task, measure, [one[measure] for one in found])
                for measure in MEASURES[task]
            ]
    write_result(
        args.json, "dense_table", rows, packages=("torch", "torchvision", "faster-coco-eval")
    )


if __name__ == "__main__":
    main()
