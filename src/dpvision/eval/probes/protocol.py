"""The interface of protocols: a name, what it needs from an encoder, and a method that returns
scores. Its settings are its fields.

Legend: N training records, M test records, D feature dimension.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import torch

from dpvision.data.store import Store
from dpvision.encoders.encoder import Encoder
from dpvision.errors import DataError
from dpvision.eval.metric import Scoring
from dpvision.eval.probes.records import LabelledFeatures, check_labels, units
from dpvision.eval.score import Score

Say = Callable[[str], None]
Count = Callable[[str, int, int], None]
"""Called with what is computed, the number of finished images, and of all."""
Needs = Literal["features", "images", "own head"]
"""Input of a protocol: features computed once, the images themselves, or the run's own head."""


@dataclass(frozen=True)
class Task:
    """Labelled training and test images, and how to score."""

    train: tuple[Store, np.ndarray]
    """A store and labelled int64 rows of it."""
    test: tuple[Store, np.ndarray]
    """As ``train``; the same store if its units were split."""
    scoring: Scoring = field(default_factory=Scoring)
    batch_size: int = 256
    """Images in one forward pass."""
    workers: int = 2
    device: str | torch.device = "cpu"
    say: Say = lambda text: None
    count: Count = lambda what, done, total: None

    @property
    def unit_N(self) -> np.ndarray:
        """Units of the training rows, int64 (N,)."""
        return units(self.train[0])[self.train[1]]


@dataclass(frozen=True)
class Subject:
    """An encoder under evaluation."""

    encoder: Encoder
    spec: str
    """The spec that it was opened from."""
    ema: bool = False
    features: tuple[LabelledFeatures, LabelledFeatures] | None = None
    """Features of the training and test records; set for protocols that need features."""


@dataclass(frozen=True)
class Protocol(ABC):
    """A way to score an encoder: a frozen dataclass, equal for equal settings, whose repr shows all
    of them but the seed.
    """

    name: ClassVar[str]
    """Name for `dpvision evaluate --protocols`."""
    needs: ClassVar[Needs]
    seed: int = field(default=0, kw_only=True, repr=False)
    """Of all that the protocol draws: few-shot images, held-out records, initial weights, order."""

    def check(self, subject: Subject, task: Task) -> None:  # noqa: B027 (most protocols take any encoder)
        """Raise ConfigError for an encoder that the protocol cannot score, before any work is
        done.
        """

    @abstractmethod
    def run(self, subject: Subject, task: Task) -> list[Score]:
        """Return the scores of one encoder."""


@dataclass(frozen=True)
class FeatureProtocol(Protocol):
    """A protocol that fits a classifier to frozen features."""

    needs = "features"

    @abstractmethod
    def predict(
        self,
        train_ND: np.ndarray,
        label_N: np.ndarray,
        unit_N: np.ndarray,
        test_MD: np.ndarray,
        names: Sequence[str] | None,
    ) -> Iterator[tuple[str, str, list[np.ndarray]]]:
        """Yield for each score its title, its settings, and the predicted test labels (M,) of each
        draw.

        Args:
            unit_N: records of one unit (person) are held out together.
            names: names of the classes, for errors.
        """

    def run(self, subject: Subject, task: Task) -> list[Score]:
        assert subject.features is not None
        return score_features(
            *subject.features, [self], task.scoring, task.train[0].label_names, task.say
        )


def score_features(
    train: LabelledFeatures,
    test: LabelledFeatures,
    protocols: Sequence[FeatureProtocol],
    scoring: Scoring | None = None,
    names: Sequence[str] | None = None,
    say: Say = lambda text: None,
) -> list[Score]:
    """Return the scores of every entry of the features by protocols that need only features.

    Args:
        names: names of the classes, for errors.

    Raises:
        DataError: labels or features are unsuitable for a classifier.
    """
    scoring = scoring or Scoring()
    check_labels(train.label_N, test.label_N, names)
    label_N, truth_M, scores = train.label_N.numpy(), test.label_N.numpy(), []
    assert scoring.any_of is None or test.row_N is not None, "any_of needs rows"
    row_M = np.arange(len(truth_M)) if test.row_N is None else test.row_N
    for protocol in protocols:
        for (name, pooling), train_ND in train.features.items():
            test_MD = test.features[name, pooling]
            for x_ND in (train_ND, test_MD):
                if not torch.isfinite(x_ND).all():
                    bad = int((~torch.isfinite(x_ND)).any(dim=1).sum())
                    raise DataError(
                        f"evaluate: features of {name} are not finite for {bad} records; "
                        "expected finite ones. Train again."
                    )
            say(f"{protocol.name}: {name}, {pooling}")
            for title, how, predicted in protocol.predict(
                train_ND.numpy(), label_N, train.unit_N, test_MD.numpy(), names
            ):
                described = f"{how}, {pooling}" if how else pooling
                scores.append(scoring.score(name, title, described, predicted, truth_M, row_M))
    return scores
