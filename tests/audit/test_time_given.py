"""Whether a part of an audit fits the time that is left, on a clock of the test."""

import math

import pytest

from dpvision.audit import time_given
from dpvision.audit.time_given import NotInTime, Pace, TimeGiven


class Clock:
    """A clock that goes by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time_given, "time", made)
    return made


def steps_until_left_out(
    clock: Clock, pace: Pace, step_s: float, total: int, preparing_s: float = 0.0
) -> tuple[int, float | None]:
    """Steps that a part makes, and the time that it is then said to need; None if it finished."""
    clock.now += preparing_s
    for step in range(total):
        clock.now += step_s
        try:
            pace("part", step + 1, total)
        except NotInTime as late:
            return step + 1, late.needed_s
    return total, None


@pytest.mark.parametrize("step_s", [0.01, 0.5, 3.0, 90.0])
def test_a_part_that_cannot_finish_is_left_out_after_its_first_steps(
    clock: Clock, step_s: float
) -> None:
    said: list[str] = []
    pace = Pace(TimeGiven(99 * step_s), said.append, said.append)
    made, needed_s = steps_until_left_out(clock, pace, step_s, 200)
    assert made <= 11 and needed_s == pytest.approx((200 - made) * step_s)


@pytest.mark.parametrize("step_s", [0.01, 0.5, 3.0, 90.0])
def test_a_part_that_fits_is_made_whole_and_its_time_is_said(clock: Clock, step_s: float) -> None:
    stays: list[str] = []
    pace = Pace(TimeGiven(200 * step_s), lambda _: None, stays.append)
    assert steps_until_left_out(clock, pace, step_s, 200) == (200, None)
    (said,) = stays
    assert said.startswith("part: ") and "more by its speed" in said


def test_the_time_of_preparing_is_not_taken_for_that_of_steps(clock: Clock) -> None:
    pace = Pace(TimeGiven(1000), lambda _: None, lambda _: None)
    assert steps_until_left_out(clock, pace, 1.0, 100, preparing_s=500.0) == (100, None)


def test_a_part_that_becomes_slow_ends_with_the_time(clock: Clock) -> None:
    given = TimeGiven(100)
    pace = Pace(given, lambda _: None, lambda _: None)
    for step in range(20):
        clock.now += 1.0
        pace("part", step + 1, 60)
    with pytest.raises(NotInTime):
        for step in range(20, 60):
            clock.now += 7.0
            pace("part", step + 1, 60)
    assert given.left_s == 0


def test_a_part_that_ends_as_the_time_does_is_finished(clock: Clock) -> None:
    pace = Pace(TimeGiven(3.5), lambda _: None, lambda _: None)
    clock.now += 1.0
    pace("part", 1, 2)
    clock.now += 3.0
    pace("part", 2, 2)


def test_each_part_is_measured_by_itself(clock: Clock) -> None:
    stays: list[str] = []
    pace = Pace(TimeGiven(), lambda _: None, stays.append)
    for what, step_s in (("slow", 10.0), ("fast", 0.5)):
        for step in range(20):
            clock.now += step_s
            pace(what, step + 1, 20)
    assert [said.split(" more")[0].split(", ")[1] for said in stays] == ["3 min", "8 s"]


def test_without_a_limit_time_is_never_over(clock: Clock) -> None:
    given = TimeGiven()
    clock.now += 1e9
    assert given.left_s == math.inf
