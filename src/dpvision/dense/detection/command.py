"""``dpvision evaluate detection``: how good is a detector that starts from an encoder?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from dpvision.cli.output import emit, pairs, table
from dpvision.cli.scores import Encoders, emit_scores
from dpvision.data.ordered import ordered_map
from dpvision.dense.detection.coco_data import CocoSet, check_apart, load_coco
from dpvision.dense.detection.detector import Detector, detection_loss
from dpvision.dense.detection.evaluation import (
    DetectionSettings,
    Say,
    Visibility,
    detect,
    detection_scores,
    make_detector,
    train_detector,
    training_crops,
)
from dpvision.dense.detection.sheet import detection_sheet
from dpvision.dense.output_places import check_places, folder_name
from dpvision.dense.sheet_file import save_sheet
from dpvision.dense.training_loop import DenseHardware, checked_steps, seconds_a_step
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.open import open_encoder, trained_on
from dpvision.errors import ConfigError
from dpvision.eval.probes.protocol import is_run
from dpvision.eval.score import Score
from dpvision.eval.score_file import merge_entries, write_scores
from dpvision.runs.folder import run_base
from dpvision.runs.lineage import image_files
from dpvision.train.distributed import Group, join, leave

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
    it reads all pictures, counts, and says how long a step takes here. Smaller:

      --detection.epochs 12 --detection.image-size 512 --detection.batch-size 16 --hardware.physical-batch-size 4

    Stopped, a training with --work goes on where it was. On eight GPUs: torchrun --nproc-per-node 8 -m dpvision evaluate detection ...
    This is training without privacy, on pictures that need none: it says how good the encoder is. docs/detection.md has the settings.

    Args:
        encoders: What to score; each gets a detector of its own.
        train: COCO's annotations of the pictures to learn from (instances_*.json).
        train_images: Folder of these pictures.
        test: Annotations of the pictures to score on, with the same classes.
        test_images: Folder of these pictures.
        public: The pictures need no protection (COCO's do not). Else scores and pictures go under confidential/.
        work: Folder for the training's state, a folder in it for each encoder. Of private pictures under confidential too.
        out: Write all scores here too. Scores of private pictures need a path with a folder called confidential in it.
        picture: Draw some test pictures here (PNG), truth beside answers; of several encoders, NAME-1.png, NAME-2.png, ...
        allow_missing: Leave out pictures whose file is missing, and say how many.
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
                f"evaluate: no {flag}; expected COCO's annotations and pictures to learn from and to score on. Name it, as in "
                "`dpvision evaluate detection --help`."
            )
    assert train is not None and train_images is not None and test is not None and test_images is not None
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
            data = _Data(
                load_coco(train, train_images, allow_missing=allow_missing), load_coco(test, test_images, allow_missing=allow_missing)
            )
            check_apart(data.train, data.test)
            job = _Job(data, detection, hardware, group, work, recompute, picture, status.update)
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
    text = "\n".join([_table(found, data), *data.notes])
    emit_scores(found, text, written, show_confidential, json, notes=list(data.notes))


@dataclass(frozen=True)
class _Data:
    train: CocoSet
    test: CocoSet

    @property
    def notes(self) -> tuple[str, ...]:
        """What counts for less than all, or for nothing."""
        made = [f"{part.name}: {note}" for part in (self.train, self.test) for note in part.notes]
        idle = sum(not picture.learned for picture in self.train.pictures)
        bare = sum(thing.outline is None for picture in self.train.pictures for thing in picture.learned)
        short = sum(not picture.has_masks for picture in self.test.pictures)
        for count, text in (
            (idle, f"{self.train.name}: {idle:,} pictures without objects are not trained on"),
            (bare, f"{self.train.name}: {bare:,} objects have a box and no mask: they teach boxes only"),
            (short, f"{self.test.name}: {short:,} pictures have objects without mask and do not count for AP mask"),
        ):
            if count:
                made.append(text)
        return tuple(made)


@dataclass(frozen=True)
class _Job:
    data: _Data
    settings: DetectionSettings
    hardware: DenseHardware
    group: Group
    work: Path | None
    recompute: bool
    picture: Path | None
    say: Say

    def model(self, encoder: Encoder) -> Detector:
        classes = len(self.data.train.classes)
        return make_detector(encoder, self.settings, classes, recompute=self.recompute, device=self.group.device)

    def run(self, spec: str, encoder: Encoder, visibility: Visibility, number: int) -> list[Score]:
        """Scores of one encoder's detector; on every rank, with intervals on rank 0 only."""

        def say(text: str) -> None:
            self.say(f"{spec}: {text}")

        model = self.model(encoder)
        work = None if self.work is None else self.work / folder_name(spec)
        train_detector(model, encoder, self.data.train, self.settings, self.hardware, work=work, group=self.group, progress=say)
        test = self.data.test
        found = detect(model, encoder, test.pictures, self.settings, self.hardware, group=self.group, progress=say)
        if not self.group.is_main:
            return []
        if self.picture is not None:
            name = self.picture if not number else self.picture.with_stem(f"{self.picture.stem}-{number}")
            save_sheet(detection_sheet(test, found), name)
        return detection_scores(encoder.name, test, found, self.settings, self.hardware, visibility=visibility, progress=say)

    def dry(self, specs: Sequence[str], opened: Sequence[Encoder]) -> dict[str, object]:
        """What a run would do; every picture is read once."""
        everything = [*self.data.train.pictures, *self.data.test.pictures]
        read = ordered_map(lambda p: p.read().shape, everything, workers=self.hardware.workers, ahead=4 * self.hardware.workers)
        for done, _ in enumerate(read):
            if done % 100 == 0:
                self.say(f"read {done:,} of {len(everything):,} pictures")
        crops = training_crops(self.data.train, opened[0], self.settings)
        training = self.settings.training()
        self.say("timing a step")
        model = self.model(opened[0])
        seconds = seconds_a_step(model, crops, detection_loss, training, self.hardware) / self.group.world_size
        steps = training.steps(len(crops))
        return {
            "encoders": ", ".join(specs),
            "training pictures with objects": len(crops),
            "test pictures": len(self.data.test.pictures),
            "classes": len(self.data.train.classes),
            "parameters": sum(p.numel() for p in model.parameters()),
            "steps for each encoder": steps,
            "seconds a step here": seconds,
            "steps a day": 86_400 / seconds,
            "days for each encoder": steps * seconds / 86_400,
            "settings": self.settings.words(self.hardware),
        }


def _table(scores: Sequence[Score], data: _Data) -> str:
    rows = []
    for score in scores:
        rows.append((score.name, score.protocol.rpartition(", ")[2], f"{100 * score.value:.1f}", _interval(score), score.n))
    title = f"{data.test.name}, trained on {data.train.name}, {scores[0].visibility}" if scores else data.test.name
    words = scores[0].protocol.rpartition(", ")[0] if scores else ""
    return table(title, ("encoder", "measure", "score", "95% over test pictures", "pictures"), rows) + f"\n{words}"


def _interval(score: Score) -> str:
    return f"{100 * score.low:.1f} to {100 * score.high:.1f}" if score.low < score.high else "-"
