"""Whether a batch that is released may be the one that was drawn for its step."""

import math

import numpy as np


class Batches:
    """The last steps' draws and releases.

    A plan draws positions and a sum has ids, and which id a position has is the data set's to know.
    But a record has one id: two batches share as many ids as their draws share positions, or fewer
    where records could not be read or are those of another process, by at most as many as are
    missing. Sums of other records than those drawn share more (the first ones, fixed batches in
    turn) or fewer (one epoch in batches, each record once). And the records of a batch were
    in no more earlier batches than those of its draw, the most frequent compared with the most
    frequent: one record in every sum (alone, or in place of another) was in more.

    Nor are the records missing those of earlier batches: two samples of a and b from at most n
    records share ab / n or more on average, with at most this variance, and pairs of batches are
    uncorrelated. In all, they share at most 7 standard deviations less: batches in turn share none.

    The time of a step grows with its own batch and with what it shares with earlier ones, and only
    a little with the number of these.
    """

    def __init__(self) -> None:
        self._next = 0
        self._sizes: dict[int, tuple[int, int]] = {}
        """Of the batches remembered, by number, oldest first: records drawn, records released."""
        self._num_drawn, self._num_released = 0, 0
        self._drawn, self._released = _Index(), _Index()
        self.shared, self.expected = 0, 0.0
        """Records that pairs of batches share, in all, and the least on average."""

    def fit(self, drawn: np.ndarray, released: np.ndarray, most: float) -> bool:
        """Return whether a batch may be that of its draw from at most ``most`` records, and
        remember it if so.
        """
        missing = len(drawn) - len(released)
        if missing < 0:
            return False
        if not len(drawn):
            return True
        oldest = next(iter(self._sizes), self._next)
        span = oldest, self._next
        shared, seen = self._released.find(released, span)
        shared_of_draw, seen_of_draw = self._drawn.find(drawn, span)
        if (seen > seen_of_draw[missing:]).any() or (shared > shared_of_draw).any():
            return False
        fewer = shared_of_draw - missing - shared
        for batch in (fewer > 0).nonzero()[0]:
            num_drawn, num_released = self._sizes[oldest + int(batch)]
            if fewer[batch] > num_drawn - num_released:
                return False
        in_all = self.shared + int(shared.sum())
        expected = self.expected + len(released) * self._num_released / most
        if in_all < expected - _DEVIATIONS * math.sqrt(expected):
            return False
        self.shared, self.expected = in_all, expected
        self._remember(drawn, released)
        return True

    def _remember(self, drawn: np.ndarray, released: np.ndarray) -> None:
        self._sizes[self._next] = len(drawn), len(released)
        self._num_drawn += len(drawn)
        self._num_released += len(released)
        while len(self._sizes) > 1 and self._num_drawn > _REMEMBERED:
            num_drawn, num_released = self._sizes.pop(next(iter(self._sizes)))
            self._num_drawn -= num_drawn
            self._num_released -= num_released
        oldest = next(iter(self._sizes))
        self._drawn.add(drawn, self._next, oldest)
        self._released.add(released, self._next, oldest)
        self._next += 1


class _Index:
    """Which batches have an id: ``parts`` of ids, ascending, and of the batch of each; the last
    part is small, so that few ids are moved for a new batch.
    """

    def __init__(self) -> None:
        self._parts = _NONE, _NONE

    def find(self, ids: np.ndarray, span: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        """Return how many of ``ids`` each batch of ``span`` (first, end) has, int64 (end - first,),
        and in how many of these each id is, ascending, int64 (len(ids),). An id given again is in
        none.
        """
        ordered = np.sort(ids, kind="stable")
        once = ordered[np.diff(ordered, prepend=ordered[:1] - 1) != 0]
        shared = np.zeros(span[1] - span[0], dtype=np.int64)
        seen = np.zeros(len(ids), dtype=np.int64)
        for part_ids, part_batches in self._parts:
            first = np.searchsorted(part_ids, once)
            num = np.searchsorted(part_ids, once, side="right") - first
            end = np.cumsum(num)
            at = np.arange(num.sum()) + np.repeat(first - end + num, num)
            batches = part_batches[at] - span[0]
            kept = batches >= 0
            shared += np.bincount(batches[kept], minlength=len(shared))
            number = np.repeat(np.arange(len(once)), num)
            seen += np.bincount(number[kept], minlength=len(seen))
        return shared, np.sort(seen)

    def add(self, ids: np.ndarray, batch: int, oldest: int) -> None:
        """Add the ids of a batch, and forget those of batches before ``oldest``."""
        old, new = self._parts
        new = _merged(new, (np.sort(ids, kind="stable"), np.full(len(ids), batch)))
        if len(new[0]) > _MOVED:
            kept = old[1] >= oldest
            old, new = _merged((old[0][kept], old[1][kept]), new), _NONE
        self._parts = old, new


_Part = tuple[np.ndarray, np.ndarray]
"""Ids in ascending order, and the number of the batch of each; int64."""


def _merged(old: _Part, new: _Part) -> _Part:
    ids = np.concatenate([old[0], new[0]])
    order = np.argsort(ids, kind="stable")  # linear for two parts in order
    return ids[order], np.concatenate([old[1], new[1]])[order]


_NONE: _Part = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
_MOVED = 2**12
"""Ids of the small part of an index."""
_REMEMBERED = 2**18
"""Records of earlier steps that a batch is compared with; at least those of one step."""
_DEVIATIONS = 7
"""By which records shared in all may fall short of their average: chance is below 1e-10."""
