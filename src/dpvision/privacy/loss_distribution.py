"""Privacy loss distributions on arrays, in a tenth of dp-accounting's time.

The algorithms are dp-accounting's: connect the dots (Doroshenko et al., arXiv 2207.04380) for one step, a Fourier transform truncated by
Chernoff bounds for many. The figures agree with those of its code up to rounding (tests/privacy/test_loss_distribution.py).

Legend: N points of a grid, E epsilons, S shifts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import fft, special

_TAIL = 1e-15
"""Mass of a composition that may be cut off at either end; it is added to delta."""
_LOG_STEP_TAIL = -50 - math.log(2)
"""Logarithm of the same for one step."""
_CHERNOFF_ORDERS = 20
_NEWTON_STEPS = 50
_LEAST_EXPONENT = -700.0


@dataclass(frozen=True, eq=False)
class Masses:
    """Probabilities of privacy losses on a grid, rounded so that no delta is too small."""

    interval: float
    first: int
    """Index of the first mass: its loss is first x interval."""
    mass_N: np.ndarray
    infinite: float
    """Probability of an infinite loss."""

    @property
    def loss_N(self) -> np.ndarray:
        """float64 (N,): losses of the masses, ascending."""
        return (np.arange(len(self.mass_N)) + self.first) * self.interval

    def compose(self, other: Masses) -> Masses:
        """Masses of the sum of two independent losses; ``other`` is on the same grid."""
        assert self.interval == other.interval
        length = len(self.mass_N) + len(other.mass_N) - 1
        size = fft.next_fast_len(length, real=True)
        mass_N = fft.irfft(fft.rfft(self.mass_N, size) * fft.rfft(other.mass_N, size), size)[:length]
        infinite = self.infinite + other.infinite - self.infinite * other.infinite
        cut = int(np.argmax(np.cumsum(mass_N) > _TAIL / 2))
        end = max(length - int(np.argmax(np.cumsum(mass_N[::-1]) > _TAIL / 2)), cut + 1)
        kept = mass_N[cut:end].copy()
        kept[0] += mass_N[:cut].sum()
        return Masses(self.interval, self.first + other.first + cut, kept, infinite + float(mass_N[end:].sum()))

    def repeat(self, count: int) -> Masses:
        """Masses of the sum of ``count`` independent losses."""
        if count == 1:
            return self
        first, last = _bounds(self.mass_N, count, _TAIL)
        size = fft.next_fast_len(max(last - first + 1, len(self.mass_N)), real=True)
        period_K = fft.irfft(fft.rfft(self.mass_N, size) ** count, size)
        mass_N = np.roll(period_K, -first)[: last - first + 1]
        return Masses(self.interval, self.first * count + first, mass_N, _TAIL - math.expm1(count * math.log1p(-self.infinite)))

    def epsilon(self, delta: float) -> float:
        """Smallest epsilon at ``delta``."""
        if self.infinite > delta:
            return math.inf
        loss, upper, lower = self._from_the_top
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            bound = np.log((upper - delta) / lower)  # epsilon, if only the losses above count
            found = (upper[:-1] > delta) & (lower[:-1] > 0) & (bound[:-1] >= loss)
        vanished = (upper[1:] >= delta) & (lower[1:] == 0)  # exp(-loss) underflows
        k = int(np.argmax(found)) if found.any() else len(loss)
        if vanished[:k].any():
            return max(0.0, float(loss[np.argmax(vanished)]))
        return 0.0 if upper[k] <= lower[k] + delta else float(bound[k])

    def deltas(self, epsilon_E: np.ndarray) -> np.ndarray:
        """Smallest delta at each epsilon, float64 of the same shape."""
        loss, upper, lower = self._from_the_top
        above = len(loss) - np.searchsorted(loss[::-1], epsilon_E, side="right")
        return np.asarray(upper[above] - np.exp(epsilon_E) * lower[above])

    @cached_property
    def _from_the_top(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Losses in falling order; and with none, one, two, ... of them, their mass under the first data set and under the second."""
        loss, mass = self.loss_N[::-1], self.mass_N[::-1]
        upper, lower = np.empty(len(loss) + 1), np.empty(len(loss) + 1)
        upper[0], lower[0] = self.infinite, 0.0
        np.cumsum(mass, out=upper[1:])
        upper[1:] += self.infinite
        # Far below zero the sums are in use no more; the limit keeps them finite.
        np.cumsum(np.exp(-np.maximum(loss, _LEAST_EXPONENT)) * mass, out=lower[1:])
        return loss, upper, lower


