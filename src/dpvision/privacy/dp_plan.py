"""The privacy plan: it draws the batches, scales the noise, sets the divisor and describes the
executed steps to the accountant.

No other object holds a sample rate, a noise scale, a divisor or a number of steps. A plan is
composed of a sampler (``sampling``), a strategy of the noise (``mechanism``) and a number of steps;
the event of executed steps follows from the three (decision 0041).
"""

import os
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Literal

import numpy as np

from dpvision.config import PrivacyConfig, from_dict
from dpvision.config.privacy import MAX_GRAD_NORM, MIN_GRAD_NORM
from dpvision.config.unit import Drawn, Unit
from dpvision.errors import PrivacyError
from dpvision.privacy import accountant
from dpvision.privacy.accountant import PrivacySpent
from dpvision.privacy.batches import Batches
from dpvision.privacy.events import Event, NonPrivate
from dpvision.privacy.mechanism import IndependentGaussian, Noise
from dpvision.privacy.sampling import LAWS, TOLERANCE, Law, Sampler
from dpvision.privacy.selection import Selection
from dpvision.privacy.stream import Stream

View = Literal["record", "unamplified", "unit"]


@dataclass(frozen=True)
class DPPlan:
    """The mechanism of a run and its guarantee. Made by ``privacy.plan`` only; frozen, and written
    into ledger and manifest.

    ``epsilon`` and ``epsilon_rdp`` are those of all planned steps. What a run states is
    ``spent(stated_steps(ledger.steps))``.
    """

    guarantee: Literal["dp", "none", "simulated"]
    sampler: Sampler
    """Draws the batches; its expected batch size is the divisor of the noisy sum."""
    noise: Noise
    """Says how much noise a step gets, and to which norm gradients are clipped."""
    steps: int
    delta: float
    value_discretization_interval: float | None
    """Grid of the privacy loss in the stated epsilon; None without a guarantee."""
    epsilon: float | None
    epsilon_rdp: float | None
    unit_epsilon: float | None
    """Epsilon of all planned steps for a unit with up to max_records_per_unit records; None if no
    units are declared.
    """
    clipping: Literal["hard", "automatic"] = "hard"
    selection: Selection | None = None
    """If None, the run executes ``steps`` steps. Otherwise its one step is a private selection
    among runs, which all other fields describe; ``run_plans`` gives their plans.
    """
    _true: ClassVar[bool] = False
    """Of this object, and of no ``dataclasses.replace`` of it: whether its epsilons are known to be
    those of its own numbers.
    """
    _drawn: ClassVar[dict[int, np.ndarray | int]]
    """Records (people) that this object drew, by step; secret. Of a step that is done only their
    number.
    """
    _released: ClassVar[set[int]]
    """Steps that this object released under a guarantee."""
    _recent: ClassVar[Batches]
    """What was drawn and what was released in the last of those steps; secret."""
    _lock: ClassVar[threading.Lock]
    """Held while a step is looked up and noted."""
    _process: ClassVar[int]
    """The process that executes this object: a forked one remembers other steps."""

    def __post_init__(self) -> None:
        ok = 0 < self.sample_rate <= 1 and (self.unit.is_person or not self.unit.draws_people)
        if self.selection is not None:
            ok = ok and self.steps == 1 and self.guarantee == "dp" and not self.unit.draws_people
        if not ok or (self.guarantee == "dp") != (self.epsilon is not None):
            raise self._altered(self.sample_rate)
        norm = self.max_grad_norm
        if norm is not None and not MIN_GRAD_NORM <= norm <= MAX_GRAD_NORM:
            raise PrivacyError(
                f"plan: max_grad_norm={norm!r}; expected between {MIN_GRAD_NORM:g} "
                f"and {MAX_GRAD_NORM:g}, where a clipped contribution is exact enough. Use 0.1 "
                "to 1."
            )
        object.__setattr__(self, "_drawn", {})
        object.__setattr__(self, "_released", set())
        object.__setattr__(self, "_recent", Batches())
        object.__setattr__(self, "_lock", threading.Lock())
        object.__setattr__(self, "_process", os.getpid())

    def _altered(self, sample_rate: float) -> PrivacyError:
        return PrivacyError(
            f"plan: sample_rate={sample_rate}, epsilon={self.epsilon}; expected "
            f"expected_batch_size / {self.unit.sampled_from}, and an epsilon if and only if "
            "guarantee is 'dp'. Make plans with make_plan; restore an altered file."
        )

    def __copy__(self) -> "DPPlan":
        """Return this object, which remembers what it drew and released; ``another_run`` is for
        another run.
        """
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "DPPlan":
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {k: value for k, value in vars(self).items() if k not in ("_lock", "_process")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in (state | {"_lock": threading.Lock(), "_process": os.getpid()}).items():
            object.__setattr__(self, name, value)

    @property
    def expected_batch_size(self) -> float:
        """float: divisor of the noisy sum; public."""
        return self.sampler.expected_batch_size

    @property
    def sample_rate(self) -> float:
        """float: expected_batch_size / number of those that are drawn, as declared."""
        return self.sampler.sample_rate

    @property
    def unit(self) -> Unit:
        """Unit: the unit of privacy."""
        return self.sampler.unit

    @property
    def dataset_size(self) -> int:
        """int: declared number of records."""
        return self.unit.num_records

    @property
    def max_grad_norm(self) -> float | None:
        """float: clipping norm; None without clipping."""
        return self.noise.max_grad_norm

    @property
    def noise_std(self) -> float:
        """float: standard deviation of the first step's noise; 0 without noise."""
        return self.noise.std(0)

    @property
    def stated_epsilon(self) -> float | None:
        """float: epsilon of all planned steps for a unit, or for a record if no units are declared;
        None without a guarantee.
        """
        return self.unit_epsilon if self.unit.is_person else self.epsilon

    def require_true(self) -> None:
        """Refuse to execute a plan whose stated epsilons are not those of its own numbers: changed
        by ``dataclasses.replace``, say.

        ``make_plan`` computed them; for any other object they are computed here, once.

        Raises:
            PrivacyError: names the epsilon.
        """
        if not self._true:
            for name, true in self.epsilons(self.steps) if self.guarantee == "dp" else ():
                stated = getattr(self, name)
                if (stated is None) != (true is None) or (
                    true is not None and not abs(stated - true) <= _SAME * true
                ):
                    raise PrivacyError(
                        f"plan: {name}={stated}, but its numbers give {true}; expected the same. "
                        "Make a plan with make_plan to change noise, steps, sample rate or delta: "
                        "dataclasses.replace leaves the epsilon as it was."
                    )
            object.__setattr__(self, "_true", True)

    def _require_process(self) -> None:
        """Refuse to execute a plan in a forked process: both would release the same steps."""
        if self._process != os.getpid():
            raise PrivacyError(
                "plan: made before this process was forked; expected to draw and release in one "
                "process, since both would release every step. Make a plan in the process that "
                "trains, and account for each; start several ranks with torchrun."
            )

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
                ids are no int64; or the records are not those that were drawn, as far as
                ``Batches`` can tell.
        """
        self._require_process()
        with self._lock:
            self._release(step, num_records, record_id)

    def _release(self, step: int, num_records: int, record_id: np.ndarray) -> None:
        if step in self._released:
            raise PrivacyError(
                f"noise: step={step}; expected a step that this plan did not release before: its "
                "epsilon is that of one release of each step. Go on with the next step; for "
                "another run, make a plan and account for both."
            )
        if self.guarantee != "dp":
            return
        self.sampler.require(num_records)
        if self.sampler.random:
            drawn = self._drawn.get(step)
            if not isinstance(drawn, np.ndarray) or num_records > len(drawn):
                raise PrivacyError(
                    f"noise: step={step}; expected a sum of the records that the plan of the noise "
                    f"drew, at sample rate {self.sample_rate}. Call draw(step, num_records, "
                    "derive_rng(key, step)) of this plan, and sum those records and no others."
                )
            record_id = np.asarray(record_id) if len(record_id) else np.empty(0, dtype=np.int64)
            if record_id.ndim != 1 or not np.can_cast(record_id.dtype, np.int64):
                raise PrivacyError(
                    f"noise: record_id: {record_id.dtype} of shape {record_id.shape}; expected "
                    "int64 ids, one for each record, by which batches are compared. Give each "
                    "record a number."
                )
            most = (1 + TOLERANCE) * self.unit.sampled_from
            if not self._recent.fit(drawn, record_id.astype(np.int64), most):
                raise PrivacyError(
                    f"noise: step={step}; expected the batch that was drawn for this step: it "
                    "shares more records with an earlier one than their draws do, or too few with "
                    "all of them. A batch that is not drawn for its step is not accounted for. Sum "
                    "the records of plan.draw(step, ...), each under one id in all steps."
                )
            self._drawn[step] = len(drawn)
        self._released.add(step)

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
        self._require_process()
        if not 0 <= step < self.steps:
            raise PrivacyError(
                f"plan.draw: step={step}; expected 0 to {self.steps - 1}. The plan is used up: "
                "stop."
            )
        with self._lock:
            return self._draw(step, num_records, rng)

    def _draw(self, step: int, num_records: int, rng: Stream) -> np.ndarray:
        private, random = self.guarantee == "dp", self.sampler.random
        if private and step in self._drawn:
            raise PrivacyError(
                f"plan.draw: step={step}; expected a step that was not drawn before: drawing "
                "until a batch is liked, or is not empty, voids the accounting. Keep the first "
                "draw; an empty batch is released as ClippedSum.zeros. For another run, make a "
                "plan."
            )
        if private or self.sampler.max_batch_size is not None:
            self.sampler.require(num_records)
        if private and random:
            rng.key.spend_draw(step)
        index = self.sampler.draw(num_records, rng)
        if private and random:
            self._drawn[step] = index.copy()
        return index

    def event(self, steps: int, view: View = "record") -> Event:
        """Event of the first ``steps`` steps; the non-private event without a guarantee.

        Args:
            view: "record": for one record, or with sampling_unit="person" for one person with all
                their records. "unamplified": the same if the attacker knows every batch. "unit":
                for a unit of unit.clipped records, which truncated draws support for one only.

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
        sampler = self.sampler.known() if view == "unamplified" else self.sampler
        records = self.unit.clipped if view == "unit" else 1
        if self.selection is None or not steps:
            return self.noise.event(sampler, steps, records)
        run = self.noise.event(sampler, self.selection.steps, records)
        return self.selection.event(run, self.noise.multiplier, records)

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

    def epsilons(self, steps: int) -> Iterator[tuple[str, float | None]]:
        """Yield name and value of the epsilons of the first ``steps`` steps of a plan with a
        guarantee. RDP comes first: it takes no time and memory, whatever the numbers are.
        """
        event = self.event(steps)
        yield "epsilon_rdp", accountant.epsilon_rdp(event, self.delta)
        epsilon = accountant.epsilon(event, self.delta, self.value_discretization_interval)
        yield "epsilon", epsilon
        yield "unit_epsilon", self._unit_epsilon(steps, epsilon)

    def _unit_epsilon(self, steps: int, epsilon: float) -> float | None:
        """Epsilon of a unit, given the record's; None if no units are declared, or if there is no
        accounting for them (refused).
        """
        if not self.unit.is_person or self.unit.clipped == 1:
            return epsilon if self.unit.is_person else None
        sampler = self.sampler
        if not sampler.accounts_for_units or (self.selection is not None and sampler.random):
            return None
        return accountant.unit_epsilon(self.event(steps, "unit"), self.delta)

    def spent(self, steps: int) -> PrivacySpent:
        """Return the privacy of the first ``steps`` steps, at ``delta``, if that number was fixed
        beforehand.

        Raises:
            PrivacyError: more steps than planned, or a negative number.
        """
        event = self.event(steps, "unamplified")
        if self.guarantee != "dp":
            return PrivacySpent(None, None, self.delta, steps, None, None)
        epsilon = dict(self.epsilons(steps))
        return PrivacySpent(
            epsilon=epsilon["epsilon"],
            epsilon_rdp=epsilon["epsilon_rdp"],
            delta=self.delta,
            steps=steps,
            epsilon_unamplified=accountant.epsilon(event, self.delta),
            unit_epsilon=epsilon["unit_epsilon"],
        )

    def attack_tpr(self, steps: int, fpr: float) -> float:
        """Best true-positive rate of a membership attack at false-positive rate ``fpr``: on a unit
        if units are declared, else on a record.

        Raises:
            PrivacyError: as ``event``; or no guarantee.
        """
        unit = None if self.unit.clipped == 1 else self.spent(steps).unit_epsilon
        if unit is None:
            return accountant.attack_tpr(self.event(steps), fpr)
        return accountant.attack_tpr(self.event(steps, "unit"), fpr, accountant.unit_interval(unit))

    def same_mechanism(self, other: "DPPlan") -> bool:
        """Return whether all fields agree except the computed epsilons, whose last digits may
        differ between machines.
        """
        names = {field.name for field in fields(self)} - _COMPUTED
        return all(getattr(self, name) == getattr(other, name) for name in names)

    def require_settings(self, cfg: PrivacyConfig, where: object) -> None:
        """Refuse settings, read from the file ``where``, that differ from this plan: both determine
        what is drawn, clipped and summed.

        Raises:
            PrivacyError: a setting differs.
        """
        form = self.form()
        same = [name for name in _SETTINGS if name != "steps" or self.selection is None]
        other = [name for name in same if getattr(cfg, name) != getattr(form, name)]
        if cfg.delta not in (None, self.delta):
            other.append("delta")
        if other:
            raise PrivacyError(
                f"run: {where}: {', '.join(f'{name}={getattr(cfg, name)}' for name in other)}; "
                "expected what the run's plan has: "
                f"{', '.join(f'{name}={getattr(form, name)}' for name in other)}. Restore the "
                "file as the run wrote it."
            )

    def form(self) -> "PlanForm":
        """The plan as it is written into files, and read by ``PlanForm.plan``."""
        names = {field.name for field in fields(self)} - {"sampler", "noise"}
        own = {name: getattr(self, name) for name in names}
        return PlanForm(**own, **self.sampler.to_dict(), **self.noise.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Plain dict of ``form``, ready for JSON; the inverse of ``from_dict``. Newer fields are
        left out at their defaults, because ledger headers, also those of older versions, are
        compared byte by byte.
        """
        return {
            name: value
            for name, value in asdict(self.form()).items()
            if name not in _NEWER or value != _NEWER[name]
        }

    @classmethod
    def from_dict(cls, values: Any) -> "DPPlan":
        """Make a plan from the dict of ``to_dict``.

        Raises:
            ConfigError: a name is unknown or missing, or a type is wrong.
            PrivacyError: the values contradict each other.
        """
        return from_dict(PlanForm, values, where="plan").plan()


@dataclass(frozen=True)
class PlanForm:
    """A plan in a ledger, manifest or statement: all its numbers side by side."""

    guarantee: Literal["dp", "none", "simulated"]
    sampling: Law
    dataset_size: int
    expected_batch_size: float
    sample_rate: float
    max_batch_size: int | None
    noise_multiplier: float
    max_grad_norm: float | None
    steps: int
    delta: float
    max_records_per_unit: int
    num_units: int | None
    value_discretization_interval: float | None
    epsilon: float | None
    epsilon_rdp: float | None
    unit_epsilon: float | None
    clipping: Literal["hard", "automatic"] = "hard"
    sampling_unit: Drawn = "record"
    selection: Selection | None = None

    def plan(self) -> DPPlan:
        """Make the plan.

        Raises:
            PrivacyError: the values contradict each other.
        """
        unit = Unit(
            self.dataset_size, self.num_units, self.max_records_per_unit, self.sampling_unit
        )
        names = {field.name for field in fields(DPPlan)} - {"sampler", "noise"}
        plan = DPPlan(
            sampler=LAWS[self.sampling](unit, self.expected_batch_size, self.max_batch_size),
            noise=IndependentGaussian(self.noise_multiplier, self.max_grad_norm),
            **{name: getattr(self, name) for name in names},
        )
        if self.sample_rate != plan.sample_rate:
            raise plan._altered(self.sample_rate)
        return plan


_SAME = 1e-4
"""Relative difference allowed between an epsilon that an earlier version computed and that of this
one.
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
