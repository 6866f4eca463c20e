"""Score a classifier run or a head on test images, without fitting anything.

Legend: B images of a batch, N images, K classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dpvision.checkpoint import Checkpoint, load_checkpoint
from dpvision.config import ClassifierConfig, HeadConfig, RunConfig
from dpvision.data.class_names import all_names, numbered_as
from dpvision.data.loader import image_batches
from dpvision.data.store import Store
from dpvision.encoders.calibration import Calibration, read_calibration
from dpvision.encoders.classifier import OpenHead, is_head, loss_of, open_head, threshold_of
from dpvision.encoders.feature_file import Extraction, Progress, feature_blocks
from dpvision.encoders.trained import load_model
from dpvision.errors import OPERATOR_ONLY, ConfigError, DataError
from dpvision.eval.any_of_labels import AnyOfLabels, same_numbers
from dpvision.eval.class_scores import ClassScores, class_scores
from dpvision.eval.groups import read_groups
from dpvision.eval.metric import Metric, Scoring, multi_label_scores
from dpvision.eval.probes.protocol import Protocol, Subject, Task
from dpvision.eval.probes.records import units
from dpvision.eval.score import Score, Visibility, check_specificity
from dpvision.eval.scored_run import check_unseen, is_run, trained_classes
from dpvision.runs.lineage import lineage_of_results, shaped_in_confidence


@dataclass(frozen=True)
class OwnHead(Protocol):
    """``score_own_head`` as a protocol; the training store is not used."""

    name: ClassVar[str] = "own_head"
    needs = "own head"

    def check(self, subject: Subject, task: Task) -> None:
        if not is_run(subject.spec):
            raise ConfigError(
                f"own_head: {subject.spec!r} has no head; expected a classifier's run folder. "
                "Use --protocols linear."
            )
        if task.test[0] is task.train[0]:
            raise ConfigError(
                "own_head: no test store; expected one with images that the head was not "
                "trained on. Give --test STORE."
            )

    def run(self, subject: Subject, task: Task) -> list[Score]:
        def report(done: int) -> None:
            task.count("own head, test images", done, len(task.test[1]))

        return score_own_head(
            subject.spec,
            task.test[0],
            any_of=task.scoring.any_of,
            ema=subject.ema,
            batch_size=task.batch_size,
            workers=task.workers,
            device=task.device,
            progress=report,
        )


@torch.inference_mode()
def score_own_head(
    run_or_checkpoint: str | Path,
    test_store: Store,
    *,
    any_of: AnyOfLabels | None = None,
    ema: bool = False,
    batch_size: int = 256,
    workers: int = 2,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> list[Score]:
    """Return the accuracy of a classifier run, or of a head on a frozen encoder, on a store's
    labelled images, one centre crop each.

    The store's classes are matched by name with those that the run was trained on. If class sizes
    differ, mean per-class accuracy is added. A multi-label run is scored by ``multi_label_scores``
    on a multi-label store.

    Args:
        any_of: sets of correct classes, for a single-label run.
        ema: whether to use the averaged weights. Scoring both and reporting the better is a
            selection.
        progress: called with the number of finished images.

    Returns:
        Scores named "own head" or "own head, averaged weights"; private if the store or the weights
        are.

    Raises:
        ConfigError: the run has no head, or it is multi-label and ``any_of`` is given.
        CheckpointError: as in ``load_model``, or the head's encoder is missing.
        DataError: no readable labelled image, a label out of range, a single-label store for a
            multi-label run or the reverse, a class that the training store does not have, or images
            that the run was trained on.
    """
    checkpoint = load_checkpoint(run_or_checkpoint)
    hardware = Extraction(batch_size, workers, device, progress)
    found = own_scores(checkpoint, test_store, hardware, ema=ema, any_is_right=any_of is not None)
    return head_scores(found, test_store, any_of)


def head_scores(
    found: "OwnScores", test_store: Store, any_of: AnyOfLabels | None = None
) -> list[Score]:
    """Return the scores of ``score_own_head``, from what ``own_scores`` found."""
    model, row_N, score_NK = model_of(found.config), found.row_N, found.score_NK
    test_store = same_numbers(found.store, test_store, any_of)
    assert model.num_classes is not None
    name = "own head, averaged weights" if found.ema else "own head"
    if model.multi_label:
        decided_NK, how = _decisions(found, model)
        return multi_label_scores(
            name,
            score_NK.numpy(),
            test_store.targets(row_N, model.num_classes),
            decided_NK,
            f"own head, centre crop{how}",
            found.visibility,
        )
    predicted_N, truth_N = score_NK.argmax(1).numpy(), test_store.labels[row_N]
    sizes = np.bincount(truth_N)
    uneven = len(set(sizes[sizes > 0].tolist())) > 1
    metrics: tuple[Metric, ...] = (
        ("accuracy", "mean_per_class") if uneven and any_of is None else ("accuracy",)
    )
    how = f"{model.num_classes} classes, centre crop"
    return [
        Scoring(m, any_of, found.visibility).score(
            name, "own head", how, [predicted_N], truth_N, row_N
        )
        for m in metrics
    ]


def scores_by_class(
    found: "OwnScores", *, groups: Path | None = None, by: Sequence[str] = (), specificity: float
) -> ClassScores:
    """Return the figures of each class, of the calibrated probabilities, with intervals over
    persons; ``marked`` if the calibration was fitted to the store.

    Args:
        groups, by: a table and attributes in it, as for ``eval.groups.read_groups``.
        specificity: as for ``eval.class_scores.class_scores``.

    Raises:
        ConfigError, DataError: as these two.
    """
    check_specificity(specificity)
    model = model_of(found.config)
    assert model.num_classes is not None
    given = read_groups(groups, by, found.store, found.row_N) if groups is not None else None
    probability_NK, scale = _calibrated(found, model)
    made = class_scores(
        probability_NK.numpy(),
        found.store.targets(found.row_N, model.num_classes),
        all_names(found.checkpoint.manifest.get("class_names"), model.num_classes),
        units(found.store)[found.row_N],
        groups=given,
        specificity=specificity,
        multi_label=model.multi_label,
        visibility=found.visibility,
    )
    return made.marked() if scale is not None and scale.fitted_on(found.store) else made


def _decisions(
    found: "OwnScores", model: ClassifierConfig | HeadConfig
) -> tuple[np.ndarray | None, str]:
    """Return whether each class is predicted, as ``predict`` does, bool (N, K), and by what, in
    words; None if the scores only define an order.
    """
    probability_NK, scale = _calibrated(found, model)
    if scale is not None and scale.thresholds is not None:
        above_NK = probability_NK.double() > torch.tensor(scale.thresholds, dtype=torch.float64)
        here = " fitted here," if scale.fitted_on(found.store) else ""
        return above_NK.numpy(), f", thresholds{here} of {scale.rule}"
    own = threshold_of(model)
    return None if own is None else (found.score_NK > own).numpy(), ""


def _calibrated(
    found: "OwnScores", model: ClassifierConfig | HeadConfig
) -> tuple[Tensor, Calibration | None]:
    """Return probabilities, float32 (N, K), and the run's calibration, if it has one."""
    assert model.num_classes is not None
    scale = read_calibration(found.checkpoint, found.ema, model.num_classes)
    logit_NK = found.score_NK
    if scale is not None:
        logit_NK = (logit_NK - scale.offset) / scale.temperature
    alone = loss_of(model) == "sigmoid"
    return logit_NK.sigmoid() if alone else logit_NK.softmax(dim=1), scale


