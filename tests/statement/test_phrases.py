"""Numbers in the report's words never flatter the guarantee, and the words follow the plan."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dpvision.privacy import printed
from dpvision.privacy.plan import make_plan
from dpvision.privacy.printed import up
from dpvision.statement import phrases

from .runs import PRIVACY


@given(st.floats(0, 1e6), st.integers(0, 4))
def test_a_rounded_number_is_never_smaller_than_the_number(x: float, digits: int) -> None:
    shown = float(up(x, digits).replace(",", ""))
    assert x - 1e-9 <= shown <= x + 10**-digits


@given(st.floats(0, 1))
def test_a_percentage_is_never_smaller_than_the_share(share: float) -> None:
    shown = float(printed.percent_up(share).rstrip("%")) / 100
    assert share - 1e-9 <= shown <= min(1.0, share + 0.01)


def test_exact_decimals_are_not_rounded_up() -> None:
    assert (up(7.99, 2), up(0.1 + 0.2, 1), printed.percent_up(0.07)) == ("7.99", "0.3", "7.0%")


def test_small_numbers_keep_their_exponent() -> None:
    assert (
        printed.short(1e-5),
        printed.short(2.1385e-9),
        printed.short(0.25),
        printed.short(0.0),
    ) == ("1e-5", "2.14e-9", "0.25", "0")


def test_words_for_a_person_appear_with_a_contribution_bound() -> None:
    plan = make_plan(replace(PRIVACY, max_records_per_unit=3, num_units=20_000))
    assert "At most 3 of a person" in phrases.unit(
        plan, head=False
    ) and "20,000 people" in phrases.unit(plan, head=False)


def test_the_grid_of_the_noise_is_called_a_mitigation_and_not_a_proof() -> None:
    text = phrases.noise_generator(make_plan(PRIVACY))
    assert "ChaCha20" in text and "a mitigation" in text and "not a proof" in text
