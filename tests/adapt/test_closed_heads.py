"""Least squares, steps in whitened coordinates, prototypes: without noise they are others' solvers,
with noise they keep their laws.
"""

import math

import numpy as np
import pytest
import torch
from feature_sets import clusters, joined, no_noise, private, releases_of, stream_of
from sklearn.linear_model import Ridge
from sklearn.neighbors import NearestCentroid

from dpvision.adapt.feature_stream import FeatureStream, Head
from dpvision.adapt.heads.feature_covariance import feature_covariance, whitener
from dpvision.adapt.heads.least_squares import least_squares
from dpvision.adapt.heads.one_step import one_step
from dpvision.adapt.heads.prototypes import prototypes, shrunk, sizes
from dpvision.adapt.release import full_batch_plan
from dpvision.config import OptimConfig
from dpvision.errors import ConfigError

HEADS = {
    "least_squares": least_squares,
    "prototypes": prototypes,
    "feature_covariance": lambda stream, releases, **settings: (
        feature_covariance(stream, releases, **settings).last
    ),
}
X, LABEL = (torch.from_numpy(a) for a in clusters(500, seed=8))


def accuracy(head: Head, x: torch.Tensor = X, label: torch.Tensor = LABEL) -> float:
    return float((head.predict(x) == label).float().mean())


