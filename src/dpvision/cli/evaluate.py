"""``dpvision evaluate``: score encoders and classifiers on labelled images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

from dpvision.cli.output import FLAT, Reading, emit, parse
from dpvision.cli.paths import check_run, check_store
from dpvision.cli.progress import ProgressLine
from dpvision.cli.scores import (
    Encoders,
    Printing,
    class_tables,
    emit_scores,
    names_of,
    released_text,
    scores_table,
)
from dpvision.errors import ConfigError
from dpvision.eval.probes.settings import ProtocolSettings, checked_controls, checked_protocols
from dpvision.eval.score import Score, check_seeds, check_specificity
from dpvision.eval.score_file import (
    NOTHING_FITTED,
    RELEASED,
    check_out,
    merge_entries,
    note_scored,
    write_class_scores,
    write_scores,
)
from dpvision.privacy.printed import count
from dpvision.runs.folder import run_base

if TYPE_CHECKING:
    from dpvision.eval.any_of_labels import AnyOfLabels
    from dpvision.eval.class_scores import ClassScores
    from dpvision.eval.metric import Metric


@dataclass(frozen=True)
class _Measure:
    metric: str | None = None
    """accuracy or mean_per_class (Caltech-101, Aircraft); if omitted, the store's, else
    accuracy.
    """
    labels: Path | None = None
    """File of sets of correct classes that replace each test image's one label: ImageNet-ReaL's
    real.json, a JSON object or a CSV (docs/evaluation.md). Images without a correct class do not
    count.
    """


@dataclass(frozen=True)
class _Probes:
    """What is fitted to --train."""

    protocols: str = "knn,linear"
    """Names from the list above, separated by commas."""
    against: str = "random,pixels"
    """Baselines: random (a run's architecture, untrained), pixels, both with a comma, or none."""
    seeds: int | None = None
    """Repeat the protocols with this many seeds of all that they draw, and print mean and standard
    deviation.
    """


@dataclass(frozen=True)
class _Classes:
    """Figures of each class; for runs' own heads."""

    per_class: bool = False
    """Print each class's AUROC, average precision, sensitivity, Brier score and calibration error,
    with intervals over persons; write them, with ROC curves and a figure of these, reliability
    and confusion matrix, beside the scores.
    """
    by: str = ""
    """With --groups: columns of the table, separated by commas, for whose values the figures are
    given too, e.g. sex,site.
    """
    groups: Path | None = None
    """CSV table of the test images: file_name, as in the folder that was imported, and the columns
    of --by.
    """
    specificity: float = 0.9
    """Share of the images of other classes that a class's threshold must leave out, for its
    sensitivity.
    """
    release: float | None = None
    """Epsilon: charge it to the private store of --test, and publish its figures of each class,
    from one table of counts with noise, in RUN/released_scores.json (docs/evaluation.md). Needs
    --privacy.*; the values of --by are declared, e.g. sex=F:M,site=north:south.
    """

    @property
    def attributes(self) -> list[str]:
        return names_of(self.by)

    @property
    def declared(self) -> dict[str, tuple[str, ...]]:
        """Declared values of each attribute; raises ConfigError if there are none, or an attribute
        or a value is given twice.
        """
        found: dict[str, tuple[str, ...]] = {}
        for attribute in self.attributes:
            name, _, values = attribute.partition("=")
            if name in found:
                raise ConfigError(
                    f"evaluate: --by {self.by}: {name} twice; expected each column once. Give all "
                    f"its values together, for example --by {name}=A:B."
                )
            found[name] = tuple(value.strip() for value in values.split(":") if value.strip())
            if not found[name] or len(set(found[name])) < len(found[name]):
                raise ConfigError(
                    f"evaluate: --by {attribute} with --release; expected the values that are "
                    "published, each once: they are declared, not read from private images. "
                    f"For example --by {name}=A:B."
                )
        return found

    def check(self, own_heads: bool) -> None:
        """Raise ConfigError for options that have no effect together."""
        given = replace(self, per_class=False, release=None) != _Classes()
        if (self.per_class or given or self.release is not None) and not own_heads:
            raise ConfigError(
                "evaluate: --per-class, --by, --groups, --specificity or --release with --train; "
                "expected the own heads of runs. Drop --train."
            )
        if given and not self.per_class and self.release is None:
            raise ConfigError(
                "evaluate: --by, --groups or --specificity without --per-class; expected it. Add "
                "--per-class."
            )
        if self.release is None and "=" in self.by:
            raise ConfigError(
                f"evaluate: --by {self.by} without --release; expected columns alone, whose values "
                "are read from the table. Drop the values."
            )
        if self.release is not None and self.specificity != _Classes.specificity:
            raise ConfigError(
                f"evaluate: --specificity {self.specificity:g} with --release; expected none: the "
                "released ROC curve has all thresholds. Drop --specificity."
            )
        if bool(self.attributes) != (self.groups is not None):
            raise ConfigError(
                "evaluate: one of --by and --groups; expected both, columns and the table that has "
                "them. Give the other."
            )
        check_specificity(self.specificity)


@dataclass(frozen=True)
class _Declared:
    """Declared numbers of the private test store; with --release, which publishes them."""

    dataset_size: int | None = None
    """Number of images."""
    num_units: int | None = None
    """Number of persons, for a store with persons: the release is then for a person with all their
    images.
    """
    delta: float | None = None
    """Delta of the release; if omitted, 1 / (2 persons), or images without persons, at most
    0.001.
    """


_OWN = {
    "captioner": "dpvision.cli.evaluate_captioner",
    "detection": "dpvision.cli.evaluate_dense",
    "segmentation": "dpvision.cli.evaluate_dense",
}
"""Subcommands: `dpvision evaluate WORD` calls evaluate_WORD of this module, imported only then."""


def run(argv: Sequence[str]) -> None:
    """Parse and run, or call the subcommand that the first argument names."""
    if argv and argv[0] in _OWN:
        name = f"evaluate_{argv[0]}"
        parse(getattr(import_module(_OWN[argv[0]]), name), f"evaluate {argv[0]}", argv[1:])
        return
    parse(evaluate, "evaluate", argv)


def evaluate(
    encoders: Encoders,
    train: Path | None = None,
    test: Path | None = None,
    probes: Annotated[_Probes, FLAT] = _Probes(),
    measure: Annotated[_Measure, FLAT] = _Measure(),
    classes: Annotated[_Classes, FLAT] = _Classes(),
    privacy: _Declared = _Declared(),
    out: Path | None = None,
    ema: bool = False,
    no_cache: bool = False,
    reading: Annotated[Reading, FLAT] = Reading(),
    settings: Annotated[ProtocolSettings, FLAT] = ProtocolSettings(),
    printing: Annotated[Printing, FLAT] = Printing(),
) -> None:
    """Score encoders on labelled images, against random weights and raw pixels.

    An ENCODER is a run folder, random:RUN, timm:NAME or torchvision:NAME (@FILE for weights),
    hf:DIR, onnx:NODE@FILE, vip:FILE, mae:FILE, dpcap:FILE, simclr:FILE, tan:FILE, pixels, hog,
    scattering, patches, patches+scattering or patches+scattering+zooms.

      dpvision evaluate runs/first --train stores/pets-train --test stores/pets-test
      dpvision evaluate runs/a runs/b hog --train stores/pets --protocols ridge,few_shot_probe
          --shots 5 10 --out scores.json
      dpvision evaluate runs/adapted --test stores/pets-test    predictions of a classifier or an
                                                                adapted head
      dpvision evaluate runs/adapted --test stores/scans-test --per-class --groups
          scans/metadata.csv --by sex,site
      dpvision evaluate runs/adapted --test stores/scans-test --release 1 --privacy.dataset-size
          5000 --privacy.num-units 2000
      dpvision evaluate runs/first --train stores/pets --protocols linear_lars --lars.epochs 30
          --lars.warmup-epochs 3

    Protocols, cheapest first (docs/evaluation.md has their settings, sources and costs):
      knn             20 nearest neighbours by cosine similarity
      ridge           closed-form linear classifier
      linear          logistic regression, regularisation chosen on held-out training images
      few_shot_probe  logistic regression on K images per class, 20 draws
      few_shot_dpcap  DP-Cap's version of it: centred features of length 1, fixed regularisation
      linear_lars     the linear probe of ViP's tables: tokens of the last 12 blocks, LARS,
                      augmented images, 90 epochs
      linear_cls      linear_lars on the class token alone, as in the MAE paper; not comparable with
                      linear_lars
      fine_tune       the whole network fine-tuned on K images per class, 200 epochs, 3 draws
      own_head        a classifier run's own head, on --test; a multi-label run needs a multi-label
                      store

    For a captioner use `dpvision evaluate captioner RUN` (see its --help): zero-shot
    classification, compositional tests, CIDEr. `dpvision evaluate detection ENCODER` trains a
    detector on the encoder and scores boxes and masks by COCO's AP. `dpvision evaluate segmentation
    ENCODER` trains a semantic segmentation model on the encoder and scores mIoU.

    A run's scores on public stores go to its scores.json (and into its report), scores on private
    stores to its confidential/; what --release publishes of these, to its released_scores.json.

    Args:
        encoders: Encoders to score.
        train: Labelled store to train the classifiers on; not needed if only runs' own heads are
            scored.
        test: Labelled store to score on; if omitted, a fifth of --train's people is held out.
        probes: What is fitted to --train.
        measure: How predictions are compared with labels.
        classes: Figures of each class; for runs' own heads.
        privacy: Declared numbers of the test store, with --release.
        out: Also write all scores here. Scores on private images need a folder named confidential
            in the path.
        ema: Use the averaged weights of runs.
        no_cache: Neither read nor write cached features and scores (STORE/confidential/features).
        reading: How images are read.
        settings: Settings of the protocols.
        printing: How scores are printed.
    """
    if not encoders:
        raise ConfigError(
            "evaluate: no encoder; expected one or more. For example: dpvision evaluate "
            "runs/first --train STORE."
        )
    reading.check("evaluate")
    seeds = probes.seeds
    check_seeds("evaluate", seeds)
    classes.check(train is None)
    if classes.release is None and privacy != _Declared():
        raise ConfigError(
            "evaluate: --privacy.* without --release; expected both: the numbers are those of a "
            "release. Add --release EPSILON."
        )
    if train is None:
        check_store(test)
        if classes.release is not None:
            others = (measure, seeds, out) != (_Measure(), None, None)
            _release(encoders, test, classes, privacy, others, ema, reading, printing)
            return
        if seeds is not None:
            raise ConfigError(
                f"evaluate: --seeds {seeds} without --train; expected --train STORE, since a "
                "trained head has one score. Train it on several seeds: dpvision adapt --seeds."
            )
        _own_heads(encoders, test, measure.labels, classes, ema, out, reading, printing)
        return
    controls = checked_controls(
        [] if probes.against.strip() == "none" else names_of(probes.against)
    )
    names = checked_protocols(names_of(probes.protocols))
    check_store(train, test)
    import torch

    from dpvision.data.open import open_store
    from dpvision.encoders.open import open_encoder, recognised
    from dpvision.eval.any_of_labels import load_any_of_labels
    from dpvision.eval.metric import checked_metric
    from dpvision.eval.probes.protocols import make_protocols
    from dpvision.eval.probes.suite import evaluate as run_suite
    from dpvision.eval.scored_run import with_averages
    from dpvision.eval.seeds import over_seeds

    asked = make_protocols(names, settings)
    named, labels = measure.metric, measure.labels
    metric: Metric | AnyOfLabels | None = None if named is None else checked_metric(named)
    train_store, test_store = open_store(train), open_store(test) if test is not None else None
    if labels is not None and metric not in (None, "accuracy"):
        raise ConfigError(
            f"evaluate: labels={str(labels)!r} with metric={metric}; expected accuracy with "
            "--labels. Drop --metric."
        )
    if labels is not None:
        metric = load_any_of_labels(labels, test_store or train_store)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Open every encoder and check --out before the first is scored, to fail fast.
    known = [train_store, *([] if test_store is None else [test_store])]
    averages = dict(zip(encoders, with_averages(encoders, ema), strict=True))
    confidential = [
        recognised(open_encoder(spec, ema=own), *known).confidential
        for spec, own in averages.items()
    ]
    private = any(confidential) or "private" in [store.results_visibility for store in known]
    if out is not None:
        check_out(out, private)
    stores = {"train_data": train.name, "test_data": (test or train).name}

    def score(spec: str, line: ProgressLine) -> list[Score]:
        note_scored(spec, test_store or train_store)
        found = [
            run_suite(
                spec,
                train_store,
                test_store,
                protocols=[replace(protocol, seed=seed) for protocol in asked],
                against=controls,
                metric=metric,
                ema=averages[spec],
                batch_size=reading.batch_size,
                workers=reading.workers,
                device=device,
                cache=not no_cache,
                progress=lambda text: line.say(f"{spec}: {text}"),
                count=lambda what, done, total: line.count(f"{spec}: {what}", done, total),
            )
            for seed in range(seeds or 1)
        ]
        return found[0] if seeds is None else over_seeds(found)

    _score_all(encoders, score, stores, out, printing, private)


def _release(
    specs: Sequence[str],
    test: Path | None,
    classes: _Classes,
    privacy: _Declared,
    others: bool,
    ema: bool,
    reading: Reading,
    printing: Printing,
) -> None:
    """Release the scores of a run on a private store.

    Args:
        others: whether options were given that have no effect on a release.
    """
    assert classes.release is not None
    if len(specs) != 1 or test is None or others:
        more = ", --metric, --labels, --seeds or --out" if others else ""
        raise ConfigError(
            f"evaluate: --release with {count(len(specs), 'encoder')}"
            f"{'' if test else ', without --test'}{more}; expected one run and --test STORE alone. "
            "Release the scores of each run by its own command: each is charged."
        )
    declared = classes.declared
    check_run(Path(specs[0]))
    import torch

    from dpvision.data.open import open_store
    from dpvision.eval.probes.release_scores import ALONE, release_scores

    store = open_store(test)
    with ProgressLine(private=True, asked=printing.show_confidential) as line:
        entry = release_scores(
            specs[0],
            store,
            classes.release,
            **asdict(privacy),
            declared=declared,
            groups=classes.groups,
            ema=ema,
            hardware=replace(
                ALONE,
                workers=reading.workers,
                device="cuda" if torch.cuda.is_available() else "cpu",
                progress=lambda n: line.count("test images", n, store.num_records),
            ),
        )
    emit(entry, printing.json, released_text(entry, Path(specs[0]) / RELEASED))


def _own_heads(
    specs: Sequence[str],
    test: Path | None,
    labels: Path | None,
    classes: _Classes,
    ema: bool,
    out: Path | None,
    reading: Reading,
    printing: Printing,
) -> None:
    """Score classifier runs on their own heads, which need no --train store."""
    import torch

    from dpvision.checkpoint import load_checkpoint
    from dpvision.cli.paths import check_run
    from dpvision.data.open import open_store
    from dpvision.encoders.feature_file import Extraction
    from dpvision.encoders.fixed import FIXED
    from dpvision.eval.any_of_labels import load_any_of_labels
    from dpvision.eval.probes.own_head import (
        has_own_head,
        head_scores,
        own_scores,
        scores_by_class,
    )
    from dpvision.eval.scored_run import is_run
    from dpvision.runs.lineage import lineage_of_results, shaped_in_confidence

    lacks = next((spec for spec in specs if not is_run(spec) or not has_own_head(spec)), None)
    if lacks is not None and ":" not in lacks and lacks not in FIXED:
        check_run(Path(lacks))
    if lacks is not None or test is None:
        what = (
            "no --test"
            if lacks is None
            else f"{lacks} has no head of its own and there is no --train"
        )
        raise ConfigError(
            f"evaluate: {what}; expected --test STORE for runs of classifiers and heads, --train "
            "STORE for all other encoders. Give one; for a captioner use `dpvision evaluate "
            "captioner RUN`."
        )
    store = open_store(test)
    any_of = load_any_of_labels(labels, store) if labels is not None else None
    private = store.results_visibility == "private"
    if out is not None:
        opened = map(load_checkpoint, specs)
        tainted = any(
            shaped_in_confidence(lineage_of_results(one.manifest["lineage"], one.path))
            for one in opened
        )
        check_out(out, tainted or private)
    stores = {"train_data": NOTHING_FITTED, "test_data": test.name}
    device = "cuda" if torch.cuda.is_available() else "cpu"

    of_classes: dict[str, ClassScores] = {}

    def score(spec: str, line: ProgressLine) -> list[Score]:
        note_scored(spec, store)
        hardware = Extraction(
            reading.batch_size,
            reading.workers,
            device,
            lambda n: line.count(f"{spec}: test images", n, store.num_records),
        )
        found = own_scores(
            load_checkpoint(spec), store, hardware, ema=ema, any_is_right=any_of is not None
        )
        if classes.per_class:
            of_classes[spec] = scores_by_class(
                found,
                groups=classes.groups,
                by=classes.attributes,
                specificity=classes.specificity,
            )
        return head_scores(found, store, any_of)

    _score_all(specs, score, stores, out, printing, private, of_classes)


def _score_all(
    specs: Sequence[str],
    score: Callable[[str, ProgressLine], list[Score]],
    stores: dict[str, str],
    out: Path | None,
    printing: Printing,
    private: bool,
    of_classes: Mapping[str, "ClassScores"] = MappingProxyType({}),
) -> None:
    """Score the encoders in sequence, write the scores of runs and ``out``, and print all.

    Args:
        private: whether a store is private.
        of_classes: figures per class, which ``score`` adds.
    """
    found: dict[str, list[Score]] = {}
    written: list[Path] = []
    with ProgressLine(private=private, asked=printing.show_confidential) as line:
        for spec in specs:
            found[spec] = score(spec, line)
            if run_base(Path(spec)) is not None:
                written += write_scores(spec, found[spec], **stores)
    scores = _told_apart(found)
    text = scores_table(scores)
    for spec, one in of_classes.items():
        from dpvision.report.class_figure import write_class_figure  # matplotlib takes time

        path = write_class_scores(spec, one, stores["test_data"])
        written += [path, write_class_figure(one, path)]
        text += f"\n{spec}\n{class_tables(one, path)}"
    if out is not None:
        written.append(merge_entries(out, [one.to_dict() | stores for one in scores]))
    more = {"classes": {k: one.to_dict() for k, one in of_classes.items()}} if of_classes else {}
    emit_scores(scores, text, written, printing, **more)


def _told_apart(found: dict[str, list[Score]]) -> list[Score]:
    """Return all scores, named by run if there are several encoders.

    A baseline that encoders share appears once. One that differs between them, such as raw pixels
    at two sizes, is named by the first encoder that it belongs to.
    """
    scores: dict[tuple[str, str, float], Score] = {}
    values: dict[tuple[str, str], set[float]] = {}
    for score in (score for some in found.values() for score in some):
        values.setdefault((score.name, score.protocol), set()).add(score.value)
    for spec, some in found.items():
        for score in some:
            name, ours = score.name, score.name.startswith(("encoder", "own head"))
            if ours and len(found) > 1:
                name = f"{spec}{name.removeprefix('encoder').removeprefix('own head')}"
            elif not ours and len(values[name, score.protocol]) > 1:
                name = f"{name}, for {spec}"
            key = (score.name if not ours else name, score.protocol, score.value)
            scores.setdefault(key, replace(score, name=name))
    return list(scores.values())
