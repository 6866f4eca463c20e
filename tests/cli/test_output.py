"""Epsilons on the command line: never less than what was executed, never more than a unit of the
fourth digit above.
"""

import numpy as np
import pytest

from dpvision.cli.ledger import _text
from dpvision.cli.output import table
from dpvision.config import PrivacyConfig
from dpvision.privacy.account import StoreAccount
from dpvision.privacy.marks import Cap
from dpvision.privacy.plan import make_plan
from dpvision.privacy.printed import down, up
from dpvision.runs.spent import guarantee_words


def test_a_table_shows_names_as_they_are() -> None:
    shown = table("[b]t[/b]", ("[i]a", "n"), [("[bold]x", 1), ("[/y] :dog:", 2), ("\x1b[31mz", 3)])
    for text in ("[b]t[/b]", "[i]a", "[bold]x", "[/y] :dog:", r"\x1b[31mz"):
        assert text in shown
    assert "\x1b" not in shown


def test_four_digits_are_rounded_to_the_safe_side() -> None:
    for x in 10 ** np.random.default_rng(0).uniform(-4, 5, 2000):
        above, below = float(up(x)), float(down(x))
        assert below <= x * (1 + 1e-12) and x * (1 - 1e-12) <= above
        assert above - below <= 1.001 * 10.0 ** (np.floor(np.log10(x)) - 3)


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (8.0, "8"),
        (7.999820838, "8"),
        (1.00045, "1.001"),
        (0.0, "0"),
        (np.inf, "infinity"),
        (None, "unknown"),
    ],
)
def test_round_numbers_stay_as_they_are(x: float | None, text: str) -> None:
    assert up(x) == text


def test_a_guarantee_in_words_is_no_smaller_than_the_executed_epsilon() -> None:
    """Rounded to the nearest, 1.00045 was printed as 1."""
    plan = make_plan(
        PrivacyConfig(
            dataset_size=1000,
            expected_batch_size=1000,
            sampling="full_batch",
            steps=1,
            noise_multiplier=3.729103,
            delta=1e-5,
        )
    )
    assert plan.epsilon is not None and 1.0004 < plan.epsilon < 1.0005
    assert "epsilon 1.001 " in guarantee_words(plan, plan.epsilon, None, plan.delta)
    account = StoreAccount(
        "s", (), (), 1e-5, plan.epsilon, plan.epsilon, None, Cap(2.0, 1e-5), 0.99955, False, 0
    )
    said = _text(account, {})
    assert (
        "total: epsilon 1.001 at delta 1e-5; 1.001 by a Renyi filter" in said
        and "left: 0.9995" in said
    )
