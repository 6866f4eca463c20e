"""Private class prototypes: each class's mean, from one release of sums and counts. For few records
and rare classes.

    C (x / R, a) / sqrt(1 + a^2)    in the row of the record's class, rows longer than R scaled down
                                    to it first

    m_k = sum_k / count_k,    mu_k = m + shrink_k (m_k - m),    score_k = mu_k x - ||mu_k||^2 / 2

The prediction is the nearest mean, whatever the class sizes: a class of ten records has a noisier
prototype, not a shorter one. Counts are shrunk towards equal counts, means towards their common
mean, and that mean towards zero, each by the fraction of their spread that the noise, whose scale
is public, explains (empirical Bayes). If noise dominates the counts, sums are as good as means.

Legend: B records of a block, E row width (``FeatureStream.width``), K classes.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dpvision.adapt.feature_stream import Block, FeatureStream, Head
from dpvision.adapt.heads.kind import Fitted, HeadKind, Task
from dpvision.adapt.moments import row_bound
from dpvision.adapt.release import Contributions, Releases
from dpvision.dp.clipped import ClippedSum
from dpvision.errors import ConfigError
from dpvision.privacy.plan import DPPlan

COUNT_LENGTH = 0.3
"""a: length of the count's part of a contribution, relative to 1 for the row. Tuned on scenes
(docs/heads.md).
"""
_LEAST_SPREAD = 1e-3
"""Smallest spread, in units of the noise variance: prototypes dominated by noise keep their
order.
"""


def prototypes(
    stream: FeatureStream,
    releases: Releases,
    *,
    feature_norm: float | None = None,
    count_length: float = COUNT_LENGTH,
) -> Head:
    """Fit a nearest-class-mean head with all releases left.

    Args:
        releases: one is enough; several are averaged.
        feature_norm: public length to which longer rows are scaled down; if None,
            ``stream.longest_row``.
        count_length: a; must be positive.

    Raises:
        ConfigError: a setting is out of range, or the rows have no public bound.
    """
    if not 0 < count_length < math.inf:
        raise ConfigError(
            f"adapt: count_length={count_length}; expected a positive number. Use {COUNT_LENGTH}."
        )
    bound, plan, count = row_bound(stream, feature_norm), releases.plan, releases.left
    released = releases.average(
        stream,
        lambda blocks: prototype_sum(
            blocks, stream.width, stream.num_classes, bound, count_length, plan
        ),
        count,
    ).grads
    unit = (plan.max_grad_norm or 1.0) / math.hypot(1.0, count_length)
    sum_KE, share_K = released["sum"] * (bound / unit), released["count"] / (unit * count_length)
    noise = releases.entry_std(count) * bound / unit
    share_K = sizes(
        share_K, (releases.entry_std(count) / (unit * count_length)) ** 2, plan.expected_batch_size
    )
    mean_KE = sum_KE / share_K[:, None]
    variance_K = (noise / share_K).square()
    weight_KE = shrunk(mean_KE, variance_K)
    return stream.head(weight_KE, -weight_KE.square().sum(dim=1) / 2)


def sizes(share_K: Tensor, variance: float, num_records: float) -> Tensor:
    """Shrink noisy class shares (fractions of all records) of the given variance towards equal
    shares; at least half a record each.
    """
    equal = 1 / len(share_K)
    spread = max(float((share_K - equal).square().mean()) - variance, 0.0)
    share_K = equal + (share_K - equal) * (spread / (spread + variance) if spread else 0.0)
    # Below the noise level a share is only known to be small.
    return share_K.clamp(min=max(min(math.sqrt(variance), equal / 2), 0.5 / num_records))


def shrunk(mean_KE: Tensor, variance_K: Tensor) -> Tensor:
    """Shrink means towards their common mean, by the fraction of their spread that noise explains,
    and the common mean towards zero.

    Args:
        mean_KE: noisy means, float64.
        variance_K: variance of the noise in each coordinate of a mean.
    """
    weight_K = 1 / (variance_K + 1e-30)
    centre_E = (mean_KE * (weight_K / weight_K.sum())[:, None]).sum(dim=0)
    away_KE = mean_KE - centre_E
    width = mean_KE.shape[1]
    # Shrink the common mean as well (James & Stein, positive part): its noise times a difference's
    # noise would bias the class.
    centre_E = centre_E * max(
        0.0, 1 - width / max(float(weight_K.sum() * centre_E.square().sum()), 1e-30)
    )
    excess_K = away_KE.square().sum(dim=1) / width - variance_K
    spread = float((excess_K * weight_K.square()).sum() / weight_K.square().sum())
    spread = max(spread, _LEAST_SPREAD * float(variance_K.min()), 1e-30)
    return centre_E + away_KE * (spread / (spread + variance_K))[:, None]


def prototype_sum(
    blocks: Iterator[Block],
    width: int,
    num_classes: int,
    bound: float,
    count_length: float,
    plan: DPPlan,
) -> ClippedSum:
    """Return the clipped sums "sum", float64 (K, E), and "count", float64 (K,), clipped together as
    one contribution.
    """
    unit = (plan.max_grad_norm or 1.0) / math.hypot(1.0, count_length)
    total = Contributions(plan, {"sum": (num_classes, width), "count": (num_classes,)})
    for block in blocks:
        shorten_B = torch.where(block.norm_B > bound, bound / block.norm_B, 1.0) * (unit / bound)
        length_B = (
            (shorten_B * block.norm_B).square() + (unit * count_length) ** 2
        ) * block.target_square_B()
        factor_B = total.factors(length_B.sqrt(), block.row_B)
        total.add(
            "sum",
            block.class_sum(block.x_BE * (shorten_B * factor_B).float()[:, None], num_classes),
        )
        total.add(
            "count", block.class_sum((unit * count_length * factor_B)[:, None], num_classes)[:, 0]
        )
    return total.sum()


class _Prototypes(HeadKind):
    name = "prototypes"

    def fit(self, task: Task) -> Fitted:
        norm = task.settings.feature_norm
        return Fitted(prototypes(task.stream, task.releases, feature_norm=norm))


PROTOTYPES = _Prototypes()
