"""``dpvision predict``: classify images."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dpvision.cli import printable
from dpvision.cli.each_image import Release, for_each
from dpvision.cli.output import FLAT, Images, Reading, RunPath, emit, parse
from dpvision.cli.paths import check_run
from dpvision.errors import OPERATOR_ONLY, DataError
from dpvision.files import check_out
from dpvision.privacy.printed import count

if TYPE_CHECKING:
    from dpvision.encoders.classifier import ImageClassifier
    from dpvision.encoders.predict import Prediction


def predict(
    run: RunPath,
    images: Images,
    csv: Path | None = None,
    encoder: str | None = None,
    ema: bool = False,
    unit_from: str | None = None,
    reading: Annotated[Reading, FLAT] = Reading(32),
    release: Annotated[Release, FLAT] = Release(),
    json: bool = False,
) -> None:
    """Classify images with a head of `dpvision adapt` or a classifier of `dpvision train`.

    Each line is an image's name, its class and the probability; for a multi-label run all classes
    above their thresholds. Unreadable files are counted and named, in the CSV file too; the exit
    status is 2 only if no image could be classified. Predictions on private images are private: the
    guarantee covers the weights, not their output on an image. A file of them needs a folder named
    confidential in its path. Images outside a store count as private.

      dpvision predict runs/first photos/cat.jpg photos/dog.png
      dpvision predict runs/first photos --csv confidential/photos.csv
      dpvision predict runs/first stores/test --csv test.csv
      dpvision predict runs/first scans --unit-from patient --csv confidential/scans.csv

    Args:
        run: Run folder of a classifier, or one of its checkpoints.
        images: Image files, folders, stores, .tar or .parquet files.
        csv: Write a table to this file instead: image, predicted, problem, the probability of each
            class, and for a multi-label run the decision for each. A name that a spreadsheet would
            read as a formula gets an apostrophe in front. Where persons are known, NAME-persons.csv
            beside it has a row for each: the mean over their images of each class's probability, or
            for a multi-label run the highest.
        encoder: The head's encoder, as for `dpvision adapt --encoder`, if it has moved since the
            run.
        ema: Use the averaged weights.
        unit_from: Field that names the person of an image outside a store, as for `dpvision data
            import`; of DICOM the patient without it. A store has its persons.
        reading: How images are read. The last digits of a probability may depend on the images in
            one forward pass.
        release: Where predictions may be written.
        json: Print JSON.
    """
    reading.check("predict")
    if csv is not None:
        check_out(csv, "predict", ".csv", name="csv")
    check_run(run)
    import torch

    from dpvision.data.image_files import find_images
    from dpvision.encoders.classifier import load_classifier
    from dpvision.encoders.predict import (
        Persons,
        predict_files,
        predictions_writer,
        write_persons,
    )

    classifier = load_classifier(
        run, encoder=encoder, ema=ema, device="cuda" if torch.cuda.is_available() else "cpu"
    )
    found = find_images(
        images,
        "predict",
        "classifier",
        workers=reading.workers,
        window=classifier.window,
        unit_from=unit_from,
    )
    private = classifier.confidential or found.visibility == "private"
    release.check(csv, "predict", "predictions on private images", private, name="csv")
    persons = Persons(classifier)

    def remembered() -> Iterator["Prediction"]:
        read = False
        for one in predict_files(
            classifier, found.samples, batch_size=reading.batch_size, workers=reading.workers
        ):
            persons.add(one)
            read = read or one.problem is None
            yield one
        if read and unit_from is not None and not persons:
            raise DataError(
                f"predict: --unit-from {unit_from}: no image has it; expected the field that names "
                "the person: a column of the table, or parent for the folder's name. Correct it, "
                "or drop it."
            )
        if csv is not None or json or unit_from is not None:  # otherwise no person is shown
            found.check_persons("predict")

    done = for_each(
        remembered(),
        csv,
        partial(predictions_writer, classifier),
        partial(_print_line, classifier=classifier),
        command="predict",
        what="predictions",
        total=found.total,
        private=private,
        json=json,
    )
    if csv is not None:
        of_persons = csv.with_name(f"{csv.stem}-persons.csv")
        if persons:
            write_persons(persons, classifier, of_persons)
        else:  # one of an earlier run is of other images than the new table
            of_persons.unlink(missing_ok=True)
    if json:
        result: dict[str, Any] = {
            "predictions": [_plain(one, classifier) for one in done.made],
            "unreadable": [{"image": one.name, "problem": one.problem} for one in done.unreadable],
            "temperature": classifier.temperature,
            "thresholds": classifier.thresholds_K,
            "visibility": "private" if private else "public",
            "out": None if csv is None else str(csv),
        }
        if persons:
            result["persons"] = [
                {
                    "person": one.name,
                    "images": num,
                    "first_image": first,
                    "problem": one.problem,
                    "classes": list(one.classes),
                    "probabilities": dict(
                        zip(classifier.class_names, one.probabilities, strict=False)
                    ),
                }
                for one, num, first in persons.predictions()
            ]
            result["images_without_person"] = persons.without
        emit(result, True, "")
    elif csv is not None:
        whose = OPERATOR_ONLY if private else ""
        lines = [f"{whose}predictions for {done.num_done:,} images in {csv}"]
        if persons:
            lines.append(
                f"{whose}and for {len(persons):,} persons in {of_persons}, each with the "
                f"{persons.rule} probability of their images"
            )
            if persons.without:
                lines.append(f"{whose}{count(persons.without, 'image')} without a person")
        if classifier.multi_label and classifier.thresholds_K is None:
            lines.append(
                "The run has no thresholds, so no class is predicted: make them with dpvision "
                "calibrate RUN STORE."
            )
        if private:
            lines.append(
                "These are predictions on private images: keep the file where the images are kept."
            )
        emit({}, False, "\n".join(lines))


def _plain(one: "Prediction", classifier: "ImageClassifier") -> dict[str, Any]:
    probabilities = dict(zip(classifier.class_names, one.probabilities, strict=True))
    return {"image": one.name, "classes": list(one.classes), "probabilities": probabilities}


def _print_line(one: "Prediction", classifier: "ImageClassifier") -> None:
    if one.problem is not None:
        return
    of_class = dict(zip(classifier.class_names, one.probabilities, strict=True))
    said = ", ".join(f"{k} {of_class[k]:.3f}" for k in one.classes) or "no class"
    print(printable(f"{one.name}: {said}"), flush=True)


run = partial(parse, predict, "predict")
