"""From predicted classes to a score: accuracy over all records or per class, with its interval and
chance.

Legend: N test records, C classes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from scipy.stats import t as student

from dpvision.errors import ConfigError
from dpvision.eval.any_of_labels import AnyOfLabels
from dpvision.eval.score import Z_95, Score, Visibility, wilson_interval

Metric = Literal["accuracy", "mean_per_class"]
METRICS: tuple[Metric, ...] = get_args(Metric)


def checked_metric(name: str) -> Metric:
    """Return ``name`` if it is one of ``METRICS``. Raises ConfigError otherwise."""
    for metric in METRICS:
        if name == metric:
            return metric
    raise ConfigError(
        f"evaluate: metric={name!r}; expected one of {', '.join(METRICS)}. Caltech-101 and "
        "Aircraft use mean_per_class."
    )


def measure(
    predicted_N: np.ndarray, truth_N: np.ndarray, metric: Metric = "accuracy"
) -> tuple[float, float, float]:
    """Return the metric and its 95% interval over test records.

    "accuracy" is the share of correct records, with Wilson's interval. "mean_per_class" is the
    average accuracy over the classes in ``truth_N`` (as for Caltech-101 and FGVC-Aircraft); its
    interval adds up the classes' variances, each at Wilson's centre, so that a class with all or no
    records correct still counts as uncertain.

    Args:
        predicted_N, truth_N: int64 labels of the same N >= 1 records.

    Returns:
        value, low, high, each in [0, 1].
    """
    right_N = predicted_N == truth_N
    if metric == "accuracy":
        return float(right_N.mean()), *wilson_interval(int(right_N.sum()), len(right_N))
    _, class_N = np.unique(truth_N, return_inverse=True)
    num_C = np.bincount(class_N)
    right_C = np.bincount(class_N, weights=right_N)
    centre_C = (right_C + Z_95**2 / 2) / (num_C + Z_95**2)
    half = (
        Z_95 * math.sqrt(float((centre_C * (1 - centre_C) / (num_C + Z_95**2)).sum())) / len(num_C)
    )
    value = float((right_C / num_C).mean())
    return value, max(0.0, value - half), min(1.0, value + half)


def chance_level(truth_N: np.ndarray, metric: Metric = "accuracy") -> float:
    """Return the score of the best constant prediction: the share of the most frequent class, or 1
    / C.
    """
    _, num_C = np.unique(truth_N, return_counts=True)
    return float(num_C.max() / num_C.sum()) if metric == "accuracy" else 1 / len(num_C)


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95% interval of the mean of two or more independent draws (Student's t), clipped
    to [0, 1].
    """
    x = np.asarray(values, dtype=np.float64)
    half = float(student.ppf(0.975, len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x)))
    return max(0.0, float(x.mean()) - half), min(1.0, float(x.mean()) + half)


def titled(protocol: str, metric: Metric) -> str:
    """Return a protocol's name with its metric."""
    return protocol if metric == "accuracy" else f"{protocol} (mean per class)"


@dataclass(frozen=True)
class Scoring:
    """Settings for comparing predicted classes with labels."""

    metric: Metric = "accuracy"
    any_of: AnyOfLabels | None = None
    """Sets of correct classes that replace each record's label; accuracy only."""
    visibility: Visibility = "private"

    def score(
        self,
        name: str,
        title: str,
        how: str,
        predicted: Sequence[np.ndarray],
        truth_N: np.ndarray,
        row_N: np.ndarray,
    ) -> Score:
        """Return the score of one draw with its interval over test records, or the mean of several
        draws with Student's interval.

        Args:
            name: name of what was measured.
            title, how: start and end of the protocol's description; the metric is between them.
            predicted: predicted classes of each draw, int64, for the same records.
            truth_N: their labels, int64.
            row_N: their rows in the test store, int64.

        Raises:
            DataError: ``any_of`` has no class for any of the rows.
        """
        if self.any_of is not None:
            counted = [self.any_of.measure(p, row_N) for p in predicted]
            figures, num = [(value, low, high) for value, low, high, _ in counted], counted[0][3]
            chance, protocol = (
                self.any_of.chance(row_N),
                f"{title}, {how}, any label of {self.any_of.name}",
            )
        else:
            figures, num = [measure(p, truth_N, self.metric) for p in predicted], len(truth_N)
            chance, protocol = (
                chance_level(truth_N, self.metric),
                f"{titled(title, self.metric)}, {how}",
            )
        values = [figure[0] for figure in figures]
        low, high = t_interval(values) if len(figures) > 1 else figures[0][1:]
        return Score(
            name, float(np.mean(values)), low, high, num, chance, protocol, self.visibility
        )
