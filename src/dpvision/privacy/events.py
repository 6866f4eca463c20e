"""What a mechanism releases, as values: the language between plans and the accountant.

An event knows its own accounting: its Renyi divergences, its privacy loss distribution, and the
Gaussian that it equals, if it does. The classes mirror dp-accounting's events, which ``to_library``
makes of them; they are ours because importing that package takes longer than answering most
questions (decision 0036).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache, reduce
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from dpvision.privacy import renyi
from dpvision.privacy.loss_distribution import (
    Distribution,
    Masses,
    mixture_of_gaussians,
    sampled_gaussian,
)

if TYPE_CHECKING:
    from dp_accounting.dp_event import DpEvent


class Event:
    """A release, or several. The defaults are those of a release without accounting."""

    private: ClassVar[bool] = True
    """Whether there is a guarantee."""
    selects: ClassVar[bool] = False
    """Whether it is a private selection, which has Renyi divergences only."""

    @property
    def parts(self) -> tuple[Event, ...]:
        """tuple: the events that it is composed of; for a single release, itself."""
        return (self,)

    def to_library(self, library: ModuleType) -> DpEvent:
        """Convert to dp-accounting's class; ``library`` is its module ``dp_event``."""
        raise NotImplementedError

    def gaussian_noise(self) -> float | None:
        """Noise multiplier of the single Gaussian equivalent to the event, infinite for the empty
        event; None if a part is not Gaussian.
        """
        return None

    def divergences(self) -> np.ndarray | None:
        """Renyi divergences at ``renyi.ORDERS``, float64; None without RDP accounting."""
        return None

    def losses(self, interval: float) -> Distribution:
        """Privacy loss distribution, pessimistic, on a grid of ``interval``."""
        return _computed_once(self, interval)

    def compute_losses(self, interval: float) -> Distribution:
        """Compute ``losses``, which remembers them."""
        raise TypeError(f"accountant: {self}; expected one release of dpvision.privacy.sampling.")

    def similar(self) -> Event:
        """A Poisson-sampled event of about the same epsilon, which has Renyi divergences."""
        return self


@lru_cache(maxsize=8)
def _computed_once(event: Event, interval: float) -> Distribution:
    """One step's distribution is computed once for all numbers of steps."""
    return event.compute_losses(interval)


@dataclass(frozen=True)
class NoRelease(Event):
    """Nothing was released."""

    def to_library(self, library: ModuleType) -> DpEvent:
        return library.NoOpDpEvent()

    def gaussian_noise(self) -> float:
        return math.inf

    def divergences(self) -> np.ndarray:
        return np.zeros(len(renyi.ORDERS))

    def compute_losses(self, interval: float) -> Distribution:
        none = Masses(interval, 0, np.ones(1), 0.0)
        return Distribution(none, none)


@dataclass(frozen=True)
class NonPrivate(Event):
    """A release without a guarantee."""

    private: ClassVar[bool] = False

    def to_library(self, library: ModuleType) -> DpEvent:
        return library.NonPrivateDpEvent()


@dataclass(frozen=True)
class Gaussian(Event):
    """A sum that one record (or unit) moves by at most 1, with Gaussian noise."""

    noise_multiplier: float
    """Standard deviation of the noise; more than 0."""

    def to_library(self, library: ModuleType) -> DpEvent:
        return library.GaussianDpEvent(self.noise_multiplier)

    def gaussian_noise(self) -> float:
        return self.noise_multiplier

    def divergences(self) -> np.ndarray:
        return renyi.ORDERS / (2 * self.noise_multiplier**2)

    def compute_losses(self, interval: float) -> Distribution:
        from dpvision.privacy import rare_events

        return rare_events.gaussian_losses(self.noise_multiplier, interval)


@dataclass(frozen=True)
class PoissonGaussian(Event):
    """The same sum over a Poisson-sampled batch."""

    sample_rate: float
    """Probability that a record is drawn, in (0, 1]."""
    noise_multiplier: float

    def to_library(self, library: ModuleType) -> DpEvent:
        return library.PoissonSampledDpEvent(
            self.sample_rate, library.GaussianDpEvent(self.noise_multiplier)
        )

    def divergences(self) -> np.ndarray:
        return renyi.poisson_gaussian(self.sample_rate, self.noise_multiplier)

    def compute_losses(self, interval: float) -> Distribution:
        return sampled_gaussian(self.sample_rate, self.noise_multiplier, interval)


