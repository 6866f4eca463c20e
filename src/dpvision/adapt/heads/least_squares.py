"""Private least squares: one head in closed form from noisy second moments (Mehta et al. 2023,
arXiv 2211.13403; Wang 2018).

    W = E[y x^T] (E[x x^T] + strength I)^-1,    both noisy moments, (E, E) and (K, E), from one set
                                                of releases

The rest is post-processing: eigenvalues that the noise made negative are set to zero, and the
strength is a multiple of the noise's largest eigenvalue, which is public, so that no direction is
divided by less than the noise in it.

Legend: E row width (``FeatureStream.width``), K classes.
"""

import math

import torch

from dpvision.adapt.feature_stream import FeatureStream, Head
from dpvision.adapt.heads.kind import Fitted, HeadKind, Task
from dpvision.adapt.moments import cross_of, moment_of, moment_sum, noise_edge, row_bound
from dpvision.adapt.release import Releases
from dpvision.errors import ConfigError

CROSS_SHARE = 0.7
STRENGTH = 0.5
"""In units of the largest eigenvalue of the noise. Tuned on scenes (docs/heads.md)."""
_LEAST_STRENGTH = 1e-6


def least_squares(
    stream: FeatureStream,
    releases: Releases,
    *,
    feature_norm: float | None = None,
    cross_share: float = CROSS_SHARE,
    strength: float = STRENGTH,
) -> Head:
    """Fit a ridge regression of the labels (1 for the record's classes, 0 elsewhere) with all
    releases left.

    Args:
        releases: one is enough; several are averaged.
        feature_norm: public length to which longer rows are scaled down; if None,
            ``stream.longest_row``.
        cross_share: fraction of a contribution's squared length given to the cross moments, in (0,
            1).
        strength: ridge penalty in units of the largest eigenvalue of the noise; at least 0.

    Raises:
        ConfigError: a setting is out of range, or the rows have no public bound.
    """
    if not 0 < cross_share < 1:
        raise ConfigError(
            f"adapt: cross_share={cross_share}; expected strictly between 0 and 1. Use "
            f"{CROSS_SHARE}."
        )
    if not 0 <= strength < math.inf:
        raise ConfigError(f"adapt: strength={strength}; expected 0 or more. Use {STRENGTH}.")
    bound, plan, count, width = (
        row_bound(stream, feature_norm),
        releases.plan,
        releases.left,
        stream.width,
    )
    released = releases.average(
        stream,
        lambda blocks: moment_sum(blocks, width, stream.num_classes, bound, cross_share, plan),
        count,
    ).grads
    value_E, basis_EE = torch.linalg.eigh(moment_of(released["moment"], bound, cross_share, plan))
    cross_KE = cross_of(released["cross"], bound, cross_share, plan)
    edge = noise_edge(releases.entry_std(count), width, bound, cross_share, plan)
    # Without noise a small penalty remains, for directions in which the features do not vary.
    damped_E = value_E.clamp(min=0) + max(strength * edge, _LEAST_STRENGTH * bound**2)
    weight_KE = cross_KE @ (basis_EE / damped_E) @ basis_EE.T
    return stream.head(weight_KE, torch.zeros(stream.num_classes))


class _LeastSquares(HeadKind):
    name = "least_squares"
    squares = True

    def fit(self, task: Task) -> Fitted:
        norm = task.settings.feature_norm
        return Fitted(least_squares(task.stream, task.releases, feature_norm=norm))


LEAST_SQUARES = _LeastSquares()
