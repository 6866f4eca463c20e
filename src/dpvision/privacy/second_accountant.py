"""A second accountant, for ``dpvision verify``: epsilon by a privacy loss distribution that shares
no code with dp-accounting.

One step releases a sum that one record (or one person) moves by k clipping norms with probability
weights[k], plus Gaussian noise. Its privacy loss is cut into bins, and each bin is replaced by two
outcomes, at its two ends, with the bin's probabilities under both data sets: a mechanism of which
the true one is a post-processing, so that every figure is an upper bound. The losses of all steps
add up; their law comes from one Fourier transform, tilted exponentially so that the far tail, where
delta lies, is computed with full relative accuracy. What is cut off, above or by the period of the
transform, is bounded (Chernoff) and added to delta.

At tiny rates epsilon comes from one rare step with a large loss, which the rounding of that
transform covers. There (``_of_one_rare_step``) that step is separated from the others, and only its
product with them is transformed.

Legend: N bins of one step; K points of the composed grid.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from scipy import fft, optimize, special, stats

from dpvision.errors import PrivacyError

MIN_DELTA = 1e-14
_CUT = 1e-4
"""Share of delta reserved for the probability that is cut off."""
_IMAGE = 1e-8
_MOST_POINTS = 1 << 22


@dataclass(frozen=True)
class Release:
    """``steps`` releases of one kind."""

    weights: tuple[float, ...]
    """Probability that a record, or the records of one person, move the sum by 0, 1, ... clipping
    norms.
    """
    noise_multiplier: float
    steps: int

    def largest_loss(self, tail: float) -> float:
        """Loss of one step above which less than ``tail`` lies."""
        highest = len(self.weights) - 1 + _far(self.noise_multiplier, tail)
        return float(_loss(np.array([highest]), np.asarray(self.weights), self.noise_multiplier)[0])


def release(sample_rate: float, noise_multiplier: float, steps: int, records: int = 1) -> Release:
    """Describe Poisson-sampled steps, or full batches at rate 1, for one record or for a person of
    ``records`` records.

    Args:
        sample_rate: in (0, 1].
        noise_multiplier: more than 0.
    """
    if sample_rate == 1:  # all steps are one Gaussian
        return Release(
            (0.0, 1.0), noise_multiplier / (records * math.sqrt(max(steps, 1))), min(steps, 1)
        )
    return Release(
        tuple(stats.binom.pmf(np.arange(records + 1), records, sample_rate).tolist()),
        noise_multiplier,
        steps,
    )


def epsilon(releases: Sequence[Release], delta: float) -> float:
    """Upper bound on epsilon at ``delta`` of all releases together, for adding or removing one
    record (person).

    Raises:
        PrivacyError: delta is not in [1e-14, 1).
    """
    if not MIN_DELTA <= delta < 1:
        raise PrivacyError(
            f"second accountant: delta={delta}; expected {MIN_DELTA} to 1. Ask for a larger delta."
        )
    return _epsilon_of_all(tuple(r for r in releases if r.steps), delta)


@lru_cache(maxsize=64)
def _epsilon_of_all(releases: tuple[Release, ...], delta: float) -> float:
    if not releases:
        return 0.0
    if all(r.weights == (0.0, 1.0) for r in releases):
        return gaussian_epsilon(
            math.sqrt(sum(r.steps / r.noise_multiplier**2 for r in releases)), delta
        )
    tail = delta / total_steps(releases)
    width = max(_bin_width(releases), *(2 * r.largest_loss(tail) / _MOST_POINTS for r in releases))
    bounds = []
    for add in (False, True):
        losses = _discretised(releases, width, delta, add)
        rare, tight = _of_one_rare_step(losses, delta)
        bounds.append(rare if tight else min(rare, _epsilon(releases, losses, delta, add)))
    return max(bounds)


def total_steps(releases: Sequence[Release]) -> int:
    """Total number of steps."""
    return sum(r.steps for r in releases)


def gaussian_delta(shift: float, epsilon: float) -> float:
    """delta at ``epsilon`` of one Gaussian whose mean moves by ``shift`` standard deviations (Balle
    and Wang, arXiv 1805.06530).
    """
    high, low = (
        special.log_ndtr(shift / 2 - epsilon / shift),
        epsilon + special.log_ndtr(-shift / 2 - epsilon / shift),
    )
    return math.exp(high) * -math.expm1(min(low - high, 0.0))


def gaussian_epsilon(shift: float, delta: float) -> float:
    """epsilon at ``delta``: the inverse of ``gaussian_delta``, rounded up."""
    if gaussian_delta(shift, 0.0) <= delta:
        return 0.0
    high = shift**2 / 2 + shift * math.sqrt(2 * math.log(1 / delta))  # Chernoff's bound
    found = optimize.brentq(
        lambda e: math.log(max(gaussian_delta(shift, e), 1e-300) / delta),
        0.0,
        high,
        xtol=1e-12,
        rtol=1e-13,
    )
    return float(found) * (1 + 1e-12)


@dataclass(frozen=True)
class _Losses:
    """Discrete privacy losses of one step: probability ``mass_N`` at ``(first + n) * width``, and
    ``infinite`` at infinity.
    """

    first: int
    mass_N: np.ndarray
    infinite: float
    width: float
    steps: int

    @classmethod
    def of(cls, r: Release, width: float, tail: float, add: bool) -> "_Losses":
        """Discretise the losses of one step; ``tail`` is delta per step. ``add``: the record is in
        the second data set, not the first.
        """
        weights, noise = np.asarray(r.weights), r.noise_multiplier
        far = _far(noise, tail)
        low, high = -far, len(weights) - 1 + far
        bottom = max(
            _loss(np.array([low]), weights, noise)[0],
            math.log(weights[0]) if weights[0] > 0 else -math.inf,
        )
        first, last = (
            math.floor(bottom / width) - 1,
            math.ceil(_loss(np.array([high]), weights, noise)[0] / width),
        )
        edge = np.arange(first, last + 1)
        x = np.concatenate(
            [[-math.inf], _where(edge * width, weights, noise, low, high), [math.inf]]
        )
        null = _between(x, 0.0, noise)
        moved = np.sum([w * _between(x, k, noise) for k, w in enumerate(weights)], axis=0)
        # Outer bins first: what lies below the lowest edge and above the highest one.
        p, q = (null, moved) if add else (moved, null)
        ratio = np.exp(
            np.clip(edge[1:] if add else edge[:-1], -690 / width, 690 / width)
            * (-width if add else width)
        )
        shrink = math.exp(-width)
        with np.errstate(invalid="ignore", divide="ignore"):
            lower = p[1:-1] * (q[1:-1] / p[1:-1] * ratio - shrink) / -math.expm1(-width)
        lower = np.clip(np.nan_to_num(lower, nan=0.0), 0.0, p[1:-1])
        lower[np.abs(edge[:-1] * width) > 680] = 0.0
        mass = np.zeros(len(edge))
        if add:  # losses are those of the other direction with the sign changed
            mass[1:] += lower
            mass[:-1] += p[1:-1] - lower
            mass[-1] += p[-1]
            return cls(-last, mass[::-1].copy(), float(p[0]), width, r.steps)
        mass[:-1] += lower
        mass[1:] += p[1:-1] - lower
        mass[0] += p[0]
        return cls(first, mass, float(p[-1]), width, r.steps)

    @cached_property
    def logs(self) -> tuple[np.ndarray, np.ndarray]:
        """Losses and log probabilities, each (N,)."""
        with np.errstate(divide="ignore"):
            return (self.first + np.arange(len(self.mass_N))) * self.width, np.log(self.mass_N)

    def log_moment(self, tilt: float) -> float:
        """log E[exp(tilt x loss)] of one step, the infinite loss left out."""
        return _log_moment(*self.logs, tilt)


def _discretised(
    releases: Sequence[Release], width: float, delta: float, add: bool
) -> list[_Losses]:
    return [_Losses.of(r, width, delta / total_steps(releases), add) for r in releases]


def _log_moment(loss_N: np.ndarray, log_mass_N: np.ndarray, tilt: float) -> float:
    """log of the sum of mass x exp(tilt x loss)."""
    log_N = tilt * loss_N
    log_N += log_mass_N
    largest = float(log_N.max(initial=-math.inf))
    if not math.isfinite(largest):
        return largest
    log_N -= largest
    return largest + math.log(np.exp(log_N, out=log_N).sum())


def _far(noise: float, tail: float) -> float:
    return noise * float(stats.norm.isf(tail * 1e-5))


def _loss(x: np.ndarray, weights: np.ndarray, noise: float) -> np.ndarray:
    """log ratio of the densities of the sum with and without the record, at x; increasing in x."""
    k = np.arange(len(weights))[:, None]
    with np.errstate(divide="ignore"):
        return special.logsumexp(
            np.log(weights)[:, None] + (2 * k * x - k**2) / (2 * noise**2), axis=0
        )


def _where(
    loss: np.ndarray, weights: np.ndarray, noise: float, low: float, high: float
) -> np.ndarray:
    """x at which the loss has these values; minus infinity for values below its minimum."""
    if len(weights) == 2:
        drawn = weights[1]
        odds = np.where(loss < 30, np.expm1(np.minimum(loss, 30.0)) + drawn, 1.0)
        with np.errstate(divide="ignore", invalid="ignore"):
            near = np.where(odds > 0, np.log(np.maximum(odds, 0.0)), -math.inf)
            far = loss + np.log1p(-weights[0] * np.exp(-np.maximum(loss, 30.0)))
        return 0.5 + noise**2 * (np.where(loss < 30, near, far) - math.log(drawn))
    left, right = np.full(len(loss), low - noise), np.full(len(loss), high + noise)
    for _ in range(60):
        middle = (left + right) / 2
        below = _loss(middle, weights, noise) < loss
        left, right = np.where(below, middle, left), np.where(below, right, middle)
    return np.where(
        loss <= (math.log(weights[0]) if weights[0] > 0 else -math.inf), -math.inf, left
    )


def _between(x: np.ndarray, mean: float, noise: float) -> np.ndarray:
    """Probability of a Gaussian between neighbouring points, computed from the smaller tail."""
    z = (x - mean) / noise
    tail = special.ndtr(-np.abs(z))
    left = np.where(z < 0, tail, 1.0 - tail)
    return np.maximum(np.where(z[:-1] < 0, left[1:] - left[:-1], tail[:-1] - tail[1:]), 0.0)


def _bin_width(releases: Sequence[Release]) -> float:
    """A twentieth of the typical step's standard deviation, so that the two ends of a bin add 0.06%
    to the variance; 0.01 at most.
    """
    variance = 0.0
    for r in releases:
        weights, noise = np.asarray(r.weights), r.noise_multiplier
        x = np.linspace(-12 * noise, len(weights) - 1 + 12 * noise, 20_001)
        loss = _loss(x, weights, noise)
        density = np.sum([w * stats.norm.pdf(x, k, noise) for k, w in enumerate(weights)], axis=0)
        density /= density.sum()
        mean = float((density * loss).sum())
        variance += r.steps * float((density * (loss - mean) ** 2).sum())
    return min(0.01, 0.05 * math.sqrt(variance / total_steps(releases)))


def _epsilon(
    releases: Sequence[Release], losses: Sequence[_Losses], delta: float, add: bool
) -> float:
    """Smallest epsilon whose bound on delta is at most ``delta``, for one direction; ``losses`` are
    those of the releases.

    At a low rate and little noise the loss of the rare step with the record is 10^6 times the
    standard deviation of a step. There the bins are wider than ``_bin_width`` asks for, because
    their number is limited; any width gives an upper bound.
    """
    width = losses[0].width
    infinite = math.fsum(loss.steps * loss.infinite for loss in losses)
    wanted = delta - infinite - _CUT * delta

    def log_moment(tilt: float) -> float:
        return math.fsum(loss.steps * loss.log_moment(tilt) for loss in losses)

    def renyi(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        return (log_moment(tilt) - math.log(wanted)) / tilt

    tilt = math.exp(
        optimize.minimize_scalar(
            renyi, bounds=(-9, 18), method="bounded", options={"xatol": 1e-3}
        ).x
    )
    total = log_moment(tilt)
    # The probability outside of [bottom, top] is below _CUT of delta, and so small under the tilted
    # law that its aliases are negligible.
    above = [
        (s, log_moment(s * tilt)) for s in (1.02, 1.05, 1.1, 1.2, 1.4, 1.7, 2.0, 3.0, 5.0, 9.0)
    ]
    top = max(
        min((moment - math.log(_CUT * delta)) / (s * tilt) for s, moment in above),
        min((moment - total - math.log(_IMAGE)) / ((s - 1) * tilt) for s, moment in above),
    )
    below = (0.98, 0.95, 0.9, 0.8, 0.6, 0.3, 0.0, -0.5, -1.0, -3.0)
    bottom = max(
        (math.log(_IMAGE) - log_moment(s * tilt) + total) / ((1 - s) * tilt) for s in below
    )
    first = math.floor(bottom / width) - 1
    points = fft.next_fast_len(max(math.ceil(top / width) - first + 2, 64), real=True)
    if points > _MOST_POINTS:
        return _epsilon(
            releases,
            _discretised(releases, 1.1 * width * points / _MOST_POINTS, delta, add),
            delta,
            add,
        )

    spectrum = np.ones(points // 2 + 1, dtype=np.complex128)
    for loss in losses:
        tilted = np.zeros(points)
        loss_N, log_mass_N = loss.logs
        share = np.exp(tilt * loss_N + log_mass_N - loss.log_moment(tilt))
        np.add.at(tilted, (loss.first + np.arange(len(share))) % points, share)
        spectrum *= fft.rfft(tilted) ** loss.steps
    order = np.arange(first, first + points)
    mass_K = np.maximum(fft.irfft(spectrum, points), 0.0)[order % points]
    loss_K = order * width
    mass_K = mass_K * np.exp(np.minimum(total - tilt * loss_K, 700.0))
    return _smallest(mass_K, loss_K, wanted, renyi(math.log(tilt)))


def _smallest(mass_K: np.ndarray, loss_K: np.ndarray, wanted: float, guess: float) -> float:
    """Smallest epsilon whose delta is at most ``wanted``, rounded up.

    delta(e) = sum over losses l > e of mass (1 - exp(e - l)), from the top down, around ``guess``.
    """
    kept = np.cumsum(mass_K[::-1])[::-1]
    scaled = np.cumsum((mass_K * np.exp(np.clip(guess - loss_K, -700.0, 700.0)))[::-1])[::-1]
    delta_K = kept - scaled * np.exp(np.clip(loss_K - guess, -700.0, 700.0))
    enough = np.flatnonzero(delta_K <= wanted)
    # Start above the last point with too large a delta: the curve decreases, and rounding far below
    # that point does not matter.
    too_much = np.flatnonzero(delta_K[: enough[-1] + 1] > wanted)
    at = int(too_much[-1]) + 1 if len(too_much) else 0
    found = guess + math.log((kept[at] - wanted) / scaled[at]) if kept[at] > wanted else loss_K[at]
    return max(0.0, min(float(found), float(loss_K[at])) * (1 + 1e-9) + 1e-12)


def _of_one_rare_step(losses: Sequence[_Losses], delta: float) -> tuple[float, bool]:
    """Upper bound on epsilon for one direction, and whether it is tight: where epsilon comes from
    one step with a loss above a threshold.

    The threshold is the smallest that two steps exceed with probability at most _CUT x delta.
    Losses are those of no such step, whose sum is bounded (Chernoff) and must stay below epsilon,
    or of one such step and the others, whose law is the product of two spectra.
    """
    width, spare = losses[0].width, _CUT * delta
    start, end = (
        min(loss.first for loss in losses),
        max(loss.first + len(loss.mass_N) for loss in losses),
    )
    above_M = np.zeros(end - start)  # expected number of steps with a loss above each point
    for loss in losses:
        tail = np.cumsum(loss.mass_N[::-1])[::-1] - loss.mass_N
        above_M[: loss.first - start] += loss.steps
        above_M[loss.first - start : loss.first - start + len(tail)] += loss.steps * tail
    threshold = start + int(np.argmax(above_M <= math.sqrt(2 * spare)))
    highest = start + int(np.argmax(above_M <= spare))
    if not threshold < highest:
        return math.inf, False
    parts = []
    for loss in losses:
        order = loss.first + np.arange(len(loss.mass_N))
        rare = (order > threshold) & (order <= highest)
        parts.append(
            (
                order[order <= threshold],
                loss.mass_N[order <= threshold],
                order[rare],
                loss.mass_N[rare],
                loss.steps,
            )
        )

    with np.errstate(divide="ignore"):
        logs = [(width * n, np.log(mass), steps) for n, mass, _, _, steps in parts]

    def log_moment(tilt: float) -> float:
        return math.fsum(
            steps * _log_moment(loss_N, log_mass_N, tilt) for loss_N, log_mass_N, steps in logs
        )

    def chernoff(log_tail: float, sign: int) -> float:
        """Value that the sum of the other steps exceeds (``sign`` 1) or falls below (-1) with this
        probability at most.
        """
        bound = optimize.minimize_scalar(
            lambda log_tilt: (
                (log_moment(sign * math.exp(log_tilt)) - log_tail) / math.exp(log_tilt)
            ),
            bounds=(-9, 18),
            method="bounded",
            options={"xatol": 1e-2},
        )
        return sign * float(bound.fun)

    # What falls below the window returns at its top, where it counts as a larger loss: only what
    # exceeds it is added to delta.
    low, high = (
        chernoff(math.log(_IMAGE), -1),
        chernoff(math.log(spare / above_M[threshold - start]), 1),
    )
    first = threshold + math.floor(low / width)
    points = fft.next_fast_len(max(highest + math.ceil(high / width) - first + 2, 64), real=True)
    if points > _MOST_POINTS:
        return math.inf, False

    def spectrum(order: np.ndarray, mass: np.ndarray) -> np.ndarray:
        placed = np.zeros(points)
        np.add.at(placed, order % points, mass)
        return fft.rfft(placed)

    usual = [(spectrum(n, mass), steps) for n, mass, _, _, steps in parts]
    whole = np.zeros(points // 2 + 1, dtype=np.complex128)
    for i, (_, _, n, mass, steps) in enumerate(parts):
        others = [of ** (count - (i == j)) for j, (of, count) in enumerate(usual)]
        whole += steps * spectrum(n, mass) * np.prod(others, axis=0)
    grid = np.arange(first, first + points)
    mass_K = np.maximum(fft.irfft(whole, points), 0.0)[grid % points]
    wanted = delta - math.fsum(loss.steps * loss.infinite for loss in losses) - 4 * spare
    found, least = (
        _smallest(mass_K, grid * width, wanted, threshold * width),
        chernoff(math.log(spare), 1),
    )
    return max(found, least), least <= found