def unit_rows(stream: FeatureStream) -> np.ndarray:
    x = stream.feature_ND.astype(np.float64)
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def skewed(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """What tells the classes apart is weak beside two directions in which they differ, too, and
    hardly.
    """
    rng = np.random.default_rng(seed)
    x, label = clusters(count, width=20, seed=seed, spread=0.5)
    x[:, :2] = 3 * x[:, :2] + 15 * rng.normal(size=(count, 2))
    return x, label


def test_without_noise_least_squares_is_sklearns_ridge() -> None:
    for constant in (0.0, 0.5):
        stream = stream_of(400, unit=True, constant=constant)
        rows = np.c_[unit_rows(stream), np.full(400, constant)]
        penalty = 400 * 1e-6 * (1 + constant**2)
        ridge = Ridge(alpha=penalty, fit_intercept=False, solver="cholesky").fit(
            rows, np.eye(4)[stream.label]
        )
        head = least_squares(stream, releases_of(no_noise(400)))
        np.testing.assert_allclose(
            head.weight_KD.numpy(), ridge.coef_[:, :12], rtol=1e-3, atol=1e-4
        )
        np.testing.assert_allclose(
            head.bias_K.numpy(), ridge.coef_[:, 12] * constant, rtol=1e-3, atol=1e-4
        )


def test_least_squares_of_several_labels_is_sklearns_ridge_too() -> None:
    stream = stream_of(400, multi=True, unit=True)
    ridge = Ridge(alpha=400e-6, fit_intercept=False, solver="cholesky").fit(
        unit_rows(stream), stream.label
    )
    head = least_squares(stream, releases_of(no_noise(400)))
    np.testing.assert_allclose(head.weight_KD.numpy(), ridge.coef_, rtol=1e-3, atol=1e-4)


def test_without_noise_prototypes_are_sklearns_nearest_centroids() -> None:
    stream = stream_of(400, unit=True)
    centroid = NearestCentroid().fit(unit_rows(stream), stream.label)
    head = prototypes(stream, releases_of(no_noise(400)))
    np.testing.assert_allclose(head.weight_KD.numpy(), centroid.centroids_, rtol=1e-4, atol=1e-5)
    x = X.numpy() / np.linalg.norm(X.numpy(), axis=1, keepdims=True)
    assert np.array_equal(head.predict(X).numpy(), centroid.predict(x))


def test_without_noise_one_whitened_step_is_least_squares() -> None:
    """From zero the gradient is that of centred targets, so the step is (Y - 1/K)^T X (E[x x^T])^-1
    up to its length.
    """
    stream = stream_of(400, unit=True)
    squares = least_squares(stream, releases_of(no_noise(400))).weight_KD.double()
    squares -= squares.mean(dim=0)
    trained = feature_covariance(stream, releases_of(no_noise(400, steps=2)))
    stepped = trained.last.weight_KD.double()
    assert float((squares * stepped).sum() / squares.norm() / stepped.norm()) > 1 - 1e-6


def test_the_whitener_whitens() -> None:
    gen = torch.Generator().manual_seed(0)
    root_EE = torch.randn(6, 6, dtype=torch.float64, generator=gen)
    covariance_EE, eye = root_EE @ root_EE.T / 6, torch.eye(6, dtype=torch.float64)
    p_EE, dimension = whitener(covariance_EE, 0.3)
    torch.testing.assert_close(p_EE @ (covariance_EE + 0.3 * eye) @ p_EE, eye / dimension)
    assert float((p_EE @ covariance_EE @ p_EE).trace()) == pytest.approx(1)
    spoiled_EE = covariance_EE - 2 * eye  # noise can make every eigenvalue negative
    p_EE, dimension = whitener(spoiled_EE - 10 * eye, 0.3)
    assert dimension == 1 and torch.isfinite(p_EE).all()


@pytest.mark.parametrize("name", HEADS)
def test_the_clip_norm_is_a_unit_of_measure_only(name: str) -> None:
    """Contributions are scaled to C and noise with them: the same noise key gives the same head for
    every C.
    """
    stream = stream_of(300, unit=True)
    for constant_c in (1e-3, 1.0, 50.0):
        if name == "feature_covariance" and constant_c != 1:
            continue  # its steps clip gradients of a length of their own
        head = HEADS[name](stream, private(300, 2.0, 2, max_grad_norm=constant_c))
        reference = HEADS[name](stream, private(300, 2.0, 2, max_grad_norm=1.0))
        torch.testing.assert_close(head.weight_KD, reference.weight_KD, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", HEADS)
def test_private_heads_learn_and_spend_every_release(name: str) -> None:
    stream = stream_of(3000, unit=True)
    releases = private(3000, 4.0, steps=8)
    head = HEADS[name](stream, releases)
    assert releases.left == 0
    assert accuracy(head) > 0.9


@pytest.mark.parametrize("name", HEADS)
def test_drowned_in_noise_a_head_is_still_finite_and_bounded(name: str) -> None:
    stream = stream_of(30, unit=True)
    for seed in range(5):
        head = HEADS[name](
            stream, private(30, 0.01, 4, keys=(bytes([seed]) * 32, bytes([seed + 9]) * 32))
        )
        assert torch.isfinite(head.weight_KD).all() and torch.isfinite(head.bias_K).all()
        assert torch.isfinite(head.scores(X)).all()


@pytest.mark.parametrize("name", HEADS)
def test_a_broken_record_does_not_change_a_head_by_a_bit(name: str) -> None:
    stream = stream_of(100, unit=True)
    broken = joined(joined(stream, np.full(12, np.inf), 0), np.ones(12), -3)
    plan = full_batch_plan(100, 2.0, steps=4)
    a, b = (HEADS[name](s, releases_of(plan)) for s in (stream, broken))
    assert torch.equal(a.weight_KD, b.weight_KD) and torch.equal(a.bias_K, b.bias_K)


@pytest.mark.parametrize("name", HEADS)
def test_rows_without_a_public_bound_are_refused_and_with_one_are_shortened(name: str) -> None:
    stream = stream_of(100)
    with pytest.raises(ConfigError, match="no-unit"):
        HEADS[name](stream, releases_of(no_noise(100, steps=2)))
    with pytest.raises(ConfigError, match="feature_norm=nan"):
        HEADS[name](stream, releases_of(no_noise(100, steps=2)), feature_norm=math.nan)
    if name == "feature_covariance":
        return  # only its covariance is of shortened rows
    shortest = float(np.linalg.norm(stream.feature_ND, axis=1).min())
    scaled = FeatureStream((unit_rows(stream) * shortest).astype(np.float32), stream.label, 4)
    a = HEADS[name](stream, releases_of(no_noise(100)), feature_norm=shortest)
    b = HEADS[name](scaled, releases_of(no_noise(100)), feature_norm=shortest)
    torch.testing.assert_close(a.weight_KD, b.weight_KD, rtol=1e-3, atol=1e-4)


def test_where_the_classes_lie_in_weak_directions_second_moments_are_worth_their_budget() -> None:
    x, label = skewed(20_000)
    stream = FeatureStream(x, label, 4, unit=True)
    test_x, test_label = (torch.from_numpy(a) for a in skewed(1000, seed=1))
    squares = least_squares(stream, private(20_000, 1.0))
    steps = feature_covariance(stream, private(20_000, 1.0, 8)).last
    plain = one_step(stream, private(20_000, 1.0), loss="softmax")
    means = prototypes(stream, private(20_000, 1.0))
    worst = min(accuracy(squares, test_x, test_label), accuracy(steps, test_x, test_label))
    assert (
        worst > max(accuracy(plain, test_x, test_label), accuracy(means, test_x, test_label)) + 0.1
    )


def test_prototypes_serve_a_rare_class() -> None:
    """One record in fifty belongs to class 0: least squares hardly ever names it, the nearest mean
    does.
    """
    x, label = clusters(12_000, spread=2.0)
    keep = (label != 0) | (np.arange(len(label)) % 17 == 0)
    stream = FeatureStream(x[keep], label[keep], 4, unit=True)
    test_x, test_label = (torch.from_numpy(a) for a in clusters(2000, seed=3, spread=2.0))
    rare = test_label == 0
    recall = {
        name: accuracy(
            HEADS[name](stream, private(stream.num_records, 4.0)), test_x[rare], test_label[rare]
        )
        for name in ("least_squares", "prototypes")
    }
    assert recall["prototypes"] > 0.6 > 0.3 > recall["least_squares"]


def test_shrinking_brings_noisy_means_nearer_to_the_true_ones() -> None:
    rng = np.random.default_rng(0)
    variance_K = torch.tensor([0.01, 0.5, 0.5, 4.0, 9.0]).double()
    for _ in range(20):
        truth_KE = torch.from_numpy(rng.normal(size=(5, 100)) * 0.5 + rng.normal(size=100))
        noise_KE = torch.from_numpy(rng.normal(size=(5, 100))) * variance_K.sqrt()[:, None]
        before = noise_KE.square().sum(dim=1)
        after = (shrunk(truth_KE + noise_KE, variance_K) - truth_KE).square().sum(dim=1)
        assert after.sum() < 0.3 * before.sum() and after[0] < 1.5 * before[0]
    no_KE = shrunk(truth_KE, torch.zeros(5).double())
    torch.testing.assert_close(no_KE, truth_KE)


def test_a_common_mean_that_is_noise_is_taken_off_and_one_that_is_not_stays() -> None:
    """Only then is a class that drew much of the common noise not preferred everywhere."""
    rng, variance_K = np.random.default_rng(0), torch.full((8,), 0.5).double()
    for length, most in ((0.0, 0.15), (3.0, 1.05)):
        before, after = 0.0, 0.0
        for _ in range(50):
            common_E = torch.from_numpy(rng.normal(size=60))
            common_E *= length / common_E.norm()
            noisy_KE = common_E + torch.from_numpy(rng.normal(size=(8, 60))) * math.sqrt(0.5)
            before += float((noisy_KE.mean(dim=0) - common_E).square().sum())
            after += float((shrunk(noisy_KE, variance_K).mean(dim=0) - common_E).square().sum())
        assert after < most * before


@pytest.mark.parametrize("bound", [0.0, 1e-200, 1e200, math.inf])
def test_a_length_out_of_float32s_range_is_refused(bound: float) -> None:
    with pytest.raises(ConfigError, match="1e-12 to 1e12"):
        least_squares(stream_of(20), private(20), feature_norm=bound)


@pytest.mark.parametrize(
    ("head", "settings", "match"),
    [
        (least_squares, {"cross_share": 1.0}, "cross_share"),
        (least_squares, {"strength": -1.0}, "strength"),
        (least_squares, {"strength": math.nan}, "strength"),
        (prototypes, {"count_length": 0.0}, "count_length"),
        (feature_covariance, {"covariance_share": 0.0}, "covariance_share"),
        (feature_covariance, {"strength": math.nan}, "strength"),
    ],
)
def test_settings_out_of_range_are_refused(head, settings, match) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=match):
        head(stream_of(50, unit=True), private(50, 1.0, 4), **settings)


def test_one_release_is_too_few_for_a_covariance_and_a_step() -> None:
    with pytest.raises(ConfigError, match="two or more"):
        feature_covariance(stream_of(50, unit=True), private(50))


def test_a_trained_bias_is_part_of_every_head() -> None:
    """Classes that differ only in how often they occur: without a constant nothing could tell."""
    rng = np.random.default_rng(0)
    label = (rng.random(4000) < 0.1).astype(np.int64)
    x = rng.normal(size=(4000, 6)).astype(np.float32)
    stream = FeatureStream(x, label, 2, unit=True, constant=1.0)
    optim = OptimConfig(
        name="sgd", learning_rate=1.0, momentum=0.0, weight_decay=0.0, schedule="constant"
    )
    heads = [
        least_squares(stream, private(4000, 4.0)),
        feature_covariance(stream, private(4000, 4.0, 4), optim=optim).last,
    ]
    for head in heads:
        assert float((head.predict(torch.from_numpy(x)) == 0).float().mean()) > 0.99


def test_class_sizes_are_measured_where_they_can_be_and_equal_where_they_cannot() -> None:
    truth_K = torch.tensor([0.7, 0.2, 0.09, 0.01]).double()
    torch.testing.assert_close(sizes(truth_K, 0.0, 1e6), truth_K)
    gen = torch.Generator().manual_seed(0)
    for std in (0.003, 0.03, 3.0):
        errors = [
            (
                float((sizes(noisy_K, std**2, 1e6) - truth_K).abs().max()),
                float((noisy_K - truth_K).abs().max()),
            )
            for noisy_K in (
                truth_K + std * torch.randn(4, generator=gen, dtype=torch.float64)
                for _ in range(200)
            )
        ]
        got, raw = np.mean(errors, axis=0)
        assert got < (1.1 if std < 0.01 else 1.0 if std < 1 else 0.6) * raw
        assert float(sizes(truth_K - 1, std**2, 1e6).min()) > 0
