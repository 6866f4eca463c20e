"""k-nearest-neighbour classification of frozen features: cosine similarity, votes weighted by
exp(similarity / temperature).

The protocol of Wu et al. (2018), also used by DINO, with its temperature of 0.07.

Legend: N training records, M test records of a chunk, D feature dimension, K neighbours.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dpvision.errors import ConfigError
from dpvision.eval.probes.protocol import FeatureProtocol

TEMPERATURE = 0.07
_CHUNK_NUMBERS = 1 << 26  # similarities held at a time: 256 MiB in float32


@dataclass(frozen=True)
class KNN(FeatureProtocol):
    """``knn_predict`` as a protocol."""

    name: ClassVar[str] = "knn"
    k: int = 20
    """Number of neighbours."""

    def __post_init__(self) -> None:
        if not self.k >= 1:
            raise ConfigError(f"evaluate: k={self.k!r}; expected at least 1 neighbour. Use 20.")

    def predict(
        self,
        train_ND: np.ndarray,
        label_N: np.ndarray,
        unit_N: np.ndarray,
        test_MD: np.ndarray,
        names: Sequence[str] | None,
    ) -> Iterator[tuple[str, str, list[np.ndarray]]]:
        yield (
            "k-NN",
            f"k={self.k}, cosine",
            [knn_predict(*map(torch.from_numpy, (train_ND, label_N, test_MD)), k=self.k).numpy()],
        )


def knn_predict(train_ND: Tensor, train_label_N: Tensor, test_ND: Tensor, *, k: int = 20) -> Tensor:
    """Return the predicted labels of the test features, int64.

    Args:
        train_ND, test_ND: finite features.
        train_label_N: int64, at least 0.
        k: number of neighbours, at least 1; if there are fewer training records, all of them vote.
    """
    train_ND, test_ND = F.normalize(train_ND.float(), dim=1), F.normalize(test_ND.float(), dim=1)
    num_classes = int(train_label_N.max()) + 1
    k = min(k, len(train_ND))
    predicted = []
    for test_MD in test_ND.split(max(1, _CHUNK_NUMBERS // len(train_ND))):
        similarity_MK, neighbour_MK = (test_MD @ train_ND.T).topk(k, dim=1)
        votes = torch.zeros(len(test_MD), num_classes, dtype=torch.float64)
        votes.scatter_add_(
            1, train_label_N[neighbour_MK], (similarity_MK.double() / TEMPERATURE).exp()
        )
        predicted.append(votes.argmax(dim=1))
    return torch.cat(predicted)
