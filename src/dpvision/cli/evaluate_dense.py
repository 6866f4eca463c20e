"""``dpvision evaluate detection`` and ``dpvision evaluate segmentation``: train a network on an
encoder and score it.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from dpvision.cli.output import FLAT, emit, table
from dpvision.cli.scores import Encoders, Printing, emit_scores
from dpvision.errors import ConfigError
from dpvision.eval.dense.settings import (
    CocoFiles,
    DenseHardware,
    DenseOptions,
    DetectionSettings,
    MaskFolders,
    SegmentationSettings,
    TaskSettings,
)

if TYPE_CHECKING:
    from dpvision.eval.dense.job import DenseTask, Say


def evaluate_detection(
    encoders: Encoders,
    files: Annotated[CocoFiles, FLAT] = CocoFiles(),
    options: Annotated[DenseOptions, FLAT] = DenseOptions(),
    recompute: bool = False,
    detection: DetectionSettings = DetectionSettings(),
    hardware: DenseHardware = DenseHardware(),
    printing: Annotated[Printing, FLAT] = Printing(),
) -> None:
    """Train Mask R-CNN on each encoder as in ViTDet, and score its boxes and masks by COCO's AP.

    An ENCODER is a run of a vision transformer, random:RUN (its architecture, untrained), vip:FILE,
    mae:FILE or dpcap:FILE.

      dpvision evaluate detection vip:vip_base.pth --train instances_train2017.json
          --train-images train2017 --test instances_val2017.json --test-images val2017 --public
          --work work/vip --out scores.json

    The defaults are ViTDet-Base's (Table 4 of the ViP paper): 100 epochs of batch 64 at 1024 px,
    which need many GPUs. Run --dry-run first: it reads and counts all images, and times a step on
    this machine. A smaller setting:

      --detection.epochs 12 --detection.image-size 512 --detection.batch-size 16
          --hardware.physical-batch-size 4

    With --work, a stopped training resumes. On eight GPUs: torchrun --nproc-per-node 8 -m dpvision
    evaluate detection ... The training is not private and measures the encoder on images that need
    no protection. For several encoders the sheets are NAME-1.png, NAME-2.png, ...
    docs/detection.md has the settings.

    Args:
        encoders: Encoders to score; each gets its own detector.
        files: COCO's annotations and images.
        options: Where results go.
        recompute: Recompute the encoder's blocks in the backward pass: less memory, a third more
            time.
        detection: Settings of the detector and its training.
        hardware: Hardware settings, which change results only by rounding and by the regions
            sampled.
        printing: How scores are printed.
    """
    if not encoders:
        raise ConfigError(
            "evaluate: no encoder; expected one or more. For example: dpvision evaluate "
            "detection vip:FILE --train FILE ..."
        )
    source = files.name
    from dpvision.eval.dense.detection import open_detection

    task = partial(open_detection, files, detection, hardware, recompute)
    _evaluate(encoders, source, detection, task, options, printing)


def evaluate_segmentation(
    encoders: Encoders,
    folders: Annotated[MaskFolders, FLAT] = MaskFolders(),
    segmentation: SegmentationSettings = SegmentationSettings(),
    hardware: DenseHardware = DenseHardware(),
    options: Annotated[DenseOptions, FLAT] = DenseOptions(),
    num_shown: int = 6,
    printing: Annotated[Printing, FLAT] = Printing(),
) -> None:
    """Train UPerNet on an encoder with images whose pixels are labelled, and score mIoU on others
    (ViP, Table 4).

    An ENCODER is a run folder of a vision transformer, random:RUN, vip:FILE, mae:FILE or
    dpcap:FILE; several are trained in sequence.

      dpvision evaluate segmentation vip:vip.pth --ade20k ADEChallengeData2016 --public
          --work work --dry-run
      torchrun --nproc-per-node 8 -m dpvision evaluate segmentation vip:vip.pth
          --ade20k ADEChallengeData2016 --public --work work
      dpvision evaluate segmentation runs/a random:runs/a --train images/train
          --train-masks masks/train --test images/val --test-masks masks/val
          --classes classes.json --ignore-ids 0 255 --public --segmentation.crop-size 128
          --segmentation.epochs 20 --segmentation.batch-size 8 --segmentation.warmup-steps 20
          --sheet sheet.png

    The defaults are the paper's: 100 epochs of ADE20K in batches of 16, infeasible on a CPU.
    --dry-run opens everything, times one pass and prints the expected duration.
    docs/segmentation.md has each setting and its source.

    The training is not private and measures the encoder on images that need no protection. Without
    --public the images count as private, and their scores go under confidential/.

    Args:
        encoders: Encoders to train on.
        folders: Images and masks.
        segmentation: Settings of the network and its training; the defaults are the paper's.
        hardware: Hardware settings, which change results only by rounding, and by BatchNorm's
            statistics of one pass.
        options: Where results go.
        num_shown: Number of images on the contact sheet, which has a column for each encoder.
        printing: How scores are printed.
    """
    if not encoders:
        raise ConfigError(
            "evaluate: no encoder; expected one or more. For example dpvision evaluate "
            "segmentation mae:FILE --ade20k FOLDER."
        )
    if not num_shown >= 1:
        raise ConfigError(f"evaluate: num_shown={num_shown}; expected at least 1. Omit it for 6.")
    source = folders.name
    from dpvision.eval.dense.segmentation import open_segmentation

    shown = num_shown if options.sheet is not None else 0
    task = partial(open_segmentation, folders, segmentation, hardware, shown)
    _evaluate(encoders, source, segmentation, task, options, printing)


def _evaluate(
    encoders: Encoders,
    source: str,
    settings: TaskSettings,
    open_task: "Callable[[Say], DenseTask]",
    options: DenseOptions,
    printing: Printing,
) -> None:
    from dpvision.eval.dense.job import evaluate_dense
    from dpvision.train.distributed import join, leave

    group = join("auto")
    try:
        with Console(stderr=True, quiet=not group.is_main).status("reading") as status:
            found = evaluate_dense(
                encoders, source, settings, open_task, options, group=group, say=status.update
            )
    finally:
        leave()
    if found is None or not group.is_main:
        return
    text = "\n".join([table(found.title, found.columns, found.rows), *found.lines])
    if options.dry_run:
        emit(found.entries, printing.json, text)
    else:
        emit_scores(found.scores, text, found.written, printing, **found.entries)
