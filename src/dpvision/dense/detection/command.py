"""``dpvision evaluate detection``: train a detector on an encoder and score it."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from dpvision.cli.output import emit, pairs
from dpvision.cli.scores import Encoders, emit_scores
from dpvision.dense.detection.settings import DetectionSettings
from dpvision.dense.output_places import check_places
from dpvision.dense.training_settings import DenseHardware
from dpvision.errors import ConfigError
from dpvision.eval.score import Score, Visibility
from dpvision.eval.score_file import merge_entries, write_scores
from dpvision.runs.folder import run_base

_DEFAULTS, _HARDWARE = DetectionSettings(), DenseHardware()


def evaluate_detection(
    encoders: Encoders,
    train: Path | None = None,
    train_images: Path | None = None,
    test: Path | None = None,
    test_images: Path | None = None,
    public: bool = False,
    work: Path | None = None,
    out: Path | None = None,
    sheet: Path | None = None,
    allow_missing: bool = False,
    recompute: bool = False,
    dry_run: bool = False,
    ema: bool = False,
    detection: DetectionSettings = _DEFAULTS,
    hardware: DenseHardware = _HARDWARE,
    show_confidential: bool = False,
    json: bool = False,
) -> None:
    """Train Mask R-CNN on each encoder as in ViTDet, and score its boxes and masks by COCO's AP.

    An ENCODER is a run of a vision transformer, random:RUN (its architecture, untrained), vip:FILE
    or mae:FILE.

      dpvision evaluate detection vip:vip_base.pth --train instances_train2017.json --train-images
      train2017 --test instances_val2017.json
        --test-images val2017 --public --work work/vip --out scores.json

    The defaults are ViTDet-Base's (Table 4 of the ViP paper): 100 epochs of batch 64 at 1024 px,
    which need many GPUs. Run --dry-run first: it reads and counts all images, and times a step on
    this machine. A smaller setting:

      --detection.epochs 12 --detection.image-size 512 --detection.batch-size 16
      --hardware.physical-batch-size 4

    With --work, a stopped training resumes. On eight GPUs: torchrun --nproc-per-node 8 -m dpvision
    evaluate detection ... The training is not private and measures the encoder on images that need
    no protection. docs/detection.md has the settings.

    Args:
        encoders: Encoders to score; each gets its own detector.
        train: COCO's annotations of the training images (instances_*.json).
        train_images: Folder of the training images.
        test: Annotations of the test images, with the same classes.
        test_images: Folder of the test images.
        public: The images need no protection (as COCO's). Otherwise scores and images go under
            confidential/.
        work: Folder for checkpoints, with a subfolder per encoder; for private images it must be
            under confidential/.
        out: Also write all scores here. Scores on private images need a folder named confidential
            in the path.
        sheet: Draw some test images here (PNG), with truth and predictions; for several encoders,
            NAME-1.png, NAME-2.png, ...
        allow_missing: Leave out images whose file is missing, and print their number.
        recompute: Recompute the encoder's blocks in the backward pass: less memory, a third more
            time.
        dry_run: Read everything, count, time a step, and train nothing.
        ema: Use the averaged weights of runs.
        detection: Settings of the detector and its training.
        hardware: Hardware settings, which change results only by rounding and by the regions
            sampled.
        show_confidential: Print scores on private images even if the output is not a terminal, such
            as a job's log.
        json: Print JSON, with private scores too.
    """
    if not encoders:
        raise ConfigError(
            "evaluate: no encoder; expected one or more. For example: dpvision evaluate "
            "detection vip:FILE --train FILE ..."
        )
    for flag, path in (
        ("--train", train),
        ("--train-images", train_images),
        ("--test", test),
        ("--test-images", test_images),
    ):
        if path is None:
            raise ConfigError(
                f"evaluate: no {flag}; expected COCO's annotations and images for training and "
                "test. Give it as in `dpvision evaluate detection --help`."
            )
    assert (
        train is not None
        and train_images is not None
        and test is not None
        and test_images is not None
    )
    from dpvision.dense.detection.coco_data import check_apart, load_coco
    from dpvision.dense.detection.evaluation import make_detector, training_crops
    from dpvision.dense.detection.job import DetectionData, DetectionJob, scores_table
    from dpvision.dense.training_loop import checked_steps
    from dpvision.encoders.open import open_encoder, trained_on
    from dpvision.eval.probes.protocol import with_averages
    from dpvision.runs.lineage import image_files
    from dpvision.train.distributed import join, leave

    # Open every encoder and check the output paths before the first is trained, to fail fast.
    images = image_files(train.name, public=public)
    opened = [
        trained_on(open_encoder(spec, ema=own), images)
        for spec, own in zip(encoders, with_averages(encoders, ema), strict=True)
    ]
    private = not public or any(encoder.confidential for encoder in opened)
    for encoder in opened:
        make_detector(encoder, detection, 1)
    check_places(out, sheet, work, private)
    group = join("auto")
    try:
        with Console(stderr=True, quiet=not group.is_main).status("reading") as status:
            data = DetectionData(
                load_coco(train, train_images, allow_missing=allow_missing),
                load_coco(test, test_images, allow_missing=allow_missing),
            )
            check_apart(data.train, data.test)
            job = DetectionJob(
                data, detection, hardware, group, work, recompute, sheet, status.update
            )
            checked_steps(
                detection.training(),
                len(training_crops(data.train, opened[0], detection)),
                group.world_size,
            )
            if dry_run:
                facts = job.dry(list(encoders), opened)
                if group.is_main:
                    emit(
                        {**facts, "notes": list(data.notes)},
                        json,
                        "\n".join([pairs(facts), *data.notes, "Nothing was trained (--dry-run)."]),
                    )
                return
            found: list[Score] = []
            written: list[Path] = []
            for i, (spec, encoder) in enumerate(zip(encoders, opened, strict=True)):
                visibility: Visibility = (
                    "private" if not public or encoder.confidential else "public"
                )
                own = job.run(spec, encoder, visibility, i + 1 if len(encoders) > 1 else 0)
                if group.is_main and run_base(Path(spec)) is not None:
                    written += write_scores(
                        spec, own, train_data=data.train.name, test_data=data.test.name
                    )
                found += [replace(score, name=spec) for score in own] if len(encoders) > 1 else own
    finally:
        leave()
    if not group.is_main:
        return
    if out is not None:
        stores = {"train_data": data.train.name, "test_data": data.test.name}
        written.append(merge_entries(out, [score.to_dict() | stores for score in found]))
    text = "\n".join([scores_table(found, data), *data.notes])
    emit_scores(found, text, written, show_confidential, json, notes=list(data.notes))
