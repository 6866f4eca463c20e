"""Whether a batch that is released may be the one that was drawn for its step."""

import math
from typing import NamedTuple

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
        self._state = _State()
        self._sizes: dict[int, tuple[int, int]] = {}
        """Records drawn and records released of a batch, by its number, from ``oldest`` on."""

    @property
    def shared(self) -> int:
        """Records that pairs of batches share, in all."""
        return self._state.shared

    @property
    def expected(self) -> float:
        """The least that they share on average."""
        return self._state.expected

    def fit(self, drawn: np.ndarray, released: np.ndarray, most: float) -> bool:
        """Return whether a batch, int64 positions and int64 ids, may be that of its draw from at
        most ``most`` records, and remember it if so.
        """
        state, missing = self._state, len(drawn) - len(released)
        if missing < 0:
            return False
        if not len(drawn):
            return True
        span = state.oldest, state.end
        shared, seen = _find(state.released, released, span)
        shared_of_draw, seen_of_draw = _find(state.drawn, drawn, span)
        if (seen > seen_of_draw[missing:]).any() or (shared > shared_of_draw).any():
            return False
        fewer = shared_of_draw - missing - shared
        for batch in (fewer > 0).nonzero()[0]:
            num_drawn, num_released = self._sizes[state.oldest + int(batch)]
            if fewer[batch] > num_drawn - num_released:
                return False
        in_all = state.shared + int(shared.sum())
        expected = state.expected + len(released) * state.num_released / most
        if in_all < expected - _DEVIATIONS * math.sqrt(expected):
            return False
        self._remember(drawn, released, state._replace(shared=in_all, expected=expected))
        return True

    def _remember(self, drawn: np.ndarray, released: np.ndarray, state: "_State") -> None:
        """All or nothing: what fails leaves the state as it was."""
        num_drawn = state.num_drawn + len(drawn)
        num_released = state.num_released + len(released)
        oldest, end = state.oldest, state.end
        while oldest < end and num_drawn > _REMEMBERED:
            num_drawn -= self._sizes[oldest][0]
            num_released -= self._sizes[oldest][1]
            oldest += 1
        self._sizes[end] = len(drawn), len(released)
        self._state = state._replace(
            oldest=oldest,
            end=end + 1,
            num_drawn=num_drawn,
            num_released=num_released,
            drawn=_with(state.drawn, drawn, end, oldest),
            released=_with(state.released, released, end, oldest),
        )
        for batch in range(state.oldest, oldest):
            del self._sizes[batch]


_Part = tuple[np.ndarray, np.ndarray]
"""Ids in ascending order, and the number of the batch of each; int64."""
_Index = tuple[_Part, _Part]
"""Which batches have an id. The second part is small, so that few ids are moved for a new batch."""


def _find(index: _Index, ids: np.ndarray, span: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return how many of ``ids`` each batch of ``span`` (first, end) has, int64 (end - first,), and
    in how many of these each id is, ascending, int64 (len(ids),). An id given again is in none.
    """
    ordered = np.sort(ids, kind="stable")
    once = ordered[np.r_[np.ones(min(len(ids), 1), dtype=bool), ordered[1:] != ordered[:-1]]]
    shared = np.zeros(span[1] - span[0], dtype=np.int64)
    seen = np.zeros(len(ids), dtype=np.int64)
    for part_ids, part_batches in index:
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


def _with(index: _Index, ids: np.ndarray, batch: int, oldest: int) -> _Index:
    """Return the index with the ids of a batch, and without those of batches before ``oldest``, in
    the end.
    """
    old, new = index
    new = _merged(new, (np.sort(ids, kind="stable"), np.full(len(ids), batch)))
    if len(new[0]) <= _MOVED:
        return old, new
    kept = old[1] >= oldest
    return _merged((old[0][kept], old[1][kept]), new), _NONE


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


class _State(NamedTuple):
    """Of all batches, and of those remembered: ``oldest`` to ``end``."""

    shared: int = 0
    expected: float = 0.0
    oldest: int = 0
    end: int = 0
    num_drawn: int = 0
    num_released: int = 0
    drawn: _Index = _NONE, _NONE
    released: _Index = _NONE, _NONE
