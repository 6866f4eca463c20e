"""Settings of the guarantee."""

import math
from dataclasses import dataclass
from typing import Literal

from dpvision.config.checks import check_choices, convert_numbers, require
from dpvision.config.unit import Unit

MIN_GRAD_NORM, MAX_GRAD_NORM = 1e-12, 1e12
"""Range of clipping norms. Outside it, factors, squares and contributions leave the range of
float32, and the bound fails: in a head one record moves the sum by 1.56 C at 2.2e-45, and by 2.86 C
at 1e40.
"""


@dataclass(frozen=True)
class PrivacyConfig:
    """The requested guarantee; ``privacy.plan.make_plan`` turns it into a plan."""

    dataset_size: int
    """Declared, public number of records N. The sample rate is expected_batch_size / N (with
    sampling_unit="person", / num_units), whatever the store holds.
    """
    expected_batch_size: float
    """Mean number of records (with sampling_unit="person", of people) in a logical batch; public,
    and the divisor of the gradient.
    """
    steps: int | None
    """Number of logical steps T (releases). If None, a private head's own number; networks need
    one.
    """
    max_grad_norm: float | None = 1.0
    """Clipping norm C of a record's (or person's) whole gradient, 1e-12 to 1e12; None only without
    a guarantee (no clipping).
    """
    noise_multiplier: float | None = None
    """Noise standard deviation / max_grad_norm. Give one of this, target_epsilon and
    target_unit_epsilon.
    """
    target_epsilon: float | None = None
    """Calibrate the noise (rounded up) so that the PLD epsilon of all steps is at most this for one
    record.
    """
    target_unit_epsilon: float | None = None
    """The same for one unit (person) with all its records; needs num_units."""
    delta: float | None = None
    """If None, 1 / (2 dataset_size), or 1 / (2 num_units) if units are declared; at most 1e-3."""
    delta_for: int | None = None
    """Number of records that a recipe chose ``delta`` for: such a delta is refused where N x delta
    exceeds 1. If None, ``delta`` was chosen for this run, and N x delta may be up to 1.5.
    """
    guarantee: Literal["dp", "none", "simulated"] = "dp"
    """'none' and 'simulated' (TAN) run the same loop, and every output states that there is no
    guarantee.
    """
    sampling: Literal["poisson", "truncated_poisson", "full_batch"] = "poisson"
    """How a logical batch is drawn: each record by its own coin, the same with a cap, or all
    records.
    """
    max_batch_size: int | None = None
    """Cap of a truncated Poisson batch; required there, forbidden elsewhere."""
    max_records_per_unit: int = 1
    """Bound k on the records of one unit (person): of those used in the run, or with
    sampling_unit="person" of those used in one step. Above 1 it needs num_units.
    """
    num_units: int | None = None
    """Declared, public number of units (people), for a store imported with --unit-from: the
    guarantee is then stated for the unit, and delta is judged by this number. If None, the unit of
    privacy is the record.
    """
    sampling_unit: Literal["record", "person"] = "record"
    """What one coin of a draw decides. 'record': each record is drawn and clipped on its own, and a
    person's guarantee is a group bound. 'person': people are drawn at rate expected_batch_size /
    num_units, and a person's mean gradient is clipped (decision 0034).
    """
    allow_weak_guarantee: bool = False
    """Train also with epsilon above 20 or delta above 1e-3, which are refused otherwise
    (docs/privacy.md).
    """
    clipping: Literal["hard", "automatic"] = "hard"
    """'hard': scale longer gradients down to the clipping norm. 'automatic': scale every gradient
    to nearly that norm (Bu et al. 2023).
    """

    def __post_init__(self) -> None:
        check_choices(self)
        convert_numbers(self)
        w = "privacy"
        n, b = self.dataset_size, self.expected_batch_size
        require(
            n >= 1,
            w,
            "dataset_size",
            n,
            "at least 1",
            "Declare the number of records of the store.",
        )
        require(
            0 < b < math.inf,
            w,
            "expected_batch_size",
            b,
            "a positive number",
            "Choose a batch between 1 and dataset_size.",
        )
        require(
            self.steps is None or self.steps >= 1,
            w,
            "steps",
            self.steps,
            "at least 1",
            "Plan one step or more.",
        )
        if self.max_grad_norm is not None:
            ok = MIN_GRAD_NORM <= self.max_grad_norm <= MAX_GRAD_NORM
            require(
                ok,
                w,
                "max_grad_norm",
                self.max_grad_norm,
                f"between {MIN_GRAD_NORM:g} and {MAX_GRAD_NORM:g}",
                "Use 0.1 to 1.",
            )
        if self.noise_multiplier is not None:
            require(
                0 <= self.noise_multiplier < math.inf,
                w,
                "noise_multiplier",
                self.noise_multiplier,
                "0 or more",
                "Use 0.5 to 5.",
            )
        if self.target_epsilon is not None:
            require(
                0 < self.target_epsilon < math.inf,
                w,
                "target_epsilon",
                self.target_epsilon,
                "a positive number",
                "Use 1 to 8.",
            )
        if self.delta is not None:
            require(
                0 < self.delta < 1,
                w,
                "delta",
                self.delta,
                "strictly between 0 and 1",
                "Leave it out for the default.",
            )
        k, units, people = self.max_records_per_unit, self.num_units, self.sampling_unit == "person"
        require(k >= 1, w, "max_records_per_unit", k, "at least 1", "Use 1 for records.")
        require(
            k == 1 or units is not None,
            w,
            "num_units",
            units,
            f"a number with max_records_per_unit={k}",
            "Declare it.",
        )
        if people:
            remedy = "Declare the number of people, for a store imported with --unit-from."
            require(
                units is not None,
                w,
                "num_units",
                units,
                "a number with sampling_unit='person'",
                remedy,
            )
            rule = f"from 1 to dataset_size={n}"
            require(
                units is not None and 1 <= units <= n,
                w,
                "num_units",
                units,
                rule,
                "Every person has at least one image.",
            )
        elif units is not None:
            rule = f"dataset_size={n} between num_units and max_records_per_unit x num_units"
            require(
                1 <= units <= n <= k * units,
                w,
                "num_units",
                units,
                rule,
                f"With max_records_per_unit={k} declare numbers that fit.",
            )
        of, size = "num_units" if people else "dataset_size", self.unit.sampled_from
        require(
            b <= size,
            w,
            "expected_batch_size",
            b,
            f"at most {of}={size}",
            "Use a smaller batch, or sampling=full_batch.",
        )
        target = self.target_unit_epsilon
        if target is not None:
            require(
                0 < target < math.inf,
                w,
                "target_unit_epsilon",
                target,
                "a positive number",
                "Use 1 to 8.",
            )
        if self.sampling == "full_batch":
            require(
                b == size,
                w,
                "expected_batch_size",
                b,
                f"{of}={size} for sampling=full_batch",
                f"Set it to {of}.",
            )
        if self.sampling == "truncated_poisson":
            m = self.max_batch_size
            require(
                m is not None and m >= 1,
                w,
                "max_batch_size",
                m,
                "a cap for truncated_poisson",
                "About mean + 7 standard deviations.",
            )
        else:
            require(
                self.max_batch_size is None,
                w,
                "max_batch_size",
                self.max_batch_size,
                "nothing unless truncated",
                "Drop it.",
            )
        names = ("noise_multiplier", "target_epsilon", "target_unit_epsilon")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            one_of = "only one of noise_multiplier, target_epsilon and target_unit_epsilon"
            option = given[0].replace("_", "-")
            require(
                False,
                w,
                given[1],
                getattr(self, given[1]),
                one_of,
                f"Drop one: --privacy.{option} None.",
            )
        if self.guarantee == "dp":
            require(
                self.max_grad_norm is not None,
                w,
                "max_grad_norm",
                None,
                "a clip norm in a private run",
                "Set it, e.g. 0.1.",
            )
            require(
                bool(given),
                w,
                "noise_multiplier",
                None,
                "noise_multiplier or target_epsilon in a private run",
                "Give target_epsilon, e.g. 8.",
            )
            require(
                self.noise_multiplier is None or self.noise_multiplier > 0,
                w,
                "noise_multiplier",
                self.noise_multiplier,
                "more than 0 in a private run",
                "For no privacy use guarantee=none.",
            )
        elif given and (
            self.noise_multiplier is None
            or (self.guarantee == "none" and self.noise_multiplier > 0)
        ):
            rule = "no target" if self.guarantee == "simulated" else "no noise and no target"
            require(
                False,
                w,
                given[0],
                getattr(self, given[0]),
                f"{rule} with guarantee={self.guarantee}",
                "Drop it.",
            )

    @property
    def num_steps(self) -> int:
        """int: the number of steps; raises ConfigError if a rule has not set it yet."""
        require(
            self.steps is not None,
            "privacy",
            "steps",
            None,
            "a number",
            "Only private heads have a rule. Give --privacy.steps.",
        )
        assert self.steps is not None
        return self.steps

    @property
    def unit(self) -> Unit:
        """Unit: the unit of privacy."""
        return Unit(
            self.dataset_size, self.num_units, self.max_records_per_unit, self.sampling_unit
        )
