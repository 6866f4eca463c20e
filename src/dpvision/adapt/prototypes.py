"""Private class prototypes: the mean of each class, from one release of sums and counts; for few records and for rare classes.

    C (x / R, a) / sqrt(1 + a^2)    in the row of the record's class, rows longer than R scaled down to it first

    m_k = sum_k / count_k,    mu_k = m + shrink_k (m_k - m),    score_k = mu_k x - ||mu_k||^2 / 2

the nearest mean, whatever the classes' sizes: a class of ten records has a noisy prototype and no smaller one. Counts are shrunk
towards equal ones, and means towards their common mean, by what the noise, whose scale is public, explains of their spread (empirical
Bayes), and their common mean towards zero: where the counts drown in noise, sums are as good as means.

Legend: B records of a block, E numbers of a row (``stream``), K classes.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dpvision.adapt.feature_stream import Block, FeatureStream, Head
from dpvision.adapt.moments import row_bound
from dpvision.adapt.release import Contributions, Releases
from dpvision.dp.clip import ClippedSum
from dpvision.errors import ConfigError
from dpvision.privacy.plan import DPPlan

COUNT_LENGTH = 0.3
"""a: length of the count's part of a contribution beside 1 for the record. Chosen on scenes (docs/heads.md)."""
_LEAST_SPREAD = 1e-3
"""Of the noise: where all prototypes drown in it, they keep their order."""


def prototypes(stream: FeatureStream, releases: Releases, *, feature_norm: float | None = None, count_length: float = COUNT_LENGTH) -> Head:
    """Nearest class mean, from all releases that are left.

    Args:
        releases: one is enough; several are averaged.
        feature_norm: public length to which longer rows are scaled down; if None, the stream's own bound (``unit``).
        count_length: a, more than 0.

    Raises:
        ConfigError: a setting is out of range, or the rows have no public bound.
    """
    if not 0 < count_length < math.inf:
        raise ConfigError(f"adapt: count_length={count_length}; expected a positive number. Use {COUNT_LENGTH}.")
    bound, plan, count = row_bound(stream, feature_norm), releases.plan, releases.left
    released = releases.average(
        stream, lambda blocks: prototype_sum(blocks, stream.width, stream.num_classes, bound, count_length, plan), count
    ).grads
    unit = (plan.max_grad_norm or 1.0) / math.hypot(1.0, count_length)
    sum_KE, share_K = released["sum"] * (bound / unit), released["count"] / (unit * count_length)
    noise = releases.entry_std(count) * bound / unit
    share_K = sizes(share_K, (releases.entry_std(count) / (unit * count_length)) ** 2, plan.expected_batch_size)
    mean_KE = sum_KE / share_K[:, None]
    variance_K = (noise / share_K).square()
    weight_KE = shrunk(mean_KE, variance_K)
    return stream.head(weight_KE, -weight_KE.square().sum(dim=1) / 2)


def sizes(share_K: Tensor, variance: float, num_records: float) -> Tensor:
    """Classes' parts of all records, from noisy ones of the given variance: shrunk towards equal parts, at least that of half a record."""
    equal = 1 / len(share_K)
    spread = max(float((share_K - equal).square().mean()) - variance, 0.0)
    share_K = equal + (share_K - equal) * (spread / (spread + variance) if spread else 0.0)
    # What is still smaller than the noise in it is known to be small and no more.
    return share_K.clamp(min=max(min(math.sqrt(variance), equal / 2), 0.5 / num_records))


def shrunk(mean_KE: Tensor, variance_K: Tensor) -> Tensor:
    """Means moved towards their common mean, each by the part of its spread that its noise explains, and that mean towards zero.

    Args:
        mean_KE: measured means, float64.
        variance_K: variance of the noise in each number of a mean.
    """
    weight_K = 1 / (variance_K + 1e-30)
    centre_E = (mean_KE * (weight_K / weight_K.sum())[:, None]).sum(dim=0)
    away_KE = mean_KE - centre_E
    width = mean_KE.shape[1]
    # The common mean as well (James & Stein, positive part): a noisy one times a noisy difference is a noisy bias of the class.
    centre_E = centre_E * max(0.0, 1 - width / max(float(weight_K.sum() * centre_E.square().sum()), 1e-30))
    excess_K = away_KE.square().sum(dim=1) / width - variance_K
    spread = float((excess_K * weight_K.square()).sum() / weight_K.square().sum())
    spread = max(spread, _LEAST_SPREAD * float(variance_K.min()), 1e-30)
    return centre_E + away_KE * (spread / (spread + variance_K))[:, None]


def prototype_sum(blocks: Iterator[Block], width: int, num_classes: int, bound: float, count_length: float, plan: DPPlan) -> ClippedSum:
    """Clipped sum of "sum", float64 (K, E), and "count", float64 (K,), together one contribution."""
    unit = (plan.max_grad_norm or 1.0) / math.hypot(1.0, count_length)
    total = Contributions(plan, {"sum": (num_classes, width), "count": (num_classes,)})
    for block in blocks:
        shorten_B = torch.where(block.norm_B > bound, bound / block.norm_B, 1.0) * (unit / bound)
        length_B = ((shorten_B * block.norm_B).square() + (unit * count_length) ** 2) * block.target_square_B()
        factor_B = total.factors(length_B.sqrt())
        total.add("sum", block.class_sum(block.x_BE * (shorten_B * factor_B).float()[:, None], num_classes))
        total.add("count", block.class_sum((unit * count_length * factor_B)[:, None], num_classes)[:, 0])
    return total.sum()