def model_of(config: RunConfig) -> ClassifierConfig | HeadConfig:
    """Return the settings of a run's classifier or head."""
    assert isinstance(config.model, ClassifierConfig | HeadConfig)
    return config.model


class OwnScores(NamedTuple):
    """Scores of a run on the readable labelled images of a store."""

    config: RunConfig
    store: Store
    """With the run's class numbers."""
    row_N: np.ndarray
    score_NK: Tensor
    """float32, on the CPU."""
    checkpoint: Checkpoint
    ema: bool
    visibility: Visibility


@torch.inference_mode()
def own_scores(
    checkpoint: Checkpoint,
    store: Store,
    hardware: Extraction,
    *,
    encoder: str | None = None,
    ema: bool = False,
    any_is_right: bool = False,
) -> OwnScores:
    """Score a store's labelled images. Arguments and errors as ``score_own_head``.

    Args:
        encoder: spec of a head's encoder, if it has moved since the run.
    """
    if is_head(checkpoint):
        opened = open_head(checkpoint, encoder=encoder, ema=ema, device=hardware.device)
        found = _scores_of_head(opened, checkpoint, store, any_is_right, hardware)
    else:
        found = _scores_of_network(checkpoint, store, any_is_right, ema, hardware)
    config, numbered, row_N, score_NK = found
    readable_N = ~torch.isnan(score_NK).all(dim=1)
    score_NK, row_N = score_NK[readable_N], row_N[readable_N.numpy()]
    if len(row_N) == 0:
        raise DataError(
            f"own_head: {store.path} has no readable image with a label; expected one or "
            "more. Import the source again."
        )
    if not torch.isfinite(score_NK).all():
        raise DataError(
            "own_head: logits are not finite; expected finite ones. The run diverged: lower "
            "--optim.learning-rate."
        )
    private = store.results_visibility == "private" or shaped_in_confidence(
        lineage_of_results(checkpoint.manifest["lineage"], checkpoint.path)
    )
    visibility: Visibility = "private" if private else "public"
    return OwnScores(config, numbered, row_N, score_NK, checkpoint, ema, visibility)


