"""``dpvision evaluate detection``: how good is a detector that starts from an encoder?"""

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
    picture: Path | None = None,
    allow_missing: bool = False,
    recompute: bool = False,
    dry_run: bool = False,
    ema: bool = False,
    detection: DetectionSettings = _DEFAULTS,
    hardware: DenseHardware = _HARDWARE,
    show_confidential: bool = False,
    json: bool = False,
) -> None:
    """Train Mask R-CNN on each encoder, as ViTDet does, and score its boxes and masks: COCO's AP box and AP mask.

    An ENCODER is a run of a vision transformer, random:RUN (its architecture, untrained), vip:FILE or mae:FILE.

      dpvision evaluate detection vip:vip_base.pth --train instances_train2017.json --train-images train2017 --test instances_val2017.json
        --test-images val2017 --public --work work/vip --out scores.json

    The defaults are ViTDet-Base's (Table 4 of the ViP paper): 100 epochs of batch 64 at 1024 px, work for many GPUs. Say --dry-run first:
    it reads all images, counts, and says how long a step takes here. Smaller:

      --detection.epochs 12 --detection.image-size 512 --detection.batch-size 16 --hardware.physical-batch-size 4

    Stopped, a training with --work goes on where it was. On eight GPUs: torchrun --nproc-per-node 8 -m dpvision evaluate detection ...
    This is training without privacy, on images that need none: it says how good the encoder is. docs/detection.md has the settings.

    Args:
        encoders: What to score; each gets a detector of its own.
        train: COCO's annotations of the images to learn from (instances_*.json).
        train_images: Folder of these images.
        test: Annotations of the images to score on, with the same classes.
        test_images: Folder of these images.
        public: The images need no protection (COCO's do not). Else scores and images go under confidential/.
        work: Folder for the training's state, a folder in it for each encoder. Of private images under confidential too.
        out: Write all scores here too. Scores of private images need a path with a folder called confidential in it.
        picture: Draw some test images here (PNG), truth beside answers; of several encoders, NAME-1.png, NAME-2.png, ...
        allow_missing: Leave out images whose file is missing, and say how many.
        recompute: Compute the encoder's blocks again in the backward pass: less memory, a third more time.
        dry_run: Read everything, count, time a step, and train nothing.
        ema: Use the averaged weights of runs.
        detection: What is learned and how.
        hardware: Where and how fast; changes no result beyond rounding and which regions are drawn.
        show_confidential: Print scores on private images also where the output is no terminal, as in a job's log.
        json: Print JSON, with private scores too.
    """
    if not encoders:
        raise ConfigError("evaluate: no encoder; expected one or more. E.g. dpvision evaluate detection vip:FILE --train FILE ...")
    for flag, path in (("--train", train), ("--train-images", train_images), ("--test", test), ("--test-images", test_images)):
        if path is None:
            raise ConfigError(
                f"evaluate: no {flag}; expected COCO's annotations and images to learn from and to score on. Name it, as in "
                "`dpvision evaluate detection --help`."
            )
    assert train is not None and train_images is not None and test is not None and test_images is not None
    from dpvision.dense.detection.coco_data import check_apart, load_coco
    from dpvision.dense.detection.evaluation import make_detector, training_crops
    from dpvision.dense.detection.job import DetectionData, DetectionJob, scores_table
    from dpvision.dense.training_loop import checked_steps
    from dpvision.encoders.open import open_encoder, trained_on
    from dpvision.eval.probes.protocol import is_run
    from dpvision.runs.lineage import image_files
    from dpvision.train.distributed import join, leave

    # Each is opened before the first is trained: a name that is wrong is said at once, and so is a place that is.
    images = image_files(train.name, public=public)
    opened = [trained_on(open_encoder(spec, ema=ema and is_run(spec)), images) for spec in encoders]
    private = not public or any(encoder.confidential for encoder in opened)
    for encoder in opened:
        make_detector(encoder, detection, 1)
    check_places(out, picture, work, private)
    group = join("auto")
    try:
        with Console(stderr=True, quiet=not group.is_main).status("reading") as status:
            data = DetectionData(
                load_coco(train, train_images, allow_missing=allow_missing), load_coco(test, test_images, allow_missing=allow_missing)
            )
            check_apart(data.train, data.test)
            job = DetectionJob(data, detection, hardware, group, work, recompute, picture, status.update)
            checked_steps(detection.training(), len(training_crops(data.train, opened[0], detection)), group.world_size)
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
                visibility: Visibility = "private" if not public or encoder.confidential else "public"
                own = job.run(spec, encoder, visibility, i + 1 if len(encoders) > 1 else 0)
                if group.is_main and run_base(Path(spec)) is not None:
                    written += write_scores(spec, own, train_data=data.train.name, test_data=data.test.name)
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
