"""The bounds of a run with canaries: against the best mechanism that a linear program finds for a
few canaries, against simulated mechanisms, and what they say of the right guesses.
"""

import itertools
import math

import numpy as np
import pytest
from scipy import optimize, stats

from dpvision.audit.one_run import epsilon_low_of_plan, level_of, mass_needed, one_run_bound
from dpvision.config import PrivacyConfig
from dpvision.privacy import coin_guesses
from dpvision.privacy.coin_guesses import epsilon_low, guess_counts, right_guesses, tail
from dpvision.privacy.plan import DPPlan, draft_plan


def best_mechanism(num: int, guesses: int, right: int, profile: list[tuple[float, float]]) -> float:
    """Return the largest probability of ``right`` or more right guesses by any function of ``num``
    coins to ``guesses`` guesses that has delta at each epsilon of ``profile``: a linear program
    over all laws of the guesses.
    """
    coins = list(itertools.product((-1, 1), repeat=num))
    made = [t for t in itertools.product((-1, 0, 1), repeat=num) if np.abs(t).sum() == guesses]
    S, T = len(coins), len(made)
    pairs = [
        (a, b) for a in range(S) for b in range(S) if np.not_equal(coins[a], coins[b]).sum() == 1
    ]
    slacks = [(a, b, e, d) for a, b in pairs for e, d in profile]
    width = S * T + len(slacks) * T
    gain = np.zeros(width)
    for s, t in itertools.product(range(S), range(T)):
        hits = sum(x == y for x, y in zip(coins[s], made[t], strict=True))
        gain[s * T + t] = (hits >= right) / S
    rows, limits = [], []
    for k, (a, b, epsilon, delta) in enumerate(slacks):
        base = S * T + k * T
        for t in range(T):  # slack >= M(a, t) - e^epsilon M(b, t)
            row = np.zeros(width)
            row[a * T + t], row[b * T + t], row[base + t] = 1.0, -math.exp(epsilon), -1.0
            rows.append(row)
            limits.append(0.0)
        row = np.zeros(width)
        row[base : base + T] = 1.0
        rows.append(row)
        limits.append(delta)
    sums = np.zeros((S, width))
    for s in range(S):
        sums[s, s * T : (s + 1) * T] = 1.0
    found = optimize.linprog(
        -gain, A_ub=np.array(rows), b_ub=limits, A_eq=sums, b_eq=np.ones(S), method="highs"
    )
    assert found.success
    return -float(found.fun)


@pytest.mark.parametrize(
    ("num", "guesses", "right"), [(1, 1, 1), (2, 2, 2), (2, 2, 1), (3, 3, 3), (3, 3, 2), (3, 2, 2)]
)
@pytest.mark.parametrize("epsilon", [0.3, 1.5])
def test_no_mechanism_guesses_better_than_the_tail(
    num: int, guesses: int, right: int, epsilon: float
) -> None:
    pure = best_mechanism(num, guesses, right, [(epsilon, 0.0)])
    q = math.exp(epsilon) / (1 + math.exp(epsilon))
    # Randomized response is the best mechanism, and the bound is its binomial tail.
    assert pure == pytest.approx(stats.binom.sf(right - 1, guesses, q), abs=1e-7)
    assert tail(num, guesses, right, epsilon, 0.0) == pytest.approx(pure, abs=1e-7)
    approximate = best_mechanism(num, guesses, right, [(epsilon, 0.02)])
    assert approximate > pure + 1e-3
    assert tail(num, guesses, right, epsilon, 0.02) == pytest.approx(approximate, abs=1e-7)


