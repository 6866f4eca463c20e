"""Train and score segmentation networks of several encoders in sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from dpvision.cli.output import emit, shown, table
from dpvision.cli.scores import emit_scores
from dpvision.dense.output_places import folder_name
from dpvision.dense.segmentation.evaluation import (
    Visibility,
    answers,
    make_segmenter,
    pixel_counts,
    segmentation_scores,
    step_seconds,
    train_segmenter,
)
from dpvision.dense.segmentation.mean_iou import class_iou
from dpvision.dense.segmentation.semantic_data import (
    SemanticFolder,
    load_classes,
    open_ade20k,
    open_folder,
)
from dpvision.dense.segmentation.settings import SegmentationSettings
from dpvision.dense.segmentation.sheet import SheetRow, render_sheet
from dpvision.dense.sheet_file import save_sheet
from dpvision.dense.training_loop import Say
from dpvision.dense.training_settings import DenseHardware
from dpvision.encoders.encoder import Encoder
from dpvision.errors import ConfigError
from dpvision.eval.score import Score
from dpvision.eval.score_file import merge_entries, write_scores
from dpvision.runs.folder import run_base
from dpvision.train.distributed import Group


@dataclass
class SegmentationJob:
    """Shared settings and data, and the results of each encoder."""

    train: SemanticFolder
    test: SemanticFolder
    settings: SegmentationSettings
    hardware: DenseHardware
    work: Path | None
    group: Group
    public: bool
    num_shown: int
    scores: dict[str, list[Score]] = field(default_factory=dict)
    iou: dict[str, dict[str, float]] = field(default_factory=dict)
    said: dict[str, list[np.ndarray]] = field(default_factory=dict)

    def run(self, spec: str, encoder: Encoder, say: Say) -> None:
        """Train and score one encoder."""

        def report(text: str) -> None:
            say(f"{spec}: {text}")

        work = None if self.work is None else self.work / folder_name(spec)
        model = make_segmenter(encoder, self.settings, len(self.train.classes.names))
        train_segmenter(
            model,
            encoder,
            self.train,
            self.settings,
            self.hardware,
            work=work,
            group=self.group,
            progress=report,
        )
        count_N3K = pixel_counts(
            model,
            encoder,
            self.test,
            self.settings,
            self.hardware,
            group=self.group,
            progress=report,
        )
        visibility: Visibility = "public" if self.public and not encoder.confidential else "private"
        self.scores[spec] = segmentation_scores(
            encoder.name, count_N3K, self.settings.words(self.hardware), visibility
        )
        iou_K = class_iou(count_N3K.sum(axis=0))
        self.iou[spec] = {
            name: float(v)
            for name, v in zip(self.test.classes.names, iou_K, strict=True)
            if np.isfinite(v)
        }
        if self.num_shown and self.group.is_main:
            self.said[spec] = [
                said for _, said in answers(model, encoder, self.test, self.shown, self.settings)
            ]

    @property
    def shown(self) -> list[int]:
        """Test images of the contact sheet, evenly spread over the folder, so not hand-picked."""
        num = min(self.num_shown, len(self.test))
        return [i * len(self.test) // num for i in range(num)]


def open_folders(
    ade20k: Path | None,
    train: Path | None,
    train_masks: Path | None,
    test: Path | None,
    test_masks: Path | None,
    classes: Path | None,
    ignore_ids: Sequence[int] | None,
    workers: int,
    say: Say,
) -> tuple[SemanticFolder, SemanticFolder]:
    given = {
        "train": train,
        "train-masks": train_masks,
        "test": test,
        "test-masks": test_masks,
        "classes": classes,
    }
    if ade20k is not None:
        extra = [f"--{name}" for name, value in given.items() if value is not None]
        if extra:
            raise ConfigError(
                f"evaluate: --ade20k with {', '.join(extra)}; expected one or the other. Drop one."
            )
        return open_ade20k(ade20k, workers=workers, progress=say)
    if (
        train is None
        or train_masks is None
        or test is None
        or test_masks is None
        or classes is None
    ):
        missing = ", ".join(f"--{name}" for name, value in given.items() if value is None)
        raise ConfigError(
            f"evaluate: {missing} missing; expected --ade20k FOLDER, or images, masks and "
            "classes of both parts. Give them."
        )
    known = load_classes(classes, ignore_ids)
    parts = ((train, train_masks), (test, test_masks))
    first, second = (open_folder(*part, known, workers=workers, progress=say) for part in parts)
    shared = {image.resolve() for image, _ in first.files} & {
        image.resolve() for image, _ in second.files
    }
    if shared:
        got = f"{len(shared):,} images are in both training and test, such as {sorted(shared)[0]}"
        raise ConfigError(f"evaluate: {got}; expected disjoint sets. Split the folders.")
    return first, second


def tell_plan(
    job: SegmentationJob,
    specs: Sequence[str],
    opened: Sequence[Encoder],
    steps: Sequence[int],
    json: bool,
    say: Say,
) -> None:
    """Print the plan, and its duration estimated from one pass."""
    plans: list[dict[str, Any]] = []
    for spec, encoder, num_steps in zip(specs, opened, steps, strict=True):
        say(f"{spec}: measuring one pass")
        model = make_segmenter(encoder, job.settings, len(job.train.classes.names))
        parameters = sum(p.numel() for p in model.parameters())
        seconds = step_seconds(model, encoder, job.train, job.settings, job.hardware, job.group)
        plans.append(
            {
                "encoder": spec,
                "parameters": parameters,
                "steps": num_steps,
                "seconds_per_step": seconds,
                "steps_per_day": 86400 / seconds,
                "days": seconds * num_steps / 86400,
            }
        )
    data = {
        part: {"name": folder.name, "images": len(folder), "classes": len(folder.classes.names)}
        for part, folder in (("train", job.train), ("test", job.test))
    }
    rows = [
        [
            p["encoder"],
            p["parameters"],
            p["steps"],
            f"{p['seconds_per_step']:.2f} s",
            round(p["steps_per_day"]),
            f"{p['days']:.2f}",
        ]
        for p in plans
    ]
    title = (
        f"{len(job.train):,} training and {len(job.test):,} test images, "
        f"{len(job.train.classes.names)} classes; on {job.group.device}"
    )
    columns = ("encoder", "parameters", "steps", "a step", "steps a day", "days")
    notes = [note for note in [job.train.classes.note()] if note]
    text = "\n".join(
        [
            table(title, columns, rows),
            f"settings: {job.settings.words(job.hardware)}",
            *notes,
            "Nothing was trained.",
        ]
    )
    if job.group.is_main:
        emit(
            {
                "data": data,
                "plans": plans,
                "settings": job.settings.words(job.hardware),
                "notes": notes,
            },
            json,
            text,
        )


def tell_scores(
    job: SegmentationJob,
    specs: Sequence[str],
    out: Path | None,
    sheet: Path | None,
    show_confidential: bool,
    json: bool,
) -> None:
    """Print the scores and write them to their files."""
    stores = {"train_data": job.train.name, "test_data": job.test.name}
    written: list[Path] = []
    for spec in specs:
        if run_base(Path(spec)) is not None:
            written += write_scores(spec, job.scores[spec], **stores)
    several = len(specs) > 1
    named = [
        replace(score, name=spec if several and score.name.startswith("encoder") else score.name)
        for spec in specs
        for score in job.scores[spec]
    ]
    if out is not None:
        written.append(merge_entries(out, [score.to_dict() | stores for score in named]))
    if sheet is not None:
        rows = []
        for n, number in enumerate(job.shown):
            labelled = job.test.read(number)
            rows.append(
                SheetRow(
                    labelled.pixels_HWC,
                    labelled.class_HW,
                    tuple(job.said[spec][n] for spec in specs),
                )
            )
        save_sheet(render_sheet(rows, job.test.classes.names, list(specs)), sheet)
        written.append(sheet)
    columns = ("encoder", "measure", "score", "95%", "chance")
    body = [
        (
            s.name,
            s.protocol.split(",")[1].strip(),
            f"{s.value:.1%}",
            f"{s.low:.1%} to {s.high:.1%}",
            f"{s.chance:.1%}",
        )
        for s in named
    ]
    title = (
        f"{job.test.name}: {named[0].n:,} test images, {len(job.test.classes.names)} classes, "
        f"{named[0].visibility}"
    )
    lines = [
        table(title, columns, body),
        f"trained on {job.train.name}, {shown(len(job.train))} images: "
        f"{job.settings.words(job.hardware)}",
    ]
    lines += [note for note in [job.train.classes.note()] if note]
    emit_scores(named, "\n".join(lines), written, show_confidential, json, class_iou=job.iou)
