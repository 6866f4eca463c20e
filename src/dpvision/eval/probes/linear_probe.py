"""Linear probe: multinomial logistic regression on frozen features.

Minimises mean cross-entropy + strength / 2 * ||W||^2 over the training records with scikit-learn's
L-BFGS (for two classes, W is the vector of their log odds). Features are standardised by the
training set's mean and standard deviation. The strength is chosen on a fifth of the training set,
never on the test set.

Legend: N training records, M test records, D feature dimension.
"""

import copy
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from sklearn.base import clone
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from threadpoolctl import threadpool_limits

from dpvision.errors import DataError
from dpvision.eval.probes.protocol import FeatureProtocol

STRENGTHS = (1e-1, 1e-2, 1e-3, 1e-4)
"""L2 strengths, tried in this order until the held-out accuracy falls."""
# Features of random weights are ill-conditioned: at a tolerance of 1e-3 their probe on CIFAR-10
# loses 0.9 points.
_TOLERANCE, _MAX_ITERATIONS = 3e-4, 600
_HELD_OUT_EVERY = 5
# Below this size an iteration is faster than waking the threads: on a busy machine threads then
# wait for each other, fifty times as long as one thread takes (measured, 240 x 768 on two busy
# cores).
_SMALL = 1 << 23


@dataclass(frozen=True)
class FittedLinear:
    """A fitted linear probe."""

    model: LogisticRegression
    mean: np.ndarray
    scale: np.ndarray
    strength: float
    """The chosen L2 strength."""

    def predict(self, x_MD: np.ndarray) -> np.ndarray:
        """Return the predicted labels, int64 (M,)."""
        return self.model.predict(_standardised(x_MD, self.mean, self.scale))


@dataclass(frozen=True)
class Linear(FeatureProtocol):
    """``fit_linear_probe`` as a protocol."""

    name: ClassVar[str] = "linear"

    def predict(
        self,
        train_ND: np.ndarray,
        label_N: np.ndarray,
        unit_N: np.ndarray,
        test_MD: np.ndarray,
        names: Sequence[str] | None,
    ) -> Iterator[tuple[str, str, list[np.ndarray]]]:
        yield (
            "linear probe",
            "",
            [fit_linear_probe(train_ND, label_N, unit_N, seed=self.seed).predict(test_MD)],
        )


def fit_linear_probe(
    x_ND: np.ndarray, label_N: np.ndarray, unit_N: np.ndarray | None = None, *, seed: int = 0
) -> FittedLinear:
    """Choose the L2 strength on held-out training records, then fit on all of them.

    Args:
        x_ND: finite float32 features.
        label_N: int64, two classes or more.
        unit_N: records of the same unit (person) are held out together; if None, each record is its
            own unit.
        seed: of the choice of the held-out records.

    Raises:
        DataError: too few records to hold some out.
    """
    mean, scale = x_ND.mean(axis=0), x_ND.std(axis=0)
    scale[scale == 0] = 1
    x_ND = _standardised(x_ND, mean, scale)
    held = to_hold_out(label_N, unit_N, seed)
    strength, start = _choose_strength(x_ND[~held], label_N[~held], x_ND[held], label_N[held])
    if len(start.classes_) < len(
        np.unique(label_N)
    ):  # a small class was held out entirely, so the start lacks it
        start = clone(start)
    return FittedLinear(_fit(start, x_ND, label_N, strength), mean, scale, strength)


def _choose_strength(
    x_ND: np.ndarray, label_N: np.ndarray, held_MD: np.ndarray, held_label_M: np.ndarray
) -> tuple[float, LogisticRegression]:
    """Return the strength with the best held-out accuracy (the strongest among ties) and its model.
    Fits are warm-started.
    """
    model = LogisticRegression(tol=_TOLERANCE, max_iter=_MAX_ITERATIONS, warm_start=True)
    best = (-1.0, 0.0, model)
    for strength in STRENGTHS:
        model = _fit(model, x_ND, label_N, strength)
        accuracy = float((model.predict(held_MD) == held_label_M).mean())
        if accuracy < best[0]:
            break
        if accuracy > best[0]:
            best = (accuracy, strength, model)
    return best[1], best[2]


def to_hold_out(label_N: np.ndarray, unit_N: np.ndarray | None, seed: int) -> np.ndarray:
    """Return ``held_out``, where each record is its own unit if ``unit_N`` is None.

    Raises:
        DataError: too few records to hold some out.
    """
    held = held_out(label_N, np.arange(len(label_N)) if unit_N is None else unit_N, seed)
    if not held.any() or len(np.unique(label_N[~held])) < 2:
        raise DataError(
            f"probe: {len(label_N)} training records; expected at least five, and more than one "
            "of each class. Label more images."
        )
    return held


def held_out(label_N: np.ndarray, unit_N: np.ndarray, seed: int) -> np.ndarray:
    """Select about every fifth unit, evenly over the classes (a unit's class is its first
    record's): bool (N,).
    """
    _, first, unit_of_N = np.unique(unit_N, return_index=True, return_inverse=True)
    shuffled = np.random.Generator(np.random.PCG64(seed)).permutation(len(first))
    order = shuffled[np.argsort(label_N[first[shuffled]], kind="stable")]
    chosen = np.zeros(len(first), dtype=bool)
    chosen[order[_HELD_OUT_EVERY - 1 :: _HELD_OUT_EVERY]] = True
    return chosen[unit_of_N]


def _standardised(x: np.ndarray, mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    x = x - mean
    x /= scale
    return x


def _fit(
    start: LogisticRegression, x_ND: np.ndarray, label_N: np.ndarray, strength: float
) -> LogisticRegression:
    """Return a copy of ``start``, fitted from its weights."""
    model = copy.deepcopy(start).set_params(C=1 / (strength * len(x_ND)))
    with warnings.catch_warnings(), threadpool_limits(1 if x_ND.size < _SMALL else None):
        # Weak strengths on separable features have no nearby finite optimum; early stopping is then
        # part of the protocol.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(x_ND, label_N)
