"""The releases of the executed steps as dp-accounting events.

One step adds Gaussian noise of standard deviation noise_multiplier x C to the sum of the drawn records' gradients, each
clipped to norm C. Adjacency is add-or-remove: of one record in ``record_event``, of one unit (person) in ``unit_event``.
"""

import math

import numpy as np
from dp_accounting import dp_event
from scipy import stats


def record_event(
    sampling: str, dataset_size: int, sample_rate: float, max_batch_size: int | None, noise_multiplier: float, steps: int
) -> dp_event.DpEvent:
    """Event of ``steps`` executed steps, for one record.

    With every record in every batch the steps are together exactly one Gaussian at noise_multiplier / sqrt(steps), which has
    a closed form; otherwise the event is one sampled step composed ``steps`` times.

    Args:
        sampling: 'poisson', 'truncated_poisson' or 'full_batch'.
        dataset_size: declared number of records N; only truncation depends on it.
        sample_rate: probability that a record is drawn, in (0, 1].
        max_batch_size: cap of truncated_poisson, else None.
        noise_multiplier: more than 0.
        steps: 0 or more.
    """
    if steps == 0:
        return dp_event.NoOpDpEvent()
    if sampling == "truncated_poisson":
        step = dp_event.TruncatedSubsampledGaussianDpEvent(
            dataset_size=dataset_size,
            sampling_probability=sample_rate,
            truncated_batch_size=max_batch_size,
            noise_multiplier=noise_multiplier,
        )
        return dp_event.SelfComposedDpEvent(step, steps)
    if sampling == "full_batch" or sample_rate == 1:
        return dp_event.GaussianDpEvent(noise_multiplier / math.sqrt(steps))
    return dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(sample_rate, dp_event.GaussianDpEvent(noise_multiplier)), steps)


def unit_event(sampling: str, sample_rate: float, noise_multiplier: float, steps: int, max_records_per_unit: int) -> dp_event.DpEvent:
    """Event of ``steps`` executed steps for one unit of at most ``max_records_per_unit`` = k records.

    Each record of the unit is sampled independently, so that Binomial(k, sample_rate) of them are in the batch and change the
    sum by at most that many clipping norms: a mixture of Gaussians (Choquette-Choo et al., arXiv 2310.15526). A full batch has
    all k: one Gaussian of sensitivity k. A unit of one record is that record. Truncation has no such event; ``make_plan``
    refuses it for units.
    """
    if steps == 0:
        return dp_event.NoOpDpEvent()
    k = max_records_per_unit
    if k == 1:
        return record_event(sampling, 0, sample_rate, None, noise_multiplier, steps)
    if sampling == "full_batch" or sample_rate == 1:
        return dp_event.GaussianDpEvent(noise_multiplier / (k * math.sqrt(steps)))
    counts = np.arange(k + 1)
    probabilities = stats.binom.pmf(counts, k, sample_rate)
    probabilities /= probabilities.sum()
    step = dp_event.MixtureOfGaussiansDpEvent(noise_multiplier, tuple(map(float, counts)), tuple(map(float, probabilities)))
    return dp_event.SelfComposedDpEvent(step, steps)
