"""Stop on a signal: SIGINT (Ctrl-C), SIGTERM and SIGUSR1 let the work in progress be finished and
saved; a second SIGINT stops at once.

Charged steps count whether or not they are saved, so stopping at once has a cost, which is printed.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """A context in which signals only set ``asked``. Does nothing outside of the main thread.

    A second SIGINT raises KeyboardInterrupt in the block, and the number of lost steps is printed
    to standard error.

    Args:
        doing: the work that is finished first, for the message on standard error.
        lost: returns the number of steps charged and not saved; 0 on ranks without a ledger.
    """

    def __init__(self, doing: str, lost: Callable[[], int]) -> None:
        self._doing, self._lost = doing, lost
        self._asked = threading.Event()
        self._interrupted = False
        self._before: dict[int, object] = {}

    @property
    def asked(self) -> bool:
        """bool: whether a signal arrived."""
        return self._asked.is_set()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in _SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        if kind is not None and issubclass(kind, KeyboardInterrupt) and (lost := self._lost()):
            print(
                "\n"
                f"Stopped at once: {lost} charged steps were not saved and are lost. They count "
                "in epsilon.",
                file=sys.stderr,
            )

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._interrupted:
            raise KeyboardInterrupt
        self._interrupted |= number == signal.SIGINT
        self._asked.set()
        again = (
            "; Ctrl-C again stops at once and loses what is not saved"
            if number == signal.SIGINT
            else ""
        )
        os.write(2, f"\n{self._doing}{again}\n".encode())
