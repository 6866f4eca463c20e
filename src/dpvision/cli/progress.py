"""Progress of a command on standard error: on a terminal a line that changes, in a log a line from
time to time.
"""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape

from dpvision.errors import OPERATOR_ONLY
from dpvision.privacy.printed import duration, time_left

LINE_EVERY_S = 15.0
"""Time between the lines of a log."""


class ProgressLine:
    """Shows how far a command is; used as a context manager.

    Args:
        private: numbers depend on private images. They are shown on a terminal, marked "operator
            only"; a log, which others may read, gets the share that is done and the time left in
            minutes.
        asked: whether the operator wants the numbers in a log too (--show-confidential).
    """

    def __init__(
        self,
        start: str = "reading",
        *,
        private: bool = False,
        asked: bool = False,
        quiet: bool = False,
    ) -> None:
        self._console = Console(stderr=True, quiet=quiet)
        self._status = self._console.status(start)
        self._numbers = not private or asked or self._console.is_terminal
        self._label = OPERATOR_ONLY if private else ""
        self._what, self._first, self._since = "", 0, 0.0
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._status.stop()

    def say(self, text: str, *, public: bool = False) -> None:
        """Show a text; in a log only if it is ``public``, or where numbers are shown."""
        if public or self._numbers:
            self._show(text)

    def stay(self, text: str) -> None:
        """Print a line that stays."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def count(self, what: str, done: int, total: int | None = None) -> None:
        """Show how many images are done, the rate and the time left.

        The rate is that since the first call with ``what``: images done before do not count in it.
        """
        now = time.monotonic()
        if what != self._what:
            self._what, self._first, self._since = what, done, now
        known = total is not None and done <= total
        rate = (done - self._first) / (now - self._since) if now > self._since else 0.0
        left = (total - done) / rate if total is not None and known and rate > 0 else None
        if self._numbers:
            what = self._label + what
            parts = [f"{done:,} of {total:,} images" if known else f"{done:,} images"]
            if rate > 0:
                parts.append(f"{rate:,.0f} images/s" if rate >= 10 else f"{rate:.1f} images/s")
            if left is not None:
                parts.append(f"{duration(left)} left")
        else:
            parts = [f"{100 * done // max(1, total)}%"] if total is not None and known else []
            if left is not None:
                parts.append(time_left(left))
        self._show(f"{what}: {', '.join(parts) or 'in progress'}")

    def _show(self, text: str) -> None:
        if self._console.is_terminal:
            self._status.update(escape(text))
        elif time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            self.stay(text)
