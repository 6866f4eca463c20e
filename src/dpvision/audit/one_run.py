"""Lower bounds on epsilon from one run whose canaries were included by fair coins.

Each of M canaries is in the data or not, by a coin of its own. An attacker guesses some of the
coins from what was released. Privacy limits how many guesses are right:

- ``coin_guesses.tail``: for (epsilon, delta), whatever the mechanism: the largest probability of so
  many (of Steinke, Nasr and Jagielski 2023, Privacy auditing with one (1) training run, made
  exact);
- ``mass_needed``: for a trade-off function, by recursion (Mahloujifar, Melis and Chaudhuri 2024,
  Auditing f-differential privacy in one run); here the plan's, at another noise multiplier.

The numbers of guesses that are tried are fixed by ``coin_guesses.guess_counts`` before any score is
known, and the confidence is shared equally among them, so that the best of them may be reported.

Legend: M canaries, E epsilons, I numbers of right guesses.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dpvision.audit.bound import CONFIDENCE, epsilon_not_refuted, profiles
from dpvision.privacy.coin_guesses import alarm_of, guesses_tried, largest_bound, tail
from dpvision.privacy.plan import DPPlan


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


def epsilon_low_of_plan(
    plan: DPPlan, num: int, right: Sequence[tuple[int, int]], alarm: float
) -> float:
    """Return the epsilon, at the plan's delta, of the largest noise multiplier that none of some
    numbers of right guesses refutes.

    Model-based: sampler, rate and steps are the plan's, and the noise is Gaussian of unknown size.

    Args:
        num: M.
        right: numbers of guesses, and of right ones among them.
        alarm: probability that one of these pairs refutes what is true.
    """

    def excess(noise_multiplier: float) -> float:
        epsilon_E, removing_E, adding_E = profiles(plan, noise_multiplier)
        level = level_of(epsilon_E, np.maximum(removing_E, adding_E))
        return 1.0 - max(mass_needed(level, num, *pair, alarm) for pair in right)

    return epsilon_not_refuted(plan, excess)


def one_run_bound(score_M: np.ndarray, inside_M: np.ndarray, plan: DPPlan) -> dict[str, Any]:
    """Return the bounds on epsilon from the canaries' scores and coins, ready for JSON.

    Each number of guesses is tested at its share of the false alarm 1 - ``CONFIDENCE``, so the
    largest bounds hold together at that confidence, each kind by itself.
    """
    num, alarm = len(score_M), alarm_of(len(score_M))
    tried = guesses_tried(score_M, inside_M, plan.delta)
    best = max(
        tried,
        key=lambda t: (t["epsilon_low"], -tail(num, int(t["guesses"]), int(t["right"]), 0.0, 0.0)),
    )
    right = [(int(t["guesses"]), int(t["right"])) for t in tried]
    return {
        "canaries": num,
        "inside": int(inside_M.sum()),
        "tried": tried,
        "guesses": best["guesses"],
        "right": best["right"],
        "epsilon_low": best["epsilon_low"],
        "epsilon_low_of_plan": epsilon_low_of_plan(plan, num, right, alarm),
        "epsilon_low_at_most": largest_bound(num, plan.delta),
        "epsilon": plan.epsilon,
        "delta": plan.delta,
        "confidence": CONFIDENCE,
    }
