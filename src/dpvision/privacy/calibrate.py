"""Target epsilon -> noise multiplier, rounded up, so that the target is never exceeded."""

import math
from collections.abc import Callable

from dpvision.errors import PrivacyError
from dpvision.privacy import accountant, gaussian
from dpvision.privacy.events import Event
from dpvision.privacy.printed import up

MIN_NOISE = 0.01
MAX_NOISE = 1e6


def calibrate(
    event_of: Callable[[float], Event], target_epsilon: float, delta: float, *, unit: bool = False
) -> float:
    """Smallest noise multiplier of five significant digits whose stated epsilon is at most
    ``target_epsilon``.

    A coarse grid, whose epsilon is an upper bound too, finds the neighbourhood; the stated grid
    decides the last digits. The result is at least 0.01.

    Args:
        event_of: noise multiplier -> event of the whole run; epsilon must fall as the noise grows.
        target_epsilon: more than 0.
        delta: in [1e-14, 1).
        unit: whether the event is for a unit of several records (``accountant.unit_epsilon``).

    Raises:
        PrivacyError: even a noise multiplier of 10^6 does not reach the target; the message gives
            the epsilon that it reaches.
    """

    def stated(noise: float) -> float:
        event = event_of(noise)
        return accountant.unit_epsilon(event, delta) if unit else accountant.epsilon(event, delta)

    unit_noise = event_of(1.0).gaussian_noise()
    if unit_noise is not None:
        start = gaussian.noise_for(target_epsilon, delta) / unit_noise
        if start > MAX_NOISE:
            raise _unreachable(target_epsilon, stated(MAX_NOISE))
        if start <= MIN_NOISE:
            return MIN_NOISE
        return _round_up(start, lambda noise: stated(noise) <= target_epsilon)

    def excess(log_noise: float) -> float:
        event = event_of(math.exp(log_noise))
        if unit:
            coarse = accountant.unit_epsilon(event, delta, parts=200)
        else:
            coarse = accountant.epsilon(
                event, delta, 10 * accountant.discretization_interval(event, delta)
            )
        return math.log(max(coarse, 1e-12) / target_epsilon)

    low = high = 0.0
    while high < math.log(MAX_NOISE) and excess(high) > 0:
        low, high = high, min(high + math.log(4), math.log(MAX_NOISE))
    while low > math.log(MIN_NOISE) and excess(low) <= 0:
        low, high = max(low - math.log(2), math.log(MIN_NOISE)), low
    if excess(low) <= 0:
        return MIN_NOISE
    if excess(high) > 0:
        reached = stated(MAX_NOISE)
        if reached > target_epsilon:
            raise _unreachable(target_epsilon, reached)
        root = high
    else:
        from scipy import optimize

        root = optimize.brentq(excess, low, high, xtol=1e-5)
    return _round_up(math.exp(root), lambda noise: stated(noise) <= target_epsilon)


def _round_up(start: float, enough: Callable[[float], bool]) -> float:
    """Smallest decimal of five significant digits (at ``start``'s scale) that is enough, found by
    galloping from ``start``.
    """
    exponent = math.floor(math.log10(start)) - 4

    def noise(mantissa: int) -> float:
        return float(f"{mantissa}e{exponent}")

    good = math.ceil(start / 10.0**exponent)
    step = 1
    if enough(noise(good)):
        while good - step > 0 and enough(noise(good - step)):
            good, step = good - step, 2 * step
        bad = max(good - step, 0)
    else:
        bad, good = good, good + 1
        while not enough(noise(good)):
            step *= 2
            bad, good = good, good + step
    while good - bad > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if enough(noise(middle)) else (good, middle)
    return noise(good)


def _unreachable(target_epsilon: float, reached: float) -> PrivacyError:
    return PrivacyError(
        f"privacy: target_epsilon={target_epsilon}; expected at least {up(reached)}, which "
        f"noise_multiplier={MAX_NOISE:.0e} reaches. Raise the target or delta, or plan fewer "
        "steps or a smaller batch."
    )
