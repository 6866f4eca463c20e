"""``dpvision demo --data``: the same on images of the user's own. They are private, and so is every score on them."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpvision.cli.demo_steps import Place, fit_classifier, train
from dpvision.cli.output import emit, private_scores
from dpvision.cli.recipe import get_recipe
from dpvision.cli.scores import scores_table
from dpvision.config import RunConfig
from dpvision.data.declared import rounded_up
from dpvision.data.import_labels import ClassRule, read_classes
from dpvision.data.importer import import_source
from dpvision.data.open import open_store
from dpvision.data.split import split_store
from dpvision.data.store import Store
from dpvision.errors import OPERATOR_ONLY, DataError
from dpvision.privacy.planner import what_if
from dpvision.report.operator_page import make_operator_page
from dpvision.report.page import make_report

_TRAIN_SHARE = 0.8


def run_on_images(data: Path, classes: Path | None, place: Place, show_confidential: bool) -> None:
    """What ``dpvision demo --data`` does: a private classifier where classes are declared, and private pre-training."""
    start, result = time.monotonic(), dict[str, Any]()
    place.say("1/3  Images")
    declared = None if classes is None else read_classes(classes)
    store = _imported(data, declared, place)
    place.say(f"     {OPERATOR_ONLY}{store.num_records:,} private records in {store.path}")
    pages = list[Path]()
    if declared is None:
        place.say("2/3  No classifier: no classes are declared. Name a file with one class a line: --classes FILE")
    else:
        place.say("2/3  A private classifier, from non-private features; a fifth of the images is held out")
        store, test = _split(store)
        root, scores = fit_classifier(place, store, rounded_up(store.num_records), len(declared), test)
        pages += [make_report(root, store_dir=store.path, tuning="none"), make_operator_page(root, store.path, test_store=test.path)]
        place.say(private_scores(scores_table(scores), [str(pages[-1])], show_confidential))
        result["classifier"] = {"run": str(root), "report": str(pages[-2]), "operator_page": str(pages[-1])}
    place.say("3/3  Private pre-training: a small masked autoencoder")
    config, root = _fitted(get_recipe("demo.images"), store), place.free_run("demo-images")
    if word := what_if(config.privacy)["advice"]:
        place.say(f"     {word}")
    epsilon = train(config, root, place)
    pages += [make_report(root, store_dir=store.path, tuning="none"), make_operator_page(root, store.path)]
    minutes = (time.monotonic() - start) / 60
    result["pre-training"] = {"run": str(root), "epsilon": epsilon, "report": str(pages[-2]), "operator_page": str(pages[-1])}
    lines = [f"Done in {minutes:.1f} minutes. Pages under confidential/ show private images and scores and must not leave:"]
    lines += [f"  {page}" for page in pages]
    lines.append(f"Then: dpvision ledger {store.path}   docs/adapt.md: more private images, pretrained weights, another epsilon")
    emit(result | {"seconds": 60 * minutes}, place.json, "\n".join(lines))


def _imported(data: Path, declared: tuple[str, ...] | None, place: Place) -> Store:
    folder = place.stores / f"demo-{data.resolve().stem}"
    rule = ClassRule(unknown="unlabelled") if declared is None else ClassRule(declared)
    store = open_store(folder) if folder.exists() else import_source(data, folder, classes=rule)
    if declared is not None and tuple(store.label_names or ()) != declared:
        raise DataError(f"demo: {folder} was imported with other classes; expected those of --classes. Remove it, or use another --stores.")
    return store


def _split(store: Store) -> tuple[Store, Store]:
    """Four fifths to train on and the rest to test on; people are not cut in two."""
    one, two = (store.path.with_name(f"{store.path.name}-{part}") for part in ("train", "test"))
    return (open_store(one), open_store(two)) if one.exists() and two.exists() else split_store(store.path, one, two, _TRAIN_SHARE)


def _fitted(config: RunConfig, store: Store) -> RunConfig:
    """The recipe's settings on a store of another size: the same number of steps, on a quarter of the records each at most."""
    num = rounded_up(store.num_records)
    privacy = replace(config.privacy, dataset_size=num, expected_batch_size=min(config.privacy.expected_batch_size, max(1, num // 4)))
    return replace(config, privacy=privacy, data=replace(config.data, store=str(store.path)))
