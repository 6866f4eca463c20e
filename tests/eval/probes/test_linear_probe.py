import numpy as np
import pytest
from scipy.special import softmax

from dpvision.errors import DataError
from dpvision.eval.probes.linear_probe import STRENGTHS, fit_linear_probe, held_out


def _blobs(
    n: int, classes: int, width: int, gap: float, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.Generator(np.random.PCG64(seed))
    label = rng.integers(0, classes, n)
    x = rng.standard_normal((n, width)).astype(np.float32)
    x[np.arange(n), label] += gap
    return x, label


def test_fit_is_a_stationary_point_of_the_stated_objective() -> None:
    x, label = _blobs(600, 3, 6, 1.5)
    probe = fit_linear_probe(x, label)
    z = (x - probe.mean) / probe.scale
    weight, bias = probe.model.coef_.astype(float), probe.model.intercept_
    residual = softmax(z @ weight.T + bias, axis=1) - np.eye(3)[label]
    assert np.abs(residual.T @ z / len(z) + probe.strength * weight).max() < 2e-3
    assert np.abs(residual.mean(axis=0)).max() < 2e-3


def test_accuracy_is_near_that_of_the_best_rule() -> None:
    x, label = _blobs(4000, 3, 6, 2.0)
    test_x, test_label = _blobs(4000, 3, 6, 2.0, seed=1)
    best = (
        test_x[:, :3].argmax(axis=1) == test_label
    ).mean()  # classes are equal Gaussians: the nearest mean is Bayes' rule
    assert abs((fit_linear_probe(x, label).predict(test_x) == test_label).mean() - best) < 0.01


def test_units_of_the_features_do_not_matter() -> None:
    x, label = _blobs(500, 3, 6, 1.5)
    scale, shift = (
        np.array([1e3, 1, 1e-3, 7, 1, 1], np.float32),
        np.array([5, 0, 1e-3, -9, 0, 0], np.float32),
    )
    plain, moved = fit_linear_probe(x, label), fit_linear_probe(x * scale + shift, label)
    assert plain.strength == moved.strength
    assert (plain.predict(x) == moved.predict(x * scale + shift)).mean() > 0.995


def test_a_constant_feature_is_harmless() -> None:
    x, label = _blobs(300, 2, 4, 2.0)
    x[:, 3] = 7
    assert (fit_linear_probe(x, label).predict(x) == label).mean() > 0.85


def test_noise_gets_more_regularisation_than_signal() -> None:
    noise_x, noise_label = _blobs(200, 2, 150, 0.0)
    signal_x, signal_label = _blobs(20_000, 8, 12, 1.0)
    assert (
        fit_linear_probe(noise_x, noise_label).strength
        == STRENGTHS[0]
        > fit_linear_probe(signal_x, signal_label).strength
    )


def test_held_out_part_never_cuts_a_unit_and_covers_the_classes() -> None:
    rng = np.random.Generator(np.random.PCG64(0))
    unit = rng.integers(0, 200, 1000)
    label = unit % 7
    held = held_out(label, unit, seed=0)
    assert not set(unit[held]) & set(unit[~held])
    assert 0.15 < held.mean() < 0.25
    assert set(label[held]) == set(label[~held]) == set(range(7))


def test_held_out_part_depends_on_the_seed_only() -> None:
    label, unit = np.arange(100) % 3, np.arange(100)
    assert (held_out(label, unit, 0) == held_out(label, unit, 0)).all()
    assert (held_out(label, unit, 0) != held_out(label, unit, 1)).any()


def test_a_class_that_was_held_out_whole_is_learned_all_the_same() -> None:
    x, label = _blobs(
        205, 2, 4, 4.0
    )  # the last of 205 records, in the order of classes, is held out
    label[7], x[7] = 2, (0, 0, 30, 0)
    assert held_out(label, np.arange(205), seed=0)[7]
    assert fit_linear_probe(x, label).predict(x[7:8]).tolist() == [2]


def test_too_few_records_are_refused() -> None:
    with pytest.raises(DataError, match=r"4 training records; expected at least five.*Label more"):
        fit_linear_probe(np.zeros((4, 2), np.float32), np.array([0, 0, 1, 1]))
