"""Fit the temperature of a run's classifier, and thresholds for several labels, on public images.

    p = softmax(score / T), or sigmoid(score / T);   T minimises the mean of -log p(labels)

after Guo et al. 2017, "On calibration of modern neural networks". The threshold of a class is the
probability above which F1 = 2 TP / (2 TP + FP + FN) is largest, or the largest one that keeps a
declared recall.

A function of private labels would need a plan of its own, so a private store is refused.

Legend: N images, K classes.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dpvision.checkpoint import load_checkpoint
from dpvision.config import ClassifierConfig, HeadConfig
from dpvision.data.class_names import all_names
from dpvision.data.store import Store
from dpvision.encoders.calibration import Calibration, save_calibration, weights_of
from dpvision.encoders.classifier import Loss, loss_of
from dpvision.encoders.feature_file import Extraction, Progress
from dpvision.errors import ConfigError, DataError, PrivacyError
from dpvision.eval.probes.own_head import own_scores
from dpvision.eval.score import Visibility
from dpvision.runs.lineage import shaped_in_confidence

_SHOWN = 3
_WIDEST = 9.0
"""Temperatures from e^-9 to e^9 times the largest score are tried."""


class Calibrated(NamedTuple):
    """A calibration that was written."""

    calibration: Calibration
    path: Path
    visibility: Visibility
    """Private if the weights are, which were trained on private images without a guarantee."""


def calibrate(
    run_or_checkpoint: str | Path,
    store: Store,
    *,
    recall: float | None = None,
    encoder: str | None = None,
    ema: bool = False,
    batch_size: int = 256,
    workers: int = 2,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> Calibrated:
    """Calibrate a run's classifier on the labelled images of a public store, and write
    calibration.json beside its checkpoints, which ``load_classifier`` reads.

    Classes are matched by name. The images must not be those that the run was trained on.

    Args:
        recall: in (0, 1], for a multi-label run: the share of a class's images that its threshold
            must find. If None, thresholds of largest F1.
        encoder: spec of a head's encoder, if it has moved since the run.
        ema: whether to calibrate the averaged weights.
        progress: called with the number of finished images.

    Raises:
        PrivacyError: the store is private, or was cleared of private twins.
        ConfigError: ``recall`` is out of range, or the run has one class per image; or as for
            ``own_head.score_own_head``.
        DataError: no finite temperature fits, or a class of a multi-label run has no image; or as
            for ``own_head.score_own_head``.
        CheckpointError: as for ``load_classifier``, or the file cannot be written.
    """
    if store.results_visibility != "public":
        raise PrivacyError(
            f"calibrate: {store.path} is private; expected a public store: a temperature fitted to "
            "private labels is covered by no plan. Import public images with --public."
        )
    if recall is not None and not 0 < recall <= 1:
        raise ConfigError(
            f"calibrate: recall={recall}; expected above 0, at most 1. Leave it out for the best "
            "F1."
        )
    checkpoint = load_checkpoint(run_or_checkpoint)
    hardware = Extraction(batch_size, workers, device, progress)
    config, store, row_N, score_NK = own_scores(
        checkpoint, store, hardware, encoder=encoder, ema=ema
    )
    model = config.model
    assert isinstance(model, ClassifierConfig | HeadConfig) and model.num_classes is not None
    if recall is not None and not model.multi_label:
        raise ConfigError(
            f"calibrate: recall={recall} with a run of one class per image; expected a "
            "multi-label run. Leave it out."
        )
    target_NK, loss = store.targets(row_N, model.num_classes), loss_of(model)
    if model.multi_label:
        _require_every_class(target_NK, store.label_names)
    temperature = fit_temperature(score_NK.numpy(), target_NK, loss)
    thresholds = rule = None
    if model.multi_label:
        probability_NK = (score_NK / temperature).sigmoid().numpy()
        thresholds = tuple(
            fit_threshold(probability_NK[:, k], target_NK[:, k] == 1, recall)
            for k in range(model.num_classes)
        )
        rule = "largest F1" if recall is None else f"recall of {recall:g} or more"
    made = Calibration(
        weights=weights_of(checkpoint, ema),
        temperature=temperature,
        thresholds=thresholds,
        rule=rule,
        store={
            "name": store.path.name,
            "store_id": store.store_id,
            "licence": store.licence,
            "images": len(row_N),
        },
        loss_before=mean_loss(score_NK.numpy(), target_NK, loss, 1.0),
        loss_after=mean_loss(score_NK.numpy(), target_NK, loss, temperature),
    )
    private = shaped_in_confidence(checkpoint.manifest["lineage"])
    return Calibrated(made, save_calibration(checkpoint, made), "private" if private else "public")


def fit_temperature(score_NK: np.ndarray, target_NK: np.ndarray, loss: Loss) -> float:
    """Return the temperature of the smallest ``mean_loss``.

    The loss is convex in 1 / T, so it has one minimum.

    Args:
        target_NK: 1 for each class of an image, 0 elsewhere.

    Raises:
        DataError: the smallest loss is at T = 0, because the scores separate the classes of these
            images, or at infinity, because they do not tell the classes apart.
    """
    from scipy.optimize import minimize_scalar  # takes time to import

    scale = max(float(np.abs(score_NK).max(initial=0.0)), float(np.finfo(np.float32).tiny))

    def loss_at(log_temperature: float) -> float:
        return mean_loss(score_NK, target_NK, loss, scale * math.exp(log_temperature))

    found: Any = minimize_scalar(
        loss_at, bounds=(-_WIDEST, _WIDEST), method="bounded", options={"xatol": 1e-7}
    )
    if not loss_at(-_WIDEST) > found.fun:
        raise DataError(
            f"calibrate: the scores separate the classes of all {len(score_NK)} images; expected "
            "some errors, without which no temperature is best. Give more images."
        )
    if not loss_at(_WIDEST) > found.fun:
        raise DataError(
            f"calibrate: the scores of {len(score_NK)} images do not tell their classes apart; "
            "expected a classifier better than chance. Check the labels (dpvision data inspect "
            "STORE), or train longer."
        )
    return scale * math.exp(found.x)


def mean_loss(score_NK: np.ndarray, target_NK: np.ndarray, loss: Loss, temperature: float) -> float:
    """Return the mean negative log likelihood of an image's labels, summed over classes with the
    sigmoid loss.
    """
    logit_NK, on_NK = score_NK.astype(np.float64) / temperature, target_NK == 1
    if loss == "sigmoid":
        return float(np.logaddexp(0.0, np.where(on_NK, -logit_NK, logit_NK)).sum(axis=1).mean())
    log_total_N = np.logaddexp.reduce(logit_NK, axis=1)
    return float((log_total_N - logit_NK[on_NK]).mean())


def fit_threshold(probability_N: np.ndarray, on_N: np.ndarray, recall: float | None) -> float:
    """Return the threshold above which a class is predicted: of largest F1, or the largest one of
    at least ``recall``; halfway between two probabilities that occur.

    Args:
        on_N: whether each image has the class; at least one has.
    """
    falling = np.argsort(-probability_N, kind="stable")
    probability_N = probability_N[falling].astype(np.float64)
    right_N = np.cumsum(on_N[falling])
    below_N = np.append(probability_N[1:], 0.0)
    # Predicting the first n images is possible where the next one's probability is smaller.
    cut_M = np.flatnonzero(np.append(probability_N[:-1] > below_N[:-1], True))
    if recall is None:
        best = int(np.argmax(2 * right_N[cut_M] / (cut_M + 1 + right_N[-1])))
    else:
        best = int(np.argmax(right_N[cut_M] >= recall * right_N[-1] * (1 - 1e-12)))
    cut = cut_M[best]
    return float((probability_N[cut] + below_N[cut]) / 2)


def _require_every_class(target_NK: np.ndarray, names: Sequence[str] | None) -> None:
    missing = np.flatnonzero(~(target_NK == 1).any(axis=0)).tolist()
    if missing:
        named = [repr(name) for name in all_names(names, target_NK.shape[1])]
        shown = ", ".join(named[k] for k in missing[:_SHOWN])
        raise DataError(
            f"calibrate: no image has {shown}{', ...' if len(missing) > _SHOWN else ''}; expected "
            "an image of every class, for its threshold. Give more images."
        )
