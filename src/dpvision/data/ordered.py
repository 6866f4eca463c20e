"""Map a function over items in threads: results in order, a bounded number of items ahead."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def ordered_map(function: Callable[[T], R], items: Iterable[T], *, workers: int, ahead: int) -> Iterator[R]:
    """Yield ``function(item)`` in the order of the items, computed by ``workers`` threads.

    At most ``ahead`` items are taken before their result is requested, so memory stays bounded. An exception of ``function`` or of the
    iterable is raised in place of its result; closing the iterator early cancels the calls that have not begun.
    """
    pool = ThreadPoolExecutor(workers)
    pending: deque[Future[R]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) > ahead:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
