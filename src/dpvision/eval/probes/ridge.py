"""Ridge probe: closed-form least squares on frozen features, in seconds where logistic regression
takes minutes.

Minimises sum over records and classes of (target - x W - b)^2 + strength N ||W||^2, targets +1 for
a record's class and -1 for the others (one against all), b unpenalised, as scikit-learn's
RidgeClassifier with alpha = strength N. Features are standardised by the training set's mean and
standard deviation, so that strengths are comparable between encoders. One eigendecomposition of the
Gram matrix (D x D, or N x N if N < D) serves all strengths (Hoerl & Kennard 1970; for N < D Hastie
& Tibshirani 2004, "Efficient quadratic regularization for expression arrays"). The strength is
chosen on a fifth of the training set, never on the test set.

Legend: N training records, M test records, D feature dimension, K classes, R rank: the smaller of N
and D.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from scipy import linalg

from dpvision.eval.probes.linear_probe import to_hold_out
from dpvision.eval.probes.protocol import FeatureProtocol

STRENGTHS = (10.0, 3.0, 1.0, 0.3, 0.1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 1e-5, 1e-6)
"""All are tried; the strongest wins ties of held-out accuracy."""
# Standardised float64 copies are made in chunks of this size (64 MiB): 50,000 x 10,000 features
# stay float32.
_CHUNK = 1 << 23


@dataclass(frozen=True)
class FittedRidge:
    """A fitted ridge probe."""

    weight_DK: np.ndarray
    """float64, for standardised features."""
    intercept_K: np.ndarray
    class_K: np.ndarray
    """Labels, sorted."""
    mean: np.ndarray
    scale: np.ndarray
    strength: float
    """The chosen strength; scikit-learn's alpha is strength N."""

    def scores(self, x_MD: np.ndarray) -> np.ndarray:
        """Return scores, float64 (M, K): near +1 for the predicted class, near -1 for the
        others.
        """
        return np.concatenate(
            [
                z @ self.weight_DK + self.intercept_K
                for z in _standardised(x_MD, self.mean, self.scale)
            ]
        )

    def predict(self, x_MD: np.ndarray) -> np.ndarray:
        """Return the predicted labels, int64 (M,)."""
        return self.class_K[self.scores(x_MD).argmax(axis=1)]


@dataclass(frozen=True)
class Ridge(FeatureProtocol):
    """``fit_ridge`` as a protocol."""

    name: ClassVar[str] = "ridge"

    def predict(
        self,
        train_ND: np.ndarray,
        label_N: np.ndarray,
        unit_N: np.ndarray,
        test_MD: np.ndarray,
        names: Sequence[str] | None,
    ) -> Iterator[tuple[str, str, list[np.ndarray]]]:
        yield (
            "ridge probe",
            "",
            [fit_ridge(train_ND, label_N, unit_N, seed=self.seed).predict(test_MD)],
        )


def fit_ridge(
    x_ND: np.ndarray, label_N: np.ndarray, unit_N: np.ndarray | None = None, *, seed: int = 0
) -> FittedRidge:
    """Choose the strength on held-out training records, then fit on all of them.

    Memory besides the features: three float64 matrices of R x R (2.4 GB at R = 10,000).

    Args:
        x_ND: finite features, float32.
        label_N: int64, two classes or more.
        unit_N: records of the same unit (person) are held out together; if None, each record is its
            own unit.
        seed: of the choice of the held-out records.

    Raises:
        DataError: too few records to hold some out.
    """
    held = to_hold_out(label_N, unit_N, seed)
    mean, scale = _moments(x_ND)
    class_K, index_N = np.unique(label_N, return_inverse=True)
    target_NK = np.where(index_N[:, None] == np.arange(len(class_K)), 1.0, -1.0)
    fit = _fit_wide if x_ND.shape[0] < x_ND.shape[1] else _fit_tall
    weight_DK, intercept_K, strength = fit(x_ND, target_NK, held, mean, scale)
    return FittedRidge(weight_DK, intercept_K, class_K, mean, scale, strength)


