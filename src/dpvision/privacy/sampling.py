"""How the batch of a step is drawn, and what a step then costs: one value for each law.

A draw gives indices only, from a secret stream; it is sorted, takes time and memory proportional to
the batch (not to the data set), and may be empty. Adjacency is add-or-remove: of one record, of a
unit (person) with up to k records, or where people are drawn, and a person's mean gradient is
clipped, of one person, who is then like one record (decision 0034).
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from scipy import special

from dpvision.config.unit import Unit
from dpvision.errors import OPERATOR_ONLY, PrivacyError
from dpvision.privacy.events import (
    Event,
    Gaussian,
    GaussianMixture,
    NoRelease,
    PoissonGaussian,
    Repeated,
    TruncatedPoissonGaussian,
)
from dpvision.privacy.stream import Key, Stream, subkey

Law = Literal["poisson", "truncated_poisson", "full_batch"]
TOLERANCE = 0.01
"""Largest relative difference between a store's count and the declared number, which is public and
may be rounded.
"""


@dataclass(frozen=True)
class Sampler:
    """The interface of the laws below: values that draw batches and account for them."""

    unit: Unit
    """What is drawn, and the declared, public number of them, whatever the store holds."""
    expected_batch_size: float
    """Public; the divisor of the noisy sum."""
    max_batch_size: int | None = None
    """Cap of truncated_poisson; None with the others."""

    law: ClassVar[Law]
    random: ClassVar[bool] = True
    """Whether the batch is secret, and so must be drawn once for each step."""
    accounts_for_units: ClassVar[bool] = True
    """Whether there is an event for a unit of several records."""

    def __post_init__(self) -> None:
        if (self.law == "truncated_poisson") != (self.max_batch_size is not None):
            raise PrivacyError(
                f"plan: sampling={self.law}, max_batch_size={self.max_batch_size}; expected a cap "
                "with truncated_poisson only. Make plans with make_plan; restore an altered file."
            )

    @property
    def sample_rate(self) -> float:
        """float: probability that one of them is in a batch."""
        return self.expected_batch_size / self.unit.sampled_from

    @property
    def amplifies(self) -> bool:
        """bool: whether epsilon is smaller because the batch is secret."""
        return self.random and self.sample_rate < 1

    def known(self) -> "FullBatch":
        """The sampler whose event holds if the attacker knows every batch."""
        return FullBatch(self.unit, self.unit.sampled_from)

    def require(self, num_records: int) -> None:
        """Refuse a number of records (people) for which the event does not hold.

        Raises:
            PrivacyError: more than were declared.
        """

    def draw(self, num_records: int, rng: Stream) -> np.ndarray:
        """Draw a batch from ``num_records`` records (people): sorted int64 indices, shape
        (batch,).
        """
        raise NotImplementedError

    def event(self, noise_multiplier: float, steps: int, records: int = 1) -> Event:
        """Event of ``steps`` steps, each with noise of its own.

        Args:
            noise_multiplier: standard deviation of the noise / clipping norm; more than 0.
            steps: 0 or more.
            records: the most records of the unit that the event is for.

        Raises:
            PrivacyError: there is no accounting for several records.
        """
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Fields of a plan's flat form."""
        return {
            "sampling": self.law,
            "dataset_size": self.unit.num_records,
            "expected_batch_size": self.expected_batch_size,
            "sample_rate": self.sample_rate,
            "max_batch_size": self.max_batch_size,
            "max_records_per_unit": self.unit.max_records,
            "num_units": self.unit.num_people,
            "sampling_unit": self.unit.drawn,
        }


@dataclass(frozen=True)
class FullBatch(Sampler):
    """All of them are in every batch: the steps are together one Gaussian at noise_multiplier /
    sqrt(steps), which has a closed form.
    """

    law: ClassVar[Law] = "full_batch"
    random: ClassVar[bool] = False

    def require(self, num_records: int) -> None:
        if num_records > self.unit.sampled_from:
            raise PrivacyError(
                f"plan: {OPERATOR_ONLY}a full batch of {num_records} records; expected at most the "
                f"{self.unit.sampled_from} declared. Give each record one id, with its images as "
                "views, or make a plan for more records."
            )

    def draw(self, num_records: int, rng: Stream) -> np.ndarray:
        return np.arange(num_records, dtype=np.int64)

    def event(self, noise_multiplier: float, steps: int, records: int = 1) -> Event:
        if steps == 0:
            return NoRelease()
        return Gaussian(noise_multiplier / (records * math.sqrt(steps)))


