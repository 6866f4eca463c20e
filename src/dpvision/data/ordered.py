"""Work spread over threads, results in order, a bounded number of items ahead."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def ordered_map(function: Callable[[T], R], items: Iterable[T], *, workers: int, ahead: int) -> Iterator[R]:
    """``function`` of each item, in the order of the items, computed by ``workers`` threads.

    Items are taken from the iterable at most ``ahead`` before their result is asked for, so memory stays bounded. An exception of
    ``function`` or of the iterable comes out where its result would have; leaving the iterator early cancels what has not begun.
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
