"""Make plans: calibrate the noise, account for the steps, refuse what would be no guarantee."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dpvision.config import PrivacyConfig
from dpvision.errors import ConfigError, PrivacyError
from dpvision.privacy import accountant, gaussian
from dpvision.privacy.dp_plan import DPPlan, View
from dpvision.privacy.events import Event
from dpvision.privacy.mechanism import IndependentGaussian
from dpvision.privacy.printed import up
from dpvision.privacy.refusal import MAX_DELTA, refusal
from dpvision.privacy.sampling import LAWS
from dpvision.privacy.selection import SCORE_SHARE, Selection, score_noise_ratio

__all__ = [
    "DPPlan",
    "View",
    "ask_selection",
    "calibrate",
    "default_delta",
    "draft_plan",
    "make_plan",
    "run_plans",
]


MIN_NOISE = 0.01
MAX_NOISE = 1e6


def default_delta(population: int) -> float:
    """Default delta: 1 / (2 population), at most 1e-3."""
    return min(1 / (2 * population), MAX_DELTA)


def make_plan(cfg: PrivacyConfig, selection: Selection | None = None) -> DPPlan:
    """Make the plan of a run: calibrate the noise, account for the steps, and refuse what would not
    be a guarantee.

    delta defaults to ``default_delta`` of the declared number of units, or of records.
    ``target_epsilon`` is per record, ``target_unit_epsilon`` per unit.

    Args:
        selection: from ``ask_selection``, to plan a private selection among runs that ``cfg``
            describes; a target epsilon is then for the whole selection.

    Raises:
        PrivacyError: the target cannot be reached, or ``refusal`` has a reason.
        ConfigError: a simulated run without noise_multiplier or max_grad_norm, or
            target_unit_epsilon without num_units.
    """
    plan = draft_plan(cfg, selection)
    reason = refusal(plan, cfg)
    if reason is not None:
        raise PrivacyError(reason)
    return plan


def ask_selection(
    cfg: PrivacyConfig,
    *,
    mean_runs: float = 10.0,
    shape: float | None = None,
    score_share: float = SCORE_SHARE,
) -> Selection:
    """Make a selection among runs of ``cfg.steps`` releases each, for ``make_plan``.

    Args:
        mean_runs, shape: see ``Selection``.
        score_share: share of a run's budget spent on its score.

    Raises:
        ConfigError: a value is out of range.
    """
    ratio = score_noise_ratio(
        cfg.num_steps, cfg.expected_batch_size / cfg.dataset_size, score_share
    )
    return Selection(mean_runs, shape, cfg.num_steps, ratio)


def draft_plan(cfg: PrivacyConfig, selection: Selection | None = None) -> DPPlan:
    """Make a plan without refusing any, for the what-if planner; do not train with it unless
    ``refusal`` returns None.
    """
    _check(cfg, selection)
    private = cfg.guarantee == "dp"
    plan = DPPlan(
        guarantee=cfg.guarantee,
        sampler=LAWS[cfg.sampling](cfg.unit, float(cfg.expected_batch_size), cfg.max_batch_size),
        noise=IndependentGaussian(
            float(cfg.noise_multiplier or 0.0),
            None if cfg.max_grad_norm is None else float(cfg.max_grad_norm),
        ),
        steps=cfg.num_steps if selection is None else 1,
        delta=default_delta(cfg.unit.population) if cfg.delta is None else cfg.delta,
        value_discretization_interval=None,
        epsilon=math.inf if private else None,  # until it is accounted for
        epsilon_rdp=None,
        unit_epsilon=None,
        clipping=cfg.clipping,
        selection=selection,
    )
    if private:
        plan = _accounted(_calibrated(plan, cfg))
    object.__setattr__(plan, "_true", True)
    return plan


def _check(cfg: PrivacyConfig, selection: Selection | None) -> None:
    """Refuse settings that have no plan."""
    if cfg.guarantee == "simulated" and (cfg.noise_multiplier is None or cfg.max_grad_norm is None):
        raise ConfigError(
            f"privacy: noise_multiplier={cfg.noise_multiplier}, "
            f"max_grad_norm={cfg.max_grad_norm}; expected both with guarantee=simulated. Plan "
            "the real run, then divide its batch and noise by the same factor."
        )
    wrong = cfg.guarantee != "dp" or cfg.sampling == "truncated_poisson" or cfg.unit.draws_people
    if selection is not None and (wrong or selection.steps != cfg.steps):
        raise ConfigError(
            f"privacy: a selection with guarantee={cfg.guarantee}, sampling={cfg.sampling}, "
            f"steps={cfg.steps} and {selection.steps}; expected guarantee=dp, poisson or "
            "full_batch draws of records, and one number of steps. Use ask_selection, or no "
            "selection."
        )
    if cfg.target_unit_epsilon is not None and (
        not cfg.unit.is_person
        or (cfg.sampling == "truncated_poisson" and not cfg.unit.draws_people)
    ):
        raise ConfigError(
            f"privacy: target_unit_epsilon={cfg.target_unit_epsilon} with "
            f"num_units={cfg.num_units}, sampling={cfg.sampling}; expected the declared number "
            "of people, and poisson or full_batch. Pass --privacy.num-units M, or "
            "--privacy.target-epsilon for records."
        )


def _calibrated(plan: DPPlan, cfg: PrivacyConfig) -> DPPlan:
    """Return ``plan`` with the noise that reaches the target epsilon, if there is one."""

    def with_noise(multiplier: float) -> DPPlan:
        return replace(plan, noise=IndependentGaussian(multiplier, plan.max_grad_norm))

    def event_of(multiplier: float) -> Event:
        return with_noise(multiplier).event(plan.steps, view)

    view: View = "record" if cfg.target_epsilon is not None else "unit"
    target = cfg.target_epsilon if view == "record" else cfg.target_unit_epsilon
    if target is None:
        return plan
    several = view == "unit" and plan.unit.clipped > 1
    return with_noise(calibrate(event_of, target, plan.delta, unit=several))


def calibrate(
    event_of: Callable[[float], Event], target_epsilon: float, delta: float, *, unit: bool = False
) -> float:
    """Smallest noise multiplier of five significant digits whose stated epsilon is at most
    ``target_epsilon``: rounded up, so that the target is never exceeded.

    A coarse grid, whose epsilon is an upper bound too, finds the neighbourhood; the stated grid
    decides the last digits. The result is at least 0.01.

    Args:
        event_of: noise multiplier -> event of the whole run; epsilon must fall as the noise grows.
        target_epsilon: more than 0.
        delta: in [1e-14, 1).
        unit: whether the event is for a unit of several records (``accountant.unit_epsilon``).

    Raises:
        PrivacyError: even a noise multiplier of 10^6 does not reach the target; the message gives
            the epsilon that it reaches.
    """

    def stated(noise: float) -> float:
        event = event_of(noise)
        return accountant.unit_epsilon(event, delta) if unit else accountant.epsilon(event, delta)

    unit_noise = event_of(1.0).gaussian_noise()
    if unit_noise is not None:
        start = gaussian.noise_for(target_epsilon, delta) / unit_noise
        if start > MAX_NOISE:
            raise _unreachable(target_epsilon, stated(MAX_NOISE))
        if start <= MIN_NOISE:
            return MIN_NOISE
        return _round_up(start, lambda noise: stated(noise) <= target_epsilon)

    def excess(log_noise: float) -> float:
        event = event_of(math.exp(log_noise))
        if unit:
            coarse = accountant.unit_epsilon(event, delta, parts=200)
        else:
            coarse = accountant.epsilon(
                event, delta, 10 * accountant.discretization_interval(event, delta)
            )
        return math.log(max(coarse, 1e-12) / target_epsilon)

    low = high = 0.0
    while high < math.log(MAX_NOISE) and excess(high) > 0:
        low, high = high, min(high + math.log(4), math.log(MAX_NOISE))
    while low > math.log(MIN_NOISE) and excess(low) <= 0:
        low, high = max(low - math.log(2), math.log(MIN_NOISE)), low
    if excess(low) <= 0:
        return MIN_NOISE
    if excess(high) > 0:
        reached = stated(MAX_NOISE)
        if reached > target_epsilon:
            raise _unreachable(target_epsilon, reached)
        root = high
    else:
        from scipy import optimize

        root = optimize.brentq(excess, low, high, xtol=1e-5)
    return _round_up(math.exp(root), lambda noise: stated(noise) <= target_epsilon)


def _round_up(start: float, enough: Callable[[float], bool]) -> float:
    """Smallest decimal of five significant digits (at ``start``'s scale) that is enough, found by
    galloping from ``start``.
    """
    exponent = math.floor(math.log10(start)) - 4

    def noise(mantissa: int) -> float:
        return float(f"{mantissa}e{exponent}")

    good = math.ceil(start / 10.0**exponent)
    step = 1
    if enough(noise(good)):
        while good - step > 0 and enough(noise(good - step)):
            good, step = good - step, 2 * step
        bad = max(good - step, 0)
    else:
        bad, good = good, good + 1
        while not enough(noise(good)):
            step *= 2
            bad, good = good, good + step
    while good - bad > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if enough(noise(middle)) else (good, middle)
    return noise(good)


def _unreachable(target_epsilon: float, reached: float) -> PrivacyError:
    return PrivacyError(
        f"privacy: target_epsilon={target_epsilon}; expected at least {up(reached)}, which "
        f"noise_multiplier={MAX_NOISE:.0e} reaches. Raise the target or delta, or plan fewer "
        "steps or a smaller batch."
    )


def _accounted(plan: DPPlan) -> DPPlan:
    """Return ``plan`` with its epsilons, and the grid that they are computed on."""
    if plan.selection is None:
        interval = accountant.discretization_interval(plan.event(plan.steps), plan.delta)
        plan = replace(plan, value_discretization_interval=interval)
    found: dict[str, Any] = {}
    for name, epsilon in plan.epsilons(plan.steps):
        if epsilon == math.inf:
            raise PrivacyError(
                f"privacy: noise_multiplier={plan.noise.multiplier}; expected enough for a finite "
                "epsilon. Use 0.5 to 5."
            )
        found[name] = epsilon
    return replace(plan, **found)


def run_plans(plan: DPPlan) -> tuple[DPPlan, DPPlan]:
    """Return the plans of one run of a selection: of its releases, and of its score, one full-batch
    release clipped to 1. Execute them only inside a selection that was charged.

    Raises:
        PrivacyError: the plan has no selection.
    """
    if plan.selection is None:
        raise PrivacyError(
            "plan.run_plans: no selection; expected a plan with one. Use make_plan(config, "
            "selection)."
        )
    noise, n = plan.noise.multiplier, plan.dataset_size
    run = PrivacyConfig(
        dataset_size=n,
        expected_batch_size=plan.expected_batch_size,
        steps=plan.selection.steps,
        max_grad_norm=plan.max_grad_norm,
        noise_multiplier=noise,
        delta=plan.delta,
        sampling=plan.sampler.law,
        max_records_per_unit=plan.unit.max_records,
        num_units=plan.unit.num_people,
        clipping=plan.clipping,
    )
    score = replace(
        run,
        expected_batch_size=n,
        steps=1,
        max_grad_norm=1.0,
        noise_multiplier=plan.selection.score_noise_ratio * noise,
        sampling="full_batch",
        clipping="hard",
    )
    return draft_plan(run), draft_plan(score)
