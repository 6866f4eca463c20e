import numpy as np
import pytest
from sklearn.linear_model import RidgeClassifier

from dpvision.errors import DataError
from dpvision.eval.probes import ridge
from dpvision.eval.probes.linear_probe import held_out
from dpvision.eval.probes.ridge import STRENGTHS, FittedRidge, fit_ridge


def _blobs(
    n: int, classes: int, width: int, gap: float, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.Generator(np.random.PCG64(seed))
    label = rng.integers(0, classes, n)
    x = (
        rng.standard_normal((n, width)).astype(np.float32)
        * rng.uniform(0.1, 9, width).astype(np.float32)
        + 3
    )
    x[np.arange(n), label] += gap
    return x, label


def _standardised(probe: FittedRidge, x: np.ndarray) -> np.ndarray:
    return (x - probe.mean) / probe.scale


SHAPES = pytest.mark.parametrize(
    ("n", "classes", "width"), [(600, 4, 30), (150, 4, 400), (400, 2, 20), (90, 2, 91)]
)


@SHAPES
def test_same_weights_and_predictions_as_scikit_learn_at_the_same_strength(
    n: int, classes: int, width: int
) -> None:
    x, label = _blobs(n, classes, width, 3.0)
    probe = fit_ridge(x, label)
    oracle = RidgeClassifier(alpha=probe.strength * n).fit(_standardised(probe, x), label)
    weight = (
        oracle.coef_.T
        if classes > 2
        else np.stack([-oracle.coef_.ravel(), oracle.coef_.ravel()], axis=1)
    )  # of two classes it fits one
    np.testing.assert_allclose(probe.weight_DK, weight, atol=1e-9)
    fresh, _ = _blobs(1000, classes, width, 3.0, seed=1)
    assert (probe.predict(fresh) == oracle.predict(_standardised(probe, fresh))).all()


@SHAPES
def test_the_strength_is_the_strongest_of_those_best_on_the_held_out_fifth(
    n: int, classes: int, width: int
) -> None:
    x, label = _blobs(n, classes, width, 2.0)
    probe = fit_ridge(x, label, seed=3)
    z, held = _standardised(probe, x), held_out(label, np.arange(n), seed=3)
    right = []
    for strength in STRENGTHS:
        oracle = RidgeClassifier(alpha=strength * (~held).sum()).fit(z[~held], label[~held])
        right.append((oracle.predict(z[held]) == label[held]).sum())
    assert len(set(right)) > 1
    assert probe.strength == STRENGTHS[int(np.argmax(right))]


@pytest.mark.parametrize("width", [40, 300])
def test_the_pieces_in_which_it_is_computed_do_not_matter(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, label = _blobs(200, 3, width, 3.0)
    whole = fit_ridge(x, label)
    monkeypatch.setattr(ridge, "_CHUNK", 7 * width)
    pieces = fit_ridge(x, label)
    assert whole.strength == pieces.strength
    np.testing.assert_allclose(pieces.weight_DK, whole.weight_DK, atol=1e-9)
    np.testing.assert_allclose(pieces.scores(x), whole.scores(x), atol=1e-9)


def test_records_of_a_person_are_held_out_together() -> None:
    x, label = _blobs(150, 2, 200, 8.0)
    rng = np.random.Generator(np.random.PCG64(2))
    label[rng.random(150) < 0.2] ^= 1
    copies, copied, person = (
        np.repeat(x, 4, axis=0),
        np.repeat(label, 4),
        np.repeat(np.arange(150), 4),
    )
    # Copies on both sides make it pay to remember the wrong labels; persons do not.
    assert fit_ridge(copies, copied).strength < 0.1 * fit_ridge(copies, copied, person).strength


def test_units_of_the_features_do_not_matter() -> None:
    x, label = _blobs(500, 3, 6, 3.0)
    scale, shift = (
        np.array([1e3, 1, 1e-3, 7, 1, 1], np.float32),
        np.array([5, 0, 1e-3, -9, 0, 0], np.float32),
    )
    plain, moved = fit_ridge(x, label), fit_ridge(x * scale + shift, label)
    assert plain.strength == moved.strength
    assert (plain.predict(x) == moved.predict(x * scale + shift)).mean() > 0.995


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e6])
@pytest.mark.parametrize("width", [10, 500])
def test_a_constant_feature_changes_nothing(constant: float, width: int) -> None:
    x, label = _blobs(300, 2, width, 20.0)
    with_constant = np.concatenate([x, np.full((300, 1), constant, np.float32)], axis=1)
    plain, probe = fit_ridge(x, label), fit_ridge(with_constant, label)
    np.testing.assert_allclose(probe.weight_DK[:-1], plain.weight_DK, atol=1e-7)
    assert np.abs(probe.weight_DK[-1]).max() < 1e-7


def test_a_class_that_was_held_out_whole_is_learned_all_the_same() -> None:
    x, label = _blobs(205, 2, 4, 4.0)
    label[7], x[7] = 2, (0, 0, 300, 0)
    assert held_out(label, np.arange(205), seed=0)[7]
    assert fit_ridge(x, label).predict(x[7:8]).tolist() == [2]


def test_labels_need_not_be_consecutive() -> None:
    x, label = _blobs(400, 3, 5, 60.0)
    names = np.array([-4, 17, 900])[label]
    assert (fit_ridge(x, names).predict(x) == names).mean() > 0.95


def test_too_few_records_are_refused() -> None:
    with pytest.raises(DataError, match=r"4 training records; expected at least five.*Label more"):
        fit_ridge(np.zeros((4, 2), np.float32), np.array([0, 0, 1, 1]))
