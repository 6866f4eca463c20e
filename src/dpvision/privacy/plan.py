"""The one object that keeps the promise: it draws the batches, scales the noise, names the divisor and describes what was executed.

Nobody else holds a sample rate, a noise scale, a divisor or a number of steps.
"""

import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from dp_accounting import dp_event

from dpvision.config import PrivacyConfig, from_dict
from dpvision.errors import ConfigError, PrivacyError
from dpvision.privacy import accountant, mechanism, sampling
from dpvision.privacy.accountant import PrivacySpent
from dpvision.privacy.calibrate import calibrate
from dpvision.privacy.selection import SCORE_SHARE, Selection, score_noise_ratio

MAX_N_TIMES_DELTA = 1.5
"""Above it a mechanism that publishes records outright could pass as private: training is refused."""
View = Literal["record", "unamplified", "unit"]
TRUNCATION_TOLERANCE = 0.01
"""How much dearer than plain Poisson a truncated draw may be."""


@dataclass(frozen=True)
class DPPlan:
    """What a run executes and what that guarantees. Made by ``make_plan`` only; frozen, and written into ledger and manifest.

    ``epsilon`` and ``epsilon_rdp`` are those of all planned steps; what was spent comes from ``spent(ledger.steps)``.
    """

    guarantee: Literal["dp", "none", "simulated"]
    sampling: Literal["poisson", "truncated_poisson", "full_batch"]
    dataset_size: int
    expected_batch_size: float
    """Divisor of the noisy sum; public."""
    sample_rate: float
    """expected_batch_size / dataset_size, whatever the number of records in the store."""
    max_batch_size: int | None
    noise_multiplier: float
    max_grad_norm: float | None
    steps: int
    delta: float
    max_records_per_unit: int
    noise_generator: Literal["torch", "hardened"]
    value_discretization_interval: float | None
    """Grid of the privacy loss in the stated epsilon; None without a guarantee."""
    epsilon: float | None
    epsilon_rdp: float | None
    clipping: Literal["hard", "automatic"] = "hard"
    selection: Selection | None = None
    """None: the steps are what is executed. Else there is one step, a private selection among runs, and all other fields are those of
    each of its runs; ``run_plans`` gives their plans."""

    def __post_init__(self) -> None:
        ok = self.sample_rate == self.expected_batch_size / self.dataset_size and 0 < self.sample_rate <= 1
        ok = ok and (self.selection is None or (self.steps == 1 and self.guarantee == "dp"))
        if not ok or (self.guarantee == "dp") != (self.epsilon is not None):
            raise PrivacyError(
                f"plan: sample_rate={self.sample_rate}, epsilon={self.epsilon}; expected expected_batch_size / dataset_size, and an "
                "epsilon exactly with guarantee=dp. Make plans with make_plan; restore an altered file."
            )

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the sum of clipped gradients: noise_multiplier x max_grad_norm; 0 without noise."""
        return self.noise_multiplier * (self.max_grad_norm or 0.0)

    def draw(self, step: int, num_records: int, rng: np.random.Generator) -> np.ndarray:
        """Indices of the logical batch of ``step``: sorted int64 of shape (batch,), possibly empty; secret.

        Args:
            step: number charged in the ledger, in [0, steps).
            num_records: records that the store holds now; does not change the sample rate.
            rng: secret generator of this step (``sampling.derive_rng``).

        Raises:
            PrivacyError: the step is not in the plan, or a truncated draw would meet more records than were accounted for.
        """
        if not 0 <= step < self.steps:
            raise PrivacyError(f"plan.draw: step={step}; expected 0 to {self.steps - 1}. The plan is used up: stop.")
        if self.sampling == "full_batch":
            return np.arange(num_records, dtype=np.int64)
        if self.max_batch_size is not None and num_records > self.dataset_size:
            raise PrivacyError(
                f"plan.draw: num_records={num_records}; expected at most dataset_size={self.dataset_size} with truncated_poisson, whose "
                "cost depends on it. Make a plan for the larger store."
            )
        index = sampling.draw_poisson(num_records, self.sample_rate, rng)
        return index if self.max_batch_size is None else sampling.truncate(index, self.max_batch_size, rng)

    def event(self, steps: int, view: View = "record") -> dp_event.DpEvent:
        """dp-accounting event of the first ``steps`` steps; the non-private event without a guarantee.

        Args:
            view: "record": for one record. "unamplified": for one record, every batch being known to the attacker. "unit": for a unit of
                max_records_per_unit records; truncated draws have that of one record only.

        Raises:
            PrivacyError: more steps than planned, or a negative number.
        """
        if not 0 <= steps <= self.steps:
            raise PrivacyError(f"plan.event: steps={steps}; expected 0 to {self.steps}. Read the number from the ledger of this plan.")
        if steps and self.guarantee != "dp":
            return dp_event.NonPrivateDpEvent()
        return _event(
            self, self.selection, steps, self.noise_multiplier,
            sampling="full_batch" if view == "unamplified" else None,
            records=self.max_records_per_unit if view == "unit" and self.max_records_per_unit > 1 else None,
        )  # fmt: skip

    def spent(self, steps: int) -> PrivacySpent:
        """What the first ``steps`` steps cost, at ``delta``.

        Raises:
            PrivacyError: more steps than planned, or a negative number.
        """
        event = self.event(steps)
        if self.guarantee != "dp":
            return PrivacySpent(None, None, self.delta, steps, None, None)
        unamplified = accountant.epsilon(self.event(steps, "unamplified"), self.delta)
        unit = None
        if self.max_records_per_unit > 1 and self.sampling != "truncated_poisson":
            unit_event = self.event(steps, "unit")
            # Ten times coarser than the record's: the mixture takes minutes otherwise, for a difference in the fourth digit.
            unit = accountant.epsilon(unit_event, self.delta, 10 * accountant.discretization_interval(unit_event, self.delta))
        return PrivacySpent(
            epsilon=accountant.epsilon(event, self.delta, self.value_discretization_interval),
            epsilon_rdp=accountant.epsilon_rdp(event, self.delta),
            delta=self.delta,
            steps=steps,
            epsilon_unamplified=unamplified,
            unit_epsilon=unit,
        )

    def run_plans(self) -> tuple["DPPlan", "DPPlan"]:
        """Plans of one run of the selection: of its releases, and of its score, one full-batch release clipped to 1. Nothing may be
        executed with them but inside the selection that was charged.

        Raises:
            PrivacyError: the plan has no selection.
        """
        if self.selection is None:
            raise PrivacyError("plan.run_plans: no selection; expected a plan of make_plan(config, selection). Make one.")
        noise, n = self.noise_multiplier, self.dataset_size
        run = PrivacyConfig(
            dataset_size=n, expected_batch_size=self.expected_batch_size, steps=self.selection.steps, max_grad_norm=self.max_grad_norm,
            noise_multiplier=noise, delta=self.delta, sampling=self.sampling, max_records_per_unit=self.max_records_per_unit,
            noise_generator=self.noise_generator, clipping=self.clipping,
        )  # fmt: skip
        ratio = self.selection.score_noise_ratio
        score = replace(run, expected_batch_size=n, steps=1, max_grad_norm=1.0, noise_multiplier=ratio * noise, sampling="full_batch")
        return draft_plan(run), draft_plan(replace(score, clipping="hard"))

    def same_mechanism(self, other: "DPPlan") -> bool:
        """Whether both execute the same: all but the computed epsilons, whose last digits may differ between machines."""
        mine, theirs = asdict(self), asdict(other)
        return all(mine[name] == theirs[name] for name in mine.keys() - _COMPUTED)

    def to_dict(self) -> dict[str, Any]:
        """Plain dict, ready for JSON; the inverse of ``from_dict``. A plan without a selection is written as before there were any: the
        header of a ledger is compared byte by byte."""
        return {name: value for name, value in asdict(self).items() if name != "selection" or value is not None}

    @classmethod
    def from_dict(cls, values: Any) -> "DPPlan":
        """Plan from the dict of ``to_dict``.

        Raises:
            ConfigError: a name is unknown or missing, or a type does not fit.
            PrivacyError: the values contradict each other.
        """
        return from_dict(cls, values, where="plan")


_COMPUTED = {"epsilon", "epsilon_rdp", "value_discretization_interval"}


def make_plan(cfg: PrivacyConfig, selection: Selection | None = None) -> DPPlan:
    """The plan of a run: calibrated, accounted, and refused where it would not be a guarantee.

    Without an explicit delta it is 1 / (2 dataset_size). A target epsilon is the record's, also where max_records_per_unit > 1;
    the unit's stands beside it in ``spent``.

    Args:
        selection: from ``ask_selection``: the plan is then that of a private selection among runs that ``cfg`` describes, and a target
            epsilon that of all of them.

    Raises:
        PrivacyError: the target cannot be reached, dataset_size x delta > 1.5, a truncation that is not nearly free, or a selection that
            has no accounting.
        ConfigError: a simulated run without noise_multiplier or max_grad_norm.
    """
    plan = draft_plan(cfg, selection)
    reason = refusal(plan)
    if reason is not None:
        raise PrivacyError(reason)
    return plan


def ask_selection(
    cfg: PrivacyConfig, *, mean_runs: float = 10.0, shape: float | None = None, score_share: float = SCORE_SHARE
) -> Selection:
    """A selection among runs of ``cfg.steps`` releases each, for ``make_plan``.

    Args:
        mean_runs, shape: see ``Selection``.
        score_share: part of a run's budget that its score gets.

    Raises:
        ConfigError: a value is out of range.
    """
    ratio = score_noise_ratio(cfg.steps, cfg.expected_batch_size / cfg.dataset_size, score_share)
    return Selection(mean_runs, shape, cfg.steps, ratio)


def draft_plan(cfg: PrivacyConfig, selection: Selection | None = None) -> DPPlan:
    """``make_plan`` without the refusal, for the what-if planner: nothing may be trained with it unless ``refusal`` is None."""
    if cfg.guarantee == "simulated" and (cfg.noise_multiplier is None or cfg.max_grad_norm is None):
        raise ConfigError(
            f"privacy: noise_multiplier={cfg.noise_multiplier}, max_grad_norm={cfg.max_grad_norm}; expected both with guarantee=simulated. "
            "Plan the real run, then divide its batch and noise by the same factor."
        )
    if selection is not None and (cfg.guarantee != "dp" or cfg.sampling == "truncated_poisson" or selection.steps != cfg.steps):
        raise ConfigError(
            f"privacy: a selection with guarantee={cfg.guarantee}, sampling={cfg.sampling}, steps={cfg.steps} and {selection.steps}; "
            "expected guarantee=dp, poisson or full_batch, and one number of steps. Use ask_selection, or leave the selection out."
        )
    n = cfg.dataset_size
    rate = cfg.expected_batch_size / n
    delta = 1 / (2 * n) if cfg.delta is None else cfg.delta
    steps = cfg.steps if selection is None else 1
    event_of = partial(_event, cfg, selection, steps)
    noise = cfg.noise_multiplier or 0.0
    interval = eps = eps_rdp = None
    if cfg.guarantee == "dp":
        if cfg.target_epsilon is not None:
            noise = calibrate(event_of, cfg.target_epsilon, delta)
        event = event_of(noise)
        interval = None if selection is not None else accountant.discretization_interval(event, delta)
        eps, eps_rdp = accountant.epsilon(event, delta, interval), accountant.epsilon_rdp(event, delta)
        if not eps < math.inf:
            raise PrivacyError(f"privacy: noise_multiplier={noise}; expected enough for a finite epsilon. Typical: 0.5 to 5.")
    return DPPlan(
        guarantee=cfg.guarantee,
        sampling=cfg.sampling,
        dataset_size=n,
        expected_batch_size=float(cfg.expected_batch_size),
        sample_rate=rate,
        max_batch_size=cfg.max_batch_size,
        noise_multiplier=float(noise),
        max_grad_norm=cfg.max_grad_norm,
        steps=steps,
        delta=delta,
        max_records_per_unit=cfg.max_records_per_unit,
        noise_generator=cfg.noise_generator,
        value_discretization_interval=interval,
        epsilon=eps,
        epsilon_rdp=eps_rdp,
        clipping=cfg.clipping,
        selection=selection,
    )


def _event(
    of: PrivacyConfig | DPPlan,
    selection: Selection | None,
    steps: int,
    noise: float,
    *,
    sampling: str | None = None,
    records: int | None = None,
) -> dp_event.DpEvent:
    """Event of ``steps`` steps for one record, or for a unit of ``records`` records; with a selection, of it as its one step."""
    rate = 1.0 if sampling == "full_batch" else of.expected_batch_size / of.dataset_size
    sampling = sampling or of.sampling
    releases = steps if selection is None else min(steps, 1) * selection.steps
    if records is None:
        event = mechanism.record_event(sampling, of.dataset_size, rate, of.max_batch_size, noise, releases)
    else:
        event = mechanism.unit_event(sampling, rate, noise, releases, records)
    return event if selection is None or not steps else selection.event(event, noise, records or 1)


def refusal(plan: DPPlan) -> str | None:
    """Why nothing may be trained with ``plan`` (the message of the error), or None. Runs without a guarantee are never refused here."""
    if plan.guarantee != "dp":
        return None
    if not plan.dataset_size * plan.delta <= MAX_N_TIMES_DELTA:
        return (
            f"privacy: delta={plan.delta}; expected dataset_size x delta at most {MAX_N_TIMES_DELTA}, got "
            f"{plan.dataset_size * plan.delta:.3g}. Leave delta out for 1 / (2 dataset_size)."
        )
    if plan.selection is not None and plan.max_records_per_unit > 1 and plan.sampling != "full_batch":
        return (
            f"privacy: max_records_per_unit={plan.max_records_per_unit}; expected 1 in a selection with sampling={plan.sampling}, which "
            "has no accounting for units. Use sampling=full_batch, or one record of each."
        )
    if plan.sampling == "truncated_poisson":
        if plan.max_records_per_unit > 1:
            return (
                f"privacy: max_records_per_unit={plan.max_records_per_unit}; expected 1 with sampling=truncated_poisson, which has no "
                "accounting for units. Use sampling=poisson."
            )
        assert plan.epsilon is not None
        plain = accountant.epsilon(
            mechanism.record_event("poisson", plan.dataset_size, plan.sample_rate, None, plan.noise_multiplier, plan.steps),
            plan.delta,
            plan.value_discretization_interval,
        )
        if not plan.epsilon <= (1 + TRUNCATION_TOLERANCE) * plain:
            enough = plan.expected_batch_size + 7 * math.sqrt(plan.expected_batch_size * (1 - plan.sample_rate))
            return (
                f"privacy: max_batch_size={plan.max_batch_size}; expected epsilon within 1% of plain Poisson's {plain:.4g}, got "
                f"{plan.epsilon:.4g}. Raise it to about {math.ceil(enough)} (mean + 7 standard deviations)."
            )
    return None
