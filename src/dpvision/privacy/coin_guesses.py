"""How many coins an attacker may guess right under (epsilon, delta), whatever the mechanism, and
the lower bound on epsilon that right guesses give (``audit.one_run`` says how they are made).

Legend: M canaries.
"""

import math
from typing import Any

import numpy as np
from scipy import optimize, stats

FALSE_ALARM = 1e-3
"""Probability with which an audit's bound may be wrong."""
_SHARES = (0.02, 0.1, 0.25, 0.5, 1.0)
"""Shares of the canaries whose coins are guessed."""
_LARGEST = 30.0
"""Epsilons above it are not told from it."""


def guess_counts(num: int) -> list[int]:
    """Return the even numbers of guesses that are tried on ``num`` canaries, 2 or more."""
    return sorted({2 * max(1, round(share * num / 2 - 1e-9)) for share in _SHARES})


def right_guesses(score_M: np.ndarray, inside_M: np.ndarray, guesses: int) -> int:
    """Return how many of ``guesses`` are right: the highest half of the scores that are used is
    guessed to be in the data, the lowest half not to be.

    Args:
        score_M: higher for canaries that look trained on; ties are broken by place.
        inside_M: bool, the coins.
        guesses: even, at most M.
    """
    order_M = np.argsort(score_M, kind="stable")
    half = guesses // 2
    return int((~inside_M[order_M[:half]]).sum() + inside_M[order_M[len(order_M) - half :]].sum())


def tail(num: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return the largest probability of ``right`` or more right guesses under
    (epsilon, delta)-differential privacy: B_v + M delta max_i c_i, for v = ``right``.

    Averaging a mechanism over permutations and flips of the coins changes neither its privacy nor
    the law P of the right guesses of G. Privacy then says that the sum over j of the positive parts
    x_j of (j + 1) P_(j+1) - e^epsilon (G - j) P_j is at most M delta. The tail is affine in the x_j
    and falls in none, so all of M delta is at one of them. With all of them 0, P is binomial, b,
    of probability e^epsilon / (1 + e^epsilon), as in Steinke et al. With
    B_i = P[W >= i]: c_i = B_v (1 - B_i) / (i b_i) for i up to v; above v no c_i is larger.

    The form of their Theorem 5.2 for guesses and abstentions (Corollary 5.4), B_v + 2 M delta max_i
    P[v - i <= W < v] / i, is larger where the tail is small, and too small for some mechanisms
    where it is large (docs/log).

    Args:
        num: canaries M, at least ``guesses``.
        guesses: number G of coins that are guessed, at least ``right``.
    """
    if right == 0:
        return 1.0
    law = stats.binom(guesses, 1 / (1 + math.exp(-epsilon)))
    log_tail = float(np.logaddexp.reduce(law.logpmf(np.arange(right, guesses + 1))))
    i = np.arange(1, right + 1)
    with np.errstate(divide="ignore", invalid="ignore"):  # where B_i rounds to 1
        log_excess = np.nanmax(log_tail + np.log(law.cdf(i - 1)) - np.log(i) - law.logpmf(i))
    return min(1.0, math.exp(log_tail) + num * delta * math.exp(min(log_excess, 0.0)))


def epsilon_low(num: int, guesses: int, right: int, delta: float, alarm: float) -> float:
    """Return the largest epsilon that is refuted at ``delta`` with false alarm ``alarm``, 0 if none
    is: the bound holds for any mechanism.
    """

    def excess(epsilon: float) -> float:
        return tail(num, guesses, right, epsilon, delta) - alarm

    if excess(0.0) >= 0:
        return 0.0
    if excess(_LARGEST) < 0:
        return _LARGEST
    root = float(optimize.bisect(excess, 0.0, _LARGEST, xtol=1e-6)) - 2e-6
    assert root < 0 or excess(root) < 0
    return max(0.0, root)


def guesses_tried(score_M: np.ndarray, inside_M: np.ndarray, delta: float) -> list[dict[str, Any]]:
    """Return each number of guesses, how many are right, and the bound for any mechanism, each at
    its share of the false alarm.
    """
    counts, tried = guess_counts(len(score_M)), []
    for guesses in counts:
        right = right_guesses(score_M, inside_M, guesses)
        low = epsilon_low(len(score_M), guesses, right, delta, alarm_of(len(score_M)))
        tried.append({"guesses": guesses, "right": right, "epsilon_low": low})
    return tried


def largest_bound(num: int, delta: float) -> float:
    """Return the largest bound for any mechanism that ``num`` canaries can give: all are right."""
    return max(epsilon_low(num, k, k, delta, alarm_of(num)) for k in guess_counts(num))


def alarm_of(num: int) -> float:
    """Return the share of ``FALSE_ALARM`` of each number of guesses."""
    return FALSE_ALARM / len(guess_counts(num))
