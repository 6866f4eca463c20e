"""``dpvision evaluate segmentation``: train a segmentation network on an encoder and score it by
mIoU.
"""

from pathlib import Path

from rich.console import Console

from dpvision.cli.scores import Encoders
from dpvision.dense.output_places import check_places
from dpvision.dense.segmentation.settings import SegmentationSettings
from dpvision.dense.training_settings import DenseHardware
from dpvision.errors import ConfigError

_SETTINGS, _HARDWARE = SegmentationSettings(), DenseHardware()


def evaluate_segmentation(
    encoders: Encoders,
    ade20k: Path | None = None,
    train: Path | None = None,
    train_masks: Path | None = None,
    test: Path | None = None,
    test_masks: Path | None = None,
    classes: Path | None = None,
    ignore_ids: tuple[int, ...] | None = None,
    public: bool = False,
    segmentation: SegmentationSettings = _SETTINGS,
    hardware: DenseHardware = _HARDWARE,
    work: Path | None = None,
    sheet: Path | None = None,
    num_shown: int = 6,
    out: Path | None = None,
    dry_run: bool = False,
    ema: bool = False,
    show_confidential: bool = False,
    json: bool = False,
) -> None:
    """Train UPerNet on an encoder with images whose pixels are labelled, and score mIoU on others
    (ViP, Table 4).

    An ENCODER is a run folder of a vision transformer, random:RUN, vip:FILE or mae:FILE; several
    are trained in sequence.

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
        ade20k: Folder ADEChallengeData2016 (images/training, annotations/validation, ...): train
            and test images, 150 classes, 0 ignored.
        train: Folder of training images; those without a mask are left out.
        train_masks: Folder of their masks: PNG files with the same stems, one channel, a class id
            per pixel.
        test: Folder of test images.
        test_masks: Folder of their masks.
        classes: JSON from ids to names, {"1": "person", "7": "train"}, of --train-masks and
            --test-masks.
        ignore_ids: Ids of pixels that do not count; if omitted, 255, unless --classes names it.
        public: The images need no protection.
        segmentation: Settings of the network and its training; the defaults are the paper's.
        hardware: Hardware settings, which change results only by rounding, and by BatchNorm's
            statistics of one pass.
        work: Folder for checkpoints, from which the same command resumes after a stop.
        sheet: Write a contact sheet here (PNG): some test images, their truth, and each encoder's
            predictions.
        num_shown: Number of images on it.
        out: Also write all scores here. Scores on private images need a folder named confidential
            in the path.
        dry_run: Only print what would be done, and how fast.
        ema: Use the averaged weights of runs.
        show_confidential: Print scores on private images even if the output is not a terminal, such
            as a job's log.
        json: Print JSON, with private scores too.
    """
    if not encoders:
        raise ConfigError(
            "evaluate: no encoder; expected one or more. For example dpvision evaluate "
            "segmentation mae:FILE --ade20k FOLDER."
        )
    if not num_shown >= 1:
        raise ConfigError(f"evaluate: num_shown={num_shown}; expected at least 1. Omit it for 6.")
    from dpvision.dense.segmentation.evaluation import checked_fit
    from dpvision.dense.segmentation.job import (
        SegmentationJob,
        open_folders,
        tell_plan,
        tell_scores,
    )
    from dpvision.encoders.open import open_encoder, trained_on
    from dpvision.eval.probes.protocol import with_averages
    from dpvision.runs.lineage import image_files
    from dpvision.train.distributed import join, leave

    images = image_files((ade20k or train or Path()).name, public=public)
    opened = [
        trained_on(open_encoder(spec, ema=own), images)
        for spec, own in zip(encoders, with_averages(encoders, ema), strict=True)
    ]
    private = not public or any(encoder.confidential for encoder in opened)
    check_places(out, sheet, work, private)
    group = join("auto")
    try:
        with Console(stderr=True, quiet=not group.is_main).status("reading") as status:
            folders = open_folders(
                ade20k,
                train,
                train_masks,
                test,
                test_masks,
                classes,
                ignore_ids,
                hardware.workers,
                status.update,
            )
            steps = [
                checked_fit(encoder, segmentation, hardware, len(folders[0]), group)
                for encoder in opened
            ]
            job = SegmentationJob(
                *folders,
                segmentation,
                hardware,
                work,
                group,
                public,
                num_shown if sheet is not None else 0,
            )
            if dry_run:
                tell_plan(job, encoders, opened, steps, json, status.update)
                return
            for spec, encoder in zip(encoders, opened, strict=True):
                job.run(spec, encoder, status.update)
        if group.is_main:
            tell_scores(job, encoders, out, sheet, show_confidential, json)
    finally:
        leave()
