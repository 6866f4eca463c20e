"""What tests of duplicates share: a call of a step, records, and the slow way to find the same."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from dpvision.curate.record import AcrossStep, Record
from dpvision.data.sample import Sample


def left_out(
    step: AcrossStep,
    column: np.ndarray,
    alive: np.ndarray | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[int, int]:
    """Row -> twin."""
    alive = np.ones(len(column), dtype=bool) if alive is None else alive
    with tempfile.TemporaryDirectory() as work:
        found = step.duplicates(column, alive, Path(work), progress)
        rows, twins = (np.array(part) for part in found)
    assert rows.dtype == twins.dtype == np.int64 and rows.shape == twins.shape
    assert (np.diff(rows) > 0).all() and (twins < rows).all() and (twins >= 0).all()
    assert alive[rows].all() and alive[twins].all()
    return dict(zip(rows.tolist(), twins.tolist(), strict=True))


def kept(step: AcrossStep, column: np.ndarray) -> list[int]:
    """Rows of the result."""
    return sorted(set(range(len(column))) - set(left_out(step, column)))


def earlier_matches(match_NN: np.ndarray, alive: np.ndarray) -> dict[int, int]:
    """Row -> first earlier row that matches, among those alive, by all pairs."""
    match = np.tril(match_NN, -1) & alive & alive[:, None]
    return {int(i): int(match[i].argmax()) for i in np.flatnonzero(match.any(axis=1))}


def records(files: list[bytes]) -> list[Record]:
    return [Record(Sample(str(k), data, {})) for k, data in enumerate(files)]
