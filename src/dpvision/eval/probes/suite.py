"""Score an encoder of any origin by several protocols, against random weights and raw pixels."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from dpvision.data.class_names import numbered_as
from dpvision.data.declared import check_declared
from dpvision.data.store import Store
from dpvision.encoders.fixed import raw_pixels
from dpvision.encoders.open import open_encoder, recognised
from dpvision.errors import ConfigError
from dpvision.eval.any_of_labels import AnyOfLabels, same_numbers
from dpvision.eval.metric import Metric, Scoring, checked_metric
from dpvision.eval.probes.cache import EvaluationCache
from dpvision.eval.probes.knn import KNN
from dpvision.eval.probes.linear_probe import Linear
from dpvision.eval.probes.protocol import Count, Protocol, Say, Subject, Task
from dpvision.eval.probes.records import check_labels, evaluation_rows, only
from dpvision.eval.probes.settings import CONTROLS, Control, checked_controls
from dpvision.eval.score import Score
from dpvision.eval.scored_run import is_run


def evaluate(
    spec: str | Path,
    train_store: Store,
    test_store: Store | None = None,
    *,
    protocols: Sequence[Protocol] = (KNN(), Linear()),
    against: Sequence[Control] = CONTROLS,
    metric: Metric | AnyOfLabels | None = None,
    ema: bool = False,
    batch_size: int = 256,
    workers: int = 2,
    device: str | torch.device = "cpu",
    cache: bool = False,
    progress: Say | None = None,
    count: Count | None = None,
) -> list[Score]:
    """Return the scores of an encoder and its baselines: its architecture with the run's initial
    random weights, and raw pixels.

    Protocols on features run on every pooling that the encoder offers; baselines run on every
    protocol that applies to them.

    Args:
        spec: as for ``encoders.open.open_encoder``: a run folder, ``timm:NAME``, ``hog``, ...
        train_store: labelled training images.
        test_store: labelled test images, whose classes are matched by name; if None, a fixed fifth
            of the first store's units.
        protocols: with their settings; ``make_protocols`` makes them from names.
        against: baselines. "random" exists only for runs.
        metric: its name, or sets of correct classes of each test record, whose accuracy it is; if
            None, the training store's, else accuracy.
        cache: whether to cache features and scores under the stores' confidential/features/.
        progress: called with a line about the current work.
        count: called while features are computed; if None, ``progress`` is.

    Returns:
        Scores by protocol, the encoder before its baselines. They are private if a store is, or if
        the encoder was trained on private images without a guarantee.

    Raises:
        ConfigError: no protocol, an unknown baseline, or a protocol that cannot score this encoder.
        DataError: a store has no labels, one class only, or labels that the training store lacks;
            too few images of a class for the shots; the stores share records; a feature is not
            finite.
        CheckpointError: the encoder cannot be read.
    """
    checked_controls(against)
    if not protocols:
        raise ConfigError(
            "evaluate: protocols=(); expected some. Omit it for k-NN and the linear probe."
        )
    any_of = metric if isinstance(metric, AnyOfLabels) else None
    named = "accuracy" if any_of is not None else metric or train_store.meta.get("metric")
    measured = checked_metric(str(named or "accuracy"))
    train_rows, test_rows = evaluation_rows(train_store, test_store)
    scored_store = train_store
    if test_store is not None:
        check_declared(
            train_store.window,
            train_store.undeclared_range,
            test_store,
            "evaluate",
            "the training images",
        )
        scored_store = same_numbers(
            numbered_as(test_store, train_store.label_names, "evaluate", "the training store"),
            test_store,
            any_of,
        )
    train_labels, test_labels = (
        torch.from_numpy(s.labels[r])
        for s, r in ((train_store, train_rows), (scored_store, test_rows))
    )
    check_labels(train_labels, test_labels, train_store.label_names)
    encoder = recognised(open_encoder(str(spec), ema=ema, device=device), train_store, scored_store)
    check_declared(
        encoder.window, False, train_store, "evaluate", "the images that the run was trained on"
    )
    private = encoder.confidential or "private" in (
        train_store.results_visibility,
        scored_store.results_visibility,
    )
    say = progress or (lambda text: None)
    task = Task(
        (train_store, train_rows),
        (scored_store, test_rows),
        Scoring(measured, any_of, "private" if private else "public"),
        batch_size,
        workers,
        device,
        say,
        count or (lambda what, done, total: say(f"{what}: {done:,} of {total:,}")),
    )
    subject = Subject(encoder, str(spec), ema)
    for protocol in protocols:
        protocol.check(subject, task)
    subjects = [subject, *_controls(subject, against, device)]
    kept = EvaluationCache(task, cache)
    prints = {s.encoder.name: kept.fingerprint(s.encoder) for s in subjects}
    pairs = [
        (protocol, s)
        for protocol in protocols
        for s in subjects
        if s is subject or _fits(protocol, s, task)
    ]
    marks = [
        prints[s.encoder.name] if protocol.needs != "own head" else None for protocol, s in pairs
    ]
    found = [kept.load(protocol, mark) for (protocol, _), mark in zip(pairs, marks, strict=True)]
    missing = {
        s.encoder.name: s.encoder
        for (p, s), scores in zip(pairs, found, strict=True)
        if p.needs == "features" and scores is None
    }
    features = kept.features(list(missing.values()), prints) if missing else None
    for i, (protocol, s) in enumerate(pairs):
        if found[i] is None:
            own = (
                None
                if features is None
                else (only(features[0], s.encoder.name), only(features[1], s.encoder.name))
            )
            scores = protocol.run(replace(s, features=own), task)
            kept.save(protocol, marks[i], scores)
            found[i] = scores
    return [score for scores in found for score in scores or ()]


def _controls(
    subject: Subject, against: Sequence[Control], device: str | torch.device
) -> list[Subject]:
    made = []
    if "random" in against and is_run(subject.spec):
        spec = f"random:{subject.spec}"
        made.append(Subject(open_encoder(spec, device=device), spec))
    if "pixels" in against:
        pixels = replace(
            subject.encoder,
            name="raw pixels",
            poolings=raw_pixels,
            family="fixed",
            backbone=None,
            arrays=None,
            blocks=None,
            lineage=(),
            own_sizes=(),
        )
        made.append(Subject(pixels, "pixels"))
    return made


def _fits(protocol: Protocol, subject: Subject, task: Task) -> bool:
    """Return whether a protocol applies to a baseline; none has an own head."""
    if protocol.needs == "own head":
        return False
    try:
        protocol.check(subject, task)
    except ConfigError:
        return False
    return True
