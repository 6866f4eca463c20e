"""Epsilon for data sets that are several records apart, from the privacy profile of one record.

If M is (x, delta(x))-private for neighbours, then for data sets D_0 and D_k with D_1, ..., D_(k-1)
between them, each the neighbour of the next, and every x >= 0:

    P(M(D_0) in S) <= e^(k x) P(M(D_k) in S) + delta(x) (1 + e^x + ... + e^((k - 1) x)).

By induction: P_0(S) <= e^x P_1(S) + delta(x), and the bound for k - 1 holds for P_1(S). With
delta(x) = 0 this is theorem 2.2 of Dwork and Roth (2014).
"""

import math

import numpy as np

from dpvision.errors import PrivacyError
from dpvision.privacy.accountant import MIN_DELTA, deltas, epsilon
from dpvision.privacy.events import Event

_POINTS = 2000


def epsilon_at_distance(event: Event, delta: float, distance: int) -> float:
    """Upper bound on epsilon of ``event`` at ``delta`` for data sets ``distance`` records apart,
    whether records are added, removed or both; infinite if there is none.

    Args:
        delta: in [1e-14, 1).
        distance: k, 1 or more.

    Raises:
        PrivacyError: the distance is below 1, or as ``accountant.epsilon``.
    """
    if not distance >= 1:
        raise PrivacyError(f"accountant: distance={distance}; expected 1 or more. Use 1.")
    low = epsilon(event, delta)
    if low == math.inf or distance == 1:
        return low
    # delta(x) is resolved to MIN_DELTA, so no larger x can help
    high = -math.log(MIN_DELTA) / (distance - 1)
    for _ in range(2):
        grid = np.linspace(low, high, _POINTS)
        allowed = _allowed(event, grid, delta, distance)
        if not low < high or not allowed.any():
            return math.inf
        first = int(allowed.argmax())
        low, high = float(grid[max(0, first - 1)]), float(grid[first])
        if first == 0:
            break
    return distance * high


def _allowed(event: Event, x_E: np.ndarray, delta: float, distance: int) -> np.ndarray:
    """Return at which x the bound on delta is at most ``delta``, bool (E,)."""
    factor_E = sum(np.exp(i * x_E) for i in range(distance))
    return deltas(event, x_E) * factor_E <= delta
