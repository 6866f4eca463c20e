"""Classify images with a trained classifier.

    for one in dpvision.predict("runs/first", ["photos"]):
        print(one.name, one.classes, one.problem)

Legend: B images of a batch, K classes, C channels, H height, W width.
"""

import contextlib
import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpvision.data.decode import BadImage, decode
from dpvision.data.image_files import ImageFile, find_images
from dpvision.data.ordered import ordered_map
from dpvision.encoders.classifier import ImageClassifier, load_classifier
from dpvision.errors import ConfigError
from dpvision.files import writing_text

PASS = 32
"""Images of a forward pass: those of ``dpvision adapt`` with a network on a CPU."""
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


class Prediction(NamedTuple):
    """Classes of one image, or the problem with it."""

    name: str
    """The image's path; in stores, tars and parquet files its key; in a folder FOLDER/KEY."""
    classes: tuple[str, ...] = ()
    """The most probable class; for a multi-label run all classes above their thresholds, in the
    order of ``ImageClassifier.class_names``.
    """
    probabilities: tuple[float, ...] = ()
    """Of each class of ``ImageClassifier.class_names``; empty if ``problem`` is set."""
    problem: str | None = None
    """"not an image", "damaged" and the like; "scores not finite" of a run that diverged."""
    person: str | None = None
    """The person that the image shows, if known (``ImageFile.person``)."""


class PersonPrediction(NamedTuple):
    """Classes of one person."""

    prediction: Prediction
    """Under the person's name."""
    images: int
    """Number of images that it is from."""
    first_image: str
    """Name of the person's first image, by which the source tells who it is."""


