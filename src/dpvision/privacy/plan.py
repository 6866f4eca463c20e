"""The one object that keeps the promise: it draws the batches, scales the noise, names the divisor and describes what was executed.

Nobody else holds a sample rate, a noise scale, a divisor or a number of steps.
"""

import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from dp_accounting import dp_event

from dpvision.config import PrivacyConfig, from_dict
from dpvision.errors import ConfigError, PrivacyError
from dpvision.privacy import accountant, mechanism, sampling
from dpvision.privacy.accountant import PrivacySpent
from dpvision.privacy.calibrate import calibrate

MAX_N_TIMES_DELTA = 1.5
"""Above it a mechanism that publishes records outright could pass as private: training is refused."""
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

    def __post_init__(self) -> None:
        ok = self.sample_rate == self.expected_batch_size / self.dataset_size and 0 < self.sample_rate <= 1
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

    def event(self, steps: int) -> dp_event.DpEvent:
        """dp-accounting event of the first ``steps`` steps, for one record; the non-private event without a guarantee.

        Raises:
            PrivacyError: more steps than planned, or a negative number.
        """
        if not 0 <= steps <= self.steps:
            raise PrivacyError(f"plan.event: steps={steps}; expected 0 to {self.steps}. Read the number from the ledger of this plan.")
        if steps and self.guarantee != "dp":
            return dp_event.NonPrivateDpEvent()
        return self._event(self.noise_multiplier, steps)

    def _event(self, noise_multiplier: float, steps: int) -> dp_event.DpEvent:
        return mechanism.record_event(self.sampling, self.dataset_size, self.sample_rate, self.max_batch_size, noise_multiplier, steps)

    def spent(self, steps: int) -> PrivacySpent:
        """What the first ``steps`` steps cost, at ``delta``.

        Raises:
            PrivacyError: more steps than planned, or a negative number.
        """
        event = self.event(steps)
        if self.guarantee != "dp":
            return PrivacySpent(None, None, self.delta, steps, None, None)
        unamplified = accountant.epsilon(
            mechanism.record_event("full_batch", self.dataset_size, 1.0, None, self.noise_multiplier, steps), self.delta
        )
        unit = None
        if self.max_records_per_unit > 1 and self.sampling != "truncated_poisson":
            unit_event = mechanism.unit_event(self.sampling, self.sample_rate, self.noise_multiplier, steps, self.max_records_per_unit)
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

    def same_mechanism(self, other: "DPPlan") -> bool:
        """Whether both execute the same: all but the computed epsilons, whose last digits may differ between machines."""
        mine, theirs = self.to_dict(), other.to_dict()
        return all(mine[name] == theirs[name] for name in mine.keys() - _COMPUTED)

    def to_dict(self) -> dict[str, Any]:
        """Plain dict, ready for JSON; the inverse of ``from_dict``."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> "DPPlan":
        """Plan from the dict of ``to_dict``.

        Raises:
            ConfigError: a name is unknown or missing, or a type does not fit.
            PrivacyError: the values contradict each other.
        """
        return from_dict(cls, values, where="plan")


_COMPUTED = {"epsilon", "epsilon_rdp", "value_discretization_interval"}


def make_plan(cfg: PrivacyConfig) -> DPPlan:
    """The plan of a run: calibrated, accounted, and refused where it would not be a guarantee.

    Without an explicit delta it is 1 / (2 dataset_size). A target epsilon is the record's, also where max_records_per_unit > 1;
    the unit's stands beside it in ``spent``.

    Raises:
        PrivacyError: the target cannot be reached, dataset_size x delta > 1.5, or a truncation that is not nearly free.
        ConfigError: a simulated run without noise_multiplier or max_grad_norm.
    """
    plan = draft_plan(cfg)
    reason = refusal(plan)
    if reason is not None:
        raise PrivacyError(reason)
    return plan


def draft_plan(cfg: PrivacyConfig) -> DPPlan:
    """``make_plan`` without the refusal, for the what-if planner: nothing may be trained with it unless ``refusal`` is None."""
    if cfg.guarantee == "simulated" and (cfg.noise_multiplier is None or cfg.max_grad_norm is None):
        raise ConfigError(
            f"privacy: noise_multiplier={cfg.noise_multiplier}, max_grad_norm={cfg.max_grad_norm}; expected both with guarantee=simulated. "
            "Plan the real run, then divide its batch and noise by the same factor."
        )
    n = cfg.dataset_size
    rate = cfg.expected_batch_size / n
    delta = 1 / (2 * n) if cfg.delta is None else cfg.delta
    event_of = partial(_event_of, cfg, rate)
    noise = cfg.noise_multiplier or 0.0
    interval = eps = eps_rdp = None
    if cfg.guarantee == "dp":
        if cfg.target_epsilon is not None:
            noise = calibrate(event_of, cfg.target_epsilon, delta)
        event = event_of(noise)
        interval = accountant.discretization_interval(event, delta)
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
        steps=cfg.steps,
        delta=delta,
        max_records_per_unit=cfg.max_records_per_unit,
        noise_generator=cfg.noise_generator,
        value_discretization_interval=interval,
        epsilon=eps,
        epsilon_rdp=eps_rdp,
        clipping=cfg.clipping,
    )


def _event_of(cfg: PrivacyConfig, rate: float, noise: float) -> dp_event.DpEvent:
    return mechanism.record_event(cfg.sampling, cfg.dataset_size, rate, cfg.max_batch_size, noise, cfg.steps)


def refusal(plan: DPPlan) -> str | None:
    """Why nothing may be trained with ``plan`` (the message of the error), or None. Runs without a guarantee are never refused here."""
    if plan.guarantee != "dp":
        return None
    if not plan.dataset_size * plan.delta <= MAX_N_TIMES_DELTA:
        return (
            f"privacy: delta={plan.delta}; expected dataset_size x delta at most {MAX_N_TIMES_DELTA}, got "
            f"{plan.dataset_size * plan.delta:.3g}. Leave delta out for 1 / (2 dataset_size)."
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
