"""Few-shot probes: a linear classifier on frozen features of K images per class, over many draws of
these images.

A cheap alternative to ``fine_tune``: only the classifier is trained, so twenty draws take seconds.

Legend: N training records, M test records, D feature dimension, C classes, K images per class.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from dpvision.eval.probes.linear_probe import fit_linear_probe
from dpvision.eval.probes.protocol import FeatureProtocol
from dpvision.eval.probes.records import check_shots, draw_shots
from dpvision.eval.probes.ridge import fit_ridge
from dpvision.eval.probes.settings import FewShotProbeSettings


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
                few_shot_probe(train_ND, label_N, unit_N, test_MD, k, self.settings, names=names),
            )


def few_shot_probe(
    train_ND: np.ndarray,
    label_N: np.ndarray,
    unit_N: np.ndarray,
    test_MD: np.ndarray,
    k: int,
    settings: FewShotProbeSettings | None = None,
    *,
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
    for draw in range(settings.draws):
        rows = draw_shots(label_N, k, draw, names=names)
        predicted.append(
            fit(train_ND[rows], label_N[rows], unit_N[rows], seed=draw).predict(test_MD)
        )
    return predicted
