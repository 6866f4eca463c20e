"""Recommend a head from public numbers only, by rules calibrated on public images (docs/heads.md
has the figures).

    s = sigma / N,    sigma = noise multiplier of one release at (epsilon, delta)

is the noise in each coordinate of a mean over all records of contributions of length 1. s sqrt(2 D)
is the largest eigenvalue of the noise in a covariance of rows of length 1, whose eigenvalues sum to
1; smaller eigenvalues cannot be distinguished from noise.
"""

import math

from dpvision.config.head_presets import HeadName
from dpvision.errors import ConfigError
from dpvision.privacy import gaussian
from dpvision.privacy.plan import default_delta

FEWEST_RECORDS_OF_A_CLASS = 5.0
WIDEST = 8192
"""Feature dimensions beyond which a covariance (D x D in float64, its eigenvectors) is too large
for an ordinary machine.
"""


def recommend_head(
    num_records: int,
    num_classes: int,
    epsilon: float,
    feature_width: int,
    delta: float | None = None,
    *,
    people: bool = False,
) -> tuple[HeadName, str]:
    """Return the recommended head, and the reason in one sentence.

    Args:
        num_records: N, as declared; where people are drawn, their number.
        num_classes: K, as declared.
        epsilon: of the whole head; positive, infinite without a guarantee.
        feature_width: D.
        delta: if None, ``privacy.plan.default_delta``.
        people: whether people are drawn, for the words of the reason.

    Raises:
        ConfigError: a number is out of range.
    """
    if not (num_records >= 1 and num_classes >= 2 and feature_width >= 1 and epsilon > 0):
        raise ConfigError(
            f"adapt: num_records={num_records}, num_classes={num_classes}, "
            f"feature_width={feature_width}, epsilon={epsilon}; expected at least one record, "
            "two classes and one feature dimension, and a positive epsilon. Set --dataset-size, "
            "--num-classes, --epsilon."
        )
    noise = mean_noise(num_records, epsilon, delta)
    per_class, several = num_records / num_classes, "people" if people else "records"
    if per_class < FEWEST_RECORDS_OF_A_CLASS:
        return (
            "prototypes",
            f"{per_class:.3g} {several} a class: only class means are worth measuring",
        )
    return "many_steps", (
        f"{num_records:,} {several} and noise of {noise:.2g} in each coordinate of their mean "
        f"gradient: gradient steps, at a rate that goes by this noise, for {feature_width:,} "
        "feature dimensions"
    )


def mean_noise(num_records: int, epsilon: float, delta: float | None = None) -> float:
    """Return sigma / N, or 0 if epsilon is infinite."""
    if math.isinf(epsilon):
        return 0.0
    delta = default_delta(num_records) if delta is None else delta
    return gaussian.noise_for(epsilon, delta) / num_records


def covariance_noise(
    num_records: int, epsilon: float, feature_width: int, delta: float | None = None
) -> float:
    """Return sqrt(2 D) sigma / N, or 0 if epsilon is infinite."""
    return math.sqrt(2 * feature_width) * mean_noise(num_records, epsilon, delta)