def best_law(num: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """The same for more canaries: over laws P_0 ... P_G of the right guesses only."""
    G, e = guesses, math.exp(epsilon)
    up, down = np.zeros((G, 3 * G + 1)), np.zeros((G, 3 * G + 1))
    for j in range(G):
        up[j, [j, j + 1, G + 1 + j]] = -e * (G - j), j + 1, -1
        down[j, [j, j + 1, 2 * G + 1 + j]] = G - j, -e * (j + 1), -1
    total, gain, budget = np.zeros((3, 3 * G + 1))
    total[: G + 1], gain[right : G + 1], budget[G + 1 :] = 1.0, -1.0, 1.0
    found = optimize.linprog(
        gain,
        A_ub=np.vstack([up, down, budget]),
        b_ub=[*[0.0] * (2 * G), num * delta],
        A_eq=total[None],
        b_eq=[1.0],
        method="highs",
    )
    return -float(found.fun)


def test_the_tail_is_that_of_the_best_law_of_more_canaries() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        num = int(rng.integers(4, 30))
        guesses = int(rng.integers(1, num + 1))
        right = int(rng.integers(1, guesses + 1))
        epsilon, delta = float(rng.uniform(0, 4)), float(10 ** rng.uniform(-5, -2)) / num
        want = best_law(num, guesses, right, epsilon, delta)
        assert tail(num, guesses, right, epsilon, delta) == pytest.approx(want, abs=1e-7)


def published(num: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return the bound of Steinke et al. (arXiv 2305.08846v1), Theorem 5.2 in the form of Corollary
    5.4, with abstentions.
    """
    law = stats.binom(guesses, 1 / (1 + math.exp(-epsilon)))
    below = np.cumsum(law.pmf(np.arange(right - 1, -1, -1)))
    most = (below / np.arange(1, right + 1)).max()
    return float(law.sf(right - 1) + 2 * num * delta * most)


@pytest.mark.parametrize(
    ("num", "guesses", "right", "delta", "printed"),
    [(100, 100, 75, 0.0, 0.702), (100, 100, 75, 1e-4, 0.699), (1000, 100, 75, 1e-4, 0.673)],
)
def test_published_bounds_are_those_that_the_paper_prints(
    num: int, guesses: int, right: int, delta: float, printed: float
) -> None:
    """Appendix D of the paper; ours is no worse at its confidence."""

    def excess(epsilon: float) -> float:
        return published(num, guesses, right, epsilon, delta) - 0.05

    assert optimize.brentq(excess, 0.0, 5.0) == pytest.approx(printed, abs=5e-4)
    assert epsilon_low(num, guesses, right, delta, 0.05) > printed - 6e-4


def test_the_tail_is_no_more_than_the_published_one_where_it_is_small() -> None:
    """Where the tail is large the published one is too small: of two canaries at epsilon 1.5 and
    delta 0.02, a mechanism guesses at least one with a probability of 0.971.
    """
    assert published(2, 2, 1, 1.5, 0.02) < best_mechanism(2, 2, 1, [(1.5, 0.02)]) - 1e-3
    for num, share, epsilon in itertools.product((100, 5000), (0.1, 1.0), (0.5, 2.0, 4.0)):
        guesses = round(share * num)
        right = int(stats.binom.isf(0.01, guesses, 1 / (1 + math.exp(-epsilon)))) + 1
        if right <= guesses:
            args = num, guesses, right, epsilon, 1e-5
            assert tail(*args) <= published(*args) <= 0.2


@pytest.mark.parametrize(
    ("num", "guesses", "right"), [(1, 1, 1), (2, 2, 2), (2, 2, 1), (3, 3, 3), (3, 3, 2), (3, 2, 2)]
)
def test_no_mechanism_with_the_profile_has_the_refuted_tail(
    num: int, guesses: int, right: int
) -> None:
    """The profile is that of Gaussian noise of 1.5; the program has four points of it."""
    epsilon_E = np.array([0.0, 0.4, 0.9, 1.6])
    delta_E = gaussian_profile(epsilon_E, 1.5)
    best = best_mechanism(num, guesses, right, [*zip(epsilon_E, delta_E, strict=True)])
    level = level_of(epsilon_E, delta_E)

    def needed(alarm: float) -> float:
        return mass_needed(level, num, guesses, right, alarm)

    assert needed(best - 1e-6) <= 1.0  # not refuted: this mechanism does it
    if right == guesses:  # elsewhere the recursion is loose for so few canaries
        smallest = optimize.brentq(lambda a: needed(a) - 1.0, best / 2, 1.0)
        assert best - 1e-6 <= smallest <= 1.3 * best
        if num == 1:  # one canary: the bound is the power of the best test
            assert smallest == pytest.approx(best, abs=1e-6)


def gaussian_profile(epsilon_E: np.ndarray, noise: float) -> np.ndarray:
    """delta of one Gaussian release of sensitivity 1 (Balle and Wang 2018, Theorem 8)."""
    a, b = 0.5 / noise, epsilon_E * noise
    return stats.norm.cdf(a - b) - np.exp(epsilon_E) * stats.norm.cdf(-a - b)


def test_without_delta_the_bound_is_the_binomial_tail_inverted() -> None:
    for guesses, right in [(10, 10), (100, 80), (500, 300)]:
        low = stats.beta.ppf(0.01, right, guesses - right + 1)  # Clopper and Pearson
        want = max(0.0, math.log(low / (1 - low)))
        assert epsilon_low(500, guesses, right, 0.0, 0.01) == pytest.approx(want, abs=1e-5)


def test_bounds_of_guesses_that_say_nothing_or_all() -> None:
    assert epsilon_low(500, 500, 250, 1e-5, 0.01) == 0.0
    assert epsilon_low(500, 10, 0, 1e-5, 0.01) == 0.0
    assert 4 < epsilon_low(1000, 1000, 1000, 1e-5, 0.001) < math.log(1000 / math.log(1000)) + 0.1
    assert tail(10, 10, 0, 1.0, 0.0) == 1.0


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_of_randomized_response_the_bound_is_below_epsilon_and_grows_with_the_canaries(
    epsilon: float,
) -> None:
    """300 trials at a false alarm of 0.05: more than 30 have a probability below 2e-4."""
    rng, q = np.random.default_rng(0), 1 / (1 + math.exp(-epsilon))
    means = []
    for num in (50, 300, 2000):
        right, times = np.unique(rng.binomial(num, q, 300), return_counts=True)
        low = np.array([epsilon_low(num, num, int(c), 0.0, 0.05) for c in right])
        assert times[low > epsilon].sum() <= 30
        means.append(float(low @ times) / 300)
    assert means[0] < means[1] < means[2] < epsilon
    assert means[2] > 0.8 * epsilon


@pytest.fixture(scope="module")
def plan() -> DPPlan:
    """One Gaussian release at epsilon 2."""
    return draft_plan(
        PrivacyConfig(
            dataset_size=1000,
            expected_batch_size=1000,
            sampling="full_batch",
            steps=1,
            target_epsilon=2.0,
            delta=1e-5,
        )
    )


def released(plan: DPPlan, num: int, seed: int, noise: float = 1.0) -> tuple[np.ndarray, ...]:
    """Return scores and coins of orthogonal canaries in one release: the plan's mechanism itself,
    by numpy alone.
    """
    rng = np.random.default_rng(seed)
    inside_M = rng.random(num) < 0.5
    return inside_M + noise * plan.noise.multiplier * rng.standard_normal(num), inside_M


def test_the_bounds_of_the_plans_own_mechanism_are_below_its_epsilon(plan: DPPlan) -> None:
    """100 runs: at a false alarm of 1e-3 more than 1 have a probability below 5e-3."""
    counts: dict[tuple[int, int], float] = {}
    alarms = 0
    for seed in range(100):
        score_M, inside_M = released(plan, 800, seed)
        tried = [(g, right_guesses(score_M, inside_M, g)) for g in guess_counts(800)]
        alarms += max(epsilon_low(800, g, c, plan.delta, 2e-4) for g, c in tried) > 2.0
        for g, c in tried:
            counts[g, c] = 0.0
    assert alarms <= 1
    # Of the plan's own curve: only the most guesses right of each number can exceed epsilon.
    most = [(g, max(c for h, c in counts if h == g)) for g in guess_counts(800)]
    together = epsilon_low_of_plan(plan, 800, most, 2e-4)
    # Of several numbers of guesses the best one counts.
    alone = [epsilon_low_of_plan(plan, 800, [pair], 2e-4) for pair in most]
    assert together == pytest.approx(max(alone), abs=2e-3) and 0.1 < together <= 2.0


def test_the_plans_own_curve_gives_more_than_any_mechanisms_bound(plan: DPPlan) -> None:
    found = one_run_bound(*released(plan, 2500, 0), plan)
    assert 0.1 < found["epsilon_low"] < found["epsilon_low_of_plan"] <= 2.0
    assert found["guesses"] in guess_counts(2500) and found["canaries"] == 2500


def test_a_release_without_noise_exceeds_epsilon(plan: DPPlan) -> None:
    found = one_run_bound(*released(plan, 400, 1, noise=0.05), plan)
    assert found["epsilon_low"] > 3 > found["epsilon"]
    assert found["epsilon_low_of_plan"] > found["epsilon"]


def test_the_highest_scores_are_guessed_to_be_inside() -> None:
    score = np.array([5.0, -1.0, 3.0, 0.0, 9.0, 1.0])
    inside = np.array([True, False, False, True, True, False])
    assert [right_guesses(score, inside, g) for g in (2, 4, 6)] == [2, 3, 4]
    assert right_guesses(-score, inside, 6) == 2
    assert guess_counts(500) == [10, 50, 124, 250, 500] and guess_counts(3) == [2]
    assert all(2 <= g <= n and g % 2 == 0 for n in range(2, 60) for g in guess_counts(n))


def test_the_confidence_is_shared_among_the_numbers_of_guesses(
    plan: DPPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One number of guesses, fixed beforehand, gives more than the same among five."""
    scores = released(plan, 400, 2, noise=0.2)
    several = one_run_bound(*scores, plan)
    monkeypatch.setattr(coin_guesses, "_SHARES", (several["guesses"] / 400,))
    alone = one_run_bound(*scores, plan)
    assert alone["guesses"] == several["guesses"]
    assert alone["epsilon_low"] > several["epsilon_low"]
