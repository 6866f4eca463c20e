"""Scores of predicted classes: the figure, its interval, chance, and how they were measured.

Legend: N test records.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpvision.eval.any_of_labels import AnyOfLabels
from dpvision.eval.metric import Metric, chance_level, measure, t_interval, titled
from dpvision.eval.score import Score, Visibility


@dataclass(frozen=True)
class Scoring:
    """How predicted classes are compared with labels."""

    metric: Metric = "accuracy"
    any_of: AnyOfLabels | None = None
    """Classes any of which is right, in place of each record's one label; accuracy only."""
    visibility: Visibility = "private"

    def score(self, name: str, title: str, how: str, predicted: Sequence[np.ndarray], truth_N: np.ndarray, row_N: np.ndarray) -> Score:
        """The score of one draw with its interval over test records, or the mean over several draws with Student's interval over them.

        Args:
            name: what was measured.
            title, how: the protocol's beginning and its end; the metric is named between them.
            predicted: of each draw, int64 classes of the same records.
            truth_N: their labels, int64.
            row_N: their rows in the test store, int64.

        Raises:
            DataError: ``any_of`` has a class for none of the rows.
        """
        if self.any_of is not None:
            counted = [self.any_of.measure(p, row_N) for p in predicted]
            figures, num = [(value, low, high) for value, low, high, _ in counted], counted[0][3]
            chance, protocol = self.any_of.chance(row_N), f"{title}, {how}, any label of {self.any_of.name}"
        else:
            figures, num = [measure(p, truth_N, self.metric) for p in predicted], len(truth_N)
            chance, protocol = chance_level(truth_N, self.metric), f"{titled(title, self.metric)}, {how}"
        values = [figure[0] for figure in figures]
        low, high = t_interval(values) if len(figures) > 1 else figures[0][1:]
        return Score(name, float(np.mean(values)), low, high, num, chance, protocol, self.visibility)
