"""When the ranks of a run stop: a signal to one of them reaches all within a second, and so does
the end of torchrun's agent, which would leave ranks that nobody can stop.

Ranks look between passes, without collective calls: a word in the store that they share. What
follows (abandon the step, save) is then decided by all together (``step``, ``loop``).
"""

import contextlib
import time

from dpvision.runs.run import StopRequest
from dpvision.train.distributed import Group

_WORD = "stop"
_LOOK_EVERY_S = 1.0


class Stopping:
    """Whether this rank knows that the run is to stop.

    Args:
        request: the signals to this process.
        finish_s: seconds from then on in which the step in progress may still end.
    """

    def __init__(self, request: StopRequest, group: Group, finish_s: float) -> None:
        self._request, self._group, self._finish_s = request, group, finish_s
        self._since: float | None = None
        self._looked = time.monotonic()

    def asked(self) -> bool:
        """Return whether a rank was asked to stop, and tell the others once."""
        if self._since is None and self._heard():
            self._since = self._request.since or time.monotonic()
            if self._group.store is not None:
                with contextlib.suppress(RuntimeError):  # it ends with the agent of rank 0
                    self._group.store.set(_WORD, "")
        return self._since is not None

    def overdue(self) -> bool:
        """Return whether the step in progress is to be abandoned."""
        if not self.asked():
            return False
        assert self._since is not None
        return time.monotonic() - self._since > self._finish_s

    def _heard(self) -> bool:
        if self._request.asked or self._group.orphaned:
            return True
        now = time.monotonic()
        if self._group.store is None or now - self._looked < _LOOK_EVERY_S:
            return False
        self._looked = now
        try:
            return self._group.store.check([_WORD])
        except RuntimeError:  # whoever held the store has ended
            return True
