"""The time that an audit is given: whether a part of it can finish, by the speed of its first
steps.
"""

import math
import time
from collections.abc import Callable

from dpvision.privacy.printed import duration

_MEASURED_S, _MEASURED_STEPS = 2.0, 10
"""A part is measured over so many seconds, or over so many steps if they are faster."""


class NotInTime(Exception):
    """A part of an audit cannot finish in the time that is left.

    Args:
        needed_s: seconds that it needs from here on, by its steps until now; None if not known.
    """

    def __init__(self, needed_s: float | None) -> None:
        super().__init__()
        self.needed_s = needed_s


class TimeGiven:
    """The time that all parts of an audit have together, from now on.

    Args:
        seconds: infinity for no limit.
    """

    def __init__(self, seconds: float = math.inf) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds left, at least 0."""
        return max(0.0, self._end - time.monotonic())


class Pace:
    """Shows how far a part is and how long it will take, and ends it if it cannot finish in time.

    Called as the ``say`` of an audit: after each step, from the first one on, with what is done, a
    number of steps and of how many. The first step that it hears of is not measured: it prepares.

    Args:
        given: the time for this part and those after it.
        show: shows a text in place of the last one.
        stay: shows a text that stays.
    """

    def __init__(
        self, given: TimeGiven, show: Callable[[str], None], stay: Callable[[str], None]
    ) -> None:
        self._given, self._show, self._stay = given, show, stay
        self._what, self._first, self._since, self._measured = "", 0, 0.0, False

    def __call__(self, what: str, done: int, total: int) -> None:
        """Raises NotInTime: the part cannot finish, by its first steps, or the time is over."""
        now = time.monotonic()
        if what != self._what:
            self._what, self._first, self._since, self._measured = what, done, now, False
        steps, took = done - self._first, now - self._since
        left_s = (total - done) * took / steps if steps else None
        first = not self._measured and (took >= _MEASURED_S or steps >= _MEASURED_STEPS)
        self._measured |= first
        if left_s is not None and first and done < total:
            if left_s > self._given.left_s:
                raise NotInTime(left_s)
            self._stay(f"{what}: {done:,} of {total:,} done, {duration(left_s)} more by its speed")
        if done < total and not self._given.left_s:
            raise NotInTime(left_s)
        text = f"{what}: {done:,} of {total:,}"
        self._show(text if left_s is None else f"{text}, {duration(left_s)} left")
