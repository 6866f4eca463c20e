"""The stated epsilon agrees with accountants that others wrote: Microsoft's prv-accountant, on
random settings and on the papers' claims, and the table of it that Opacus tests against.
"""

import csv
import sys
from pathlib import Path

import pytest

from dpvision.privacy.claims import CLAIMS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from second_opinion import opinions, sampled_delta, settings, stated  # noqa: E402

CLAIMS_FILE = ROOT.parent / "shared" / "reference" / "privacy_claims.csv"

# noise multiplier: epsilon at delta 1e-6, of Opacus's tests/prv_accountant.py (commit 334b5a8),
# made with prv-accountant: upper bounds with an error of 0.01.
OPACUS = {
    (0.001, 100): (0.270403364, 0.0393694193, 0.0291045370, 0.0215200935),
    (0.05, 100): (6.741051939, 1.953853136, 1.283637380, 0.767933790),
    (0.2, 100): (24.33366418, 8.498977859, 5.672055609, 3.381220512),
    (0.001, 1000): (0.477771266, 0.0998206602, 0.0712187825, 0.0476159309),
    (0.05, 1000): (19.52584280, 6.209969245, 4.172799807, 2.527574326),
    (0.001, 20000): (1.296009258, 0.437005109, 0.305837940, 0.194031031),
    (0.05, 20000): (140.6552098, 38.30661791, 24.42171857, 13.96111470),
    (0.001, 50000): (2.034514808, 0.704218385, 0.491354910, 0.309694162),
    (0.05, 50000): (291.3843254, 73.19017673, 45.23699586, 24.94200564),
    (0.001, 100000): (2.924622119, 1.015288075, 0.706719902, 0.443671721),
}
"""Sample rate and steps: epsilons at the noise multipliers 0.8, 1.5, 2 and 3."""


@pytest.mark.parametrize(("rate", "steps"), OPACUS)
def test_opacus_table(rate: float, steps: int) -> None:
    """Upper bounds, 0.01 and the error in delta above their estimate."""
    for noise, published in zip((0.8, 1.5, 2.0, 3.0), OPACUS[rate, steps], strict=True):
        ours = stated(((noise, rate, steps),), 1e-6)
        assert ours == pytest.approx(published - 0.01, rel=0.01, abs=4e-4), (noise, rate, steps)
        assert published - 0.02 <= ours <= published


def check(count: int, seed: int) -> None:
    for runs, delta in settings(count, seed):
        found = opinions(runs, delta)
        assert found.high - found.low <= 0.02 * found.stated, "the reference is not sharp enough"
        assert found.agree(), (runs, delta, found)


def test_three_accountants_agree_within_one_percent() -> None:
    """benchmarks/second_opinion.py compares 500."""
    check(4, seed=1)


def test_a_setting_that_is_two_percent_off_is_seen() -> None:
    found = opinions(((0.98, 0.02, 300),), 1e-6)
    honest = stated(((1.0, 0.02, 300),), 1e-6)
    assert found.agree() and honest < 0.99 * found.stated and honest < found.low


@pytest.mark.slow
def test_three_accountants_agree_on_more_settings() -> None:
    check(24, seed=1)


@pytest.mark.slow
def test_no_stated_epsilon_is_below_the_lower_bound() -> None:
    for runs, delta in settings(10, seed=2, inside=False):
        found = opinions(runs, delta, 0.05)
        assert min(found.stated, found.second) >= found.low, (runs, delta, found)


@pytest.mark.skipif(not CLAIMS_FILE.exists(), reason="no ../shared/reference")
def test_the_claims_are_those_of_the_collection() -> None:
    """The collection writes delta with five digits."""
    rows = {row["id"]: row for row in csv.DictReader(CLAIMS_FILE.open())}
    assert list(rows) == [claim.name for claim in CLAIMS]
    for claim in CLAIMS:
        row = rows[claim.name]
        assert float(row["dataset_size"]) == claim.dataset_size, claim.name
        assert float(row["expected_batch_size"]) == claim.expected_batch_size, claim.name
        assert float(row["noise_multiplier"]) == claim.noise_multiplier, claim.name
        assert float(row["steps"]) == claim.steps and float(row["delta"]) == claim.delta, claim.name
        assert (claim.claimed_epsilon or 0) == float(row["claimed_epsilon"] or 0), claim.name


@pytest.mark.slow
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_three_accountants_agree_on_every_claim(claim) -> None:
    rate = claim.expected_batch_size / claim.dataset_size
    assert opinions(((claim.noise_multiplier, rate, claim.steps),), claim.delta).agree()


@pytest.mark.parametrize(
    "runs",
    [
        ((2.0, 1.0, 4),),
        ((1.403, 0.0005198, 23), (0.912, 0.1109, 30)),
        ((1.1, 0.02, 60), (2.0, 1.0, 4)),
    ],
)
def test_sampled_losses_give_delta_at_the_stated_epsilon(runs) -> None:
    """prv-accountant is above it by 1.7% in 2 of 500 settings; sampling says that it is wrong."""
    epsilon = stated(runs, 1e-6)
    mean, error = sampled_delta(runs, epsilon, num=20_000)
    assert error < 0.03e-6 and abs(mean - 1e-6) < 5 * error
    less, error = sampled_delta(runs, 0.97 * epsilon, num=20_000)
    assert less - 1e-6 > 5 * error  # sharp enough to see 3% of epsilon
