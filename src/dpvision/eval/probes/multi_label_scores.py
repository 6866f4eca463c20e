"""Multi-label scores: mean average precision, and the share of correct decisions.

    AP_k = sum_i (recall_i - recall_(i-1)) precision_i    over the records by falling score, ties
                                                          together, no interpolation

Unlike ``any_of_labels``, where one class is predicted and any of several acceptable ones is
correct.

Legend: N test records, K classes, R draws of the bootstrap.
"""

import numpy as np

from dpvision.errors import DataError
from dpvision.eval.score import Score, Visibility

_DRAWS = 200
_AT_ONCE = 1 << 22


def multi_label_scores(
    name: str,
    score_NK: np.ndarray,
    target_NK: np.ndarray,
    threshold: float | None,
    how: str,
    visibility: Visibility,
) -> list[Score]:
    """Return mean average precision over the classes present in the set, and the share of correct
    decisions among all N x K.

    Intervals are 95% bootstrap intervals over records, since decisions about one record are
    correlated. Draws repeat records, which raises average precision, so their spread is centred on
    the value of the original records. Chance is the share of positives in those classes (random
    scores), and the accuracy of the best constant decision per class.

    Args:
        score_NK: finite; larger is more likely.
        target_NK: 0 or 1.
        threshold: decision threshold; if None, scores only define an order, and there is no second
            score.
        how: end of the protocol's description.

    Raises:
        DataError: no record has any class.
    """
    num, classes = target_NK.shape
    present = np.flatnonzero(target_NK.any(axis=0))
    if not len(present):
        raise DataError(
            f"evaluate: none of {num} records has any class; expected some to score on. Give a "
            "store with labels."
        )
    rng = np.random.Generator(np.random.PCG64(0))
    weight_RN = np.stack(
        [
            np.ones(num),
            *(np.bincount(rng.integers(0, num, num), minlength=num) for _ in range(_DRAWS)),
        ]
    )
    precision_KR = np.stack(
        [average_precision(score_NK[:, k], target_NK[:, k], weight_RN) for k in present]
    )
    # A draw without positives of a class does not count for that class; a draw without any
    # positives does not count at all.
    seen_KR = ~np.isnan(precision_KR)
    mean_R = (
        np.where(seen_KR, precision_KR, 0).sum(axis=0)[seen_KR.any(axis=0)]
        / seen_KR.sum(axis=0)[seen_KR.any(axis=0)]
    )
    of = f"{classes}" if len(present) == classes else f"{len(present)} of {classes}"
    chance = float(target_NK[:, present].mean())
    found = [
        _score(
            name, mean_R, num, chance, f"mean average precision of {of} classes, {how}", visibility
        )
    ]
    if threshold is not None:
        right_N = ((score_NK > threshold) == target_NK).mean(axis=1)
        share_K = target_NK.mean(axis=0)
        constant = float(np.maximum(share_K, 1 - share_K).mean())
        told = f"share of decisions right, {classes} classes, {how}"
        found.append(_score(name, weight_RN @ right_N / num, num, constant, told, visibility))
    return found


def average_precision(
    score_N: np.ndarray, truth_N: np.ndarray, weight_RN: np.ndarray
) -> np.ndarray:
    """Return the average precision of one class under each of R weightings, float64 (R,); NaN if no
    positive record has weight.

    Equals scikit-learn's ``average_precision_score``, computed for all bootstrap draws (weights
    that count each record) from one sort. Separate sorts would take hours for a thousand classes of
    50,000 records.

    Args:
        truth_N: 0 or 1.
        weight_RN: at least 0.
    """
    order = np.argsort(-score_N, kind="stable")
    score_N, truth_N = score_N[order], truth_N[order].astype(np.float64)
    last_of_equal = np.flatnonzero(np.append(np.diff(score_N) != 0, True))
    found = []
    step = max(1, _AT_ONCE // len(score_N))
    for start in range(0, len(weight_RN), step):
        part_RN = weight_RN[start : start + step, order]
        hits_R = np.cumsum(part_RN * truth_N, axis=1)[:, last_of_equal]
        taken_R = np.cumsum(part_RN, axis=1)[:, last_of_equal]
        precision = np.divide(hits_R, taken_R, out=np.zeros_like(hits_R), where=taken_R > 0)
        gained = np.diff(hits_R, axis=1, prepend=0.0)
        total_R = hits_R[:, -1]
        found.append(
            np.divide(
                (gained * precision).sum(axis=1),
                total_R,
                out=np.full_like(total_R, np.nan),
                where=total_R > 0,
            )
        )
    return np.concatenate(found)


def _score(
    name: str, value_R: np.ndarray, num: int, chance: float, protocol: str, visibility: Visibility
) -> Score:
    """Make a score from the value of the original records (first) and of the bootstrap draws (the
    rest).
    """
    value, drawn = float(value_R[0]), value_R[1:]
    low, high = (value + np.quantile(drawn, (0.025, 0.975)) - drawn.mean()).clip(0, 1).tolist()
    return Score(name, value, min(value, low), max(value, high), num, chance, protocol, visibility)
