"""Fit the temperature of a run's classifier, and thresholds for several labels, on public images.

    p = softmax(score / T), or sigmoid((score - b) / T);   T, b minimise the mean of -log p(labels)

after Guo et al. 2017, "On calibration of modern neural networks", and Platt 1999 for the sigmoid:
the zero of a private head's scores may be anywhere. The threshold of a class is the
probability above which F1 = 2 TP / (2 TP + FP + FN) is largest, or the largest one that keeps a
declared recall.

A function of private labels would need a plan of its own, so a private store is refused.

Legend: N images, K classes.
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dpvision.checkpoint import load_checkpoint
from dpvision.data.store import Store
from dpvision.encoders.calibration import Calibration, save_calibration, weights_of
from dpvision.encoders.classifier import Loss, loss_of, probability_of, threshold_of
from dpvision.encoders.feature_file import Extraction, Progress
from dpvision.errors import ConfigError, DataError, PrivacyError
from dpvision.eval.probes.own_head import model_of, own_scores
from dpvision.eval.score import Visibility

_FLATTEST = 1e-5
"""Smallest slope of the logits that is tried, for scores of standard deviation 1."""


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

    Classes are matched by name. The images must not be those that the run was trained on; where
    the training store is there, they are compared (``scored_run.check_unseen``).

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
        DataError: no finite temperature fits, or a class has no image and the run no threshold of
            its own; or as for ``own_head.score_own_head``.
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
    found = own_scores(checkpoint, store, hardware, encoder=encoder, ema=ema)
    model, store, row_N, score_NK = model_of(found.config), *found[1:4]
    assert model.num_classes is not None
    if recall is not None and not model.multi_label:
        raise ConfigError(
            f"calibrate: recall={recall} with a run of one class per image; expected a "
            "multi-label run. Leave it out."
        )
    target_NK, loss = store.targets(row_N, model.num_classes), loss_of(model)
    scale = fit_scale(score_NK.numpy(), target_NK, loss)
    thresholds = rule = None
    if model.multi_label:
        probability_NK = ((score_NK - scale.offset) / scale.temperature).sigmoid().numpy()
        own = threshold_of(model)
        kept = None if own is None else probability_of((own - scale.offset) / scale.temperature)
        thresholds, rule = _thresholds(probability_NK, target_NK == 1, recall, kept)
    made = Calibration(
        weights=weights_of(checkpoint, ema),
        temperature=scale.temperature,
        offset=scale.offset,
        thresholds=thresholds,
        rule=rule,
        store={
            "name": store.path.name,
            "store_id": store.store_id,
            "split": store.meta.get("split"),
            "licence": store.licence,
            "images": len(row_N),
        },
        loss_before=mean_loss(score_NK.numpy(), target_NK, loss),
        loss_after=mean_loss(score_NK.numpy(), target_NK, loss, scale),
    )
    return Calibrated(made, save_calibration(checkpoint, made), found.visibility)


class Scale(NamedTuple):
    """Scores become logits: (score - offset) / temperature."""

    temperature: float
    offset: float = 0.0


def fit_scale(score_NK: np.ndarray, target_NK: np.ndarray, loss: Loss) -> Scale:
    """Return the scale of the smallest ``mean_loss``; the offset is 0 with the softmax loss, which
    does not depend on it.

    The loss is convex in 1 / temperature and offset / temperature, so every minimum is the global
    one.

    Args:
        target_NK: 1 for each class of an image, 0 elsewhere.

    Raises:
        DataError: the smallest loss is at temperature 0, because the scores separate the classes of
            these images, or at infinity, because they do not tell the classes apart.
    """
    from scipy import optimize, special  # they take time to import

    middle = float(score_NK.mean(dtype=np.float64)) if loss == "sigmoid" else 0.0
    spread = max(float(score_NK.std(dtype=np.float64)), float(np.finfo(np.float32).tiny))
    z_NK, on_NK = (score_NK.astype(np.float64) - middle) / spread, target_NK == 1

    def loss_at(slope_and_shift: np.ndarray) -> tuple[float, np.ndarray]:
        logit_NK = slope_and_shift[0] * z_NK + slope_and_shift[1]
        predict = special.expit if loss == "sigmoid" else partial(special.softmax, axis=1)
        error_NK = (predict(logit_NK) - on_NK) / len(z_NK)
        return _loss_of_logits(logit_NK, on_NK, loss), np.array(
            [(error_NK * z_NK).sum(), error_NK.sum() if loss == "sigmoid" else 0.0]
        )

    found: Any = optimize.minimize(
        loss_at,
        np.array([1.0, 0.0]),
        jac=True,
        method="L-BFGS-B",
        bounds=[(_FLATTEST, None), (None, None)],
        options={"ftol": 1e-15, "gtol": 1e-9, "maxiter": 1000},
    )
    slope, shift = found.x
    if not (slope > 2 * _FLATTEST and np.ptp(z_NK) > 0):
        raise DataError(
            f"calibrate: the scores of {len(score_NK)} images do not tell their classes apart; "
            "expected a classifier better than chance. Check the labels (dpvision data inspect "
            "STORE), or train longer."
        )
    if not loss_at(2 * found.x)[0] > found.fun:
        raise DataError(
            f"calibrate: the scores separate the classes of all {len(score_NK)} images; expected "
            "some errors, without which no temperature is best. Give more images."
        )
    return Scale(float(spread / slope), float(middle - shift * spread / slope) if shift else 0.0)


def mean_loss(
    score_NK: np.ndarray, target_NK: np.ndarray, loss: Loss, scale: Scale | None = None
) -> float:
    """Return the mean negative log likelihood of an image's labels, summed over classes with the
    sigmoid loss.
    """
    scale = scale or Scale(1.0)
    logit_NK = (score_NK.astype(np.float64) - scale.offset) / scale.temperature
    return _loss_of_logits(logit_NK, target_NK == 1, loss)


def _loss_of_logits(logit_NK: np.ndarray, on_NK: np.ndarray, loss: Loss) -> float:
    if loss == "sigmoid":
        return float(np.logaddexp(0.0, np.where(on_NK, -logit_NK, logit_NK)).sum(axis=1).mean())
    return float((np.logaddexp.reduce(logit_NK, axis=1) - logit_NK[on_NK]).mean())


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


def _thresholds(
    probability_NK: np.ndarray, on_NK: np.ndarray, recall: float | None, own: float | None
) -> tuple[tuple[float, ...], str]:
    """Return a threshold for each class, and how they were chosen, in words. A class without an
    image keeps the run's own threshold, the probability ``own``.
    """
    rule = "largest F1" if recall is None else f"recall of {recall:g} or more"
    missing = int((~on_NK.any(axis=0)).sum())
    if missing and own is None:
        raise DataError(
            f"calibrate: {missing} of {on_NK.shape[1]} classes have no image; expected an image of "
            "every class, because this run has no thresholds of its own. Give more images."
        )
    if missing:
        rule += f"; the run's own for {missing} classes without an image"
    classes = zip(probability_NK.T, on_NK.T, strict=True)
    found = [fit_threshold(p, on, recall) if on.any() else own for p, on in classes]
    return tuple(threshold for threshold in found if threshold is not None), rule
