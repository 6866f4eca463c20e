"""Lower bounds on epsilon from one run whose canaries were included by fair coins.

M canaries are in the data or not, each by its own coin. An attacker guesses the coins of some of
them from what was released. Privacy limits how many guesses are right:

- ``tail``: for (epsilon, delta), whatever the mechanism: the largest probability of so many (of
  Steinke, Nasr and Jagielski 2023, Privacy auditing with one (1) training run, made exact);
- ``mass_needed``: for a trade-off function, by recursion (Mahloujifar, Melis and Chaudhuri 2024,
  Auditing f-differential privacy in one run); here that of the plan at another noise multiplier.

The numbers of guesses that are tried are fixed by ``guess_counts`` before any score is known, and
the confidence is shared equally among them, so that the best of them may be reported.

Legend: M canaries, E epsilons, I numbers of right guesses.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import optimize, stats

from dpvision.audit.bound import CONFIDENCE, epsilon_not_refuted, profiles
from dpvision.privacy.plan import DPPlan

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
    of probability e^epsilon / (1 + e^epsilon), as Theorem 5.1 of Steinke et al. has it. With
    B_i = P[W >= i]: c_i = B_v (1 - B_i) / (i b_i) for i up to v; above v no c_i is larger.

    The form of their Theorem 5.2, B_v + 2 M delta max_i P[v - i <= W < v] / i, is larger where the
    tail is small, and too small for some mechanisms where it is large (docs/log).

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


def mass_needed(
    level: Callable[[float], float], num: int, guesses: int, right: int, alarm: float
) -> float:
    """Return the total probability that a law of the right guesses needs, if ``right`` or more of
    them have the probability ``alarm``. The mechanism is refuted if it exceeds 1.

    Let r_i and w_i be the sums of j p_j / M and (G - j) p_j / M over j >= i, where p_j is the
    probability of exactly j right guesses of G. One coin flipped turns one right guess into a wrong
    one: r_(i+1) is at most the power of a test of level w_i. The smallest law with this tail has it
    all at ``right``; below, each p_i is the least that the powers above it allow.

    Args:
        level: the inverse of the trade-off function's power: the least level of a test of a power,
            symmetric in adding and removing.
    """
    correct, wrong = alarm * right / num, alarm * (guesses - right) / num
    for i in range(right - 1, -1, -1):
        more = max(0.0, level(min(correct, 1.0)) - wrong)
        correct, wrong = correct + more * i / (guesses - i), wrong + more
    return (correct + wrong) * num / guesses


def level_of(epsilon_E: np.ndarray, delta_E: np.ndarray) -> Callable[[float], float]:
    """Return the least level of a test of a power, for the privacy profile delta(epsilon)."""
    up_E, down_E = np.exp(epsilon_E), np.exp(-epsilon_E)

    def level(power: float) -> float:
        one = ((power - delta_E) * down_E).max()
        two = (1 - delta_E - up_E * (1 - power)).max()
        return float(max(0.0, one, two))

    return level


def epsilon_low_of_plan(plan: DPPlan, num: int, guesses: int, right: int, alarm: float) -> float:
    """Return the epsilon, at the plan's delta, of the largest noise multiplier that the right
    guesses do not refute with false alarm ``alarm``.

    Model-based: sampler, rate and steps are the plan's, and the noise is Gaussian of unknown size.
    """

    def excess(noise_multiplier: float) -> float:
        epsilon_E, removing_E, adding_E = profiles(plan, noise_multiplier)
        level = level_of(epsilon_E, np.maximum(removing_E, adding_E))
        return 1.0 - mass_needed(level, num, guesses, right, alarm)

    return epsilon_not_refuted(plan, excess)


def one_run_bound(score_M: np.ndarray, inside_M: np.ndarray, plan: DPPlan) -> dict[str, Any]:
    """Return the bounds on epsilon from the canaries' scores and coins, ready for JSON.

    Each number of guesses is tested at its share of the false alarm 1 - ``CONFIDENCE``, so the
    largest bounds hold together at that confidence, each kind by itself.
    """
    num, counts = len(score_M), guess_counts(len(score_M))
    alarm = (1 - CONFIDENCE) / len(counts)
    tried = []
    for guesses in counts:
        right = right_guesses(score_M, inside_M, guesses)
        low = epsilon_low(num, guesses, right, plan.delta, alarm)
        tried.append({"guesses": guesses, "right": right, "epsilon_low": low})
    best = max(
        tried,
        key=lambda t: (t["epsilon_low"], -tail(num, int(t["guesses"]), int(t["right"]), 0.0, 0.0)),
    )
    of_plan = max(
        epsilon_low_of_plan(plan, num, int(t["guesses"]), int(t["right"]), alarm) for t in tried
    )
    return {
        "canaries": num,
        "inside": int(inside_M.sum()),
        "tried": tried,
        "guesses": best["guesses"],
        "right": best["right"],
        "epsilon_low": best["epsilon_low"],
        "epsilon_low_of_plan": of_plan,
        "epsilon": plan.epsilon,
        "delta": plan.delta,
        "confidence": CONFIDENCE,
    }
