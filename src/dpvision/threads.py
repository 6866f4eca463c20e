"""Run independent operations on a CPU at the same time, each on one thread."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def is_traced() -> bool:
    """Return whether torch records operations (``torch.jit.trace``, ``torch.export``, compilation),
    so that the code must not split a batch: the record is to hold for any number of images.
    """
    return torch.jit.is_tracing() or torch.compiler.is_compiling()


@contextmanager
def one_thread() -> Iterator[None]:
    """Run operations on a CPU on one thread: the bits of a product may depend on their number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def map_pieces(function: Callable[[T], R], pieces: Iterable[T], device: torch.device) -> list[R]:
    """Return ``function(piece)`` for every piece, in order.

    On a CPU, ``torch.get_num_threads()`` pieces run at the same time, each on one thread: threads
    that share an operation wait for each other at its end, which costs a small operation more than
    it gains. The bits of a result do not depend on the number of threads. On a GPU the pieces run
    in turn, on the caller's thread.

    Args:
        function: called in other threads, which inherit neither ``torch.no_grad`` nor autocast. It
            sets what it needs, and no two pieces write to the same tensor.
        pieces: at best the largest first.
        device: where the tensors are.

    Raises:
        Exception: of the first piece that failed, once the running pieces have ended.
    """
    pieces, threads = list(pieces), torch.get_num_threads()
    if device.type != "cpu" or threads == 1 or len(pieces) <= 1:
        return [function(piece) for piece in pieces]
    try:
        with ThreadPoolExecutor(
            min(threads, len(pieces)), initializer=partial(torch.set_num_threads, 1)
        ) as pool:
            return list(pool.map(function, pieces))
    finally:
        torch.set_num_threads(threads)
