"""Signs of life of ranks that work while others wait for them, through the store that all share.

Rank 0 checks the model of a start, or writes a checkpoint, for minutes. Meanwhile no collective
call is open, whose timeout would end the run: a working rank writes a word every second, and the
others read it, say how long it has taken, and give up a rank that falls silent.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

import torch.distributed as dist

_LOG = logging.getLogger("dpvision")
_EVERY_S = 1.0
SILENT_S = 60.0
"""A rank without a new word for so long has ended or hangs; more than eight times ``_EVERY_S``."""
_MOST_S = 2 * 3600.0
"""A rank that works longer hangs, though its thread lives."""
_SAY_EVERY_S = 30.0
_SAY_AFTER_S = 10.0
_ENDED = "ended"


@contextlib.contextmanager
def signs_of_life(store: dist.Store, name: str, rank: int) -> Iterator[None]:
    """Write a word every second until the block ends, from a thread; the last one if it raises.

    Args:
        name: of the block, another each time; the same on all ranks.
    """
    start, ended = time.monotonic(), threading.Event()

    def write() -> None:
        # The store ends with the process that holds it.
        with contextlib.suppress(RuntimeError):
            while not ended.is_set():
                store.set(_word(name, rank), f"{time.monotonic() - start:.3f}")
                ended.wait(_EVERY_S)

    thread = threading.Thread(target=write, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    except BaseException:
        ended.set()
        thread.join()
        with contextlib.suppress(RuntimeError):
            store.set(_word(name, rank), _ENDED)
        raise
    finally:
        ended.set()
        thread.join()


def wait_for_others(store: dist.Store, name: str, rank: int, num: int, doing: str) -> str | None:
    """Wait until all ``num`` ranks have come so far, and say every half minute which one has not.

    Args:
        name: as for ``signs_of_life``.
        doing: what a rank that works does, as in "rank 0 checks the model".

    Returns:
        None; or which rank ended, was silent for ``SILENT_S``, or is not done after two hours; or
        that the store was silent.

    Raises:
        RuntimeError: the store ended.
    """
    # A call to a store whose host was stopped, or lost its network, does not return.
    returned, failed, answered = [], [], [time.monotonic()]

    def wait() -> None:
        try:
            returned.append(_waited(store, name, rank, num, doing, answered))
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=wait, name="wait for others", daemon=True)
    thread.start()
    looked = time.monotonic()
    while thread.is_alive():
        thread.join(_EVERY_S)
        now = time.monotonic()
        if now - looked > SILENT_S / 4:
            answered[0] = now  # this process was stopped
        looked = now
        if thread.is_alive() and now - answered[0] > SILENT_S:
            return f"the ranks' store ended or hangs: no answer from its host for {SILENT_S:g} s"
    if failed:
        raise failed[0]
    return returned[0]


def _waited(
    store: dist.Store, name: str, rank: int, num: int, doing: str, answered: list[float]
) -> str | None:
    """``wait_for_others``, without an end if the store does not answer; ``answered`` has the time
    of its last answer.
    """
    store.set(_done(name, rank), "")
    others = [other for other in range(num) if other != rank]
    heard: dict[int, tuple[bytes, float]] = {}
    start = looked = time.monotonic()
    say, pause = start + _SAY_AFTER_S, 0.01
    while not store.check([_done(name, other) for other in others]):
        time.sleep(pause)
        pause, now = min(2 * pause, _EVERY_S / 4), time.monotonic()
        answered[0] = now
        if now - looked < _EVERY_S:
            continue
        if now - looked > SILENT_S / 4:
            heard.clear()  # this process was stopped, and perhaps all were
        looked = now
        missing = [other for other in others if not store.check([_done(name, other)])]
        for other in missing:
            known = store.check([_word(name, other)])
            word = store.get(_word(name, other)) if known else b""
            if word == _ENDED.encode():
                return f"rank {other} ended"
            before, since = heard.get(other, (None, now))
            if word != before:
                heard[other] = word, now
            elif now - since > SILENT_S:
                return f"rank {other} ended or hangs: no word from it for {SILENT_S:g} s"
        if missing and now - start > _MOST_S:
            return f"rank {missing[0]} is not done after {_MOST_S:g} s"
        if missing and now >= say and rank == min({rank, *others} - {*missing}):
            say = now + _SAY_EVERY_S
            taken = float(heard[missing[0]][0] or 0)
            _LOG.warning("ranks: rank %d %s: %.0f s so far", missing[0], doing, taken)
    return None


def _word(name: str, rank: int) -> str:
    return f"{name}: word of {rank}"


def _done(name: str, rank: int) -> str:
    return f"{name}: {rank} is done"
