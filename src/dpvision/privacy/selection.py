"""Private selection: release the best of K runs, where K is random and secret.

Each run draws a setting uniformly from a public list, trains with it, and computes a noisy score.
The run with the highest score is released with its setting and its score; the other runs and K stay
secret. Liu and Talwar (arXiv 1811.07971) showed that this costs a small multiple of one run, which
does not hold if K is known or depends on the scores. The bounds are those of Papernot and Steinke
(arXiv 2110.03620), theorems 2 and 6, as in dp-accounting's RepeatAndSelectDpEvent: Renyi only.
"""

import decimal
import functools
import math
from dataclasses import dataclass
from decimal import Decimal

from dpvision.errors import ConfigError
from dpvision.privacy.events import Composed, Event, Gaussian, Selected
from dpvision.privacy.stream import Stream

_DIGITS = 50
MOST_RUNS = 10_000.0
SCORE_SHARE = 0.1
"""Share of a run's budget spent on its score: noise in the weights nearly always affects the choice
more than noise in the score.
"""


@dataclass(frozen=True)
class Selection:
    """Number of runs, releases of each, and noise of its score. Part of a ``DPPlan``, whose one
    step is the whole selection.
    """

    mean_runs: float
    """E[K]; public, more than 1."""
    shape: float | None
    """If None, K is Poisson, and may be 0: then nothing is released. Else K is truncated negative
    binomial of this shape, at least 1, with longer tails: 1 is geometric, 0 logarithmic.
    """
    steps: int
    """Releases of one run, without its score."""
    score_noise_ratio: float
    """Noise multiplier of the score / noise multiplier of a step."""

    def __post_init__(self) -> None:
        if not 1 < self.mean_runs <= MOST_RUNS:
            raise ConfigError(
                f"selection: mean_runs={self.mean_runs}; expected more than 1, at most "
                f"{MOST_RUNS:g}. Use 10."
            )
        if self.shape is not None and not 0 <= self.shape <= 100:
            raise ConfigError(
                f"selection: shape={self.shape}; expected 0 to 100, or None for Poisson. Use 1 "
                "for a geometric number of runs."
            )
        if not self.steps >= 1:
            raise ConfigError(
                f"selection: steps={self.steps}; expected at least 1 in each run. Plan one step "
                "or more."
            )
        if not 0 < self.score_noise_ratio < math.inf:
            raise ConfigError(
                f"selection: score_noise_ratio={self.score_noise_ratio}; expected a positive "
                "number. Use score_noise_ratio()."
            )

    def event(self, run: Event, noise_multiplier: float, records: int = 1) -> Event:
        """Event of the whole selection.

        Args:
            run: event of the ``steps`` releases of one run.
            noise_multiplier: noise multiplier of a step.
            records: records of the unit that the event is for; each changes the score's count by at
                most one.
        """
        score = Gaussian(self.score_noise_ratio * noise_multiplier / records)
        shape = math.inf if self.shape is None else self.shape
        return Selected(Composed((run, score)), self.mean_runs, shape)

    def draw_runs(self, rng: Stream) -> int:
        """Draw K, which is secret: do not print, write or time anything that depends on it.

        By inversion of the law in 50 decimal digits, at a uniform number of 128 bits.

        Args:
            rng: stream of a fresh secret key (``stream.subkey``).
        """
        high, low = map(int, rng.words(2))
        with decimal.localcontext(prec=_DIGITS):
            return self.runs_at((2 * (high << 64 | low) + 1) / Decimal(2**129))

    def runs_at(self, uniform: Decimal) -> int:
        """The smallest k with P(K <= k) > ``uniform``, which is in (0, 1), in the precision of the
        decimal context.
        """
        mean = Decimal(self.mean_runs)
        if self.shape is None:
            runs, share = 0, (-mean).exp()
        else:
            gamma, shape = (
                Decimal(success_probability(self.mean_runs, self.shape)),
                Decimal(self.shape),
            )
            runs = 1
            none = gamma**shape
            share = (
                (1 - gamma) / -gamma.ln() if shape == 0 else shape * (1 - gamma) * none / (1 - none)
            )
        below = share
        while below <= uniform:
            share *= (
                mean / (runs + 1)
                if self.shape is None
                else (1 - gamma) * (runs + shape) / (runs + 1)
            )
            runs += 1
            below += share
        return runs


@functools.cache
def success_probability(mean_runs: float, shape: float) -> float:
    """gamma of the truncated negative binomial with this mean: P(K = k) proportional to (1 -
    gamma)^k times the product over j < k of (j + shape) / (j + 1).

    Rounded up by 1e-11: the law that is drawn has no larger mean, and no smaller gamma, than the
    one that is accounted for.
    """

    from scipy import optimize

    def excess(log_gamma: float) -> float:
        return _mean(log_gamma, shape) - mean_runs

    low = -1.0
    while excess(low) < 0:
        low *= 2
    root = optimize.brentq(excess, low, -1e-12, xtol=1e-15, rtol=1e-14)
    return min(1.0, math.exp(root) * (1 + 1e-11))


def _mean(log_gamma: float, shape: float) -> float:
    odds = math.expm1(-log_gamma)  # 1 / gamma - 1
    return odds / -log_gamma if shape == 0 else shape * odds / -math.expm1(shape * log_gamma)


def score_noise_ratio(steps: int, sample_rate: float = 1.0, share: float = SCORE_SHARE) -> float:
    """The ratio at which the score gets ``share`` of a run's precision (1 / noise^2, added up over
    its releases; sampling counts as q^2).

    This only divides the budget; the cost follows from the event.

    Args:
        share: strictly between 0 and 1.
    """
    if not 0 < share < 1:
        raise ConfigError(
            f"selection: score_share={share}; expected strictly between 0 and 1. Use {SCORE_SHARE}."
        )
    return math.sqrt((1 - share) / (share * steps)) / sample_rate
