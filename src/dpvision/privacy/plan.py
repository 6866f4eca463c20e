"""The privacy plan: it draws the batches, scales the noise, sets the divisor and describes the
executed steps to the accountant.

No other object holds a sample rate, a noise scale, a divisor or a number of steps.
"""

import hashlib
import math
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np

from dpvision.config import PrivacyConfig, from_dict
from dpvision.config.privacy import MAX_GRAD_NORM, MIN_GRAD_NORM
from dpvision.config.unit import Unit
from dpvision.errors import ConfigError, PrivacyError
from dpvision.privacy import accountant, mechanism, sampling, stated
from dpvision.privacy.accountant import PrivacySpent
from dpvision.privacy.calibrate import calibrate
from dpvision.privacy.events import Event, NonPrivate
from dpvision.privacy.refusal import MAX_DELTA, refusal
from dpvision.privacy.selection import SCORE_SHARE, Selection, score_noise_ratio
from dpvision.privacy.stream import Stream

View = Literal["record", "unamplified", "unit"]


@dataclass(frozen=True)
class DPPlan:
    """The mechanism of a run and its guarantee. Made by ``make_plan`` only; frozen, and written
    into ledger and manifest.

    ``epsilon`` and ``epsilon_rdp`` are those of all planned steps. What a run states is
    ``spent(stated_steps(ledger.steps))``.
    """

    guarantee: Literal["dp", "none", "simulated"]
    sampling: Literal["poisson", "truncated_poisson", "full_batch"]
    dataset_size: int
    expected_batch_size: float
    """Divisor of the noisy sum; public."""
    sample_rate: float
    """expected_batch_size / sampled_from, whatever the number of records in the store."""
    max_batch_size: int | None
    noise_multiplier: float
    max_grad_norm: float | None
    steps: int
    delta: float
    max_records_per_unit: int
    num_units: int | None
    """Declared number of units (people); if None, the unit of privacy is the record."""
    value_discretization_interval: float | None
    """Grid of the privacy loss in the stated epsilon; None without a guarantee."""
    epsilon: float | None
    epsilon_rdp: float | None
    unit_epsilon: float | None
    """Epsilon of all planned steps for a unit with up to max_records_per_unit records; None if no
    units are declared.
    """
    clipping: Literal["hard", "automatic"] = "hard"
    sampling_unit: Literal["record", "person"] = "record"
    """What one coin of a draw decides (``PrivacyConfig``). With "person" every epsilon is a
    person's.
    """
    selection: Selection | None = None
    """If None, the run executes ``steps`` steps. Otherwise its one step is a private selection
    among runs, and all other fields are those of each of these; ``run_plans`` gives their plans.
    """
    _true: ClassVar[bool] = False
    """Of this object, and of no ``dataclasses.replace`` of it: whether its epsilons are known to be
    those of its own numbers.
    """
    _drawn: ClassVar[dict[int, int]]
    """Number of records (people) that this object drew, by step; secret."""
    _released: ClassVar[set[int]]
    """Steps that this object released under a guarantee."""
    _batches: ClassVar[set[bytes]]
    """Digests of the records of those steps; secret."""

    def __post_init__(self) -> None:
        ok = (
            self.sample_rate == self.expected_batch_size / self.sampled_from
            and 0 < self.sample_rate <= 1
        )
        ok = ok and (self.selection is None or (self.steps == 1 and self.guarantee == "dp"))
        ok = ok and (
            self.sampling_unit == "record"
            or (self.num_units is not None and self.selection is None)
        )
        if not ok or (self.guarantee == "dp") != (self.epsilon is not None):
            raise PrivacyError(
                f"plan: sample_rate={self.sample_rate}, epsilon={self.epsilon}; expected "
                f"expected_batch_size / {self.sampled_from}, and an epsilon exactly with "
                "guarantee=dp. Make plans with make_plan; restore an altered file."
            )
        if (
            self.max_grad_norm is not None
            and not MIN_GRAD_NORM <= self.max_grad_norm <= MAX_GRAD_NORM
        ):
            raise PrivacyError(
                f"plan: max_grad_norm={self.max_grad_norm!r}; expected between {MIN_GRAD_NORM:g} "
                f"and {MAX_GRAD_NORM:g}, where a clipped contribution is exact enough. Use 0.1 "
                "to 1."
            )
        object.__setattr__(self, "_drawn", {})
        object.__setattr__(self, "_released", set())
        object.__setattr__(self, "_batches", set())

    def __copy__(self) -> "DPPlan":
        """Return this object, which remembers what it drew and released; ``another_run`` is for
        another run.
        """
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "DPPlan":
        return self

    @property
    def unit(self) -> Unit:
        """Unit: the unit of privacy."""
        return Unit(
            self.dataset_size, self.num_units, self.max_records_per_unit, self.sampling_unit
        )

    @property
    def population(self) -> int:
        """int: declared number of units, or of records if no units are declared."""
        return self.unit.population

    @property
    def sampled_from(self) -> int:
        """int: declared number of those that are drawn."""
        return self.unit.sampled_from

    @property
    def clipped_per_unit(self) -> int:
        """int: clipped gradients that one unit adds to the sum of a step, at most."""
        return self.unit.clipped

    @property
    def stated_epsilon(self) -> float | None:
        """float: epsilon of all planned steps for a unit, or for a record if no units are declared;
        None without a guarantee.
        """
        return self.epsilon if self.num_units is None else self.unit_epsilon

    @property
    def noise_std(self) -> float:
        """float: standard deviation of the noise on the sum of clipped gradients, noise_multiplier
        x max_grad_norm; 0 without noise.
        """
        return self.noise_multiplier * (self.max_grad_norm or 0.0)

    def require_true(self) -> None:
        """Refuse to execute a plan whose stated epsilons are not those of its own numbers: changed
        by ``dataclasses.replace``, say.

        ``make_plan`` computed them; for any other object they are computed here, once
        (``stated.require_true``).
        """
        if not self._true:
            stated.require_true(self)
            object.__setattr__(self, "_true", True)

    def another_run(self) -> "DPPlan":
        """Return the same plan for another run, which draws and releases every step once more:
        account for each run.

        A private selection, say, is charged for all its runs at once.
        """
        plan = replace(self)
        object.__setattr__(plan, "_true", self._true)
        return plan

    def release(self, step: int, num_records: int, record_id: np.ndarray) -> None:
        """Note that ``step`` is about to be released. Under a guarantee it is refused if this plan
        did not draw its batch, since the accounting is for its own sample rate, or if it was
        released before, under whatever key: a run has one release of each step.

        Args:
            num_records: records (people) in the step's sum.
            record_id: ids of those of this process.

        Raises:
            PrivacyError: the batch was drawn by another plan or by none, or has more records than
                were drawn, or with full batches than were declared; the step was released before;
                or the records are those of another step, which draws do not give.
        """
        if step in self._released:
            raise PrivacyError(
                f"noise: step={step}; expected a step that this plan did not release before: its "
                "epsilon is that of one release of each step. Go on with the next step; for "
                "another run, make a plan and account for both."
            )
        if self.guarantee != "dp":
            return
        self._require_declared(num_records)
        if self.sampling != "full_batch" and not num_records <= self._drawn.get(step, -1):
            raise PrivacyError(
                f"noise: step={step}; expected a sum of the records that the plan of the noise "
                f"drew, at sample rate {self.sample_rate}. Call draw(step, num_records, "
                "derive_rng(key, step)) of this plan, and sum those records and no others."
            )
        if self.sampling != "full_batch" and len(record_id) * math.log(self.sample_rate) < _NEVER:
            batch = hashlib.sha256(np.sort(record_id).tobytes()).digest()
            if batch in self._batches:
                raise PrivacyError(
                    f"noise: step={step}; expected the batch that was drawn for this step, not "
                    "the records of an earlier one: a batch that is released again is not "
                    "accounted for. Sum the records of plan.draw(step, ...)."
                )
            self._batches.add(batch)
        self._released.add(step)

    def _require_declared(self, num_records: int) -> None:
        if self.sampling == "full_batch" and num_records > self.sampled_from:
            raise PrivacyError(
                f"plan: a full batch of {num_records} records; expected at most the "
                f"{self.sampled_from} declared. Give each record one id, with its images as "
                "views, or make a plan for more records."
            )

    def draw(self, step: int, num_records: int, rng: Stream) -> np.ndarray:
        """Draw the logical batch of ``step``, of records or with sampling_unit="person" of people:
        sorted int64 indices of shape (batch,), possibly empty; secret.

        Args:
            step: number charged in the ledger, in [0, steps).
            num_records: records (people) that the store holds now; does not change the sample rate.
            rng: secret stream of this step (``sampling.derive_rng``).

        Raises:
            PrivacyError: the step is not in the plan or, under a guarantee, was drawn before; the
                stream is not this step's, or was used; a truncated draw or a full batch has more
                records than were accounted for; or the plan was changed (``require_true``).
        """
        self.require_true()
        if not 0 <= step < self.steps:
            raise PrivacyError(
                f"plan.draw: step={step}; expected 0 to {self.steps - 1}. The plan is used up: "
                "stop."
            )
        if self.sampling == "full_batch":
            if self.guarantee == "dp":
                self._require_declared(num_records)
            return np.arange(num_records, dtype=np.int64)
        if self.guarantee == "dp" and step in self._drawn:
            raise PrivacyError(
                f"plan.draw: step={step}; expected a step that was not drawn before: drawing "
                "until a batch is liked, or is not empty, voids the accounting. Keep the first "
                "draw; an empty batch is released as ClippedSum.zeros. For another run, make a "
                "plan."
            )
        if self.max_batch_size is not None and num_records > self.sampled_from:
            raise PrivacyError(
                f"plan.draw: num_records={num_records}; expected at most {self.sampled_from} as "
                "declared with truncated_poisson, whose cost depends on it. Make a plan for the "
                "larger store."
            )
        if self.guarantee == "dp":
            rng.key.spend_draw(step)
        index = sampling.draw_poisson(num_records, self.sample_rate, rng)
        if self.max_batch_size is not None:
            index = sampling.truncate(index, self.max_batch_size, rng)
        self._drawn[step] = len(index)
        return index

    def event(self, steps: int, view: View = "record") -> Event:
        """Event of the first ``steps`` steps; the non-private event without a guarantee.

        Args:
            view: "record": for one record, or with sampling_unit="person" for one person with all
                their records. "unamplified": the same if the attacker knows every batch. "unit":
                for a unit of clipped_per_unit records, which truncated draws support for one only.

        Raises:
            PrivacyError: more steps than planned, or a negative number.
        """
        if not 0 <= steps <= self.steps:
            raise PrivacyError(
                f"plan.event: steps={steps}; expected 0 to {self.steps}. Read the number from "
                "the ledger of this plan."
            )
        if steps and self.guarantee != "dp":
            return NonPrivate()
        return mechanism.whole_event(
            self,
            self.selection,
            steps,
            self.noise_multiplier,
            sampling="full_batch" if view == "unamplified" else None,
            records=self.clipped_per_unit if view == "unit" and self.clipped_per_unit > 1 else None,
        )

    def stated_steps(self, charged: int) -> int:
        """Return the number of steps whose epsilon is stated for a run that was charged ``charged``
        steps: all planned ones, or 0 before the first.

        A run may end where its released weights, or scores of them, look right. The epsilon of the
        steps executed by then does not hold (3 to 5 times delta); that of all planned steps does:
        what was released is what the whole run would have released, with the rest dropped (decision
        0038). Every figure, total and cap goes by this number.

        Raises:
            PrivacyError: more steps than planned, or a negative number.
        """
        if not 0 <= charged <= self.steps:
            raise PrivacyError(
                f"plan: charged={charged}; expected 0 to {self.steps}. Read the number from the "
                "ledger of this plan."
            )
        return self.steps if charged else 0

    def spent(self, steps: int) -> PrivacySpent:
        """Return the privacy of the first ``steps`` steps, at ``delta``, if that number was fixed
        beforehand.

        Raises:
            PrivacyError: more steps than planned, or a negative number.
        """
        event = self.event(steps)
        if self.guarantee != "dp":
            return PrivacySpent(None, None, self.delta, steps, None, None)
        unamplified = accountant.epsilon(self.event(steps, "unamplified"), self.delta)
        epsilon = accountant.epsilon(event, self.delta, self.value_discretization_interval)
        return PrivacySpent(
            epsilon=epsilon,
            epsilon_rdp=accountant.epsilon_rdp(event, self.delta),
            delta=self.delta,
            steps=steps,
            epsilon_unamplified=unamplified,
            unit_epsilon=stated.unit_epsilon(
                self,
                self.num_units,
                self.selection,
                steps,
                self.noise_multiplier,
                self.delta,
                epsilon,
            ),
        )

    def attack_tpr(self, steps: int, fpr: float) -> float:
        """Best true-positive rate of a membership attack at false-positive rate ``fpr``: on a unit
        if units are declared, else on a record.

        Raises:
            PrivacyError: as ``event``; or no guarantee.
        """
        unit = None if self.clipped_per_unit == 1 else self.spent(steps).unit_epsilon
        if unit is None:
            return accountant.attack_tpr(self.event(steps), fpr)
        return accountant.attack_tpr(self.event(steps, "unit"), fpr, accountant.unit_interval(unit))

    def run_plans(self) -> tuple["DPPlan", "DPPlan"]:
        """Return the plans of one run of the selection: of its releases, and of its score, one
        full-batch release clipped to 1. Execute them only inside a selection that was charged.

        Raises:
            PrivacyError: the plan has no selection.
        """
        if self.selection is None:
            raise PrivacyError(
                "plan.run_plans: no selection; expected a plan with one. Use make_plan(config, "
                "selection)."
            )
        noise, n = self.noise_multiplier, self.dataset_size
        run = PrivacyConfig(
            dataset_size=n,
            expected_batch_size=self.expected_batch_size,
            steps=self.selection.steps,
            max_grad_norm=self.max_grad_norm,
            noise_multiplier=noise,
            delta=self.delta,
            sampling=self.sampling,
            max_records_per_unit=self.max_records_per_unit,
            num_units=self.num_units,
            clipping=self.clipping,
        )
        ratio = self.selection.score_noise_ratio
        score = replace(
            run,
            expected_batch_size=n,
            steps=1,
            max_grad_norm=1.0,
            noise_multiplier=ratio * noise,
            sampling="full_batch",
        )
        return draft_plan(run), draft_plan(replace(score, clipping="hard"))

    def same_mechanism(self, other: "DPPlan") -> bool:
        """Return whether all fields agree except the computed epsilons, whose last digits may
        differ between machines.
        """
        mine, theirs = asdict(self), asdict(other)
        return all(mine[name] == theirs[name] for name in mine.keys() - _COMPUTED)

    def require_settings(self, cfg: PrivacyConfig, where: object) -> None:
        """Refuse settings, read from the file ``where``, that differ from this plan: both determine
        what is drawn, clipped and summed.

        Raises:
            PrivacyError: a setting differs.
        """
        same = [name for name in _SETTINGS if name != "steps" or self.selection is None]
        other = [name for name in same if getattr(cfg, name) != getattr(self, name)]
        if cfg.delta not in (None, self.delta):
            other.append("delta")
        if other:
            raise PrivacyError(
                f"run: {where}: {', '.join(f'{name}={getattr(cfg, name)}' for name in other)}; "
                "expected what the run's plan has: "
                f"{', '.join(f'{name}={getattr(self, name)}' for name in other)}. Restore the "
                "file as the run wrote it."
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain dict, ready for JSON; the inverse of ``from_dict``. Newer fields are left out at
        their defaults, because ledger headers, also those of older versions, are compared byte by
        byte.
        """
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in _NEWER or value != _NEWER[name]
        }

    @classmethod
    def from_dict(cls, values: Any) -> "DPPlan":
        """Make a plan from the dict of ``to_dict``.

        Raises:
            ConfigError: a name is unknown or missing, or a type is wrong.
            PrivacyError: the values contradict each other.
        """
        return from_dict(cls, values, where="plan")


_NEVER = -60.0
"""Logarithm of a probability that two steps of a million never meet: that a draw has these
records.
"""
_NEWER = {"selection": None, "sampling_unit": "record"}
_SETTINGS = (
    "guarantee",
    "sampling",
    "sampling_unit",
    "dataset_size",
    "num_units",
    "max_records_per_unit",
    "expected_batch_size",
    "max_batch_size",
    "max_grad_norm",
    "clipping",
    "steps",
)
"""Fields that a plan has from the run's settings as they are."""
_COMPUTED = {"epsilon", "epsilon_rdp", "unit_epsilon", "value_discretization_interval"}


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
    if cfg.guarantee == "simulated" and (cfg.noise_multiplier is None or cfg.max_grad_norm is None):
        raise ConfigError(
            f"privacy: noise_multiplier={cfg.noise_multiplier}, "
            f"max_grad_norm={cfg.max_grad_norm}; expected both with guarantee=simulated. Plan "
            "the real run, then divide its batch and noise by the same factor."
        )
    wrong = (
        cfg.guarantee != "dp"
        or cfg.sampling == "truncated_poisson"
        or cfg.sampling_unit == "person"
    )
    if selection is not None and (wrong or selection.steps != cfg.steps):
        raise ConfigError(
            f"privacy: a selection with guarantee={cfg.guarantee}, sampling={cfg.sampling}, "
            f"steps={cfg.steps} and {selection.steps}; expected guarantee=dp, poisson or "
            "full_batch draws of records, and one number of steps. Use ask_selection, or no "
            "selection."
        )
    if cfg.target_unit_epsilon is not None and (
        cfg.num_units is None
        or (cfg.sampling == "truncated_poisson" and cfg.sampling_unit == "record")
    ):
        raise ConfigError(
            f"privacy: target_unit_epsilon={cfg.target_unit_epsilon} with "
            f"num_units={cfg.num_units}, sampling={cfg.sampling}; expected the declared number "
            "of people, and poisson or full_batch. Pass --privacy.num-units M, or "
            "--privacy.target-epsilon for records."
        )
    rate = cfg.expected_batch_size / cfg.sampled_from
    delta = default_delta(cfg.num_units or cfg.dataset_size) if cfg.delta is None else cfg.delta
    steps = cfg.num_steps if selection is None else 1
    event_of = partial(mechanism.whole_event, cfg, selection, steps)
    noise = cfg.noise_multiplier or 0.0
    interval = eps = eps_rdp = unit_eps = None
    if cfg.guarantee == "dp":
        if cfg.target_epsilon is not None:
            noise = calibrate(event_of, cfg.target_epsilon, delta)
        elif cfg.target_unit_epsilon is not None:
            k = cfg.clipped_per_unit
            noise = calibrate(
                partial(event_of, records=k if k > 1 else None),
                cfg.target_unit_epsilon,
                delta,
                unit=k > 1,
            )
        event = event_of(noise)
        interval = (
            None if selection is not None else accountant.discretization_interval(event, delta)
        )
        eps, eps_rdp = (
            accountant.epsilon(event, delta, interval),
            accountant.epsilon_rdp(event, delta),
        )
        if not eps < math.inf:
            raise PrivacyError(
                f"privacy: noise_multiplier={noise}; expected enough for a finite epsilon. Use "
                "0.5 to 5."
            )
        unit_eps = stated.unit_epsilon(cfg, cfg.num_units, selection, steps, noise, delta, eps)
    plan = DPPlan(
        guarantee=cfg.guarantee,
        sampling=cfg.sampling,
        dataset_size=cfg.dataset_size,
        expected_batch_size=float(cfg.expected_batch_size),
        sample_rate=rate,
        max_batch_size=cfg.max_batch_size,
        noise_multiplier=float(noise),
        max_grad_norm=cfg.max_grad_norm,
        steps=steps,
        delta=delta,
        max_records_per_unit=cfg.max_records_per_unit,
        num_units=cfg.num_units,
        value_discretization_interval=interval,
        epsilon=eps,
        epsilon_rdp=eps_rdp,
        unit_epsilon=unit_eps,
        clipping=cfg.clipping,
        sampling_unit=cfg.sampling_unit,
        selection=selection,
    )
    object.__setattr__(plan, "_true", True)
    return plan
