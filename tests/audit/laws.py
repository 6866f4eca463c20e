"""The laws of noise and draws, checked on what a step released, with the power that is claimed.

Legend: T steps, P coordinates of all parameters, N records.
"""

import math
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
from scipy import stats

from dpvision.audit.canaries import CanaryRun
from dpvision.config import PrivacyConfig

SHIFT, RATIO = 0.0375, 1.0625
"""A mean and a variance, in standard deviations, that are rejected; a correlation of ``SHIFT``
too.
"""
ALARM, MISS = 1e-6, 1e-3
"""Probability that a law refuses correct noise, and that it accepts SHIFT or RATIO."""

LAWS = {
    "poisson": {"sampling": "poisson", "expected_batch_size": 16.0},
    "truncated": {
        "sampling": "truncated_poisson",
        "expected_batch_size": 16.0,
        "max_batch_size": 16,
    },
    "full batch": {"sampling": "full_batch", "expected_batch_size": 32.0},
}
"""Divisors are powers of two: a release times the divisor is exact."""


def privacy(law: str, steps: int, **more: Any) -> PrivacyConfig:
    settings = {"dataset_size": 32, "noise_multiplier": 2.0, "max_grad_norm": 0.5, "delta": 1e-5}
    return PrivacyConfig(**{**settings, **LAWS[law], "steps": steps, **more})


def numbers_needed() -> int:
    """How many numbers reject SHIFT and RATIO."""
    alarm, miss = stats.norm.isf(ALARM / 2), stats.norm.isf(MISS)
    return math.ceil(
        max((alarm + miss) / SHIFT, math.sqrt(2) * (alarm + RATIO * miss) / (RATIO - 1)) ** 2
    )


def noise_of(run: CanaryRun) -> np.ndarray:
    """Noise of each step in units of the plan's standard deviation, (T, P): what was released,
    minus the sum that the auditor knows.
    """
    plan = run.training.plan
    return np.stack(
        [
            (released_P - drawn_N @ run.clipped_NP) / plan.noise.std(step)
            for step, (released_P, drawn_N) in enumerate(run.steps())
        ]
    )


def broken_noise_laws(noise_TP: np.ndarray, parameters: list[slice]) -> list[str]:
    """Names of the laws of independent standard normals that ``noise_TP`` breaks."""
    x, found = noise_TP.ravel(), []
    n = len(x)
    assert n >= numbers_needed()
    if abs(x.mean()) > stats.norm.isf(ALARM / 2) / math.sqrt(n):
        found.append("mean")
    low, high = stats.chi2.ppf([ALARM / 2, 1 - ALARM / 2], n) / n
    if not low < np.square(x).mean() < high:
        found.append("variance")
    if stats.kstest(x, "norm").pvalue < ALARM:
        found.append("distribution")
    tails = [stats.binomtest(int((s * x > 3).sum()), n, stats.norm.sf(3)).pvalue for s in (-1, 1)]
    if min(tails) < ALARM:
        found.append("tails")
    for name, pairs in (
        ("steps", combinations(noise_TP, 2)),
        ("neighbours", [(x[1:], x[:-1])]),
        ("parameters", _beginnings(noise_TP, parameters)),
        ("shares of two ranks", _halves(noise_TP, parameters)),
    ):
        if _correlated(list(pairs)):
            found.append(name)
    return found


def _beginnings(noise_TP: np.ndarray, parameters: list[slice]) -> Iterator[tuple]:
    for a, b in combinations(parameters, 2):
        most = min(a.stop - a.start, b.stop - b.start)
        if most >= 16:
            yield (
                noise_TP[:, a.start : a.start + most].ravel(),
                noise_TP[:, b.start : b.start + most].ravel(),
            )


def _halves(noise_TP: np.ndarray, parameters: list[slice]) -> Iterator[tuple]:
    parts = [(s.start, (s.stop - s.start) // 2) for s in parameters]
    yield (
        np.concatenate([noise_TP[:, at : at + half].ravel() for at, half in parts]),
        np.concatenate([noise_TP[:, at + half : at + 2 * half].ravel() for at, half in parts]),
    )


def _correlated(pairs: list[tuple]) -> bool:
    """Whether one of the pairs, or their squares, go together; all together at ``ALARM``."""
    limit = stats.norm.isf(ALARM / 4 / max(len(pairs), 1))
    return any(
        abs(np.corrcoef(f(a), f(b))[0, 1]) * math.sqrt(len(a)) > limit * slack
        for a, b in pairs
        # The product of squares has heavier tails than a normal variable.
        for f, slack in ((np.asarray, 1.0), (np.square, 1.5))
    )


def broken_draw_laws(drawn_TN: np.ndarray, rate: float, most: int | None = None) -> list[str]:
    """Names of the laws that draws break: each record by its own coin of ``rate``, of which a
    uniform subset of ``most`` is kept if there are more.
    """
    num_steps, num = drawn_TN.shape
    sizes = stats.binom(num, rate).pmf(np.arange(num + 1))
    if most is not None:
        sizes = np.append(sizes[:most], sizes[most:].sum())
    size_T = drawn_TN.sum(1)
    if size_T.max() >= len(sizes):
        return ["cap"]
    mean = sizes @ np.arange(len(sizes))
    rate, found = mean / num, []
    limit = stats.norm.isf(ALARM / 2)
    spread = math.sqrt(sizes @ np.square(np.arange(len(sizes)) - mean))
    if abs(size_T.mean() - mean) > limit * spread / math.sqrt(num_steps):
        found.append("rate")
    keep = num_steps * sizes >= 5
    seen = np.bincount(size_T, minlength=len(sizes))
    rest = [seen[~keep].sum() + 1], [num_steps * sizes[~keep].sum() + 1]
    expected = np.append(num_steps * sizes[keep], rest[1])
    if stats.chisquare(np.append(seen[keep], rest[0]), expected).pvalue < ALARM:
        found.append("sizes")
    z_N = (drawn_TN.sum(0) - num_steps * rate) / math.sqrt(num_steps * rate * (1 - rate))
    if np.abs(z_N).max() > stats.norm.isf(ALARM / 2 / num):
        found.append("records")
    place_N = np.arange(num) - (num - 1) / 2
    if abs(place_N @ z_N) / np.linalg.norm(place_N) > limit:
        found.append("places")
    centred = (drawn_TN - rate) / math.sqrt(rate * (1 - rate))
    pairs = (centred.T @ centred)[np.triu_indices(num, 1)] / math.sqrt(num_steps)
    if np.abs(pairs).max() > 1.3 * stats.norm.isf(ALARM / 2 / len(pairs)):
        found.append("pairs of records")
    again = (centred[1:] * centred[:-1]).sum() / math.sqrt((num_steps - 1) * num)
    if abs(again) > limit:
        found.append("steps")
    return found
