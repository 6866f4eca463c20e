"""How well a classifier tells each class, in the figures that medicine reports.

Of each class against all others: AUROC, average precision (AUPRC), sensitivity at a specificity,
Brier score and calibration error; over all images and in declared groups, such as sex or site. With
them the confusion matrix and what a reliability diagram shows. Intervals are 95% bootstrap
intervals over units (persons), since images of one person are alike.

Legend: N images, K classes, R draws of the bootstrap, M distinct scores, J bins of probability.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from dpvision.eval.metric import (
    bootstrap_interval,
    bootstrap_weights,
    precision_of,
    ranked,
    share_of,
)
from dpvision.eval.score import Visibility, check_specificity

NUM_BINS = 15
"""Bins of equal width of the calibration error (Guo et al. 2017, arXiv 1706.04599)."""
ALL = "all"
"""Name of the group of all images, and of the row of all classes."""
FITTED = ", fitted here"
"""End of the name of a figure that is none of a test: a calibration was fitted to these images."""


class Value(NamedTuple):
    """A figure with its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class ClassRow:
    """Figures of one class in one group, or their mean over the classes."""

    name: str
    """The class, or ``ALL``: means over the classes that have images with and without them, but for
    the Brier score and the calibration error, which are those of the whole prediction.
    """
    group: str
    """``ALL``, or ATTRIBUTE=VALUE."""
    images: int
    """Of the class, in the group."""
    units: int
    """Persons whom these images show; equal to ``images`` where no persons are known."""
    figures: dict[str, Value | None]
    """By measure; None where the images do not define it, as AUROC without images of the class or
    without others.
    """


@dataclass(frozen=True)
class ClassScores:
    """Figures per class of one classifier on one store."""

    class_names: tuple[str, ...]
    rows: tuple[ClassRow, ...]
    images: int
    units: int
    confusion_KK: tuple[tuple[int, ...], ...] | None
    """Images by declared (row) and predicted class; None for a multi-label run."""
    reliability: tuple[tuple[int, float, float], ...]
    """Of each bin: the number of predictions, their mean probability, and the share that is right;
    of the predicted class's probability, or of all classes of a multi-label run.
    """
    roc: dict[str, tuple[list[float], list[float]]]
    """By class, over all images: false and true positive rates at the corners of its ROC curve,
    from 0 to 1; without the classes that have no AUROC.
    """
    visibility: Visibility

    @property
    def fitted(self) -> bool:
        """bool: whether figures are marked as ``FITTED``."""
        return any(name.endswith(FITTED) for name in self.rows[0].figures)

    def marked(self) -> "ClassScores":
        """Return these figures with ``FITTED`` after the names of those that a temperature changes:
        it was fitted to the images.
        """
        of_scale = ("Brier score", "calibration error")
        rows = (
            {k + FITTED if k in of_scale else k: v for k, v in row.figures.items()}
            for row in self.rows
        )
        marked = (replace(row, figures=k) for row, k in zip(self.rows, rows, strict=True))
        return replace(self, rows=tuple(marked))

    def to_dict(self) -> dict[str, Any]:
        """Return a plain dict, ready for JSON."""
        rows = [
            asdict(row) | {"figures": {k: v and v._asdict() for k, v in row.figures.items()}}
            for row in self.rows
        ]
        return asdict(self) | {"rows": rows}