class Persons:
    """Predictions of persons: from the mean, over a person's images, of the probability of each
    class; of a multi-label run from the highest, since a person has what any image shows. Images
    with a problem do not count.

    Args:
        classifier: decides from these, as for an image.
    """

    def __init__(self, classifier: ImageClassifier) -> None:
        self._classifier = classifier
        self.rule = "highest" if classifier.multi_label else "mean"
        """str: how the probabilities of a person's images become the person's."""
        self.without = 0
        """int: images without a person, and without a problem."""
        self._found: dict[str, tuple[np.ndarray, int, str]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(self, one: Prediction) -> None:
        """Add an image; one without a person is only counted."""
        if one.person is None:
            self.without += one.problem is None
            return
        nothing = np.zeros(len(self._classifier.class_names)), 0, one.name
        joined_K, num, first = self._found.get(one.person, nothing)
        if one.problem is None:
            join = np.maximum if self.rule == "highest" else np.add
            joined_K, num = join(joined_K, one.probabilities), num + 1
        self._found[one.person] = joined_K, num, first

    def predictions(self) -> Iterator[PersonPrediction]:
        """Yield the prediction of each person, in the order of their first images."""
        for name, (joined_K, num, first) in self._found.items():
            made = Prediction(name, problem="no readable image")
            if num:
                probability_K = joined_K if self.rule == "highest" else joined_K / num
                made = _prediction(self._classifier, name, torch.from_numpy(probability_K))
            yield PersonPrediction(made._replace(person=name), num, first)


def predict(
    run_or_classifier: str | Path | ImageClassifier,
    images: str | Path | Sequence[str | Path],
    *,
    batch_size: int = PASS,
    workers: int = 2,
    unit_from: str | None = None,
) -> list[Prediction]:
    """Classify images in files, folders, tars, parquet files or stores; one prediction for each, in
    order. Also available as ``dpvision.predict``.

    Predictions on private images are private, whatever guarantee the weights have.

    Args:
        run_or_classifier: run folder, or what ``load_classifier`` returned.
        batch_size, workers: as for ``predict_files``.
        unit_from: as for ``data.image_files.find_images``; ``Persons`` has predictions of persons.

    Raises:
        ConfigError, CheckpointError: as ``load_classifier``.
        DataError: as ``data.image_files.find_images``, or persons spelled in several ways.
    """
    classifier = (
        run_or_classifier
        if isinstance(run_or_classifier, ImageClassifier)
        else load_classifier(run_or_classifier)
    )
    places = [images] if isinstance(images, str | Path) else images
    found = find_images(
        places,
        "predict",
        "classifier",
        workers=workers,
        window=classifier.window,
        unit_from=unit_from,
    )
    made = list(predict_files(classifier, found.samples, batch_size=batch_size, workers=workers))
    found.check_persons("predict")
    return made


def predict_files(
    classifier: ImageClassifier,
    files: Iterable[ImageFile],
    *,
    batch_size: int = PASS,
    workers: int = 2,
) -> Iterator[Prediction]:
    """Yield the prediction of each file, in order.

    Every forward pass has ``batch_size`` images, the last one padded, so that an image's
    probabilities do not depend on the number of images. With the images per pass of ``dpvision
    adapt`` its features have the bits that a head of float32 features was trained on.

    Args:
        workers: threads that read images, at least 1.

    Raises:
        ConfigError: ``batch_size`` or ``workers`` is below 1.
    """
    if not batch_size >= 1:
        raise ConfigError(f"predict: batch_size={batch_size}; expected at least 1. Use {PASS}.")

    def read(file: ImageFile) -> tuple[ImageFile, np.ndarray | None]:
        if file.problem is not None:
            return file, None
        try:
            pixels_HWC = decode(file.image, window=None if file.stored else classifier.window)
        except BadImage as error:
            return file._replace(problem=error.reason), None
        return file, classifier.preprocess(pixels_HWC)

    opened = ordered_map(read, files, workers=workers, ahead=2 * batch_size)
    while batch := list(islice(opened, batch_size)):
        readable = [x_CHW for _, x_CHW in batch if x_CHW is not None]
        made = iter(_probabilities(classifier, readable, batch_size))
        for file, x_CHW in batch:
            one = (
                Prediction(file.name, problem=file.problem)
                if x_CHW is None
                else _prediction(classifier, file.name, next(made))
            )
            yield one._replace(person=file.person)


@contextlib.contextmanager
def predictions_writer(
    classifier: ImageClassifier, out: Path
) -> Iterator[Callable[[Prediction], None]]:
    """Yield a function that writes a prediction as a row of a CSV file: image, predicted, problem,
    the probability of each class, and for a run with thresholds the decision for each.

    It is written as by ``files.writing_text``. A name that a spreadsheet would read as a formula
    gets an apostrophe in front.

    Raises:
        DataError: the file cannot be written.
    """
    with writing_text(out, "predict", "csv") as file:
        rows = csv.writer(file)
        rows.writerow(("image", *_columns(classifier)))
        yield lambda one: rows.writerow((_text(one.name), *_cells(classifier, one)))


def write_persons(persons: Persons, classifier: ImageClassifier, out: Path) -> None:
    """Write the predictions of persons as rows of a CSV file: person, images, first_image, and the
    other columns of ``predictions_writer``. Raises as it does.
    """
    with writing_text(out, "predict", "csv") as file:
        rows = csv.writer(file)
        rows.writerow(("person", "images", "first_image", *_columns(classifier)))
        for one, num, first in persons.predictions():
            rows.writerow((_text(one.name), num, _text(first), *_cells(classifier, one)))


def _decided(classifier: ImageClassifier) -> tuple[str, ...]:
    decides = classifier.multi_label and classifier.thresholds_K is not None
    return classifier.class_names if decides else ()


def _columns(classifier: ImageClassifier) -> tuple[str, ...]:
    return (
        "predicted",
        "problem",
        *(f"probability:{name}" for name in classifier.class_names),
        *(f"decision:{name}" for name in _decided(classifier)),
    )


def _cells(classifier: ImageClassifier, one: Prediction) -> tuple[str | int, ...]:
    return (
        _text("; ".join(one.classes)),
        one.problem or "",
        *([f"{p:.9g}" for p in one.probabilities] or [""] * len(classifier.class_names)),
        *("" if one.problem else int(name in one.classes) for name in _decided(classifier)),
    )


@torch.inference_mode()
def _probabilities(
    classifier: ImageClassifier, images: Sequence[np.ndarray], batch_size: int
) -> Tensor:
    """Return probabilities, float32 (B, K), on the CPU."""
    if not images:
        return torch.empty(0, len(classifier.class_names))
    x_BCHW = np.zeros((batch_size, *images[0].shape), dtype=np.float32)
    x_BCHW[: len(images)] = images
    device = next(classifier.parameters()).device
    return classifier.probabilities(torch.from_numpy(x_BCHW).to(device))[: len(images)].cpu()


def _prediction(classifier: ImageClassifier, name: str, probability_K: Tensor) -> Prediction:
    if not torch.isfinite(probability_K).all():
        return Prediction(name, problem="scores not finite")
    names, probabilities = classifier.class_names, tuple(probability_K.tolist())
    if not classifier.multi_label:
        return Prediction(name, (names[int(probability_K.argmax())],), probabilities)
    thresholds = classifier.thresholds_K or (1.0,) * len(names)  # no decision without thresholds
    decided = zip(names, probabilities, thresholds, strict=True)
    return Prediction(name, tuple(k for k, p, t in decided if p > t), probabilities)


def _text(value: str) -> str:
    return f"'{value}" if value.startswith(_FORMULA) else value
