"""``dpvision demo --data``: the classifier on images of the user's own. They are private, and so is
every score on them.
"""

import time
from pathlib import Path

from dpvision.cli.demo_steps import CLASSIFIER_EPSILON, Place, fit_classifier
from dpvision.cli.output import emit, private_scores
from dpvision.cli.scores import scores_table
from dpvision.data.declared import rounded_up
from dpvision.data.import_labels import ClassRule, read_rule
from dpvision.data.importer import import_source
from dpvision.data.open import open_store
from dpvision.data.split import split_store
from dpvision.data.store import Store
from dpvision.errors import OPERATOR_ONLY, DataError
from dpvision.report.operator_page import make_operator_page
from dpvision.report.page import make_report

_TRAIN_SHARE = 0.8


def run_on_images(data: Path, classes: Path, place: Place, show_confidential: bool) -> None:
    """What ``dpvision demo --data`` does: a private classifier, and its scores on a fifth of the
    images.
    """
    start = time.monotonic()
    place.say("1/2  Images")
    declared = read_rule(classes)
    store = _imported(data, declared, place)
    place.say(f"     {OPERATOR_ONLY}{store.num_records:,} private records in {store.path}")
    place.say(
        "2/2  A private classifier, from non-private features; a fifth of the images is held out"
    )
    store, test = _split(store)
    place.say(
        "     Each repetition of this command is charged to these images again; dpvision ledger "
        f"{store.path} shows the total."
    )
    root, scores = fit_classifier(
        place, store, rounded_up(store.num_records), len(declared.declared or ()), test
    )
    report, operator_page = (
        make_report(root, store_dir=store.path, tuning="none"),
        make_operator_page(root, store.path, test_store=test.path),
    )
    place.say(private_scores(scores_table(scores), [str(operator_page)], show_confidential))
    minutes = (time.monotonic() - start) / 60
    found = {
        "run": str(root),
        "epsilon": CLASSIFIER_EPSILON,
        "report": str(report),
        "operator_page": str(operator_page),
    }
    lines = [
        f"Done in {minutes:.1f} minutes. The page under confidential/ shows private images and "
        "scores and must not leave:"
    ]
    lines += [f"  {page}" for page in (report, operator_page)]
    lines.append(
        f"Then: dpvision ledger {store.path}   docs/adapt.md: more private images, pretrained "
        "weights, another epsilon"
    )
    emit({"classifier": found, "seconds": 60 * minutes}, place.json, "\n".join(lines))


def _imported(data: Path, declared: ClassRule, place: Place) -> Store:
    folder = place.stores / f"demo-{data.resolve().stem}"
    store = open_store(folder) if folder.exists() else import_source(data, folder, classes=declared)
    if tuple(store.label_names or ()) != declared.declared:
        raise DataError(
            f"demo: {folder} was imported with other classes; expected those of --classes. "
            "Remove it, or use another --stores."
        )
    return store


def _split(store: Store) -> tuple[Store, Store]:
    """Four fifths to train on and the rest to test on; people are not cut in two."""
    one, two = (store.path.with_name(f"{store.path.name}-{part}") for part in ("train", "test"))
    return (
        (open_store(one), open_store(two))
        if one.exists() and two.exists()
        else split_store(store.path, one, two, _TRAIN_SHARE)
    )
