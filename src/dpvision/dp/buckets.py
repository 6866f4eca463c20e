"""Which records are summed together: by a public hash of (seed, step, record id), so that one
record moves its own bucket only.

Float sums round. If a batch were cut into slices, removing one record would shift every later slice
and change the rounding of each. Here a record's place follows from its own hash. A bucket is an
interval of hashes; where it holds more records than a pass, or a block of a matrix product more
error than allowed, it is halved at the next bit of the hash. So removing a record changes the sums
that it was in, and may join the two halves of one interval; every other sum has the same records as
before.

Legend: B records.
"""

import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from dpvision.data.keys import StepKey
from dpvision.dp.rounding import BUDGET, gamma

_BITS = 63
_TOP = 31
"""Bits of the hash that choose the bucket."""
_UNITS = 2**16
"""Units of a block's cost in its budget."""
_MOST_COST = 2**24
"""Cost, in budgets, from which a record is alone in its block: that of two is above u 2^24 = 1."""


def hashes(key: StepKey, record_id_B: Tensor) -> Tensor:
    """Public hashes of the records in this step, int64 (B,) in [0, 2^63)."""
    return key.bits(record_id_B, "bucket", 1)[:, 0]


def num_buckets(expected_batch_size: float, physical_batch_size: int, world_size: int = 1) -> int:
    """Return the number of buckets of a step, from public numbers: the one that should need the
    fewest passes.

    A bucket's size is about Poisson, of mean m = expected batch size / buckets; one larger than a
    pass takes two passes. So buckets (1 + P(size > physical batch)) is least, over numbers for
    which m is between half a pass and a whole one.
    """
    share = expected_batch_size / (physical_batch_size * world_size)  # full passes of each rank
    count = world_size * torch.arange(
        max(1, math.ceil(share)), math.ceil(2 * share) + 2, dtype=torch.float64
    )
    too_large = torch.special.gammainc(
        torch.full_like(count, physical_batch_size + 1), expected_batch_size / count
    )
    return min(int(count[(count * (1 + too_large)).argmin()]), 2**_TOP)


def pass_sizes(
    expected_batch_size: float, physical_batch_size: int, steps: int, world_size: int = 1
) -> list[int]:
    """Numbers of rows at which it pays to check a record's bits (``clip.check_bits``), ascending,
    from public numbers.

    A bucket's size is about Poisson, of mean m. Every g-th number within four standard deviations
    of m is checked, in two passes, and a pass is padded by (g - 1) / 2 rows on average; g makes the
    sum of the two costs least.
    """
    count = num_buckets(expected_batch_size, physical_batch_size, world_size)
    mean = expected_batch_size / count
    room = 4 * math.sqrt(mean)
    low, high = max(1, math.floor(mean - room)), min(physical_batch_size, math.ceil(mean + room))
    step = max(1, round(math.sqrt(4 * mean * (high - low) * world_size / (steps * count))))
    return [*range(high, low - 1, -step)][::-1]


def passes(
    key: StepKey,
    record_id: np.ndarray,
    buckets: int,
    physical_batch_size: int,
    rank: int = 0,
    world_size: int = 1,
) -> list[np.ndarray]:
    """Positions of the records of each pass of one process: its buckets in order, inside by hash; a
    bucket too large in several passes.

    Args:
        record_id: int64 ids of the drawn records.
        rank: this process's buckets are those whose number is ``rank`` modulo ``world_size``.
    """
    bits = hashes(key, torch.from_numpy(np.asarray(record_id, dtype=np.int64))).numpy()
    order = np.lexsort((record_id, bits))
    bits = bits[order]
    bucket = ((bits >> (_BITS - _TOP)) * buckets) >> _TOP
    found = []
    edges = [0, *(np.flatnonzero(np.diff(bucket)) + 1).tolist(), len(bits)]
    for start, stop in itertools.pairwise(edges):
        if stop > start and bucket[start] % world_size == rank:
            found += [
                order[part]
                for part in halved(bits, start, stop, lambda a, b: b - a <= physical_batch_size)
            ]
    return found


def blocks(bits_B: np.ndarray, cost_B: np.ndarray, terms: int, max_grad_norm: float) -> list[slice]:
    """Records whose products are summed in float32 before float64 takes over, so that each block's
    proven error is within the budget.

    A block of n records has n T terms to a number, so its error is at most gamma_(n T) times the
    sum of its terms' lengths.

    Args:
        bits_B: hashes in ascending order.
        cost_B: (T + 1) x factor x sum over t of |l_t| |r_t| of every record, over all layers (root
            of the sum of squares), float64.
        terms: T + 1 of the layer with most places T.
    """
    # Integers, so that a block's cost does not depend on the records before it.
    share_B = np.minimum(cost_B / (BUDGET * max_grad_norm), _MOST_COST)
    total = np.concatenate([[0], np.ceil(share_B * _UNITS).astype(np.int64).cumsum()])

    def within(start: int, stop: int) -> bool:
        cost = int(total[stop] - total[start])
        return cost == 0 or block_error(stop - start, terms) * cost <= _UNITS

    return list(halved(bits_B, 0, len(bits_B), within)) if len(bits_B) else []


def block_error(num_records: int, terms: int) -> float:
    """Bound on the error of a block's float32 product, for the sum of its records' ``cost_B``:
    gamma_((n + 1)(T + 1)) / (T + 1), and 2% for the lengths, which are themselves float32 numbers.
    """
    return 1.02 * gamma((num_records + 1) * terms) / terms


def halved(
    bits: np.ndarray, start: int, stop: int, whole: Callable[[int, int], bool], bit: int = _BITS - 1
) -> list[slice]:
    """The largest intervals of hashes, each the half of another, whose records ``whole`` accepts; a
    single record is always accepted.

    Args:
        bits: hashes in ascending order; those from ``start`` to ``stop`` are meant.
    """
    if stop - start <= 1 or whole(start, stop):
        return [slice(start, stop)] if stop > start else []
    if bit < 0:  # the same record twice
        return [slice(i, i + 1) for i in range(start, stop)]
    middle = start + int(np.searchsorted((bits[start:stop] >> bit) & 1, 1))
    return halved(bits, start, middle, whole, bit - 1) + halved(bits, middle, stop, whole, bit - 1)
