"""Second moments of private features: clipped sums to release, and estimates from what was
released.

A symmetric matrix is released as its upper triangle with off-diagonal entries times sqrt(2). This
vector's norm is the matrix's Frobenius norm: a record's x x^T has norm exactly ||x||^2, and no
budget is spent on duplicate entries.

Legend: B records of a block, E row width, S = E (E + 1) / 2 entries of a triangle, K classes.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dpvision.adapt.feature_stream import Block, FeatureStream
from dpvision.adapt.release import Contributions
from dpvision.dp.clipped import ClippedSum
from dpvision.errors import ConfigError
from dpvision.privacy.plan import DPPlan


def row_bound(stream: FeatureStream, feature_norm: float | None) -> float:
    """Return the public bound R on the length of a row: ``feature_norm``, or ``stream.longest_row``
    if that is None.

    Raises:
        ConfigError: there is no bound, or it is out of range.
    """
    bound = stream.longest_row if feature_norm is None else feature_norm
    if bound is None:
        raise ConfigError(
            "adapt: feature_norm=None for features of any length; expected a public bound. "
            "Leave out --model.no-unit, or give --model.feature-norm."
        )
    # Beyond these, its square and the factors computed from it overflow float32.
    if not 1e-12 <= bound <= 1e12:
        raise ConfigError(
            f"adapt: feature_norm={bound}; expected 1e-12 to 1e12. Use the typical length of "
            "public features."
        )
    return bound


def moment_sum(
    blocks: Iterator[Block],
    width: int,
    num_classes: int,
    bound: float,
    cross_share: float,
    plan: DPPlan,
) -> ClippedSum:
    """Return the clipped sum of each record's second moments and cross moments with its target, as
    one contribution:

        C (sqrt(1 - s) x x^T / R^2,  sqrt(s) y x^T / R),    rows longer than R scaled down to it
                                                            first

    Its norm is at most C for a record with one label; longer contributions are clipped.

    Args:
        bound: R.
        cross_share: s, the fraction of the contribution's squared length given to the cross
            moments, in [0, 1].

    Returns:
        "moment", float64 (S,), if s < 1; "cross", float64 (K, E), if s > 0.
    """
    scale = plan.max_grad_norm or 1.0
    own, cross = (
        scale * math.sqrt(1 - cross_share) / bound**2,
        scale * math.sqrt(cross_share) / bound,
    )
    shapes = {"moment": (width * (width + 1) // 2,), "cross": (num_classes, width)}
    total = Contributions(
        plan,
        {
            name: shape
            for name, shape in shapes.items()
            if {"moment": own, "cross": cross}[name] > 0
        },
    )
    own_EE = torch.zeros(width, width, dtype=torch.float64)
    for block in blocks:
        x_BE, norm_B = block.x_BE, block.norm_B
        long_B = norm_B > bound
        if long_B.any():
            x_BE = x_BE * torch.where(long_B, bound / norm_B, 1.0).float()[:, None]
            # At most R up to the rounding of the length and of the product, 7 eps, which the clip's
            # margin covers.
            norm_B = norm_B.clamp(max=bound)
        length_B = (own**2 * norm_B**4 + cross**2 * norm_B**2 * block.target_square_B()).sqrt()
        factor_B = total.factors(length_B, block.row_B)
        if own:
            y_BE = x_BE * (own * factor_B.double()).sqrt().float()[:, None]
            y_BE = y_BE.double()
            own_EE += y_BE.T @ y_BE
        if cross:
            total.add("cross", block.class_sum(x_BE * (cross * factor_B)[:, None], num_classes))
    if own:
        total.add("moment", _triangle(own_EE))
    return total.sum()


def moment_of(released_S: Tensor, bound: float, cross_share: float, plan: DPPlan) -> Tensor:
    """Return E[x x^T] from a released "moment": symmetric float64 (E, E)."""
    width = (math.isqrt(8 * len(released_S) + 1) - 1) // 2
    row_S, column_S = torch.triu_indices(width, width)
    matrix_EE = torch.zeros(width, width, dtype=torch.float64)
    matrix_EE[row_S, column_S] = released_S.double() * torch.where(
        row_S == column_S, 1.0, math.sqrt(0.5)
    )
    matrix_EE = matrix_EE + matrix_EE.T.tril(-1)
    return matrix_EE * (bound**2 / math.sqrt(1 - cross_share) / (plan.max_grad_norm or 1.0))


def cross_of(released_KE: Tensor, bound: float, cross_share: float, plan: DPPlan) -> Tensor:
    """Return E[y x^T] from a released "cross": float64 (K, E)."""
    return released_KE.double() * (bound / math.sqrt(cross_share) / (plan.max_grad_norm or 1.0))


def noise_edge(
    entry_std: float, width: int, bound: float, cross_share: float, plan: DPPlan
) -> float:
    """Return the largest eigenvalue of the noise in ``moment_of``: 2 s sqrt(E) with s the
    off-diagonal standard deviation (Wigner).
    """
    off_diagonal = (
        entry_std
        * math.sqrt(0.5)
        * bound**2
        / math.sqrt(1 - cross_share)
        / (plan.max_grad_norm or 1.0)
    )
    return 2 * off_diagonal * math.sqrt(width)


def _triangle(matrix_EE: Tensor) -> Tensor:
    row_S, column_S = torch.triu_indices(*matrix_EE.shape)
    return matrix_EE[row_S, column_S] * torch.where(row_S == column_S, 1.0, math.sqrt(2))
