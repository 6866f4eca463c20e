"""The commands that are printed after an import, a split and a run: they follow from what the store
holds, and each passes as printed.
"""

from pathlib import Path
from shlex import quote

import numpy as np

from dpvision.config import CaptionerConfig, RunConfig
from dpvision.data.declared import numbers_to_declare
from dpvision.data.rows import AllRows, Rows
from dpvision.data.store import Store
from dpvision.errors import OPERATOR_ONLY, ConfigError, DataError
from dpvision.recipes import get_recipe

_SMALLEST_SHARE = 10
"""Records for each record of a batch, in a store that is smaller than the recipe's."""
_SCENES = 20_000
_ENOUGH_UNITS = 5
"""Units of which the linear probe holds one out."""


def to_train(store: Store) -> list[str]:
    """Return commands that plan a private run on a store's captions, labels or images, with numbers
    to declare; for a public store first how to test on it.

    The numbers are counts of the store, rounded: for the operator, who declares them or better
    ones.
    """
    numbers = numbers_to_declare(store)[0]
    size, rows, place = numbers["dataset_size"], store.eligible_rows(1, 0), quote(str(store.path))
    units = f" --privacy.num-units {numbers['num_units']}" if "num_units" in numbers else ""
    declare = (
        "declare a number of records (public; rounded, or better chosen without counting: "
        "docs/data.md):"
    )
    lines = [f"Next, {declare}"]
    if store.visibility == "public":
        lines = [
            f"Next, to test on these images: --test {place} with dpvision adapt or dpvision "
            f"evaluate{', or dpvision calibrate RUN ' + place if store.has_labels else ''}.",
            f"To train on them, {declare}",
        ]
    captioned, recipe, words = int(store.has_captions(rows).sum()), "vip.micro_random_start", ""
    if captioned == len(rows):
        recipe, file = "dpcap.micro_random_start", quote(f"{store.path}-words.json")
        model, texts = (
            get_recipe(recipe).model,
            f" --store {place}" if store.results_visibility == "public" else "",
        )
        assert isinstance(model, CaptionerConfig)
        lines.append(
            f"  dpvision data tokenizer {file}{texts} --scenes {_SCENES} --vocab-size "
            f"{model.vocab_size}"
        )
        words = f" --data.tokenizer {file}"
    batch = max(1, size // _SMALLEST_SHARE)
    batch_size = (
        f" --privacy.expected-batch-size {batch}"
        if batch < get_recipe(recipe).privacy.expected_batch_size
        else ""
    )
    lines.append(
        f"  dpvision train {recipe} --data {place}{words} --privacy.dataset-size "
        f"{size}{batch_size}{units} --dry-run"
    )
    if store.has_labels:
        lines.append(_to_adapt(store, rows, f"--dataset-size {size}{units}"))
    if words:
        lines.append(
            "The tokenizer knows the words of procedural scenes; add --text FILE, public "
            "captions like yours, if you have some."
        )
    if len(numbers_to_declare(store)) > 1:
        lines.append(
            "These commands take one image of each person. For more, declare other numbers with "
            "--privacy.max-records-per-unit (`dpvision data inspect`)."
        )
    if not words and captioned:
        whose = OPERATOR_ONLY if store.results_visibility == "private" else ""
        lines.append(
            f"{whose}{len(rows) - captioned:,} images have no caption. For a captioner import "
            "with --require-captions, or curate with --steps caption."
        )
    return lines


def _to_adapt(store: Store, rows: Rows, declared: str) -> str:
    """Return the command that plans a classifier, or why these labels allow none."""
    from dpvision.runs.store_checks import check_labels

    classes = (
        int(store.classes(np.asarray(rows))[1].max(initial=0)) + 1
        if store.label_names is None
        else len(store.label_names)
    )
    try:
        check_labels(store, rows, classes, multi_label=store.multi_label)
    except DataError as error:
        return f"  no classifier: {error}"
    several = "--model.multi-label " if store.multi_label else ""
    command = (
        f"dpvision adapt --data {quote(str(store.path))} --encoder patches+scattering "
        f"{several}--num-classes {classes}"
    )
    return f"  {command} {declared} --epsilon 1 --dry-run"


def after_run(
    root: Path, store: Store, config: RunConfig, *, released: bool, scored: bool = False
) -> list[str]:
    """Return commands that score and report a finished run.

    Args:
        store: the store trained on.
        released: whether the run may leave; otherwise it gets no statement.
        scored: whether it has its scores.
    """
    from dpvision.data.split import other_half  # imports torch

    run, other = quote(str(root)), other_half(store)
    lines = [] if scored else _to_score(run, store, other, config)
    if released:
        lines.append(f"  dpvision report {run}")
    elif config.model.kind != "head":
        lines.append(f"  tensorboard --logdir {run}/confidential")
    return ["Next:", *lines] if lines else []


def _to_score(run: str, store: Store, other: Store | None, config: RunConfig) -> list[str]:
    from dpvision.eval.probes.own_head import scorable

    kind, test = config.model.kind, "" if other is None else quote(str(other.path))
    if kind == "captioner":
        captioned = (
            other is not None and int(other.has_captions(AllRows(other.num_records)).sum()) > 1
        )
        return [
            f"  dpvision evaluate captioner {run} "
            f"{f'--store {test} --captions' if captioned else '--scenes 1000'}"
        ]
    if kind not in ("classifier", "head"):
        return (
            [
                f"  dpvision evaluate {run} --train "
                f"{quote(str(store.path))}{f' --test {test}' if test else ''}"
            ]
            if _probes(store, other)
            else []
        )
    try:
        if other is not None and len(
            scorable(config, other, {"class_names": store.label_names})[1]
        ):
            return [f"  dpvision evaluate {run} --test {test}"]
    except (DataError, ConfigError):
        pass
    return []


def _probes(store: Store, other: Store | None) -> bool:
    """Return whether the default protocols of ``dpvision evaluate`` have enough labelled images."""
    import torch

    from dpvision.eval.probes.records import check_labels, evaluation_rows, units

    if not store.has_labels or store.multi_label:
        return False
    try:
        train, test = evaluation_rows(store, other)
        check_labels(
            torch.from_numpy(store.labels[train]),
            torch.from_numpy((other or store).labels[test]),
            store.label_names,
        )
    except DataError:
        return False
    unit, first = np.unique(units(store)[train], return_index=True)
    _, of_a_class = np.unique(store.labels[train][first], return_counts=True)
    return len(unit) >= _ENOUGH_UNITS and int((of_a_class > 1).sum()) > 1
