"""The few-shot probe of DP-Cap: the optimality condition of its own objective as oracle."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from dpvision.config import MAEConfig
from dpvision.encoders.pooled import pooled_network
from dpvision.errors import DataError
from dpvision.eval.probes.few_shot_probe import (
    STRENGTH,
    DPCapProbe,
    centred,
    dpcap_probe,
    fit_fixed_strength,
)
from dpvision.eval.probes.protocol import score_features
from dpvision.eval.probes.records import LabelledFeatures, draw_shots
from dpvision.models import make_model

from ..captions.captioners import make_captioner


def _blobs(per_class: int, num_classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.Generator(np.random.PCG64(seed))
    label_N = np.arange(per_class * num_classes) % num_classes
    means = np.random.Generator(np.random.PCG64(99)).normal(size=(num_classes, 12))
    return (means[label_N] + rng.normal(size=(len(label_N), 12)) + 5).astype(np.float32), label_N


@pytest.mark.parametrize("num_classes", [2, 3, 7])
def test_it_minimises_the_papers_objective(num_classes: int) -> None:
    x_ND, label_N = _blobs(8, num_classes)
    x = torch.from_numpy(centred(x_ND)).double()
    model = fit_fixed_strength(x.numpy(), label_N)
    # of two classes scikit-learn keeps the difference of the two rows; by symmetry they are its
    # halves
    rows = model.coef_ if num_classes > 2 else np.concatenate([-model.coef_, model.coef_]) / 2

    def objective(weight_DC: torch.Tensor) -> torch.Tensor:
        return (
            F.cross_entropy(x @ weight_DC, torch.from_numpy(label_N))
            + STRENGTH / len(x) / 2 * weight_DC.square().sum()
        )

    slow = torch.zeros(12, num_classes, dtype=torch.float64, requires_grad=True)
    lbfgs = torch.optim.LBFGS(
        [slow],
        max_iter=2000,
        tolerance_grad=1e-12,
        tolerance_change=1e-15,
        line_search_fn="strong_wolfe",
    )

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = objective(slow)
        loss.backward()
        return loss

    lbfgs.step(closure)
    lowest = objective(slow).item()
    assert objective(torch.from_numpy(rows.T)).item() == pytest.approx(lowest, rel=1e-5)
    # a tenth off is seen: the comparison is sharp enough to notice a factor of two in the strength
    with torch.no_grad():
        assert objective(0.9 * slow).item() > lowest * (1 + 1e-3)
    assert model.intercept_.tolist() == [0] * (1 if num_classes == 2 else num_classes)


def test_rows_are_centred_and_of_length_one() -> None:
    x_ND = centred(np.array([[1.0, 2.0, 6.0], [4.0, 4.0, 4.0]]))
    assert x_ND.mean(axis=1) == pytest.approx(0) and np.linalg.norm(x_ND, axis=1) == pytest.approx(
        [1, 0]
    )
    assert centred(7 * x_ND[:1] + 3) == pytest.approx(x_ND[:1])


def test_draws_are_those_of_the_other_few_shot_probe_and_more_shots_help() -> None:
    (x, label_N), (y, truth) = _blobs(40, 5), _blobs(40, 5, seed=1)
    found = dpcap_probe(x, label_N, y, 3, 2)
    rows = draw_shots(label_N, 3, 1)
    assert (
        found[1] == fit_fixed_strength(centred(x)[rows], label_N[rows]).predict(centred(y))
    ).all()
    accuracy = {
        k: np.mean([(p == truth).mean() for p in dpcap_probe(x, label_N, y, k, 5)]) for k in (1, 10)
    }
    assert accuracy[10] > accuracy[1] > 1 / 5
    with pytest.raises(DataError, match="shots=41"):
        dpcap_probe(x, label_N, y, 41, 1)


def test_the_protocol_gives_a_score_for_each_number_of_shots() -> None:
    (x, label_N), (y, truth) = _blobs(20, 4), _blobs(20, 4, seed=1)
    train, test = (
        LabelledFeatures(
            {("e", "bridge"): torch.from_numpy(f)}, torch.from_numpy(t), np.arange(len(t))
        )
        for f, t in ((x, label_N), (y, truth))
    )
    scores = score_features(train, test, [DPCapProbe((1, 2, 5, 10))])
    assert [s.protocol for s in scores] == [
        f"{k}-shot DP-Cap probe, 20 draws, bridge" for k in (1, 2, 5, 10)
    ]
    assert scores[0].value < scores[-1].value and scores[0].chance == 0.25


def test_a_captioners_encoder_offers_its_tokens_as_the_decoder_gets_them_less_their_positions() -> (
    None
):
    model = make_captioner()
    x_BCHW = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    found = pooled_network(model.encoder, bridge=model.decoder.bridge).poolings(x_BCHW)
    memory_BSD = model.encode(x_BCHW)
    memory_BSD[:, 1:] -= model.decoder.position_LD
    torch.testing.assert_close(found["bridge"], memory_BSD.mean(1))
    assert list(found) == ["mean", "2x2", "bridge"]
    plain = pooled_network(make_model(MAEConfig(encoder=model.cfg.encoder), 0).encoder).poolings(
        x_BCHW
    )
    assert list(plain) == ["mean", "2x2"]
