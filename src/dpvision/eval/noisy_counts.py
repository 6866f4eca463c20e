"""Figures of a classifier from a released table of noisy counts: post-processing, which reads no
image and costs no privacy.

The table has, for each declared class, predicted class and bin of the predicted class's
probability, the number of units (persons, or images) with noise of a known standard deviation. A
class's ROC curve orders images as follows: those predicted as the class, by rising probability,
come after all others, which are in order of falling probability. For two classes this is the order
of the class's own probability.

Legend: G groups, K classes (declared, predicted), J bins, R draws of the bootstrap, M = 2 J places
in the order of a ROC curve.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from dpvision.eval.class_scores import ALL, Value
from dpvision.eval.metric import share_of

NUM_BINS = 5
DECIMALS = 4
"""Of released numbers."""
FEWEST = 5.0
"""A figure is given if each count that it divides by has more standard deviations of noise."""
_GAPS = "calibration error"
_DRAWS, _NUMBERS = 1000, 20_000_000
"""Draws of the bootstrap, and the most numbers that they may have."""


@dataclass(frozen=True)
class NoisyCounts:
    """One table: numbers of units by group, declared class, predicted class and bin."""

    attribute: str
    """What the groups are values of; ``ALL`` for a table without groups."""
    groups: tuple[str, ...]
    count_GKKJ: np.ndarray
    """float64; noise makes some of them negative."""
    noise_std: float
    """Of each count."""


@dataclass(frozen=True)
class NoisyRow:
    """Figures of one class in one group; of ``ALL`` classes, those of the whole prediction."""

    name: str
    group: str
    """``ALL``, or ATTRIBUTE=VALUE."""
    count: float
    """Noisy number of units of the class in the group."""
    count_std: float
    """Standard deviation of its noise."""
    figures: dict[str, Value | None]
    """By measure, with 95% intervals that include the noise; None if the counts are too few."""


def bin_edges(num_classes: int) -> np.ndarray:
    """Return the edges of the bins, (J + 1,): of equal width from 1 / K, below which the predicted
    class's probability cannot be, to 1.
    """
    return np.linspace(1 / num_classes, 1, NUM_BINS + 1)


def rows_of(tables: Sequence[NoisyCounts], class_names: Sequence[str]) -> list[NoisyRow]:
    """Return the figures of each class, over all images and in each group.

    Those over all images are of ``whole_of`` the tables. Intervals are by a parametric bootstrap:
    to every count, noise of the release and noise of a Poisson count's variance are added, and the
    figure computed again. Units that spread over several cells vary less than Poisson counts.
    """
    rng = np.random.default_rng(0)
    rows = _rows(ALL, *whole_of(tables), class_names, rng)
    for table in tables:
        for group, count_KKJ in zip(table.groups, table.count_GKKJ, strict=True):
            if table.attribute != ALL:
                name = f"{table.attribute}={group}"
                rows += _rows(name, count_KKJ, table.noise_std, class_names, rng)
    return rows


def whole_of(tables: Sequence[NoisyCounts]) -> tuple[np.ndarray, float]:
    """Return the counts over all groups (K, K, J) and the standard deviation of their noise: the
    mean of the tables, weighted by their precision.
    """
    least = min(table.noise_std for table in tables)
    weight = [
        (least / table.noise_std) ** 2 / len(table.groups) if least else 1.0 for table in tables
    ]
    whole_KKJ = np.zeros(tables[0].count_GKKJ.shape[1:])
    for share, table in zip(weight, tables, strict=True):
        whole_KKJ += share / sum(weight) * table.count_GKKJ.sum(axis=0)
    return whole_KKJ, least / math.sqrt(sum(weight))


def roc_of(count_KKJ: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the false and true positive rates of class ``k`` at each threshold, from the highest,
    (M + 1,) each, from 0 to 1. Where noise makes a count negative, a rate stays as it is.
    """
    rates = []
    for one_KJ in _off_and_on(count_KKJ, k):
        found_M = _ordered(one_KJ, k)[::-1].cumsum()
        share_M = np.clip(found_M / found_M[-1], 0, 1)
        rates.append(np.maximum.accumulate(np.r_[0.0, share_M]))
    return rates[0], rates[1]


def figures_of(tables: Sequence[NoisyCounts], class_names: Sequence[str]) -> dict[str, Any]:
    """Return the tables and all that follows from them, ready for JSON."""
    rows, (whole_KKJ, _) = rows_of(tables, class_names), whole_of(tables)
    # A curve where the class has an AUROC.
    known = {r.name for r in rows if r.group == ALL and r.figures["AUROC"] is not None}
    curves = {
        name: [one.round(DECIMALS).tolist() for one in roc_of(whole_KKJ, k)]
        for k, name in enumerate(class_names)
        if name in known
    }
    return {
        "class_names": list(class_names),
        "bin_edges": bin_edges(len(class_names)).tolist(),
        "tables": [
            {
                "attribute": table.attribute,
                "groups": list(table.groups),
                "noise_std": table.noise_std,
                "counts": table.count_GKKJ.tolist(),
            }
            for table in tables
        ],
        "rows": [
            asdict(row) | {"figures": {k: v and v._asdict() for k, v in row.figures.items()}}
            for row in rows
        ],
        "confusion": whole_KKJ.sum(axis=2).round(DECIMALS).tolist(),
        "roc": curves,
    }


