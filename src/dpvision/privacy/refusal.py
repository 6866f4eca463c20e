"""Which plans are refused: no valid accounting, no meaningful delta or, unless allowed, an epsilon
that says next to nothing.
"""

import math

import numpy as np
from scipy import special

from dpvision.config import PrivacyConfig
from dpvision.privacy import accountant, gaussian
from dpvision.privacy.dp_plan import DPPlan
from dpvision.privacy.printed import up, up_delta
from dpvision.privacy.sampling import Poisson

MAX_N_TIMES_DELTA = 1.5
"""Above it a mechanism that publishes records outright could pass as private: training is
refused.
"""
MAX_DELTA = 1e-3
"""Largest delta without ``allow_weak_guarantee``, and largest default: for ten records, 1 / (2 N)
would allow publishing one of them with probability 1/20.
"""
MAX_EPSILON = 20.0
"""Largest epsilon per unit of privacy that is accepted without ``allow_weak_guarantee``: 19.61, the
epsilon of the 2020 US census and the largest of any well-known release, rounded. Epsilons of 10 or
more count as weak (Ponomareva et al. 2023).
"""
TAIL_TOLERANCE = 0.01
"""Largest fraction of delta that the bounded tails of the noise may add to it."""
TRUNCATION_TOLERANCE = 0.01
"""Largest relative excess of a truncated draw's epsilon over plain Poisson's."""


def refusal(plan: DPPlan, cfg: PrivacyConfig | None = None) -> str | None:
    """Return why ``plan`` is refused, as an error message, or None. Runs without a guarantee are
    never refused here.

    Args:
        cfg: the settings that the plan is of; if None, nothing is allowed
            (``allow_weak_guarantee``), and its delta is no recipe's (``delta_for``).
    """
    if plan.guarantee != "dp":
        return None
    declared, population = plan.unit.setting, plan.unit.population
    if not population * plan.delta <= MAX_N_TIMES_DELTA:
        return (
            f"privacy: delta={plan.delta}; expected {declared} x delta at most "
            f"{MAX_N_TIMES_DELTA}, got {up_delta(population * plan.delta)}. Leave delta out for 1 "
            f"/ (2 {declared})."
        )
    its_records = None if cfg is None else cfg.delta_for
    if its_records is not None and not population * plan.delta <= 1 + 1e-9:
        return (
            f"privacy: N x delta={up_delta(population * plan.delta)} (the recipe's "
            f"{up_delta(plan.delta)} is for {its_records:,} records, and {population:,} are "
            "declared); expected at most 1. Give --privacy.delta None for the default."
        )
    weak = None if cfg is not None and cfg.allow_weak_guarantee else weakness(plan)
    return _unaccounted(plan) or weak or _shown_by_tails(plan)


def weakness(plan: DPPlan) -> str | None:
    """Return why ``plan`` is refused without ``allow_weak_guarantee``, or None."""
    remedy = "To train nevertheless: --privacy.allow-weak-guarantee."
    if not plan.delta <= MAX_DELTA:
        return (
            f"privacy: delta={plan.delta}; expected at most {MAX_DELTA}. Pass --privacy.delta "
            f"{MAX_DELTA}. {remedy}"
        )
    stated = plan.stated_epsilon
    if stated is None or not stated <= MAX_EPSILON:
        unit = plan.unit
        whose = "one person" if unit.is_person else "one record"
        if unit.is_person and not unit.draws_people:
            whose += f" ({unit.clipped} records)"
        return (
            f"privacy: epsilon={up(stated)} for {whose}; expected at most {up(MAX_EPSILON)}, "
            "above which a guarantee says next to nothing. Raise --privacy.noise-multiplier, lower "
            f"--privacy.target-epsilon, or take fewer --privacy.steps. {remedy}"
        )
    return None


def seen_in_tails(plan: DPPlan) -> float:
    """Return a bound on the probability that a release shows a unit because not all normals beyond
    ``gaussian.DENSE_NORMAL`` are drawn: what the accounting, of normals without end, leaves out.
    """
    sampler, k, noise = plan.sampler, plan.unit.clipped, plan.noise.multiplier
    rate, count = sampler.sample_rate if sampler.random else 1.0, np.arange(1.0, k + 1)
    # Of the unit's k records this many or more are in a batch.
    in_batch = special.betainc(count, k - count + 1, rate)
    tails = np.array([gaussian.beyond_largest(c / noise) for c in count])
    step = float(np.diff(tails, prepend=0.0) @ in_batch)
    if plan.selection is None:
        return plan.steps * step
    score = gaussian.beyond_largest(k / (plan.selection.score_noise_ratio * noise))
    return plan.selection.mean_runs * (plan.selection.steps * step + score)


def _shown_by_tails(plan: DPPlan) -> str | None:
    """Why the noise of ``plan`` is too little for its bounded tails, or None."""
    if not (seen := seen_in_tails(plan)) <= TAIL_TOLERANCE * plan.delta:
        return (
            f"privacy: noise_multiplier={plan.noise.multiplier:g} at "
            f"delta={up_delta(plan.delta)}; "
            "expected more noise in a step: that not all normals beyond "
            f"{gaussian.DENSE_NORMAL:.2f} are drawn could show a record with probability "
            f"{min(seen, 1.0):.1g}, which must be below 1% of delta. Plan more noise, more steps "
            "or a larger delta."
        )
    return None


def _unaccounted(plan: DPPlan) -> str | None:
    """Why ``plan`` has no valid accounting, or costs much more than plain Poisson; None
    otherwise.
    """
    sampler, k = plan.sampler, plan.unit.max_records
    if plan.selection is not None and plan.unit.clipped > 1 and sampler.random:
        return (
            f"privacy: max_records_per_unit={k}; expected 1 in a selection with "
            f"sampling={sampler.law}, which has no accounting for units. Use "
            "sampling=full_batch, or max_records_per_unit=1."
        )
    if not sampler.accounts_for_units and plan.unit.clipped > 1:
        return (
            f"privacy: max_records_per_unit={k}; expected 1 with sampling={sampler.law}, which has "
            "no accounting for units. Use sampling=poisson."
        )
    if sampler.max_batch_size is None:
        return None
    assert plan.epsilon is not None
    untruncated = Poisson(sampler.unit, sampler.expected_batch_size)
    plain = accountant.epsilon(
        plan.noise.event(untruncated, plan.steps), plan.delta, plan.value_discretization_interval
    )
    if plan.epsilon <= (1 + TRUNCATION_TOLERANCE) * plain:
        return None
    enough = plan.expected_batch_size + 7 * math.sqrt(
        plan.expected_batch_size * (1 - plan.sample_rate)
    )
    return (
        f"privacy: max_batch_size={sampler.max_batch_size}; expected epsilon within 1% of "
        f"plain Poisson's {up(plain)}, got {up(plan.epsilon)}. Raise it to about "
        f"{math.ceil(enough)} (mean + 7 standard deviations)."
    )