@dataclass(frozen=True, eq=False)
class Distribution:
    """Losses of removing a record and of adding one; the larger figure counts."""

    removing: Masses
    adding: Masses

    def compose(self, other: Distribution) -> Distribution:
        """Distribution of both releases together."""
        return Distribution(self.removing.compose(other.removing), self.adding.compose(other.adding))

    def repeat(self, count: int) -> Distribution:
        """Distribution of ``count`` such releases."""
        return Distribution(self.removing.repeat(count), self.adding.repeat(count))

    def epsilon(self, delta: float) -> float:
        """Smallest epsilon at ``delta``, infinite if there is none."""
        return max(self.removing.epsilon(delta), self.adding.epsilon(delta))

    def deltas(self, epsilon_E: np.ndarray) -> np.ndarray:
        """Smallest delta at each epsilon, float64 of the same shape."""
        return np.maximum(self.removing.deltas(epsilon_E), self.adding.deltas(epsilon_E))


def sampled_gaussian(sample_rate: float, noise_multiplier: float, interval: float) -> Distribution:
    """Distribution of one Poisson-sampled Gaussian step.

    Args:
        sample_rate: in (0, 1).
        noise_multiplier: more than 0.
        interval: grid of the privacy loss.
    """
    return _distribution(np.ones(1), np.full(1, sample_rate), noise_multiplier, interval)


def mixture_of_gaussians(shifts: tuple[float, ...], probabilities: tuple[float, ...], noise: float, interval: float) -> Distribution:
    """Distribution of one step whose sum moves by ``shifts`` with these probabilities.

    Args:
        shifts: 0, and numbers above it, ascending.
        probabilities: of the same length; that of 0 is above 0.
        noise: standard deviation, more than 0.
        interval: grid of the privacy loss.
    """
    kept = np.asarray(probabilities)[1:] > 0
    return _distribution(np.asarray(shifts)[1:][kept], np.asarray(probabilities)[1:][kept], noise, interval)


def _distribution(shift_S: np.ndarray, weight_S: np.ndarray, noise: float, interval: float) -> Distribution:
    removing, adding = (_one_step(shift_S, weight_S, noise, interval, adding=adding) for adding in (False, True))
    return Distribution(removing, adding)


def _one_step(shift_S: np.ndarray, weight_S: np.ndarray, noise: float, interval: float, *, adding: bool) -> Masses:
    """Masses by connect the dots: second differences of delta, over the interval.

    By symmetry delta(epsilon) = 1 - e^epsilon + e^epsilon delta_other(-epsilon), delta_other that of the other direction. The first part
    is a mass of 1 at zero; what remains is small, and so is its rounding, which differences magnify.
    """
    least, most = _range(shift_S, weight_S, noise, adding=adding)
    first, last = min(0, math.floor(least / interval)), max(0, math.ceil(most / interval))
    above, below = np.arange(last + 1) * interval, np.arange(-first, 0, -1) * interval
    small = np.concatenate(
        [
            np.exp(-below) * _hockey_stick(below, shift_S, weight_S, noise, adding=not adding),
            _hockey_stick(above, shift_S, weight_S, noise, adding=adding),
        ]
    )
    mass = np.zeros(len(small))
    if len(small) > 1:
        fall, rise = np.diff(small), math.expm1(interval)
        mass[0] = fall[0] / rise
        mass[1:-1] = (fall[1:] - fall[:-1] * math.exp(interval)) / rise
        mass[-1] = fall[-1] / math.expm1(-interval)
    mass[0] -= small[0]
    mass[-first] += 1.0
    return Masses(interval, first, np.maximum(0.0, mass), float(small[-1]))


def _range(shift_S: np.ndarray, weight_S: np.ndarray, noise: float, *, adding: bool) -> tuple[float, float]:
    """Losses between which all but a mass of e^-50 lies. Any other range is valid too: what lies above it counts as infinite, what lies
    below it is rounded up."""

    def loss(t: float) -> float:
        moved = math.log1p(-float(weight_S.sum())), *(np.log(weight_S) + (shift_S * t - shift_S**2 / 2) / noise**2).tolist()
        return float(np.logaddexp.reduce(moved))

    reach = -noise * float(special.ndtri_exp(_LOG_STEP_TAIL))
    if adding:
        return -loss(reach), -loss(-reach)
    low, high = reach, reach + float(shift_S[-1])
    while high - low > 1e-3 * noise:  # where the tail of the moved sum begins
        middle = (low + high) / 2
        tail = float(special.ndtr((shift_S - middle) / noise) @ weight_S)
        low, high = (middle, high) if tail > math.exp(_LOG_STEP_TAIL) else (low, middle)
    return loss(-reach), loss(high)


