"""The releases of the executed steps as events for the accountant.

One step adds Gaussian noise of standard deviation noise_multiplier x C to the sum of the drawn
records' gradients, each clipped to norm C. Adjacency is add-or-remove: of one record in
``record_event``, of one unit (person) in ``unit_event``. Where people are drawn, and a person's
mean gradient is clipped, a person is that one record (decision 0034).
"""

import math
from typing import Protocol

import numpy as np
from scipy import special

from dpvision.privacy.events import (
    Event,
    Gaussian,
    GaussianMixture,
    NoRelease,
    PoissonGaussian,
    Repeated,
    TruncatedPoissonGaussian,
)
from dpvision.privacy.selection import Selection


class Sampled(Protocol):
    """What decides the law of a draw: a ``PrivacyConfig`` or a ``DPPlan``."""

    @property
    def sampling(self) -> str: ...
    @property
    def expected_batch_size(self) -> float: ...
    @property
    def sampled_from(self) -> int: ...
    @property
    def max_batch_size(self) -> int | None: ...


def whole_event(
    of: Sampled,
    selection: Selection | None,
    steps: int,
    noise: float,
    *,
    sampling: str | None = None,
    records: int | None = None,
) -> Event:
    """Event of ``steps`` steps for one that is drawn, or for a unit of ``records`` records; with a
    selection, the event of all of it.
    """
    rate = 1.0 if sampling == "full_batch" else of.expected_batch_size / of.sampled_from
    sampling = sampling or of.sampling
    releases = steps if selection is None else min(steps, 1) * selection.steps
    if records is None:
        event = record_event(sampling, of.sampled_from, rate, of.max_batch_size, noise, releases)
    else:
        event = unit_event(sampling, rate, noise, releases, records)
    return event if selection is None or not steps else selection.event(event, noise, records or 1)


def record_event(
    sampling: str,
    dataset_size: int,
    sample_rate: float,
    max_batch_size: int | None,
    noise_multiplier: float,
    steps: int,
) -> Event:
    """Event of ``steps`` executed steps, for one record.

    With every record in every batch the steps are together exactly one Gaussian at noise_multiplier
    / sqrt(steps), which has a closed form; otherwise the event is one sampled step composed
    ``steps`` times.

    Args:
        sampling: 'poisson', 'truncated_poisson' or 'full_batch'.
        dataset_size: declared number of records N; only truncation depends on it.
        sample_rate: probability that a record is drawn, in (0, 1].
        max_batch_size: cap of truncated_poisson, else None.
        noise_multiplier: more than 0.
        steps: 0 or more.
    """
    if steps == 0:
        return NoRelease()
    if sampling == "truncated_poisson":
        assert max_batch_size is not None
        return Repeated(
            TruncatedPoissonGaussian(dataset_size, sample_rate, max_batch_size, noise_multiplier),
            steps,
        )
    if sampling == "full_batch" or sample_rate == 1:
        return Gaussian(noise_multiplier / math.sqrt(steps))
    return Repeated(PoissonGaussian(sample_rate, noise_multiplier), steps)


def unit_event(
    sampling: str,
    sample_rate: float,
    noise_multiplier: float,
    steps: int,
    max_records_per_unit: int,
) -> Event:
    """Event of ``steps`` executed steps for one unit of at most ``max_records_per_unit`` = k
    records.

    Each record of the unit is sampled independently, so that Binomial(k, sample_rate) of them are
    in the batch and change the sum by at most that many clipping norms: a mixture of Gaussians
    (Choquette-Choo et al., arXiv 2310.15526). A full batch has all k: one Gaussian of sensitivity
    k. A unit of one record is that record. Truncation has no such event; ``make_plan`` refuses it
    for units.
    """
    if steps == 0:
        return NoRelease()
    k = max_records_per_unit
    if k == 1:
        return record_event(sampling, 0, sample_rate, None, noise_multiplier, steps)
    if sampling == "full_batch" or sample_rate == 1:
        return Gaussian(noise_multiplier / (k * math.sqrt(steps)))
    count = np.arange(k + 1.0)
    log_choices = (
        special.gammaln(k + 1) - special.gammaln(count + 1) - special.gammaln(k - count + 1)
    )
    probability = np.exp(
        log_choices + special.xlogy(count, sample_rate) + special.xlog1py(k - count, -sample_rate)
    )
    return Repeated(
        GaussianMixture(
            noise_multiplier,
            tuple(count.tolist()),
            tuple((probability / probability.sum()).tolist()),
        ),
        steps,
    )
