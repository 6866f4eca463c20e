"""dp-accounting's privacy loss distributions, with its loops over grid points replaced by array operations.

Algorithms and grids are dp-accounting's: connect the dots (Doroshenko et al., arXiv 2207.04380) for one step, a Fourier transform truncated
by Chernoff bounds for many. Figures agree with those of its own code up to rounding (tests/privacy/test_loss_distribution.py), in a tenth
of the time.

Legend: N points of a grid, E epsilons, S shifts.
"""

import math
from functools import cached_property
from typing import Any

import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_mechanism
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution as Distribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType as _Direction
from scipy import fft, special

_DIRECTIONS = (_Direction.REMOVE, _Direction.ADD)
_CHERNOFF_ORDERS = 20
_NEWTON_STEPS = 50
_LEAST_EXPONENT = -700.0


def sampled_gaussian(sample_rate: float, noise_multiplier: float, interval: float) -> Distribution:
    """Distribution of one Poisson-sampled Gaussian step, for removing and for adding a record.

    Args:
        sample_rate: in (0, 1).
        noise_multiplier: more than 0.
        interval: grid of the privacy loss.
    """

    def loss(direction: _Direction) -> privacy_loss_mechanism.MonotonePrivacyLoss:
        return privacy_loss_mechanism.GaussianPrivacyLoss(noise_multiplier, sampling_prob=sample_rate, adjacency_type=direction)

    drawn = np.ones(1), np.full(1, sample_rate)
    return Distribution(*(_one_step(loss(d), *drawn, noise_multiplier, interval, adding=d == _Direction.ADD) for d in _DIRECTIONS))


def mixture_of_gaussians(sensitivities: tuple[float, ...], weights: tuple[float, ...], noise: float, interval: float) -> Distribution:
    """Distribution of one step whose sum moves by ``sensitivities`` with probabilities ``weights``.

    Args:
        sensitivities: 0, and numbers above it, ascending.
        weights: of the same shape; that of 0 is above 0.
        noise: standard deviation, more than 0.
        interval: grid of the privacy loss.
    """

    def loss(direction: _Direction) -> privacy_loss_mechanism.MonotonePrivacyLoss:
        return privacy_loss_mechanism.MixtureGaussianPrivacyLoss(noise, sensitivities, weights, adjacency_type=direction)

    kept = np.asarray(weights)[1:] > 0
    drawn = np.asarray(sensitivities)[1:][kept], np.asarray(weights)[1:][kept]
    return Distribution(*(_one_step(loss(d), *drawn, noise, interval, adding=d == _Direction.ADD) for d in _DIRECTIONS))


def vectorised(made: Distribution) -> Distribution:
    """A distribution that dp-accounting made, with the faster composition and queries."""
    if made._symmetric:
        return Distribution(_Pmf.of(made._pmf_remove))
    return Distribution(_Pmf.of(made._pmf_remove), _Pmf.of(made._pmf_add))


class _Pmf(pld_pmf.DensePLDPmf):
    """Masses on a grid of losses; composition and queries by array operations."""

    @classmethod
    def of(cls, pmf: pld_pmf.PLDPmf) -> "_Pmf":
        dense = pmf.to_dense_pmf()
        return cls(dense._discretization, dense._lower_loss, dense._probs, dense._infinity_mass, dense._pessimistic_estimate)

    @property
    def _loss_N(self) -> np.ndarray:
        return (np.arange(self.size) + self._lower_loss) * self._discretization

    def compose(self, other: Any, tail_mass_truncation: float = 0) -> "_Pmf":
        return _Pmf.of(super().compose(_Pmf.of(other), tail_mass_truncation))

    def self_compose(self, num_times: int, tail_mass_truncation: float = 1e-15) -> "_Pmf":
        if num_times == 1:
            return self
        first, last = _bounds(self._probs, num_times, tail_mass_truncation)
        size = fft.next_fast_len(max(last - first + 1, self.size), real=True)
        period_K = fft.irfft(fft.rfft(self._probs, size) ** num_times, size)
        probs = np.roll(period_K, -first)[: last - first + 1]
        infinite = tail_mass_truncation - math.expm1(num_times * math.log1p(-self._infinity_mass))
        return _Pmf(self._discretization, self._lower_loss * num_times + first, probs, infinite, self._pessimistic_estimate)

    def get_epsilon_for_delta(self, delta: float) -> float:
        if self._infinity_mass > delta:
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

    def get_delta_for_epsilon(self, epsilon: Any) -> Any:
        if np.ndim(epsilon) == 0:
            return super().get_delta_for_epsilon(float(epsilon))
        loss, upper, lower = self._from_the_top
        above = len(loss) - np.searchsorted(loss[::-1], epsilon, side="right")
        return upper[above] - np.exp(epsilon) * lower[above]

    @cached_property
    def _from_the_top(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Losses in falling order; and with none, one, two, ... of them, their mass under the first data set and under the second."""
        loss, mass = self._loss_N[::-1], self._probs[::-1]
        upper, lower = np.empty(len(loss) + 1), np.empty(len(loss) + 1)
        upper[0], lower[0] = self._infinity_mass, 0.0
        np.cumsum(mass, out=upper[1:])
        upper[1:] += self._infinity_mass
        # Far below zero the sums are in use no more; the limit keeps them finite.
        np.cumsum(np.exp(-np.maximum(loss, _LEAST_EXPONENT)) * mass, out=lower[1:])
        return loss, upper, lower


def _one_step(
    loss: privacy_loss_mechanism.MonotonePrivacyLoss,
    shift_S: np.ndarray,
    weight_S: np.ndarray,
    noise: float,
    interval: float,
    *,
    adding: bool,
) -> _Pmf:
    """Masses by connect the dots: second differences of delta, over the interval.

    By symmetry delta(epsilon) = 1 - e^epsilon + e^epsilon delta_other(-epsilon), delta_other that of the other direction. The first part
    is a mass of 1 at zero; what remains is small, and so is its rounding, which differences magnify.
    """
    bounds = loss.connect_dots_bounds()
    first, last = min(0, math.floor(bounds.epsilon_lower / interval)), max(0, math.ceil(bounds.epsilon_upper / interval))
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
    return _Pmf(interval, first, np.maximum(0.0, mass), small[-1], True)


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
