"""Few-shot probes: a linear classifier on frozen features of K pictures per class, repeated over many draws of these pictures.

The cheap companion of ``eval.fine_tune``: nothing is trained but the classifier, so twenty draws take seconds.

Legend: N training records, M test records, D numbers of a feature, C classes, K pictures per class.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dpvision.errors import ConfigError, DataError
from dpvision.eval.probes.linear_probe import fit_linear_probe


@dataclass(frozen=True)
class FewShotSettings:
    """How a few-shot probe draws and what it fits."""

    draws: int = 20
    """Independent draws of the K pictures per class."""
    classifier: Literal["linear", "ridge"] = "linear"

    def __post_init__(self) -> None:
        if not self.draws >= 1:
            raise ConfigError(f"few_shot_probe: draws={self.draws!r}; expected at least 1. Use 20.")


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


def few_shot_probe(
    train_ND: np.ndarray,
    label_N: np.ndarray,
    unit_N: np.ndarray,
    test_MD: np.ndarray,
    k: int,
    settings: FewShotSettings | None = None,
    *,
    names: Sequence[str] | None = None,
) -> list[np.ndarray]:
    """Predicted test labels (M,) of one classifier for each draw; its strength is chosen within the K pictures, by units.

    Draw i of the same labels is the same for every encoder, so that encoders can be compared draw by draw.

    Raises:
        ConfigError, DataError: as ``draw_shots``; too few pictures in all to choose a strength.
    """
    settings = settings or FewShotSettings()
    if settings.classifier == "ridge":
        from dpvision.eval.probes.ridge import fit_ridge as fit
    else:
        fit = fit_linear_probe  # type: ignore[assignment]
    predicted = []
    for draw in range(settings.draws):
        rows = draw_shots(label_N, k, draw, names=names)
        predicted.append(fit(train_ND[rows], label_N[rows], unit_N[rows], seed=draw).predict(test_MD))
    return predicted


def class_name(label: int, names: Sequence[str] | None) -> str:
    """A class as errors print it."""
    return f"{names[label]!r}" if names is not None and 0 <= label < len(names) else f"class {label}"
