"""Private gradient steps in whitened coordinates: DP-FC of Mehta et al. 2023 (arXiv 2211.13403).

Some releases of the plan measure E[x x^T]; the rest are gradient steps on z = P x,

    P = (E[x x^T] + strength I)^(-1/2) / sqrt(d),    d = trace((E[x x^T] + strength I)^-1 E[x x^T])

so that a typical z has length 1. A step of gradient descent on z is a step on x preconditioned with
P^2. The paper clips and adds noise before the preconditioner; here both happen in the coordinates
of z, where noise is not amplified in weak directions.

In these coordinates the curvature is known: for the softmax loss at zero weights it is 1 / (K d),
so the learning rate is given in units of K d / steps. At a rate of 1 all steps together cover the
distance of one Newton step.

Legend: E row width (``FeatureStream.width``), K classes.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from dpvision.adapt.feature_stream import FeatureStream
from dpvision.adapt.gradient import Loss
from dpvision.adapt.heads.kind import (
    AfterStep,
    Coordinates,
    Fitted,
    HeadKind,
    Progress,
    Task,
    Trained,
)
from dpvision.adapt.heads.many_steps import check_loss, many_steps
from dpvision.adapt.moments import moment_of, moment_sum, noise_edge, row_bound
from dpvision.adapt.release import Releases
from dpvision.config import OptimConfig
from dpvision.config.heads import FeatureCovariance
from dpvision.errors import ConfigError

COVARIANCE_SHARE = 0.25
"""Fraction of the releases that measure the covariance. This and the next two were tuned on scenes
and digits (docs/heads.md).
"""
STRENGTH = 0.3
"""In units of the largest eigenvalue of the noise."""


def feature_covariance(
    stream: FeatureStream,
    releases: Releases,
    *,
    covariance_share: float = COVARIANCE_SHARE,
    feature_norm: float | None = None,
    strength: float = STRENGTH,
    loss: Loss = "softmax",
    optim: OptimConfig = FeatureCovariance.optim,
    bias: float = 0.0,
    start: Progress | None = None,
    after_step: AfterStep = lambda trained: None,
) -> Trained:
    """Measure the covariance, whiten, then train with the steps left.

    Args:
        releases: must have at least two steps left, or one with ``start``.
        covariance_share: fraction of the releases spent on the covariance (rounded, at least one);
            in (0, 1).
        feature_norm: public length to which longer rows are scaled down for the covariance; if
            None, ``stream.longest_row``.
        strength: multiple of the identity added to the covariance, in units of the largest
            eigenvalue of the noise; at least 0.
        optim: its learning rate is in units of K d / steps.
        loss, bias: as in ``many_steps.many_steps``.
        start: go on from these steps of an earlier start, in their coordinates.
        after_step: called after each step with a function that returns the heads so far.

    Raises:
        ConfigError: a setting is out of range, the rows have no public bound, or fewer than two
            steps are left.
    """
    check_loss(stream, loss)
    if not 0 < covariance_share < 1:
        raise ConfigError(
            f"adapt: covariance_share={covariance_share}; expected strictly between 0 and 1. Use "
            f"{COVARIANCE_SHARE}."
        )
    if not 0 <= strength < math.inf:
        raise ConfigError(f"adapt: strength={strength}; expected 0 or more. Use {STRENGTH}.")
    own = None if start is None else start.coordinates
    if own is None:
        own = _measured(
            stream,
            releases,
            covariance_share,
            row_bound(stream, feature_norm),
            strength,
            optim.rate,
        )

    def with_coordinates(trained: Trained) -> Trained:
        return replace(trained, progress=replace(trained.progress, coordinates=own))

    return with_coordinates(
        many_steps(
            stream.mapped(own.map_EE),
            releases,
            loss=loss,
            optim=replace(optim, learning_rate=own.rate),
            bias=bias,
            start=start,
            after_step=lambda trained: after_step(lambda: with_coordinates(trained())),
        )
    )


def _measured(
    stream: FeatureStream,
    releases: Releases,
    share: float,
    bound: float,
    strength: float,
    rate: float,
) -> Coordinates:
    """Release the covariance, and return the coordinates in which it is about ``I / d``."""
    if releases.left < 2:
        raise ConfigError(
            f"adapt: steps={releases.left}; expected two or more, one for the covariance. Give "
            "more --privacy.steps."
        )
    plan, width = releases.plan, stream.width
    # A few releases of the second moments, averaged. What is below the largest eigenvalue of the
    # noise is noise, so the whitener is damped by a multiple of it; the rate is for 1 / (K d).
    count = min(max(1, round(share * releases.left)), releases.left - 1)
    released = releases.average(
        stream,
        lambda blocks: moment_sum(blocks, width, stream.num_classes, bound, 0.0, plan),
        count,
    )
    covariance_EE = moment_of(released.grads["moment"], bound, 0.0, plan)
    edge = noise_edge(releases.entry_std(count), width, bound, 0.0, plan)
    map_EE, dimension = whitener(covariance_EE, max(strength * edge, 1e-6 * bound**2))
    return Coordinates(map_EE.float(), rate * stream.num_classes * dimension / releases.left, count)


def whitener(covariance_EE: Tensor, strength: float) -> tuple[Tensor, float]:
    """Return P (symmetric float64, (E, E)) and d from a noisy covariance. Negative eigenvalues
    count as zero, and d is at least 1.
    """
    value_E, basis_EE = torch.linalg.eigh(covariance_EE)
    value_E = value_E.clamp(min=0)
    dimension = max(float((value_E / (value_E + strength)).sum()), 1.0)
    return (basis_EE / (dimension * (value_E + strength)).sqrt()) @ basis_EE.T, dimension


class _FeatureCovariance(HeadKind):
    name = "feature_covariance"
    fewest_releases = 2
    squares = saves_map = True

    def fit(self, task: Task) -> Fitted:
        own: FeatureCovariance = task.settings
        assert own.loss != "auto" and own.bias is not None
        trained = feature_covariance(
            task.stream,
            task.releases,
            feature_norm=own.feature_norm,
            loss=own.loss,
            optim=task.config.optim,
            bias=own.bias,
            start=task.start,
            after_step=lambda made: task.after_step(lambda: made().fitted(own.iterate)),
        )
        return trained.fitted(own.iterate)


FEATURE_COVARIANCE = _FeatureCovariance()