def class_scores(
    probability_NK: np.ndarray,
    target_NK: np.ndarray,
    class_names: Sequence[str],
    unit_N: np.ndarray,
    *,
    groups: Mapping[str, np.ndarray] | None = None,
    specificity: float = 0.9,
    multi_label: bool = False,
    visibility: Visibility = "private",
) -> ClassScores:
    """Return the figures of each class, over all images and in each group.

    Args:
        probability_NK: in [0, 1].
        target_NK: 1 for each class of an image, 0 elsewhere.
        unit_N: images of one unit (person) have the same number.
        groups: attribute to the value of each image, (N,) of str; figures are given for the images
            of each value.
        specificity: of the threshold that "sensitivity at" is for: the share of other images that
            it must leave out.
        multi_label: whether an image can have several classes, or none.

    Raises:
        ConfigError: ``specificity`` is not above 0 and below 1.
    """
    check_specificity(specificity)
    masks = {ALL: np.ones(len(target_NK), dtype=bool)}
    for attribute, value_N in (groups or {}).items():
        masks |= {f"{attribute}={v}": value_N == v for v in sorted(set(value_N.tolist()))}
    rows: list[ClassRow] = []
    for group, in_N in masks.items():
        made = _Group(probability_NK[in_N], target_NK[in_N], unit_N[in_N], multi_label)
        of_classes = [made.of_class(k, specificity) for k in range(len(class_names))]
        rows.append(ClassRow(ALL, group, *made.size(made.any_N), made.of_all(of_classes)))
        rows += [
            ClassRow(name, group, *made.size(target_NK[in_N, k] == 1), figures)
            for k, (name, (figures, _)) in enumerate(zip(class_names, of_classes, strict=True))
        ]
    predicted_N = probability_NK.argmax(axis=1)
    confusion_KK = None
    if not multi_label:
        counts_KK = np.zeros((len(class_names), len(class_names)), dtype=np.int64)
        np.add.at(counts_KK, (target_NK.argmax(axis=1), predicted_N), 1)
        confusion_KK = tuple(map(tuple, counts_KK.tolist()))
    surest_M, right_M = _decided(probability_NK, target_NK, multi_label)
    num_RJ, sum_RJ, right_RJ = _binned(surest_M, right_M, np.ones((1, len(surest_M))))
    return ClassScores(
        tuple(class_names),
        tuple(rows),
        len(target_NK),
        len(np.unique(unit_N)),
        confusion_KK,
        tuple(
            (int(num), total / max(num, 1), right / max(num, 1))
            for num, total, right in zip(num_RJ[0], sum_RJ[0], right_RJ[0], strict=True)
        ),
        {
            name: (false_M.tolist(), true_M.tolist())
            for k, name in enumerate(class_names)
            if 0 < target_NK[:, k].sum() < len(target_NK)
            for false_M, true_M in [roc_of(probability_NK[:, k], target_NK[:, k])]
        },
        visibility,
    )


_Figures = dict[str, Value | None]


