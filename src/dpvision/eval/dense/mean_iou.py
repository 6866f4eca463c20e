"""Mean intersection over union, pixel accuracy and mean class accuracy.

    IoU_k = right_k / (true_k + said_k - right_k)        over all pixels of all test images together

Pixels whose truth is ``IGNORED`` do not count. A class in neither truth nor predictions has no IoU
and is left out of the mean; a class without true pixels is left out of the mean class accuracy
(Everingham et al. 2010; ADE20K, Zhou et al. 2019).

Legend: N images, K classes, R draws of the bootstrap.
"""

from collections.abc import Callable, Sequence

import numpy as np

from dpvision.errors import DataError
from dpvision.eval.dense.job import Measure
from dpvision.eval.dense.semantic_data import IGNORED
from dpvision.eval.score import Z_95

_DRAWS = 1000
RIGHT, TRUE, SAID = 0, 1, 2
"""Indices of counts: diagonal, row sums and column sums of a confusion matrix."""


def count_pixels(truth: np.ndarray, said: np.ndarray, num_classes: int) -> np.ndarray:
    """Return the numbers of correct, true and predicted pixels of one image by class, int64 (3, K).

    Args:
        truth: class numbers of any shape, ``IGNORED`` for pixels that do not count.
        said: predictions in [0, K), of the same shape.
    """
    counted = truth != IGNORED
    t, s = truth[counted].astype(np.int64), said[counted].astype(np.int64)
    return np.stack([np.bincount(part, minlength=num_classes) for part in (t[t == s], t, s)])


def measures(count_N3K: np.ndarray, seed: int = 0) -> list[Measure]:
    """Return mIoU, pixel accuracy and mean class accuracy, with intervals by bootstrap over images.

    An interval is the value +- 1.96 standard deviations of its bootstrap draws, clipped to [0, 1].
    Percentiles of the draws would be too high: a draw lacks some of the rare classes, on which
    networks are worst.

    Raises:
        DataError: no pixel counts.
    """
    total_3K = count_N3K.sum(axis=0)
    if not total_3K[TRUE].any():
        raise DataError(
            "segmentation: no test pixel counts; expected some that are not ignored. Change "
            "--ignore-ids."
        )
    drawn_R3K = _resampled(count_N3K, seed)
    commonest, present = (
        total_3K[TRUE].max() / total_3K[TRUE].sum(),
        np.count_nonzero(total_3K[TRUE]),
    )
    found = []
    chances = {
        "mIoU": commonest / present,
        "pixel accuracy": commonest,
        "mean class accuracy": 1 / present,
    }
    for name, function in _FUNCTIONS.items():
        value = float(function(total_3K[None])[0])
        half = Z_95 * float(function(drawn_R3K).std()) if len(count_N3K) > 1 else 1.0
        found.append(
            Measure(
                name,
                value,
                max(0.0, value - half),
                min(1.0, value + half),
                float(chances[name]),
                len(count_N3K),
            )
        )
    return found


def class_iou(total_3K: np.ndarray) -> np.ndarray:
    """Return the IoU of each class, float64 (..., K); NaN for classes in neither truth nor
    predictions.
    """
    right, true, said = (total_3K[..., i, :].astype(np.float64) for i in (RIGHT, TRUE, SAID))
    return _share(right, true + said - right)


def mean_iou(total_3K: np.ndarray) -> np.ndarray:
    """Return the mean IoU over the classes that occur, from counts (..., 3, K)."""
    return np.nanmean(class_iou(total_3K), axis=-1)


def pixel_accuracy(total_3K: np.ndarray) -> np.ndarray:
    """Return the share of correct pixels."""
    return total_3K[..., RIGHT, :].sum(axis=-1) / total_3K[..., TRUE, :].sum(axis=-1)


def mean_class_accuracy(total_3K: np.ndarray) -> np.ndarray:
    """Return the mean over the true classes of the share of their pixels that are correct."""
    return np.nanmean(
        _share(total_3K[..., RIGHT, :].astype(np.float64), total_3K[..., TRUE, :]), axis=-1
    )


_FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "mIoU": mean_iou,
    "pixel accuracy": pixel_accuracy,
    "mean class accuracy": mean_class_accuracy,
}
MEASURES: Sequence[str] = tuple(_FUNCTIONS)


def _share(part: np.ndarray, whole: np.ndarray) -> np.ndarray:
    return np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole > 0)


def _resampled(count_N3K: np.ndarray, seed: int) -> np.ndarray:
    """Return sums over images drawn with replacement, (R, 3, K), without draws in which no pixel
    counts.
    """
    num = len(count_N3K)
    rng = np.random.Generator(np.random.PCG64(seed))
    times_RN = rng.multinomial(num, np.full(num, 1 / num), size=_DRAWS)
    drawn = (times_RN @ count_N3K.reshape(num, -1)).reshape(_DRAWS, *count_N3K.shape[1:])
    return drawn[drawn[:, TRUE].any(axis=1)]
