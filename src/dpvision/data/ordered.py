"""Map a function over items in threads or processes, with results in order."""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing.connection import Connection
from types import ModuleType
from typing import TypeVar

from dpvision.environment import own_cores
from dpvision.errors import ConfigError

T = TypeVar("T")
R = TypeVar("R")


def checked_workers(workers: int | None) -> int:
    """Return the number of workers, the cores of this process if None. Raises ConfigError for one
    below 1.
    """
    if workers is not None and not workers >= 1:
        raise ConfigError(f"workers={workers}; expected at least 1. Use 2.")
    return own_cores() if workers is None else workers


def ordered_map(
    function: Callable[[T], R],
    items: Iterable[T],
    *,
    workers: int,
    ahead: int,
    processes: bool = False,
) -> Generator[R, None, None]:
    """Yield ``function(item)`` in the order of the items, from threads or processes.

    At most ``ahead`` items are taken before their result is requested, so memory stays bounded. An
    exception of ``function`` or of the iterable is raised in place of its result; closing the
    iterator early cancels the calls that have not begun, and ends processes that run others.
    Processes are started with the first request, import ``function`` by name but not the program
    that runs, which may lack a guard, and end when this process ends, even if it is killed.

    Raises:
        ConfigError: ``workers`` is below 1.
    """
    checked_workers(workers)
    pending: deque[Future[R]] = deque()
    context = multiprocessing.get_context("spawn")  # a fork would inherit others' locks
    stopped = context.Pipe(duplex=False) if processes else None
    pool: Executor = (
        ProcessPoolExecutor(
            workers,
            mp_context=context,
            initializer=_end_with_parent,
            initargs=(stopped[0],),
        )
        if stopped is not None
        else ThreadPoolExecutor(workers)
    )
    try:
        for item in items:
            with _without_main() if processes else nullcontext():
                pending.append(pool.submit(function, item))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except (GeneratorExit, KeyboardInterrupt):
        if stopped is not None:
            stopped[1].send_bytes(b"\0")  # a call may take hours
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        for end in stopped or ():
            end.close()


@contextmanager
def _without_main() -> Iterator[None]:
    """Hide the program from a process that is started meanwhile: it would run the program again,
    whole unless it is guarded by ``if __name__ == "__main__"``.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _end_with_parent(stopped: Connection) -> None:
    """End this process when its parent ends, when a byte arrives in ``stopped``, and at Ctrl-C,
    about which the parent prints a message. The byte is never read, so that every process sees it.

    Without this, the workers of a killed process would wait for work forever, since each holds both
    ends of the pool's queue. It is a pipe because to set an Event waits for those that wait for it,
    forever for a process that Ctrl-C has ended.
    """
    signal.signal(signal.SIGINT, lambda *_: os._exit(1))
    parent = multiprocessing.parent_process()
    assert parent is not None

    def after(wait: Callable[[], object]) -> None:
        wait()
        os._exit(1)

    for wait in (parent.join, partial(stopped.poll, None)):
        threading.Thread(target=after, args=(wait,), daemon=True).start()
