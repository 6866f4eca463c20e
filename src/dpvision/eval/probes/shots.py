"""Draws of K images per class, the same for every encoder and protocol.

Legend: N training records, C classes, K images per class.
"""

from collections.abc import Sequence

import numpy as np

from dpvision.errors import ConfigError, DataError


def check_shots(shots: tuple[int, ...]) -> None:
    """Raise ConfigError unless there are numbers of images per class, each at least 1."""
    if not shots or not all(k >= 1 for k in shots):
        raise ConfigError(f"evaluate: shots={shots!r}; expected at least 1 picture per class. Use 10.")


def draw_shots(label_N: np.ndarray, k: int, seed: int, *, names: Sequence[str] | None = None) -> np.ndarray:
    """Sorted positions of K records of each class, uniformly without replacement.

    Args:
        label_N: int64 labels, 0 and up; the classes are those that occur.
        k: records per class.
        names: of the classes, for the error.

    Raises:
        ConfigError: ``k`` is below 1. DataError: a class has fewer than ``k`` records.
    """
    if not k >= 1:
        raise ConfigError(f"few-shot: shots={k!r}; expected at least 1 picture per class. Use 10.")
    classes, num_C = np.unique(label_N, return_counts=True)
    if num_C.min() < k:
        small = np.argsort(num_C, kind="stable")[: int((num_C < k).sum())]
        shown = ", ".join(f"{class_name(int(classes[c]), names)} has {num_C[c]}" for c in small[:5])
        more = f" and {len(small) - 5} more" if len(small) > 5 else ""
        raise DataError(f"few-shot: shots={k}, but {shown}{more}; expected {k} training pictures of each class. Ask for {num_C.min()}.")
    shuffled = np.random.Generator(np.random.PCG64(seed)).permutation(len(label_N))
    by_class = shuffled[np.argsort(label_N[shuffled], kind="stable")]
    first_C = np.cumsum(num_C) - num_C
    return np.sort(by_class[(first_C[:, None] + np.arange(k)).ravel()])


def class_name(label: int, names: Sequence[str] | None) -> str:
    """A class as errors print it."""
    return f"{names[label]!r}" if names is not None and 0 <= label < len(names) else f"class {label}"
