"""Few-shot probes: a linear classifier on frozen features of K images per class, over many draws of
these images.

A cheap alternative to ``fine_tune``: only the classifier is trained, so twenty draws take seconds.

The probe of DP-Cap's tables is logistic regression with fixed regularisation on centred features of
length 1. It minimises mean cross-entropy + lambda / 2 * ||W||^2, with one row of W per class,
lambda = 0.0025 / n for n training images, and no intercept (Sander et al., ICML 2024, appendix
A.3.3, after Assran et al. 2022). Their code calls Cyanure; scikit-learn's L-BFGS finds the same
minimum, because the problem is strictly convex.

Legend: N training records, M test records, D feature dimension, C classes, K images per class.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from dpvision.eval.probes.linear_probe import fit_linear_probe
from dpvision.eval.probes.protocol import FeatureProtocol
from dpvision.eval.probes.records import check_shots, draw_shots, draws_of
from dpvision.eval.probes.ridge import fit_ridge
from dpvision.eval.probes.settings import FewShotProbeSettings

STRENGTH = 0.0025
"""DP-Cap's lambda times the number of training images."""
_TOLERANCE, _MAX_ITERATIONS = 1e-6, 5000


@dataclass(frozen=True)
class FewShotProbe(FeatureProtocol):
    """``few_shot_probe`` as a protocol."""

    name: ClassVar[str] = "few_shot_probe"
    shots: tuple[int, ...] = (10,)
    """Images per class."""
    settings: FewShotProbeSettings = field(default_factory=FewShotProbeSettings)

    def __post_init__(self) -> None:
        check_shots(self.shots)

    def predict(
        self,
        train_ND: np.ndarray,
        label_N: np.ndarray,
        unit_N: np.ndarray,
        test_MD: np.ndarray,
        names: Sequence[str] | None,
    ) -> Iterator[tuple[str, str, list[np.ndarray]]]:
        for k in self.shots:
            yield (
                f"{k}-shot {self.settings.classifier} probe",
                f"{self.settings.draws} draws",
                few_shot_probe(
                    train_ND,
                    label_N,
                    unit_N,
                    test_MD,
                    k,
                    self.settings,
                    seed=self.seed,
                    names=names,
                ),
            )


def few_shot_probe(
    train_ND: np.ndarray,
    label_N: np.ndarray,
    unit_N: np.ndarray,
    test_MD: np.ndarray,
    k: int,
    settings: FewShotProbeSettings | None = None,
    *,
    seed: int = 0,
    names: Sequence[str] | None = None,
) -> list[np.ndarray]:
    """Return the predicted test labels (M,) of one classifier per draw. Its regularisation is
    chosen within the K images, by units.

    Draw i of the same labels is the same for every encoder, so that encoders can be compared draw
    by draw.

    Raises:
        ConfigError, DataError: as ``draw_shots``; too few images to choose the regularisation.
    """
    settings = settings or FewShotProbeSettings()
    fit = fit_ridge if settings.classifier == "ridge" else fit_linear_probe
    predicted = []
    for draw in draws_of(seed, settings.draws):
        rows = draw_shots(label_N, k, draw, names=names)
        predicted.append(
            fit(train_ND[rows], label_N[rows], unit_N[rows], seed=draw).predict(test_MD)
        )
    return predicted


@dataclass(frozen=True)
class DPCapProbe(FeatureProtocol):
    """``dpcap_probe`` as a protocol."""

    name: ClassVar[str] = "few_shot_dpcap"
    shots: tuple[int, ...] = (10,)
    """Images per class."""
    draws: int = 20
    """Independent draws of the K images per class."""

    def __post_init__(self) -> None:
        check_shots(self.shots)

    def predict(
        self,
        train_ND: np.ndarray,
        label_N: np.ndarray,
        unit_N: np.ndarray,
        test_MD: np.ndarray,
        names: Sequence[str] | None,
    ) -> Iterator[tuple[str, str, list[np.ndarray]]]:
        for k in self.shots:
            yield (
                f"{k}-shot DP-Cap probe",
                f"{self.draws} draws",
                dpcap_probe(train_ND, label_N, test_MD, k, self.draws, seed=self.seed, names=names),
            )


def dpcap_probe(
    train_ND: np.ndarray,
    label_N: np.ndarray,
    test_MD: np.ndarray,
    k: int,
    draws: int,
    *,
    seed: int = 0,
    names: Sequence[str] | None = None,
) -> list[np.ndarray]:
    """Return the predicted test labels (M,) of one classifier per draw of ``k`` images per class,
    with ``few_shot_probe``'s draws.

    Raises:
        ConfigError, DataError: as ``draw_shots``.
    """
    train_ND, test_MD = centred(train_ND), centred(test_MD)
    predicted = []
    for draw in draws_of(seed, draws):
        rows = draw_shots(label_N, k, draw, names=names)
        predicted.append(fit_fixed_strength(train_ND[rows], label_N[rows]).predict(test_MD))
    return predicted


def fit_fixed_strength(x_ND: np.ndarray, label_N: np.ndarray) -> LogisticRegression:
    """Fit the classifier to preprocessed features."""
    # scikit-learn minimises C * sum of losses + ||W||^2 / 2. For two classes it fits one vector w
    # with W = +- w / 2: half the penalty.
    c = (2 if len(np.unique(label_N)) == 2 else 1) / STRENGTH
    model = LogisticRegression(C=c, fit_intercept=False, tol=_TOLERANCE, max_iter=_MAX_ITERATIONS)
    with threadpool_limits(1):
        return model.fit(x_ND, label_N)


def centred(x_ND: np.ndarray) -> np.ndarray:
    """Subtract each row's mean and scale it to length 1; a constant row becomes zero."""
    x_ND = x_ND - x_ND.mean(axis=1, keepdims=True)
    norm_N1 = np.linalg.norm(x_ND, axis=1, keepdims=True)
    return x_ND / np.where(norm_N1 > 0, norm_N1, 1)
