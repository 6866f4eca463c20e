"""One job for detection and segmentation: train a copy of each encoder on labelled images, score it
on others, write scores and contact sheets.

A ``DenseTask`` (``detection.Detection``, ``segmentation.Segmentation``) is what a task adds to the
job: its data, network, views, loss and measures.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from dpvision.encoders.encoder import Encoder
from dpvision.encoders.open import open_encoder, trained_on
from dpvision.errors import ConfigError
from dpvision.eval.dense.dense_vit import DenseViT, layer_decay_groups, plain_vit
from dpvision.eval.dense.settings import DenseHardware, DenseOptions, TaskSettings
from dpvision.eval.dense.training_loop import (
    Images,
    Say,
    checked_steps,
    fit,
    seconds_a_step,
    synchronised,
)
from dpvision.eval.score import Score, Visibility
from dpvision.eval.score_file import check_out, merge_entries, write_scores
from dpvision.eval.scored_run import with_averages
from dpvision.runs.folder import run_base
from dpvision.runs.lineage import image_files
from dpvision.train.distributed import Group


class LabelledImages(Protocol):
    """The training or the test images of a task."""

    @property
    def name(self) -> str:
        """Name in files of scores."""

    @property
    def num_images(self) -> int: ...

    @property
    def num_classes(self) -> int: ...


@dataclass(frozen=True)
class Measure:
    """One measure of a trained network: a value in [0, 1] with its 95% interval over images."""

    name: str
    value: float
    low: float
    high: float
    chance: float
    """The best score without looking at the images."""
    num_images: int
    """Number of test images that count."""


@dataclass(frozen=True)
class Scored:
    """Scores of one trained network."""

    measures: list[Measure]
    predictions: list[Any] = field(default_factory=list)
    """For the test images of the contact sheet (``DenseTask.draw``)."""
    entries: dict[str, Any] = field(default_factory=dict)
    """Further results, ready for JSON."""


class DenseTask(ABC):
    """A task with its data and settings: a frozen dataclass."""

    train: LabelledImages
    test: LabelledImages
    settings: TaskSettings
    hardware: DenseHardware

    @property
    def num_trained(self) -> int:
        """Number of training images that are trained on."""
        return self.train.num_images

    @property
    @abstractmethod
    def notes(self) -> list[str]:
        """Notes on what is left out or may be wrong, one per line."""

    @abstractmethod
    def make(self, encoder: Encoder) -> nn.Module:
        """Make a new network on a trainable copy of the encoder, on the CPU: a function of the
        encoder's weights and the seed.

        Raises:
            ConfigError: the encoder is not a plain vision transformer, or its patches do not tile
                the task's images.
        """

    @abstractmethod
    def images(self, encoder: Encoder) -> Images[Any]:
        """Return the training images under the task's augmentation."""

    @abstractmethod
    def loss(self, model: nn.Module, examples: list[Any]) -> Tensor:
        """Return the mean loss of the examples of one forward pass."""

    @abstractmethod
    def about(self, encoder: Encoder) -> str:
        """Return a line on data and settings that a checkpoint must match to be resumed."""

    @abstractmethod
    def protocol(self, measure: str) -> str:
        """Return the protocol of a measure as text for scores."""

    @abstractmethod
    def score(self, model: nn.Module, encoder: Encoder, group: Group, say: Say) -> Scored | None:
        """Score a trained network: every rank predicts its part, and rank 0 returns the result."""

    @abstractmethod
    def draw(self, path: Path, predictions: dict[str, list[Any]]) -> list[Path]:
        """Write contact sheets of ``Scored.predictions`` by encoder, and return their files."""

    def look(self, say: Say) -> None:  # noqa: B027 (a task may read all images when it is opened)
        """Read every image once, for a dry run. Raises DataError for one that cannot be read."""

    def check(self, encoder: Encoder, group: Group) -> int:
        """Return the number of steps. Raises ConfigError for an encoder, or a number of processes,
        that does not fit the settings.
        """
        self.hardware.autocast(group.device)
        num_images = len(self.images(encoder))
        return checked_steps(self.settings.training(), num_images, group.world_size)


