"""Train and score detectors of several encoders in sequence."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dpvision.cli.output import table
from dpvision.data.ordered import ordered_map
from dpvision.dense.detection.coco_data import CocoSet
from dpvision.dense.detection.detector import Detector, detection_loss
from dpvision.dense.detection.evaluation import (
    Say,
    Visibility,
    detect,
    detection_scores,
    make_detector,
    train_detector,
    training_crops,
)
from dpvision.dense.detection.settings import DetectionSettings
from dpvision.dense.detection.sheet import detection_sheet
from dpvision.dense.output_places import folder_name
from dpvision.dense.sheet_file import save_sheet
from dpvision.dense.training_loop import seconds_a_step
from dpvision.dense.training_settings import DenseHardware
from dpvision.encoders.encoder import Encoder
from dpvision.eval.score import Score
from dpvision.train.distributed import Group


@dataclass(frozen=True)
class DetectionData:
    train: CocoSet
    test: CocoSet

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on images and objects that are left out or count only partly."""
        made = [f"{part.name}: {note}" for part in (self.train, self.test) for note in part.notes]
        idle = sum(not image.learned for image in self.train.images)
        bare = sum(thing.outline is None for image in self.train.images for thing in image.learned)
        short = sum(not image.has_masks for image in self.test.images)
        for count, text in (
            (idle, f"{self.train.name}: {idle:,} images without objects are not trained on"),
            (
                bare,
                f"{self.train.name}: {bare:,} objects have a box and no mask: they train boxes "
                "only",
            ),
            (
                short,
                f"{self.test.name}: {short:,} images have objects without mask and do not count "
                "for AP mask",
            ),
        ):
            if count:
                made.append(text)
        return tuple(made)


@dataclass(frozen=True)
class DetectionJob:
    data: DetectionData
    settings: DetectionSettings
    hardware: DenseHardware
    group: Group
    work: Path | None
    recompute: bool
    sheet: Path | None
    say: Say

    def model(self, encoder: Encoder) -> Detector:
        classes = len(self.data.train.classes)
        return make_detector(
            encoder, self.settings, classes, recompute=self.recompute, device=self.group.device
        )

    def run(self, spec: str, encoder: Encoder, visibility: Visibility, number: int) -> list[Score]:
        """Train and score one encoder's detector on all ranks; only rank 0 returns scores."""

        def say(text: str) -> None:
            self.say(f"{spec}: {text}")

        model = self.model(encoder)
        work = None if self.work is None else self.work / folder_name(spec)
        train_detector(
            model,
            encoder,
            self.data.train,
            self.settings,
            self.hardware,
            work=work,
            group=self.group,
            progress=say,
        )
        test = self.data.test
        found = detect(
            model,
            encoder,
            test.images,
            self.settings,
            self.hardware,
            group=self.group,
            progress=say,
        )
        if not self.group.is_main:
            return []
        if self.sheet is not None:
            name = self.sheet if not number else self.sheet.with_stem(f"{self.sheet.stem}-{number}")
            save_sheet(detection_sheet(test, found), name)
        return detection_scores(
            encoder.name,
            test,
            found,
            self.settings,
            self.hardware,
            visibility=visibility,
            progress=say,
        )

    def dry(self, specs: Sequence[str], opened: Sequence[Encoder]) -> dict[str, object]:
        """Return the facts of a dry run, after reading every image once and timing a step."""
        everything = [*self.data.train.images, *self.data.test.images]
        read = ordered_map(
            lambda p: p.read().shape,
            everything,
            workers=self.hardware.workers,
            ahead=4 * self.hardware.workers,
        )
        for done, _ in enumerate(read):
            if done % 100 == 0:
                self.say(f"read {done:,} of {len(everything):,} images")
        crops = training_crops(self.data.train, opened[0], self.settings)
        training = self.settings.training()
        self.say("timing a step")
        model = self.model(opened[0])
        seconds = (
            seconds_a_step(model, crops, detection_loss, training, self.hardware)
            / self.group.world_size
        )
        steps = training.steps(len(crops))
        return {
            "encoders": ", ".join(specs),
            "training images with objects": len(crops),
            "test images": len(self.data.test.images),
            "classes": len(self.data.train.classes),
            "parameters": sum(p.numel() for p in model.parameters()),
            "steps for each encoder": steps,
            "seconds a step here": seconds,
            "steps a day": 86_400 / seconds,
            "days for each encoder": steps * seconds / 86_400,
            "settings": self.settings.words(self.hardware),
        }


def scores_table(scores: Sequence[Score], data: DetectionData) -> str:
    rows = []
    for score in scores:
        rows.append(
            (
                score.name,
                score.protocol.rpartition(", ")[2],
                f"{100 * score.value:.1f}",
                _interval(score),
                score.n,
            )
        )
    title = (
        f"{data.test.name}, trained on {data.train.name}, {scores[0].visibility}"
        if scores
        else data.test.name
    )
    words = scores[0].protocol.rpartition(", ")[0] if scores else ""
    return (
        table(title, ("encoder", "measure", "score", "95% over test images", "images"), rows)
        + f"\n{words}"
    )


def _interval(score: Score) -> str:
    return f"{100 * score.low:.1f} to {100 * score.high:.1f}" if score.low < score.high else "-"
