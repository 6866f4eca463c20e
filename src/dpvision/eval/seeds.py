"""Scores over several seeds: mean, standard deviation and interval."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev

from dpvision.eval.metric import t_interval
from dpvision.eval.score import Score


def over_seeds(found: Sequence[Sequence[Score]]) -> list[Score]:
    """Return the scores of several seeds as their means, each with the standard deviation between
    seeds (n - 1 in the denominator) and Student's 95% interval of the mean.

    The interval leaves out the chance of the test records, which all seeds share.

    Args:
        found: the same scores in the same order for each of two seeds or more.
    """
    scores = []
    for same in zip(*found, strict=True):
        values = [score.value for score in same]
        low, high = t_interval(values)
        private = any(score.visibility == "private" for score in same)
        scores.append(
            replace(
                same[0],
                value=fmean(values),
                low=low,
                high=high,
                protocol=f"{same[0].protocol}, mean over {len(same)} seeds",
                visibility="private" if private else "public",
                std=stdev(values),
            )
        )
    return scores
