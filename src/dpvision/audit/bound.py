"""A lower bound on epsilon from executed steps.

A canary's score is the log-likelihood ratio of the plan's law with the canary and without it, added
up over the steps of a run. The share of pairs in which a canary in the data scores above one that
is not estimates the area under the ROC curve of the best attack. A noise multiplier is refuted if
its privacy loss distribution allows smaller areas only. The bound is the epsilon of the largest
noise multiplier that is not refuted.

The bound is model-based: sampler, rate and steps are the plan's, the noise is Gaussian of unknown
size. For another mechanism it proves nothing.

Legend: M canaries in the data, T steps, E epsilons.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import optimize, stats

from dpvision.audit.acceptance import (
    FALSE_ALARM,
    RARE_ALARM,
    Check,
    Say,
    noise_interval,
    sampling_checks,
)
from dpvision.audit.canaries import weights_run
from dpvision.config import PrivacyConfig, RunConfig
from dpvision.privacy import accountant
from dpvision.privacy.plan import DPPlan
from dpvision.train.distributed import Group

CONFIDENCE = 1 - FALSE_ALARM
FLOOR, AIM = 0.6, 0.7
"""Share of epsilon that the bound must reach, and the one that the scores suffice for."""
_LEAST, _MOST = 2_000, 1_000_000
"""Scores. A canary is one weight: cheap."""
_WORK, _OF_DRAW, _ANYHOW = 7e9, 120, 40_000
"""Scores times steps that take about five minutes of an idle core; a score's share of the draws
costs ``_OF_DRAW`` times its rate more; scores that are affordable whatever the steps.
"""
_EPSILONS = 2001
_KEPT, _PRODUCTS, _FEWEST, _COMPARED = 2**24, 5e10, 64, 100_000
"""Of the comparison of all steps with each other: numbers kept, products made, numbers of a step
that tell two apart, and steps (12 s of a core at 100,000).
"""
_BLOCK = 64


def num_scores(plan: DPPlan) -> int:
    """Return the number of scores, half of them of canaries in the data: the fewest with which the
    bound of a correct mechanism is ``AIM`` of epsilon or more except with probability
    ``FALSE_ALARM``, as far as time allows.

    An estimated area is low by z standard deviations at most, with that probability, and refutes
    what is z standard deviations below (``wilson_low``).
    """
    area, refuted = area_allowed(plan, plan.noise.multiplier), _area_of_epsilon(plan)
    work = plan.steps * (1 + _OF_DRAW * plan.sample_rate)
    most = min(_MOST, max(_ANYHOW, _WORK / work))
    if not area > refuted:  # of an epsilon so large that all areas are 1
        return 2 * math.ceil(most / 2)
    reach = math.sqrt(area * (1 - area)) + math.sqrt(refuted * (1 - refuted))
    inside = (float(stats.norm.isf(FALSE_ALARM)) * reach / (area - refuted)) ** 2
    return 2 * math.ceil(min(max(_LEAST, 2 * inside), most) / 2)


def _area_of_epsilon(plan: DPPlan) -> float:
    """Return the area that the noise multiplier allows at which epsilon is ``AIM`` of the plan's,
    to about 0.001 of epsilon.
    """
    assert plan.epsilon is not None
    noise, wanted = plan.noise.multiplier, AIM * plan.epsilon

    def excess(log: float) -> float:
        event = plan.sampler.event(noise * math.exp(log), plan.steps)
        interval = 10 * accountant.discretization_interval(event, plan.delta)
        return accountant.epsilon(event, plan.delta, interval) - wanted

    log = optimize.brentq(excess, 0.0, math.log(64), xtol=1e-4)
    return area_allowed(plan, noise * math.exp(log))


def on_records(plan: DPPlan, num: int) -> PrivacyConfig:
    """Return the settings of ``plan`` on ``num`` records: its law, rate, noise, steps, clipping and
    delta, and so its epsilon.
    """
    rate, law = plan.sample_rate, plan.sampler.law
    most = math.ceil(num * rate + 8 * math.sqrt(num * rate) + 8)
    return PrivacyConfig(
        dataset_size=num,
        expected_batch_size=num * rate if plan.sampler.random else num,
        steps=plan.steps,
        sampling=law,
        max_batch_size=min(most, num) if law == "truncated_poisson" else None,
        noise_multiplier=plan.noise.multiplier,
        max_grad_norm=plan.max_grad_norm,
        clipping=plan.clipping,
        delta=plan.delta,
    )


def lower_bound(config: RunConfig, plan: DPPlan, group: Group, say: Say) -> dict[str, Any]:
    """Execute the plan's steps on canaries, each with coins of its own, and bound epsilon.

    Returns:
        The bound and what it was computed from, and the checks of all steps: noise where no canary
        is, the shift of those that are drawn, and the draws.
    """
    num = num_scores(plan) // 2
    run = weights_run(config, on_records(plan, num), num, group)
    made, score = run.training.plan, np.zeros(2 * num)
    size_T, count_M = [], np.zeros(num, dtype=np.int64)
    moved, before = 0.0, None
    square_T, like_T = list[float](), list[float]()
    shift = float(run.clipped_NP[0, 0])
    noise_TD, place_D = _room(made.steps, 2 * num)
    near_D = place_D[place_D < num]
    assert made.epsilon is not None, "a plan with a guarantee"
    for step, (released, drawn_M) in enumerate(run.steps()):
        inside, outside = np.split(released[: 2 * num], 2)
        moved += float(inside[drawn_M].sum())
        square_T.append(float(np.square(outside / made.noise.std(step)).sum()))
        direction = outside / np.linalg.norm(outside)
        like_T += [] if before is None else [float(direction @ before)]
        before = direction
        if step < len(noise_TD):
            noise_TD[step] = released[place_D] / made.noise.std(step)
            noise_TD[step, : len(near_D)] -= drawn_M[near_D] * (shift / made.noise.std(step))
        score += log_ratio(released[: 2 * num] / (made.max_grad_norm or 1.0), made, step)
        size_T.append(int(drawn_M.sum()))
        count_M += drawn_M
        say("bound", step + 1, made.steps)
    area = area_above(score[:num], score[num:])
    least_area = wilson_low(area, num)
    low, floor = epsilon_of_area(made, least_area), floor_of(made, num)
    scores = num * made.steps
    checks = {
        "all_noise": Check(
            math.sqrt(sum(square_T) / scores), *noise_interval(scores, RARE_ALARM), RARE_ALARM
        ),
        **step_checks(np.array(square_T), np.array(like_T), num),
        **reuse_check(noise_TD),
        **shift_check(moved / shift, int(count_M.sum()), made),
        **sampling_checks(np.array(size_T), count_M, made.sample_rate),
    }
    return {
        "epsilon_low": low,
        "epsilon": made.epsilon,
        "delta": made.delta,
        "confidence": CONFIDENCE,
        "floor": floor,
        "passed": floor <= low <= made.epsilon,
        "false_alarm": 2 * FALSE_ALARM,
        "scores": 2 * num,
        "steps": made.steps,
        "sample_rate": made.sample_rate,
        "area": area,
        "area_low": least_area,
        "checks": {name: check.to_dict() for name, check in checks.items()},
    }


def step_checks(square_T: np.ndarray, like_T: np.ndarray, num: int) -> dict[str, Check]:
    """Check the noise of each step by itself, and that no step has the noise of the one before.

    Args:
        square_T: sum of the squares of ``num`` normal numbers, in standard deviations of the plan.
        like_T: cosine between these numbers of each step but the first and those before.
    """
    tail_T = np.minimum(stats.chi2.cdf(square_T, num), stats.chi2.sf(square_T, num))
    least = math.sqrt(square_T[np.argmin(tail_T)] / num)
    interval = noise_interval(num, RARE_ALARM / len(square_T))
    checks = {"step_noise": Check(least, *interval, RARE_ALARM)}
    if len(like_T):
        reach = _cosine_reach(num, len(like_T))
        most = float(like_T[np.argmax(np.abs(like_T))])
        checks["repeated_noise"] = Check(most, -reach, reach, RARE_ALARM)
    return checks


def _room(steps: int, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a place for some of the ``num`` numbers of each step, float32 (T, D), and which they
    are: spread over all, so that each rank's noise is among them.
    """
    steps = min(steps, _COMPARED)
    most = min(_KEPT // steps, int(_PRODUCTS / steps**2))
    kept = min(num, max(_FEWEST, most))
    return np.zeros((steps, kept), np.float32), np.arange(kept) * num // kept


def reuse_check(noise_TD: np.ndarray) -> dict[str, Check]:
    """Check that no two steps have the same noise: the cosine of the likest two; none for one step.

    Args:
        noise_TD: D normal numbers of each of T steps.
    """
    num_steps, num = noise_TD.shape
    if num_steps < 2:
        return {}
    unit_TD = noise_TD / np.linalg.norm(noise_TD, axis=1, keepdims=True)
    ends = list[float]()
    for first in range(0, num_steps, _BLOCK):
        like_BT = unit_TD[first : first + _BLOCK] @ unit_TD[first:].T
        like_BT[np.tril_indices(len(like_BT))] = 0.0  # each pair once
        ends += [float(like_BT.min()), float(like_BT.max())]
        del like_BT
    reach = _cosine_reach(num, num_steps * (num_steps - 1) // 2)
    most = ends[np.argmax(np.abs(ends))]  # NaN, if there is one
    return {"reused_noise": Check(most, -reach, reach, RARE_ALARM)}


def _cosine_reach(num: int, count: int) -> float:
    """Return what the largest of ``count`` cosines of two vectors of ``num`` normal numbers stays
    below, except with probability ``RARE_ALARM``; (1 + cosine) / 2 has a beta law.
    """
    half = (num - 1) / 2
    return 2 * float(stats.beta.isf(RARE_ALARM / 2 / count, half, half)) - 1


def shift_check(moved: float, draws: int, plan: DPPlan) -> dict[str, Check]:
    """Check the mean shift of ``draws`` canaries whose numbers add up to ``moved`` clipped norms;
    none if none was drawn.
    """
    if not draws:
        return {}
    reach = float(stats.norm.isf(RARE_ALARM / 2)) * plan.noise.multiplier / math.sqrt(draws)
    return {"all_shift": Check(moved / draws, 1 - reach, 1 + reach, RARE_ALARM)}


def floor_of(plan: DPPlan, num: int) -> float:
    """Return what the bound must reach: ``FLOOR`` of epsilon; or what it reaches under the plan
    except with probability ``FALSE_ALARM``, where this is less: at few draws of a canary in all,
    a small epsilon, or a very large one.
    """
    assert plan.epsilon is not None
    area = area_allowed(plan, plan.noise.multiplier)
    reach = float(stats.norm.isf(FALSE_ALARM)) * math.sqrt(area * (1 - area) / num)
    return min(FLOOR * plan.epsilon, epsilon_of_area(plan, wilson_low(area - reach, num)))


def log_ratio(value: np.ndarray, plan: DPPlan, step: int) -> np.ndarray:
    """Return the log-likelihood ratio, with a canary and without it, of released numbers in units
    of the clipping norm.
    """
    noise, rate = plan.noise.std(step) / (plan.max_grad_norm or 1.0), plan.sample_rate
    moved = (value - 0.5) / noise**2
    return moved if rate == 1 else np.logaddexp(math.log1p(-rate), math.log(rate) + moved)


def area_above(inside: np.ndarray, outside: np.ndarray) -> float:
    """Return the share of pairs in which the score inside is above that outside (Mann and
    Whitney), ties counted half.
    """
    rank = stats.rankdata(np.concatenate([inside, outside]))[: len(inside)]
    return float((rank.sum() - len(inside) * (len(inside) + 1) / 2) / len(inside) / len(outside))


def wilson_low(area: float, num: int) -> float:
    """Return the smallest area that is not refuted by ``area``, estimated from ``num`` independent
    scores of each kind.

    The variance of the estimate is at most area (1 - area) / num, whatever the laws of the scores
    (Birnbaum and Klose 1957); the normal quantile then gives Wilson's limit.
    """
    z2 = float(stats.norm.isf(FALSE_ALARM)) ** 2 / num
    middle, reach = area + z2 / 2, math.sqrt(z2 * area * (1 - area) + z2**2 / 4)
    return (middle - reach) / (1 + z2)


def area_allowed(plan: DPPlan, noise_multiplier: float) -> float:
    """Return an upper bound on the area under the ROC curve of any attack that tells whether a
    record was in the data of ``plan``, were its noise multiplier this one.

    A true-positive rate is at most delta + e^epsilon fpr, with the delta of removing, and at most
    1 - e^-epsilon (1 - delta - fpr), with that of adding.
    """
    epsilon_E, removing_E, adding_E = profiles(plan, noise_multiplier)

    def tpr(fpr: float) -> float:
        hit_1 = removing_E + np.exp(epsilon_E) * fpr
        hit_2 = 1.0 - np.exp(-epsilon_E) * (1.0 - adding_E - fpr)
        return float(min(1.0, hit_1.min(), hit_2.min()))

    return accountant.auc_of(tpr)


def profiles(plan: DPPlan, noise_multiplier: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return epsilons and upper bounds on delta at each, for removing a record and for adding one,
    of ``plan`` with another noise multiplier; from its privacy loss distribution, float64 (E,).
    """
    event = plan.sampler.event(noise_multiplier, plan.steps)
    losses = event.losses(3 * accountant.discretization_interval(event))
    epsilon_E = np.linspace(0.0, min(losses.epsilon(1e-9), 700.0), _EPSILONS)
    return epsilon_E, losses.removing.deltas(epsilon_E), losses.adding.deltas(epsilon_E)


def epsilon_of_area(plan: DPPlan, area: float) -> float:
    """Return the epsilon of the largest noise multiplier at which attacks reach ``area``; 0 if that
    is no more than chance.
    """
    if not area > 0.5:
        return 0.0
    return epsilon_not_refuted(plan, lambda noise: area_allowed(plan, noise) - area)


def epsilon_not_refuted(plan: DPPlan, excess: Callable[[float], float]) -> float:
    """Return the epsilon of ``plan`` with the largest noise multiplier that is not refuted; 0 if
    none up to 64 times the plan's is.

    Noise of less than a quarter of the plan's is not distinguished from a quarter.

    Args:
        excess: falls with the noise multiplier, and is below 0 where it is refuted.
    """
    noise = plan.noise.multiplier
    low, high = math.log(noise / 4), math.log(noise * 64)
    if excess(math.exp(low)) <= 0:
        root = low
    elif excess(math.exp(high)) >= 0:
        return 0.0
    else:
        root = optimize.brentq(lambda log: excess(math.exp(log)), low, high, xtol=1e-4)
    event = plan.sampler.event(math.exp(root), plan.steps)
    return accountant.epsilon(event, plan.delta)
