"""From predictions to a score, with its interval and chance: accuracy over all records or per
class; for several labels mean average precision and the share of correct decisions.

    AP_k = sum_i (recall_i - recall_(i-1)) precision_i    over the records by falling score, ties
                                                          together, no interpolation

With several labels a record has all of them, and each class is decided on its own; of
``AnyOfLabels`` any one is a correct answer.

Legend: N test records, C or K classes, R draws of the bootstrap.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from scipy import special

from dpvision.errors import ConfigError, DataError
from dpvision.eval.any_of_labels import AnyOfLabels
from dpvision.eval.score import Z_95, Score, Visibility, wilson_interval

Metric = Literal["accuracy", "mean_per_class"]
METRICS: tuple[Metric, ...] = get_args(Metric)
_DRAWS = 200
_AT_ONCE = 1 << 22


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
    half = float(special.stdtrit(len(x) - 1, 0.975) * x.std(ddof=1) / math.sqrt(len(x)))
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


def multi_label_scores(
    name: str,
    score_NK: np.ndarray,
    target_NK: np.ndarray,
    decided_NK: np.ndarray | None,
    how: str,
    visibility: Visibility,
) -> list[Score]:
    """Return mean average precision over the classes present in the set, and the share of correct
    decisions among all N x K.

    Intervals are 95% bootstrap intervals over records, since decisions about one record are
    correlated. Chance is the share of positives in those classes (random scores), and the accuracy
    of the best constant decision per class.

    Args:
        score_NK: finite; larger is more likely.
        target_NK: 0 or 1.
        decided_NK: whether each class is predicted, bool; if None, scores only define an order, and
            there is no second score.
        how: end of the protocol's description.

    Raises:
        DataError: no record has any class.
    """
    num, classes = target_NK.shape
    present = np.flatnonzero(target_NK.any(axis=0))
    if not len(present):
        raise DataError(
            f"evaluate: none of {num} records has any class; expected some to score on. Give a "
            "store with labels."
        )
    weight_RN = bootstrap_weights(np.arange(num))
    precision_KR = np.stack(
        [average_precision(score_NK[:, k], target_NK[:, k], weight_RN) for k in present]
    )
    # A draw without positives of a class does not count for that class; a draw without any
    # positives does not count at all.
    seen_KR = ~np.isnan(precision_KR)
    mean_R = (
        np.where(seen_KR, precision_KR, 0).sum(axis=0)[seen_KR.any(axis=0)]
        / seen_KR.sum(axis=0)[seen_KR.any(axis=0)]
    )
    of = f"{classes}" if len(present) == classes else f"{len(present)} of {classes}"
    chance = float(target_NK[:, present].mean())
    found = [
        _score(
            name, mean_R, num, chance, f"mean average precision of {of} classes, {how}", visibility
        )
    ]
    if decided_NK is not None:
        right_N = (decided_NK == target_NK).mean(axis=1)
        share_K = target_NK.mean(axis=0)
        constant = float(np.maximum(share_K, 1 - share_K).mean())
        told = f"share of decisions right, {classes} classes, {how}"
        found.append(_score(name, weight_RN @ right_N / num, num, constant, told, visibility))
    return found


def bootstrap_weights(unit_N: np.ndarray) -> np.ndarray:
    """Return how often each record counts: float64 (R, N), once in the first row and as its unit is
    drawn, with replacement, in each of the others.

    Args:
        unit_N: records of one unit (person) are drawn together.
    """
    _, at_N = np.unique(unit_N, return_inverse=True)
    num = int(at_N.max()) + 1
    rng = np.random.Generator(np.random.PCG64(0))
    drawn_RU = [np.bincount(rng.integers(0, num, num), minlength=num) for _ in range(_DRAWS)]
    return np.stack([np.ones(len(unit_N)), *(drawn_U[at_N] for drawn_U in drawn_RU)])


def bootstrap_interval(value_R: np.ndarray) -> tuple[float, float, float]:
    """Return the value of the original records (first) and its 95% interval in [0, 1] from those of
    the draws (the rest), without NaN.

    Draws repeat records, which raises average precision, so their spread is centred on the value of
    the original records.
    """
    value, drawn = float(value_R[0]), value_R[1:]
    low, high = (value + np.quantile(drawn, (0.025, 0.975)) - drawn.mean()).clip(0, 1).tolist()
    return value, min(value, low), max(value, high)


def average_precision(
    score_N: np.ndarray, truth_N: np.ndarray, weight_RN: np.ndarray
) -> np.ndarray:
    """Return the average precision of one class under each of R weightings, float64 (R,); NaN if no
    positive record has weight.

    Equals scikit-learn's ``average_precision_score``. Arguments as for ``ranked``.
    """
    return ranked((precision_of,), score_N, truth_N, weight_RN)[0]


Counted = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""From ``hits_RM`` and ``taken_RM`` to a value for each weighting, float64 (R,): the weight of the
positive records, and of all, whose score is at least the m-th largest of M distinct ones.
"""


def ranked(
    measures: Sequence[Counted], score_N: np.ndarray, truth_N: np.ndarray, weight_RN: np.ndarray
) -> list[np.ndarray]:
    """Return measures of one class's order of records under each of R weightings.

    All bootstrap draws (weights that count each record) share one sort. Separate sorts would take
    hours for a thousand classes of 50,000 records.

    Args:
        score_N: larger is more likely; equal scores are never told apart.
        truth_N: 0 or 1.
        weight_RN: at least 0.
    """
    order = np.argsort(-score_N, kind="stable")
    score_N, truth_N = score_N[order], truth_N[order].astype(np.float64)
    last_of_equal = np.flatnonzero(np.append(np.diff(score_N) != 0, True))
    found: list[list[np.ndarray]] = [[] for _ in measures]
    step = max(1, _AT_ONCE // len(score_N))
    for start in range(0, len(weight_RN), step):
        part_RN = weight_RN[start : start + step, order]
        hits_RM = np.cumsum(part_RN * truth_N, axis=1)[:, last_of_equal]
        taken_RM = np.cumsum(part_RN, axis=1)[:, last_of_equal]
        for measure, values in zip(measures, found, strict=True):
            values.append(measure(hits_RM, taken_RM))
    return [np.concatenate(values) for values in found]


def precision_of(hits_RM: np.ndarray, taken_RM: np.ndarray) -> np.ndarray:
    """Return the average precision; see ``average_precision``."""
    precision = np.divide(hits_RM, taken_RM, out=np.zeros_like(hits_RM), where=taken_RM > 0)
    gained = np.diff(hits_RM, axis=1, prepend=0.0)
    return share_of((gained * precision).sum(axis=1), hits_RM[:, -1])


def share_of(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    """Return ``part / whole``, NaN where ``whole`` is 0."""
    return np.divide(part, whole, out=np.full_like(whole, np.nan), where=whole > 0)


def _score(
    name: str, value_R: np.ndarray, num: int, chance: float, protocol: str, visibility: Visibility
) -> Score:
    """Make a score from the value of the original records (first) and of the bootstrap draws (the
    rest).
    """
    return Score(name, *bootstrap_interval(value_R), num, chance, protocol, visibility)