def scorable(
    config: RunConfig,
    test_store: Store,
    manifest: Mapping[str, Any] | None = None,
    *,
    any_is_right: bool = False,
) -> tuple[Store, np.ndarray]:
    """Return a test store with the run's class numbers, and its rows that the run's head can be
    scored on, int64. Raises as ``score_own_head``, without reading images.

    Args:
        manifest: of the run's checkpoint; None if it has not started.
        any_is_right: whether sets of correct classes are given (``any_of``).
    """
    model = config.model
    assert isinstance(model, ClassifierConfig | HeadConfig) and model.num_classes is not None
    check_unseen(config.data, test_store, "own_head")
    if model.multi_label and any_is_right:
        raise ConfigError(
            "own_head: --labels with a multi-label run; expected none, because the test store "
            "has all classes of an image. Drop --labels."
        )
    if model.multi_label != test_store.multi_label:
        has, rule = ("one label", "several") if model.multi_label else ("several labels", "one")
        raise DataError(
            f"own_head: {test_store.path} has {has} per record; expected {rule}, as in training. "
            "Import it with such labels, or evaluate another run."
        )
    names = trained_classes(config.data, manifest, "own_head")
    numbered = numbered_as(test_store, names, "own_head", "the training store")
    return numbered, _labelled_rows(numbered, model.num_classes)


def _scores_of_head(
    headed: OpenHead,
    checkpoint: Checkpoint,
    store: Store,
    any_is_right: bool,
    hardware: Extraction,
) -> tuple[RunConfig, Store, np.ndarray, Tensor]:
    """Return scores of all labelled images, from cached features: NaN if unreadable."""
    assert isinstance(headed.config.model, HeadConfig)
    store, rows = scorable(headed.config, store, checkpoint.manifest, any_is_right=any_is_right)
    keep = not headed.encoder.confidential or store.visibility == "private"
    blocks = feature_blocks(
        headed.encoder,
        headed.pooling,
        headed.config.model.encoder.width,
        store,
        rows,
        hardware,
        keep=keep,
    )
    scored = [
        headed.head(torch.from_numpy(np.array(block_BD)).to(hardware.device).float()).cpu()
        for block_BD in blocks
    ]
    score_NK = torch.cat([torch.empty(0, headed.config.model.num_classes or 0), *scored])
    return headed.config, store, rows, score_NK


def _scores_of_network(
    checkpoint: Checkpoint, store: Store, any_is_right: bool, ema: bool, hardware: Extraction
) -> tuple[RunConfig, Store, np.ndarray, Tensor]:
    """Return scores like ``_scores_of_head``, for a classifier trained as a network."""
    model, config = load_model(checkpoint, ema=ema)
    if not isinstance(config.model, ClassifierConfig):
        raise ConfigError(
            f"own_head: {checkpoint.path} has model kind {config.model.kind!r}; expected "
            "'classifier'. Use --protocols knn,linear."
        )
    model = model.to(hardware.device).eval()
    store, rows = scorable(config, store, checkpoint.manifest, any_is_right=any_is_right)
    score_NK, done = torch.full((len(rows), config.model.num_classes or 0), torch.nan), 0
    size = config.model.encoder.image_size
    for x_BCHW, row_B, _ in image_batches(
        store, rows, size, config.data, batch_size=hardware.batch_size, workers=hardware.workers
    ):
        score_BK = model(x_BCHW.to(hardware.device)).float().cpu()
        # Readable images never have NaN scores, which mark unreadable ones.
        score_NK[np.searchsorted(rows, row_B.numpy())] = score_BK.nan_to_num(
            nan=torch.inf, posinf=torch.inf, neginf=-torch.inf
        )
        done += len(row_B)
        if hardware.progress is not None:
            hardware.progress(done)
    return config, store, rows, score_NK


def has_own_head(run_or_checkpoint: str | Path) -> bool:
    """Return whether a run is a classifier or a head."""
    return load_checkpoint(run_or_checkpoint).manifest["config"].get("model", {}).get("kind") in (
        "classifier",
        "head",
    )


def _labelled_rows(store: Store, num_classes: int) -> np.ndarray:
    rows = np.flatnonzero(store.labelled)
    if not len(rows):
        raise DataError(
            f"own_head: {store.path} has no labels; expected a class for each image. Import it "
            "with --label-from FIELD."
        )
    if (largest := int(store.classes(rows)[1].max(initial=-1))) >= num_classes:
        whose = OPERATOR_ONLY if store.results_visibility == "private" else ""
        raise DataError(
            f"own_head: {whose}{store.path} has label={largest}; expected 0 to {num_classes - 1}, "
            "the classes of the run. Import it with the same classes as the training store."
        )
    return rows
