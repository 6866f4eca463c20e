"""From predictions to one figure with its interval: the share that is right, over all records or class by class.

Legend: N test records, C classes.
"""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
from scipy.stats import norm
from scipy.stats import t as student

from dpvision.errors import ConfigError
from dpvision.eval.score import wilson_interval

Metric = Literal["accuracy", "mean_per_class"]
METRICS: tuple[Metric, ...] = get_args(Metric)
_Z = float(norm.ppf(0.975))


def checked_metric(name: str) -> Metric:
    """``name``, if it is one of ``METRICS``. Raises ConfigError otherwise."""
    for metric in METRICS:
        if name == metric:
            return metric
    raise ConfigError(f"evaluate: metric={name!r}; expected one of {', '.join(METRICS)}. Caltech-101 and Aircraft use mean_per_class.")


def measure(predicted_N: np.ndarray, truth_N: np.ndarray, metric: Metric = "accuracy") -> tuple[float, float, float]:
    """The figure and its 95% interval over test records.

    "accuracy" is the share of records that are right, with Wilson's interval. "mean_per_class" is the average over the classes in
    ``truth_N`` of the share of each that is right (what Caltech-101 and FGVC-Aircraft are scored by); its interval adds up the
    classes' variances, each taken at Wilson's centre, so that a class with all or none right still counts as uncertain.

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
    centre_C = (right_C + _Z**2 / 2) / (num_C + _Z**2)
    half = _Z * math.sqrt(float((centre_C * (1 - centre_C) / (num_C + _Z**2)).sum())) / len(num_C)
    value = float((right_C / num_C).mean())
    return value, max(0.0, value - half), min(1.0, value + half)


def chance_level(truth_N: np.ndarray, metric: Metric = "accuracy") -> float:
    """What the best constant answer gets: the share of the most frequent class, or one of C classes."""
    _, num_C = np.unique(truth_N, return_counts=True)
    return float(num_C.max() / num_C.sum()) if metric == "accuracy" else 1 / len(num_C)


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """95% interval of the mean of two or more independent draws (Student's t), cut to [0, 1]."""
    x = np.asarray(values, dtype=np.float64)
    half = float(student.ppf(0.975, len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x)))
    return max(0.0, float(x.mean()) - half), min(1.0, float(x.mean()) + half)


def titled(protocol: str, metric: Metric) -> str:
    """A protocol's name as scores print it: another measure is another protocol."""
    return protocol if metric == "accuracy" else f"{protocol} (mean per class)"
