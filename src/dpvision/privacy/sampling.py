"""Which records are in a logical batch: indices only, drawn from a secret generator.

Every draw is sorted, takes time and memory proportional to the batch (not to the data set), and may be empty.
"""

import hashlib

import numpy as np


def derive_rng(key: bytes, step: int) -> np.random.Generator:
    """Generator of one step's draw, derived from the secret run key: ``blake2b(key, step, "draw")`` seeds all 128 bits of Philox.

    Args:
        key: secret bytes of this start of the run, at least 16 (guarantee.md, rule 4: from the operating system, never written).
        step: number of the step in the ledger, 0 or more.
    """
    if not 16 <= len(key) <= 64:
        raise ValueError(f"derive_rng: key of {len(key)} bytes; expected 16 to 64. Use os.urandom(32).")
    digest = hashlib.blake2b(f"draw {step}".encode(), key=key, digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def draw_poisson(num_records: int, sample_rate: float, rng: np.random.Generator) -> np.ndarray:
    """Each of ``num_records`` records by its own coin of probability ``sample_rate``.

    The gaps between heads of independent coins are independent Geometric(sample_rate) numbers, so the heads are found by
    jumping from one to the next.

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
        # Mean + 6 standard deviations: a second round is rare, and only costs time. The cap keeps the sum of a few enormous
        # gaps (tiny rates) inside int64; whatever jumps past the end is past the end.
        gaps = rng.geometric(sample_rate, size=int(mean + 6 * mean**0.5) + 8)
        np.minimum(gaps, num_records + 1, out=gaps)
        index = np.cumsum(gaps, out=gaps)
        index += last
        last = int(index[-1])
        parts.append(index[: np.searchsorted(index, num_records)])
    if not parts:
        return np.empty(0, dtype=np.int64)
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def truncate(index: np.ndarray, max_batch_size: int, rng: np.random.Generator) -> np.ndarray:
    """At most ``max_batch_size`` of the drawn indices: a uniformly random subset where there are more, never the sorted tail."""
    if len(index) <= max_batch_size:
        return index
    return np.sort(rng.choice(index, size=max_batch_size, replace=False, shuffle=False))