def tables_of(tables: Sequence[Mapping[str, Any]]) -> list[NoisyCounts]:
    """Return tables as ``figures_of`` wrote them."""
    return [
        NoisyCounts(
            one["attribute"],
            tuple(one["groups"]),
            np.array(one["counts"], dtype=float),
            one["noise_std"],
        )
        for one in tables
    ]


def _rows(
    group: str, count_KKJ: np.ndarray, std: float, names: Sequence[str], rng: np.random.Generator
) -> list[NoisyRow]:
    # The first draw is the table itself.
    shape = (min(_DRAWS, max(100, _NUMBERS // count_KKJ.size)), *count_KKJ.shape)
    noise_RKKJ = std * rng.normal(size=shape)
    drawn_RKKJ = std * rng.normal(size=shape)
    drawn_RKKJ += np.sqrt(np.maximum(count_KKJ, 0)) * rng.normal(size=shape)
    noise_RKKJ[0] = drawn_RKKJ[0] = 0
    drawn_RKKJ += count_KKJ

    areas, rows = [], []
    for k, name in enumerate(names):
        off_KJ, on_KJ = _off_and_on(count_KKJ, k)
        count, count_std = _count(on_KJ, std)
        off, off_std = _count(off_KJ, std * math.sqrt(len(names) - 1))
        found = _of_class(drawn_RKKJ, k)
        enough = count > FEWEST * count_std and off > FEWEST * off_std
        if enough:
            areas.append(found["AUROC"])
        shown = {measure: _value(one_R) if enough else None for measure, one_R in found.items()}
        rows.append(NoisyRow(name, group, count, count_std, shown))
    whole, whole_std = _count(count_KKJ, std)
    found = {"AUROC": np.mean(areas, axis=0)} if areas else {}
    found |= _of_prediction(drawn_RKKJ)
    figures: dict[str, Value | None] = dict.fromkeys(("AUROC", *found))
    if whole > FEWEST * whole_std:
        figures |= {name: _value(one_R) for name, one_R in found.items()}
        # Noise makes absolute differences larger, and noise once more by about as much again.
        again_R = _of_prediction(count_KKJ + noise_RKKJ)[_GAPS]
        figures[_GAPS] = _lowered(_value(found[_GAPS]), again_R)
    return [NoisyRow(ALL, group, whole, whole_std, figures), *rows]


def _of_prediction(count_RKKJ: np.ndarray) -> dict[str, np.ndarray]:
    """Figures of the predicted class; a probability counts as the middle of its bin."""
    num_classes = count_RKKJ.shape[1]
    edges = bin_edges(num_classes)
    middle_J = (edges[:-1] + edges[1:]) / 2
    right_RJ = count_RKKJ.diagonal(axis1=1, axis2=2).sum(axis=2)
    all_RJ = count_RKKJ.sum(axis=(1, 2))
    total_R = all_RJ.sum(axis=1)
    square_RJ = right_RJ * (1 - middle_J) ** 2 + (all_RJ - right_RJ) * middle_J**2
    gap_RJ = np.abs(right_RJ - middle_J * all_RJ)
    return {
        "accuracy": share_of(right_RJ.sum(axis=1), total_R),
        "Brier score": share_of(square_RJ.sum(axis=1), total_R),
        _GAPS: share_of(gap_RJ.sum(axis=1), total_R),
    }


def _of_class(count_RKKJ: np.ndarray, k: int) -> dict[str, np.ndarray]:
    """Figures of class ``k`` against all others."""
    off_RKJ, on_RKJ = _off_and_on(count_RKKJ, k)
    off_RM, on_RM = _ordered(off_RKJ, k), _ordered(on_RKJ, k)
    off_R, on_R = off_RM.sum(axis=1), on_RM.sum(axis=1)
    below_RM = off_RM.cumsum(axis=1) - off_RM / 2
    return {
        "AUROC": share_of((on_RM * below_RM).sum(axis=1), on_R * off_R),
        "sensitivity": share_of(on_RKJ[:, k].sum(axis=1), on_R),
        "specificity": 1 - share_of(off_RKJ[:, k].sum(axis=1), off_R),
    }


def _off_and_on(count_KKJ: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts (..., K, J) of the units of other classes than ``k``, and of those of it."""
    on_KJ = count_KKJ[..., k, :, :]
    return count_KKJ.sum(axis=-3) - on_KJ, on_KJ


def _ordered(count_KJ: np.ndarray, k: int) -> np.ndarray:
    """Counts (..., M) in the order of class ``k``'s ROC curve, the least likely first."""
    as_k_J = count_KJ[..., k, :]
    return np.concatenate([(count_KJ.sum(axis=-2) - as_k_J)[..., ::-1], as_k_J], axis=-1)


def _count(count: np.ndarray, std: float) -> tuple[float, float]:
    return float(count.sum()), std * math.sqrt(count.size)


def _value(value_R: np.ndarray) -> Value:
    """A share with its percentile interval, limited to 0 to 1."""
    low, high = np.nanquantile(value_R, (0.025, 0.975))
    return Value(*(float(np.clip(one, 0, 1)) for one in (value_R[0], low, high)))


def _lowered(found: Value, again_R: np.ndarray) -> Value:
    """A figure without the share of the noise, and its interval reflected."""
    excess = float(np.nanmean(again_R[1:]) - again_R[0])
    middle = found.value - excess
    low, high = 2 * found.value - found.high, 2 * found.value - found.low
    return Value(*(min(max(one, 0.0), 1.0) for one in (middle, low, high)))