class _Group:
    """Some images, and their draws."""

    def __init__(
        self,
        probability_NK: np.ndarray,
        target_NK: np.ndarray,
        unit_N: np.ndarray,
        multi_label: bool,
    ) -> None:
        self._probability_NK, self._target_NK = probability_NK.astype(np.float64), target_NK
        self._unit_N, self._multi_label = unit_N, multi_label
        self._weight_RN = bootstrap_weights(unit_N)
        self.any_N = np.ones(len(unit_N), dtype=bool)

    def size(self, chosen_N: np.ndarray) -> tuple[int, int]:
        """Numbers of chosen images, and of their units."""
        return int(chosen_N.sum()), len(np.unique(self._unit_N[chosen_N]))

    def of_class(self, k: int, specificity: float) -> tuple[_Figures, dict[str, np.ndarray]]:
        """Figures of class ``k`` against all others, and their values in each draw."""
        probability_N, on_N = self._probability_NK[:, k], self._target_NK[:, k]
        auroc_R, precision_R, found_R = ranked(
            (auroc_of, precision_of, functools.partial(sensitivity_of, specificity=specificity)),
            probability_N,
            on_N,
            self._weight_RN,
        )
        values = {
            "AUROC": auroc_R,
            "AUPRC": precision_R,
            f"sensitivity at {specificity:.0%}": found_R,
            "Brier score": self._mean((probability_N - on_N) ** 2),
            "calibration error": calibration_error(probability_N, on_N, self._weight_RN),
        }
        both = 0 < on_N.sum() < len(on_N)
        return {name: _value(value_R) if both else None for name, value_R in values.items()}, values

    def of_all(self, of_classes: Sequence[tuple[_Figures, dict[str, np.ndarray]]]) -> _Figures:
        """Means over the classes, and the figures of the whole prediction."""
        found: _Figures = {}
        defined = [values for figures, values in of_classes if figures["AUROC"] is not None]
        for name in of_classes[0][0]:
            value_KR = np.array([values[name] for values in defined])
            found[name] = _value(_mean_of_defined(value_KR)) if len(value_KR) else None
        square_N = ((self._probability_NK - self._target_NK) ** 2).sum(axis=1)
        scale = self._target_NK.shape[1] if self._multi_label else 2
        found["Brier score"] = _value(self._mean(square_N / scale))
        surest_M, right_M = _decided(self._probability_NK, self._target_NK, self._multi_label)
        weight_RM = np.repeat(self._weight_RN, len(surest_M) // len(self._unit_N), axis=1)
        found["calibration error"] = _value(calibration_error(surest_M, right_M, weight_RM))
        return found

    def _mean(self, value_N: np.ndarray) -> np.ndarray:
        return self._weight_RN @ value_N / self._weight_RN.sum(axis=1)


def auroc_of(hits_RM: np.ndarray, taken_RM: np.ndarray) -> np.ndarray:
    """Return the area under the ROC curve, (R,): the chance that a record of the class scores above
    another one, equal scores counting half. A measure for ``ranked``.
    """
    false_RM = taken_RM - hits_RM
    more_RM = np.diff(false_RM, axis=1, prepend=0.0)
    before_RM = hits_RM - np.diff(hits_RM, axis=1, prepend=0.0)
    area_R = (more_RM * (before_RM + hits_RM) / 2).sum(axis=1)
    return share_of(area_R, hits_RM[:, -1] * false_RM[:, -1])


def roc_of(probability_N: np.ndarray, on_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return false and true positive rates at the corners of the ROC curve, (M,) each, from 0 to 1.

    Args:
        on_N: 1 for records of the class, 0 for others; there are both.
    """
    (counts_2M,) = ranked(
        [lambda hits_RM, taken_RM: np.concatenate([taken_RM - hits_RM, hits_RM])],
        probability_N,
        on_N,
        np.ones((1, len(on_N))),
    )
    counts_2M = np.concatenate([np.zeros((2, 1)), counts_2M], axis=1)
    x, y = np.diff(counts_2M, axis=1)
    # Points on a straight line are left out: whole numbers, so that the product is exact.
    corner_M = np.concatenate([[True], x[:-1] * y[1:] != x[1:] * y[:-1], [True]])
    false_M, true_M = counts_2M[:, corner_M] / counts_2M[:, -1:]
    return false_M, true_M


def sensitivity_of(hits_RM: np.ndarray, taken_RM: np.ndarray, *, specificity: float) -> np.ndarray:
    """Return the largest share of the class's records that a threshold finds which leaves out the
    share ``specificity`` of the others, (R,). A measure for ``ranked``.
    """
    false_RM = taken_RM - hits_RM
    allowed_R = (1 - specificity) * false_RM[:, -1] * (1 + 1e-12)
    found_R = np.where(false_RM <= allowed_R[:, None], hits_RM, 0.0).max(axis=1)
    return np.where(false_RM[:, -1] > 0, share_of(found_R, hits_RM[:, -1]), np.nan)


def calibration_error(
    probability_N: np.ndarray, right_N: np.ndarray, weight_RN: np.ndarray
) -> np.ndarray:
    """Return the expected calibration error under each weighting, (R,): the mean over ``NUM_BINS``
    bins of equal width, by their weight, of |share right - mean probability| (Guo et al. 2017,
    eq. 3).
    """
    _, sum_RJ, right_RJ = _binned(probability_N, right_N, weight_RN)
    return share_of(np.abs(sum_RJ - right_RJ).sum(axis=1), weight_RN.sum(axis=1))


def _binned(
    probability_N: np.ndarray, right_N: np.ndarray, weight_RN: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weight, sum of probabilities and weight of right ones in each bin, (R, J) each."""
    bin_N = np.clip(np.ceil(probability_N * NUM_BINS).astype(int) - 1, 0, NUM_BINS - 1)
    in_NJ = np.eye(NUM_BINS)[bin_N]
    return (
        weight_RN @ in_NJ,
        weight_RN @ (in_NJ * probability_N[:, None]),
        weight_RN @ (in_NJ * right_N[:, None]),
    )


def _decided(
    probability_NK: np.ndarray, target_NK: np.ndarray, multi_label: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities whose calibration counts, and whether each is right: of the predicted class, or
    of every class of a multi-label run, image by image.
    """
    if multi_label:
        return probability_NK.ravel(), target_NK.ravel() == 1
    best_N = probability_NK.argmax(axis=1)[:, None]
    return (
        np.take_along_axis(probability_NK, best_N, 1)[:, 0],
        np.take_along_axis(target_NK, best_N, 1)[:, 0] == 1,
    )


def _mean_of_defined(value_KR: np.ndarray) -> np.ndarray:
    """Mean over the classes in each draw; a class that a draw lacks does not count there."""
    defined_KR = ~np.isnan(value_KR)
    total_R = np.where(defined_KR, value_KR, 0.0).sum(axis=0)
    return share_of(total_R, defined_KR.sum(axis=0).astype(np.float64))


def _value(value_R: np.ndarray) -> Value | None:
    """The figure with its interval; None if the original records do not define it."""
    if math.isnan(value_R[0]):
        return None
    return Value(*bootstrap_interval(value_R[~np.isnan(value_R)]))