@dataclass(frozen=True)
class TruncatedPoissonGaussian(Event):
    """The same over a Poisson-sampled batch of which at most ``max_batch_size`` records are
    kept.
    """

    dataset_size: int
    sample_rate: float
    max_batch_size: int
    noise_multiplier: float

    def to_library(self, library: ModuleType) -> DpEvent:
        return library.TruncatedSubsampledGaussianDpEvent(
            self.dataset_size, self.sample_rate, self.max_batch_size, self.noise_multiplier
        )

    def compute_losses(self, interval: float) -> Distribution:
        from dpvision.privacy import rare_events

        return rare_events.truncated_losses(
            self.dataset_size,
            self.sample_rate,
            self.max_batch_size,
            self.noise_multiplier,
            interval,
        )

    def similar(self) -> Event:
        return PoissonGaussian(self.sample_rate, self.noise_multiplier)


@dataclass(frozen=True)
class GaussianMixture(Event):
    """A sum with Gaussian noise that a unit moves by one of ``shifts``, with these probabilities
    (Choquette-Choo et al., arXiv 2310.15526).
    """

    noise_multiplier: float
    shifts: tuple[float, ...]
    """0, and numbers above it, ascending."""
    probabilities: tuple[float, ...]
    """Of the same length; they add up to 1, and that of 0 is above 0."""

    def to_library(self, library: ModuleType) -> DpEvent:
        return library.MixtureOfGaussiansDpEvent(
            self.noise_multiplier, self.shifts, self.probabilities
        )

    def compute_losses(self, interval: float) -> Distribution:
        return mixture_of_gaussians(
            self.shifts, self.probabilities, self.noise_multiplier, interval
        )

    def similar(self) -> Event:
        any_drawn = max(1.0 - self.probabilities[0], 1e-300)
        return PoissonGaussian(any_drawn, self.noise_multiplier / max(self.shifts))


@dataclass(frozen=True)
class Repeated(Event):
    """``count`` releases of one kind."""

    event: Event
    count: int

    def to_library(self, library: ModuleType) -> DpEvent:
        return library.SelfComposedDpEvent(self.event.to_library(library), self.count)

    def gaussian_noise(self) -> float | None:
        noise = self.event.gaussian_noise()
        return None if noise is None else noise / math.sqrt(self.count)

    def divergences(self) -> np.ndarray | None:
        of_one = self.event.divergences()
        return None if of_one is None else of_one * self.count

    def compute_losses(self, interval: float) -> Distribution:
        return self.event.losses(interval).repeat(self.count)

    def similar(self) -> Event:
        return Repeated(self.event.similar(), self.count)


@dataclass(frozen=True)
class Composed(Event):
    """All of ``events``."""

    events: tuple[Event, ...]

    @property
    def parts(self) -> tuple[Event, ...]:
        return self.events

    def to_library(self, library: ModuleType) -> DpEvent:
        return library.ComposedDpEvent([event.to_library(library) for event in self.events])

    def gaussian_noise(self) -> float | None:
        noises = [event.gaussian_noise() for event in self.events]
        known = [noise for noise in noises if noise is not None]
        if len(known) < len(noises):
            return None
        precision = sum(noise**-2 for noise in known)
        return precision**-0.5 if precision > 0 else math.inf

    def divergences(self) -> np.ndarray | None:
        found = [event.divergences() for event in self.events]
        known = [divergence for divergence in found if divergence is not None]
        return np.sum(known, axis=0) if known and len(known) == len(found) else None

    def losses(self, interval: float) -> Distribution:
        # All Gaussian parts are one Gaussian, exactly, and equal parts are computed once: the time
        # grows with the different plans of a store's runs, not with the runs.
        gaussian = tuple(event for event in self.events if event.gaussian_noise() is not None)
        noise = Composed(gaussian).gaussian_noise()
        assert noise is not None, "each part has one"
        count_of = Counter(event for event in self.events if event.gaussian_noise() is None)
        if noise < math.inf or not count_of:
            count_of[Gaussian(noise) if noise < math.inf else NoRelease()] = 1
        parts = (event.losses(interval).repeat(count) for event, count in count_of.items())
        return reduce(Distribution.compose, parts)

    def similar(self) -> Event:
        return Composed(tuple(event.similar() for event in self.events))


@dataclass(frozen=True)
class Selected(Event):
    """The best of K runs of ``event`` (``selection.Selection``)."""

    event: Event
    mean_runs: float
    shape: float
    """Of the truncated negative binomial law of K; infinite for the Poisson law."""

    selects: ClassVar[bool] = True

    def to_library(self, library: ModuleType) -> DpEvent:
        return library.RepeatAndSelectDpEvent(
            self.event.to_library(library), self.mean_runs, self.shape
        )

    def divergences(self) -> np.ndarray | None:
        return _selected_divergences(self)


@lru_cache(maxsize=64)
def _selected_divergences(event: Selected) -> np.ndarray | None:
    from dp_accounting import dp_event

    from dpvision.privacy import rare_events

    return rare_events.renyi_divergences(event.to_library(dp_event))