def _hockey_stick(epsilon_E: np.ndarray, shift_S: np.ndarray, weight_S: np.ndarray, noise: float, *, adding: bool) -> np.ndarray:
    """delta at each epsilon, from 0 on, of a step that moves the sum by shift_S with chances weight_S, else not at all; for one direction.

    The privacy loss of adding is minus that of removing. Of removing, the loss at t is log(w0 + sum of w exp((s t - s^2 / 2) / noise^2)):
    above log(w0), and rising in t. With t where the loss is epsilon,

        delta = sum of w Phi((s - t) / noise) - (e^epsilon - w0) Phi(-t / noise)

    in which the unmoved part, and its rounding, has cancelled; adding is the mirror image, with t where the loss is -epsilon.
    """
    drawn = float(weight_S.sum())
    loss_E = -epsilon_E if adding else epsilon_E
    occurs = loss_E > math.log1p(-drawn)
    loss = loss_E[occurs]
    with np.errstate(divide="ignore"):
        near = np.log(np.maximum(np.expm1(np.minimum(loss, 1.0)) + drawn, 0.0))
        far = loss + np.log1p((drawn - 1) * np.exp(-np.maximum(loss, 1.0)))
    log_sum = np.where(loss > 1, far, near)
    t = _where(log_sum, shift_S, weight_S, noise)
    away_ES = (shift_S - t[:, None]) / noise
    delta_E = np.zeros(len(epsilon_E))
    if adding:
        delta_E[occurs] = np.exp(log_sum - loss + special.log_ndtr(t / noise)) - np.exp(-loss) * (special.ndtr(-away_ES) @ weight_S)
    else:
        delta_E[occurs] = special.ndtr(away_ES) @ weight_S - np.exp(log_sum + special.log_ndtr(-t / noise))
    return np.clip(delta_E, 0.0, 1.0)


def _where(log_sum_E: np.ndarray, shift_S: np.ndarray, weight_S: np.ndarray, noise: float) -> np.ndarray:
    """t at which log(sum of w exp((s t - s^2 / 2) / noise^2)) has these values: convex and rising in t, so Newton's method from a point
    that is too large falls to the root."""
    t_E = np.min(0.5 * shift_S + noise**2 * (log_sum_E[:, None] - np.log(weight_S)) / shift_S, axis=1)
    if len(shift_S) == 1:
        return t_E
    found = np.isfinite(t_E)
    for _ in range(_NEWTON_STEPS):
        t = t_E[found]
        term_ES = np.log(weight_S) + (t[:, None] * shift_S - shift_S**2 / 2) / noise**2
        largest = term_ES.max(axis=1, keepdims=True)
        term_ES = np.exp(term_ES - largest)
        total = term_ES.sum(axis=1)
        step = noise**2 * (np.log(total) + largest[:, 0] - log_sum_E[found]) * total / (term_ES @ shift_S)
        t_E[found] = t - step
        if np.all(np.abs(step) <= 1e-12 * (noise + np.abs(t))):
            break
    return t_E


def _bounds(mass_N: np.ndarray, num_times: int, tail: float) -> tuple[int, int]:
    """Indices of the composed grid outside of which at most ``tail`` lies, by Chernoff's bound."""
    first, last = 0, (len(mass_N) - 1) * num_times
    if tail == 0:
        return first, last
    index = np.arange(len(mass_N)) / len(mass_N)
    for sign in (1.0, -1.0):
        factor, power = np.exp(sign * index), np.ones(len(mass_N))
        for k in range(1, _CHERNOFF_ORDERS + 1):
            power *= factor
            order = sign * k / len(mass_N)
            bound = (num_times * math.log(float(mass_N @ power)) + math.log(2 / tail)) / order
            if sign > 0:
                last = min(last, math.ceil(bound))
            else:
                first = max(first, math.floor(bound))
    return first, last