@dataclass(frozen=True)
class DenseResult:
    """What a job prints: a table with lines below it, and the same for JSON."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    lines: list[str]
    entries: dict[str, Any]
    scores: list[Score] = field(default_factory=list)
    """Empty for a dry run."""
    written: list[Path] = field(default_factory=list)


def evaluate_dense(
    specs: Sequence[str],
    source: str,
    settings: TaskSettings,
    open_task: Callable[[Say], DenseTask],
    options: DenseOptions,
    *,
    group: Group,
    say: Say,
) -> DenseResult | None:
    """Train and score a network on each encoder in sequence. A run's scores are written as soon as
    it is scored.

    Args:
        specs: encoders, as for ``encoders.open.open_encoder``.
        source: name of the training images, for the lineage of what is trained on them.
        settings: those of the task; checked for every encoder before images are read.
        open_task: reads the data.
        say: called with lines of progress.

    Returns:
        What rank 0 prints; None on other ranks.

    Raises:
        ConfigError: an encoder is not a plain vision transformer, or does not fit the settings; an
            output path cannot be used.
        DataError, CheckpointError: as ``open_task``, ``open_encoder`` and ``train``.
    """
    images = image_files(source, public=options.public)
    encoders = {
        spec: trained_on(open_encoder(spec, ema=own), images)
        for spec, own in zip(specs, with_averages(specs, options.ema), strict=True)
    }
    for encoder in encoders.values():
        settings.check_patch(plain_vit(encoder).cfg.patch_size, encoder.name)
    check_places(options, not options.public or any(e.confidential for e in encoders.values()))
    task = open_task(say)
    steps = {spec: task.check(encoder, group) for spec, encoder in encoders.items()}
    if options.dry_run:
        return _dry_run(task, encoders, steps, group, say)
    stores = {"train_data": task.train.name, "test_data": task.test.name}
    found: dict[str, Scored] = {}
    scores: dict[str, list[Score]] = {}
    written: list[Path] = []
    for spec, encoder in encoders.items():
        scored = _train_and_score(task, spec, encoder, options, group, say)
        if scored is None:
            continue
        private = not options.public or encoder.confidential
        own = _scores(task, encoder.name, scored, "private" if private else "public")
        if run_base(Path(spec)) is not None:
            written += write_scores(spec, own, **stores)
        found[spec] = scored
        scores[spec] = [replace(one, name=spec) for one in own] if len(encoders) > 1 else own
    if not found:
        return None
    flat = [score for own in scores.values() for score in own]
    if options.out is not None:
        written.append(merge_entries(options.out, [score.to_dict() | stores for score in flat]))
    if options.sheet is not None:
        written += task.draw(options.sheet, {spec: s.predictions for spec, s in found.items()})
    return replace(_table(task, found, scores), written=written)


def _train_and_score(
    task: DenseTask, spec: str, encoder: Encoder, options: DenseOptions, group: Group, say: Say
) -> Scored | None:
    def progress(text: str) -> None:
        say(f"{spec}: {text}")

    model = task.make(encoder)
    work = None if options.work is None else options.work / folder_name(spec)
    train(task, model, encoder, work=work, group=group, progress=progress)
    return task.score(model, encoder, group, progress)


def _scores(task: DenseTask, name: str, scored: Scored, visibility: Visibility) -> list[Score]:
    return [
        Score(
            name, m.value, m.low, m.high, m.num_images, m.chance, task.protocol(m.name), visibility
        )
        for m in scored.measures
    ]


def train(
    task: DenseTask,
    model: nn.Module,
    encoder: Encoder,
    *,
    work: Path | None = None,
    group: Group | None = None,
    progress: Say | None = None,
) -> None:
    """Train ``task.make(encoder)`` in place, with rates that fall towards the encoder's input. With
    a ``work`` folder a stopped training resumes. Raises as ``training_loop.fit``.
    """
    group = group or Group(0, 1, next(model.parameters()).device)
    synchronised(model.to(group.device), group)
    [vit] = [part for part in model.modules() if isinstance(part, DenseViT)]
    settings = task.settings
    groups = layer_decay_groups(
        vit,
        model.parameters(),
        learning_rate=settings.learning_rate,
        layer_decay=settings.layer_decay,
        weight_decay=settings.weight_decay,
    )
    fit(
        model,
        task.images(encoder),
        task.loss,
        groups,
        settings.training(),
        task.hardware,
        work=work,
        group=group,
        about=task.about(encoder),
        lineage=encoder.lineage,
        progress=progress,
    )


def _table(
    task: DenseTask, found: dict[str, Scored], scores: dict[str, list[Score]]
) -> DenseResult:
    rows = [
        (
            score.name,
            measure.name,
            f"{score.value:.1%}",
            f"{score.low:.1%} to {score.high:.1%}" if score.low < score.high else "-",
            f"{score.chance:.1%}",
            score.n,
        )
        for spec, own in scores.items()
        for score, measure in zip(own, found[spec].measures, strict=True)
    ]
    flat = [score for own in scores.values() for score in own]
    words = task.settings.words(task.hardware)
    return DenseResult(
        f"{task.test.name}: {task.test.num_images:,} test images, {task.test.num_classes} classes, "
        f"{flat[0].visibility}",
        ("encoder", "measure", "score", "95%", "chance", "images"),
        rows,
        [f"trained on {task.train.name}, {task.num_trained:,} images: {words}", *task.notes],
        {"notes": task.notes}
        | {
            name: {spec: scored.entries[name] for spec, scored in found.items()}
            for name in next(iter(found.values())).entries
        },
        flat,
    )


def _dry_run(
    task: DenseTask,
    encoders: dict[str, Encoder],
    steps: dict[str, int],
    group: Group,
    say: Say,
) -> DenseResult:
    """Read every image, and return the plan with its duration estimated from one pass."""
    task.look(say)
    plans: list[dict[str, Any]] = []
    for spec, encoder in encoders.items():
        say(f"{spec}: measuring one pass")
        model = task.make(encoder).to(group.device)
        images, training = task.images(encoder), task.settings.training()
        seconds = seconds_a_step(model, images, task.loss, training, task.hardware)
        seconds /= group.world_size
        plans.append(
            {
                "encoder": spec,
                "parameters": sum(p.numel() for p in model.parameters()),
                "steps": steps[spec],
                "seconds_per_step": seconds,
                "steps_per_day": 86400 / seconds,
                "days": seconds * steps[spec] / 86400,
            }
        )
    parts = (("train", task.train, task.num_trained), ("test", task.test, task.test.num_images))
    words = task.settings.words(task.hardware)
    return DenseResult(
        f"{task.num_trained:,} training and {task.test.num_images:,} test images, "
        f"{task.train.num_classes} classes; on {group.device}",
        ("encoder", "parameters", "steps", "a step", "steps a day", "days"),
        [
            (
                plan["encoder"],
                plan["parameters"],
                plan["steps"],
                f"{plan['seconds_per_step']:.2f} s",
                round(plan["steps_per_day"]),
                f"{plan['days']:.2f}",
            )
            for plan in plans
        ],
        [f"settings: {words}", *task.notes, "Nothing was trained."],
        {
            "data": {
                which: {"name": part.name, "images": num, "classes": part.num_classes}
                for which, part, num in parts
            },
            "plans": plans,
            "settings": words,
            "notes": task.notes,
        },
    )


def check_places(options: DenseOptions, private: bool) -> None:
    """Refuse unusable output paths before any work is done."""
    if options.out is not None:
        check_out(options.out, private)
    sheet, work = options.sheet, options.work
    for name, place, folder in (
        ("sheet", sheet, None if sheet is None else sheet.parent.resolve()),
        ("work", work, None if work is None else work.resolve()),
    ):
        if private and folder is not None and "confidential" not in folder.parts:
            raise ConfigError(
                f"evaluate: {name}={str(place)!r} depends on private images; expected a folder "
                "called confidential in its path. Use one, or give --public if the images need "
                "no protection."
            )
    if sheet is not None and (
        sheet.suffix != ".png" or sheet.is_dir() or not sheet.absolute().parent.is_dir()
    ):
        raise ConfigError(
            f"evaluate: sheet={str(sheet)!r}; expected a file that ends in .png in an existing "
            "folder. Change --sheet."
        )
    if work is not None and work.exists() and not work.is_dir():
        raise ConfigError(
            f"evaluate: work={str(work)!r}; expected a folder. Choose another --work."
        )


def folder_name(spec: str) -> str:
    """Return a readable folder name for an encoder's checkpoints, unique per encoder."""
    mark = hashlib.sha256(spec.encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', spec).strip('-')[-40:]}-{mark}"