def _fit_tall(
    x_ND: np.ndarray, target_NK: np.ndarray, held: np.ndarray, mean: np.ndarray, scale: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    """Fit via the features' second moments, D x D: for N >= D.

    1. One pass over the records sums Z^T Z, Z^T Y and Z, of kept and held-out records apart.
    2. The moments of the n kept records, centred on their means, are diagonalised once. For each
       strength, W solves (Z^T Z + strength n I) W = Z^T Y, which is diagonal in the eigenbasis.
    3. The strength with the most correct held-out records is solved again on all records.
    """
    width, count = x_ND.shape[1], np.flatnonzero(~held).size
    parts = []
    for part in (~held, held):
        gram_DD, cross_DK, sum_D, done = (
            np.zeros((width, width)),
            np.zeros((width, target_NK.shape[1])),
            np.zeros(width),
            0,
        )
        rows, target_PK = np.flatnonzero(part), target_NK[part]
        for z in _standardised(x_ND, mean, scale, rows):
            gram_DD += z.T @ z  # numpy detects the symmetry and computes one half
            cross_DK += z.T @ target_PK[done : done + len(z)]
            sum_D += z.sum(axis=0)
            done += len(z)
        parts.append((gram_DD, cross_DK, sum_D))
    (kept_DD, kept_DK, kept_D), (held_DD, held_DK, _) = parts
    held_DD += kept_DD
    centre_D, offset_K = kept_D / count, target_NK[~held].mean(axis=0)
    kept_DD -= count * np.outer(centre_D, centre_D)
    value_D, basis_DD = linalg.eigh(kept_DD, overwrite_a=True, check_finite=False)
    turned_DK = basis_DD.T @ (kept_DK - count * np.outer(centre_D, offset_K))
    weights = [
        basis_DD @ (turned_DK / (np.maximum(value_D, 0) + s * count)[:, None]) for s in STRENGTHS
    ]
    intercepts = [offset_K - centre_D @ weight_DK for weight_DK in weights]
    strength = _best(x_ND, target_NK, held, mean, scale, weights, intercepts)
    del kept_DD, basis_DD
    # The standardised mean of all records is zero, so the intercept is the targets' mean.
    held_DD[np.diag_indices(width)] += strength * len(x_ND)
    weight_DK = linalg.solve(
        held_DD, kept_DK + held_DK, assume_a="pos", overwrite_a=True, check_finite=False
    )
    return weight_DK, target_NK.mean(axis=0), strength


def _fit_wide(
    x_ND: np.ndarray, target_NK: np.ndarray, held: np.ndarray, mean: np.ndarray, scale: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    """Fit via the records' inner products, N x N: for N < D, where the minimum is W = Z^T A.

    1. The inner products Z Z^T of all records are summed over chunks of columns.
    2. Those of the n kept records, centred on their mean, are diagonalised once. For each strength,
       the dual A solves (Z Z^T + strength n I) A = Y, which is diagonal in the eigenbasis.
    3. ``lifted`` turns the duals of all strengths into W = Z^T A in one pass over the columns.
    4. The strength with the most correct held-out records is solved again on all records.
    """
    total = len(x_ND)
    step = max(1, _CHUNK // total)
    columns = [slice(start, start + step) for start in range(0, x_ND.shape[1], step)]
    gram_NN = np.zeros((total, total))
    for part in columns:
        z = (x_ND[:, part] - mean[part]) / scale[part]
        gram_NN += z @ z.T
    kept, count = np.flatnonzero(~held), np.flatnonzero(~held).size
    kept_NN = gram_NN[np.ix_(kept, kept)]
    mean_N = kept_NN.mean(axis=0)
    # Centre the records on the mean of the kept ones.
    kept_NN += mean_N.mean() - mean_N - mean_N[:, None]
    offset_K = target_NK[kept].mean(axis=0)
    value_N, basis_NN = linalg.eigh(kept_NN, overwrite_a=True, check_finite=False)
    turned_NK = basis_NN.T @ (target_NK[kept] - offset_K)
    duals = [
        basis_NN @ (turned_NK / (np.maximum(value_N, 0) + s * count)[:, None]) for s in STRENGTHS
    ]

    def lifted(rows: np.ndarray, dual_NK: np.ndarray) -> np.ndarray:
        return np.concatenate(
            [((x_ND[rows, part] - mean[part]) / scale[part]).T @ dual_NK for part in columns]
        )

    # The duals sum to zero, so centred and uncentred records give the same W.
    weights = np.split(lifted(kept, np.concatenate(duals, axis=1)), len(STRENGTHS), axis=1)
    sum_N = gram_NN[:, kept].mean(axis=1)[kept]
    intercepts = [offset_K - sum_N @ dual_NK for dual_NK in duals]
    strength = _best(x_ND, target_NK, held, mean, scale, weights, intercepts)
    gram_NN[np.diag_indices(total)] += strength * total
    centred_NK = target_NK - target_NK.mean(axis=0)
    dual_NK = linalg.solve(
        gram_NN, centred_NK, assume_a="pos", overwrite_a=True, check_finite=False
    )
    return lifted(np.arange(total), dual_NK), target_NK.mean(axis=0), strength


def _best(
    x_ND: np.ndarray,
    target_NK: np.ndarray,
    held: np.ndarray,
    mean: np.ndarray,
    scale: np.ndarray,
    weights: list[np.ndarray],
    intercepts: list[np.ndarray],
) -> float:
    """Return the strength with the most correct held-out records."""
    weight_D, intercept = np.concatenate(weights, axis=1), np.concatenate(intercepts)
    rows, right_S = np.flatnonzero(held), np.zeros(len(STRENGTHS), dtype=np.int64)
    truth_M, done = target_NK[rows].argmax(axis=1), 0
    for z in _standardised(x_ND, mean, scale, rows):
        score_MSK = (z @ weight_D + intercept).reshape(len(z), len(STRENGTHS), -1)
        right_S += (score_MSK.argmax(axis=2) == truth_M[done : done + len(z), None]).sum(axis=0)
        done += len(z)
    return STRENGTHS[int(right_S.argmax())]


def _moments(x_ND: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and standard deviation of each dimension, float64; constant dimensions get
    deviation 1.
    """
    mean = x_ND.mean(axis=0, dtype=np.float64)
    square = sum(
        ((z**2).sum(axis=0) for z in _standardised(x_ND, mean, np.ones_like(mean))),
        np.zeros_like(mean),
    )
    scale = np.sqrt(square / len(x_ND))
    # float32 rounding of a constant is not signal: standardised, it would be noise of full size.
    scale[scale <= 1e-6 * np.abs(mean)] = 1
    scale[scale == 0] = 1
    return mean, scale


def _standardised(
    x_ND: np.ndarray, mean: np.ndarray, scale: np.ndarray, rows: np.ndarray | None = None
) -> Iterator[np.ndarray]:
    """Yield standardised chunks of the records, or of ``rows``, float64."""
    count = len(x_ND) if rows is None else len(rows)
    step = max(1, _CHUNK // x_ND.shape[1])
    for start in range(0, count, step):
        piece = x_ND[start : start + step] if rows is None else x_ND[rows[start : start + step]]
        yield (piece - mean) / scale