@dataclass(frozen=True)
class Poisson(Sampler):
    """Each of them is in the batch by a coin of its own: one sampled step, composed ``steps``
    times.

    Of a unit's k records Binomial(k, sample_rate) are in the batch, and move the sum by at most
    that many clipping norms: a mixture of Gaussians (Choquette-Choo et al., arXiv 2310.15526).
    """

    law: ClassVar[Law] = "poisson"

    def require(self, num_records: int) -> None:
        if num_records > (1 + TOLERANCE) * self.unit.sampled_from:
            raise PrivacyError(
                f"plan.draw: {OPERATOR_ONLY}num_records={num_records}; expected at most "
                f"{100 * TOLERANCE:.0f}% more than the {self.unit.sampled_from} declared, of which "
                "the sample rate is. Give each record one id, with its images as views, or make a "
                "plan for more records."
            )

    def draw(self, num_records: int, rng: Stream) -> np.ndarray:
        return draw_poisson(num_records, self.sample_rate, rng)

    def event(self, noise_multiplier: float, steps: int, records: int = 1) -> Event:
        if steps == 0 or not self.amplifies:
            return self.known().event(noise_multiplier, steps, records)
        if records == 1:
            return Repeated(PoissonGaussian(self.sample_rate, noise_multiplier), steps)
        count = np.arange(records + 1.0)
        log_choices = (
            special.gammaln(records + 1)
            - special.gammaln(count + 1)
            - special.gammaln(records - count + 1)
        )
        probability = np.exp(
            log_choices
            + special.xlogy(count, self.sample_rate)
            + special.xlog1py(records - count, -self.sample_rate)
        )
        shares = (probability / probability.sum()).tolist()
        mixture = GaussianMixture(noise_multiplier, tuple(count.tolist()), tuple(shares))
        return Repeated(mixture, steps)


@dataclass(frozen=True)
class TruncatedPoisson(Poisson):
    """Poisson sampling of which at most max_batch_size are kept, for fixed shapes."""

    law: ClassVar[Law] = "truncated_poisson"
    accounts_for_units: ClassVar[bool] = False

    def require(self, num_records: int) -> None:
        if num_records > self.unit.sampled_from:
            raise PrivacyError(
                f"plan.draw: {OPERATOR_ONLY}num_records={num_records}; expected at most "
                f"{self.unit.sampled_from} as declared with truncated_poisson, whose cost depends "
                "on it. Make a plan for the larger store."
            )

    def draw(self, num_records: int, rng: Stream) -> np.ndarray:
        assert self.max_batch_size is not None
        return truncate(super().draw(num_records, rng), self.max_batch_size, rng)

    def event(self, noise_multiplier: float, steps: int, records: int = 1) -> Event:
        if records > 1:
            raise PrivacyError(
                f"plan.event: a unit of {records} records with truncated_poisson; expected 1, "
                "because there is no accounting for more. Use sampling=poisson."
            )
        if steps == 0:
            return NoRelease()
        n, rate, most = self.unit.sampled_from, self.sample_rate, self.max_batch_size
        assert most is not None
        return Repeated(TruncatedPoissonGaussian(n, rate, most, noise_multiplier), steps)


LAWS: dict[Law, type[Sampler]] = {law.law: law for law in (Poisson, TruncatedPoisson, FullBatch)}


def derive_rng(key: Key, step: int) -> Stream:
    """Return the stream of one step's draw.

    Args:
        key: secret key of this start of the run, from ``stream.new_key``.
        step: number of the step in the ledger, 0 or more.

    Raises:
        PrivacyError: not a key, or not of this process.
    """
    return Stream(subkey(key, "draw", step=step))


def draw_poisson(num_records: int, sample_rate: float, rng: Stream) -> np.ndarray:
    """Sample each of ``num_records`` records independently with probability ``sample_rate``.

    The gaps between heads of independent coins are independent Geometric(sample_rate) numbers, so
    the heads are found by jumping from one to the next.

    Args:
        num_records: 0 or more.
        sample_rate: in (0, 1].

    Returns:
        Sorted int64 indices in [0, num_records), shape (batch,).
    """
    if sample_rate == 1:
        return np.arange(num_records, dtype=np.int64)
    parts = []
    last = -1
    while last < num_records - 1:
        mean = (num_records - 1 - last) * sample_rate
        # Mean + 6 standard deviations: a second round is rare, and only costs time. The cap keeps
        # the sum of a few enormous gaps (tiny rates) inside int64; a capped gap still jumps past
        # the end.
        gaps = rng.gaps(sample_rate, int(mean + 6 * mean**0.5) + 8, num_records + 1)
        index = np.cumsum(gaps, out=gaps)
        index += last
        last = int(index[-1])
        parts.append(index[: np.searchsorted(index, num_records)])
    if not parts:
        return np.empty(0, dtype=np.int64)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def truncate(index: np.ndarray, max_batch_size: int, rng: Stream) -> np.ndarray:
    """Keep at most ``max_batch_size`` of the drawn indices: a uniformly random subset if there are
    more, never the first ones.
    """
    if len(index) <= max_batch_size:
        return index
    return index[rng.subset(len(index), max_batch_size)]
