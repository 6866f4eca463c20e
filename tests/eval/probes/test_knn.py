import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from dpvision.eval.probes import knn
from dpvision.eval.probes.knn import TEMPERATURE, knn_predict


@pytest.mark.parametrize("k", [1, 5, 20])
def test_predictions_are_those_of_scikit_learn(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knn, "_CHUNK_NUMBERS", 7 * 300)  # several chunks, the last one smaller
    generator = torch.Generator().manual_seed(0)
    label = torch.randint(0, 4, (300,), generator=generator)
    train = torch.randn(300, 8, generator=generator) + 0.7 * torch.nn.functional.one_hot(label, 8)
    test = torch.randn(100, 8, generator=generator)
    oracle = KNeighborsClassifier(
        k, metric="cosine", weights=lambda distance: np.exp((1 - distance) / TEMPERATURE)
    )
    expected = oracle.fit(train.double().numpy(), label.numpy()).predict(test.double().numpy())
    assert (knn_predict(train, label, test, k=k).numpy() == expected).all()


def test_length_of_a_feature_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(1)
    train, test = torch.randn(50, 4, generator=generator), torch.randn(20, 4, generator=generator)
    label = torch.arange(50) % 3
    scale = torch.rand(50, 1, generator=generator) * 9 + 1
    assert (
        knn_predict(train * scale, label, test, k=3) == knn_predict(train, label, test, k=3)
    ).all()


def test_all_vote_when_there_are_fewer_than_k() -> None:
    train, label = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1])
    assert knn_predict(train, label, torch.tensor([[0.2, 1.0]]), k=20).tolist() == [1]
