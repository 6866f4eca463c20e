"""What a mechanism releases, as values: the language between plans and the accountant.

The classes mirror dp-accounting's events, which ``to_library`` makes of them. They are ours because
importing that package takes longer than answering most questions (decision 0036).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dp_accounting.dp_event import DpEvent


@dataclass(frozen=True)
class NoRelease:
    """Nothing was released."""


@dataclass(frozen=True)
class NonPrivate:
    """A release without a guarantee."""


@dataclass(frozen=True)
class Gaussian:
    """A sum that one record (or unit) moves by at most 1, with Gaussian noise."""

    noise_multiplier: float
    """Standard deviation of the noise; more than 0."""


@dataclass(frozen=True)
class PoissonGaussian:
    """The same sum over a Poisson-sampled batch."""

    sample_rate: float
    """Probability that a record is drawn, in (0, 1]."""
    noise_multiplier: float


@dataclass(frozen=True)
class TruncatedPoissonGaussian:
    """The same over a Poisson-sampled batch of which at most ``max_batch_size`` records are
    kept.
    """

    dataset_size: int
    sample_rate: float
    max_batch_size: int
    noise_multiplier: float


@dataclass(frozen=True)
class GaussianMixture:
    """A sum with Gaussian noise that a unit moves by one of ``shifts``, with these probabilities
    (Choquette-Choo et al., arXiv 2310.15526).
    """

    noise_multiplier: float
    shifts: tuple[float, ...]
    """0, and numbers above it, ascending."""
    probabilities: tuple[float, ...]
    """Of the same length; they add up to 1, and that of 0 is above 0."""


@dataclass(frozen=True)
class Repeated:
    """``count`` releases of one kind."""

    event: Event
    count: int


@dataclass(frozen=True)
class Composed:
    """All of ``events``."""

    events: tuple[Event, ...]


@dataclass(frozen=True)
class Selected:
    """The best of K runs of ``event`` (``selection.Selection``)."""

    event: Event
    mean_runs: float
    shape: float
    """Of the truncated negative binomial law of K; infinite for the Poisson law."""


Event = (
    NoRelease
    | NonPrivate
    | Gaussian
    | PoissonGaussian
    | TruncatedPoissonGaussian
    | GaussianMixture
    | Repeated
    | Composed
    | Selected
)


def to_library(event: Event) -> DpEvent:
    """Convert ``event`` to dp-accounting's class."""
    from dp_accounting import dp_event as library

    match event:
        case NoRelease():
            return library.NoOpDpEvent()
        case NonPrivate():
            return library.NonPrivateDpEvent()
        case Gaussian(noise):
            return library.GaussianDpEvent(noise)
        case PoissonGaussian(rate, noise):
            return library.PoissonSampledDpEvent(rate, library.GaussianDpEvent(noise))
        case TruncatedPoissonGaussian(size, rate, most, noise):
            return library.TruncatedSubsampledGaussianDpEvent(size, rate, most, noise)
        case GaussianMixture(noise, shifts, probabilities):
            return library.MixtureOfGaussiansDpEvent(noise, shifts, probabilities)
        case Repeated(inner, count):
            return library.SelfComposedDpEvent(to_library(inner), count)
        case Composed(parts):
            return library.ComposedDpEvent([to_library(part) for part in parts])
        case Selected(inner, mean_runs, shape):
            return library.RepeatAndSelectDpEvent(to_library(inner), mean_runs, shape)
