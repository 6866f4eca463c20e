"""Draw the records of a logical batch: indices only, from a secret stream.

Every draw is sorted, takes time and memory proportional to the batch (not to the data set), and may
be empty.
"""

import numpy as np

from dpvision.privacy.stream import Key, Stream, subkey


def derive_rng(key: Key, step: int) -> Stream:
    """Return the stream of one step's draw.

    Args:
        key: secret key of this start of the run, from ``stream.new_key``.
        step: number of the step in the ledger, 0 or more.

    Raises:
        PrivacyError: not a key, or not of this process.
    """
    return Stream(subkey(key, "draw", step=step))


def draw_poisson(num_records: int, sample_rate: float, rng: Stream) -> np.ndarray:
    """Sample each of ``num_records`` records independently with probability ``sample_rate``.

    The gaps between heads of independent coins are independent Geometric(sample_rate) numbers, so
    the heads are found by jumping from one to the next.

    Args:
        num_records: 0 or more.
        sample_rate: in (0, 1].

    Returns:
        Sorted int64 indices in [0, num_records), shape (batch,).
    """
    if sample_rate == 1:
        return np.arange(num_records, dtype=np.int64)
    parts = []
    last = -1
    while last < num_records - 1:
        mean = (num_records - 1 - last) * sample_rate
        # Mean + 6 standard deviations: a second round is rare, and only costs time. The cap keeps
        # the sum of a few enormous gaps (tiny rates) inside int64; a capped gap still jumps past
        # the end.
        gaps = rng.gaps(sample_rate, int(mean + 6 * mean**0.5) + 8, num_records + 1)
        index = np.cumsum(gaps, out=gaps)
        index += last
        last = int(index[-1])
        parts.append(index[: np.searchsorted(index, num_records)])
    if not parts:
        return np.empty(0, dtype=np.int64)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def truncate(index: np.ndarray, max_batch_size: int, rng: Stream) -> np.ndarray:
    """Keep at most ``max_batch_size`` of the drawn indices: a uniformly random subset if there are
    more, never the first ones.
    """
    if len(index) <= max_batch_size:
        return index
    return index[rng.subset(len(index), max_batch_size)]
