"""The records of an evaluation: selection for training and test, checks of their labels, few-shot
draws, and epochs of training.

Legend: N records, D feature dimension, C classes, K images per class.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from dpvision.data.keys import StepKey
from dpvision.data.store import Store
from dpvision.errors import ConfigError, DataError

TEST_FRACTION = 0.2
"""Expected share of the units of a single store that is held out for the test."""
_IMPORT = "Import both with the same --label-from and the same class folders."


@dataclass(frozen=True)
class LabelledFeatures:
    """Features of the labelled records of one store, by (encoder's name, feature's name)."""

    features: dict[tuple[str, str], Tensor]
    """float32 (N, D) each."""
    label_N: Tensor
    unit_N: np.ndarray
    """Records of one person have the same number."""
    row_N: np.ndarray | None = None
    """int64 rows of the store; needed for ``any_of``."""


def check_labels(
    train_label_N: Tensor, test_label_N: Tensor, names: Sequence[str] | None = None
) -> None:
    """Raise DataError unless the training labels have two classes or more and include all test
    labels.
    """
    train, test = train_label_N.numpy(), test_label_N.numpy()
    known, asked = set(train.tolist()), set(test.tolist())
    if len(known) < 2:
        only = ", ".join(f"{class_name(label, names)}, {len(train)} images" for label in known)
        raise DataError(
            f"evaluate: {len(known)} class among the training "
            f"labels{f' ({only})' if only else ''}; expected two or more. Add images of another "
            "class."
        )
    if asked - known:
        missing = sorted(asked - known)
        shown = "; ".join(
            f"{class_name(c, names)}: {int((test == c).sum())} test images, 0 to train on"
            for c in missing[:5]
        )
        raise DataError(
            f"evaluate: the test store has labels {missing[:5]} that the training store lacks "
            f"({shown}); expected the same classes. {_IMPORT}"
        )


def evaluation_rows(train_store: Store, test_store: Store | None) -> tuple[np.ndarray, np.ndarray]:
    """Return labelled rows for training and test. A single store is split by units with keyed
    random numbers, as ``data split`` does.

    Raises:
        DataError: a store has no labels, a label has no name, the stores share records or persons,
            or a single store is too small to split.
    """
    train_rows = _labelled_rows(train_store)
    if test_store is None:
        coin_N = StepKey(0, 0).uniform_numpy(units(train_store)[train_rows], "evaluation test", 1)[
            :, 0
        ]
        train_part, test_part = (
            train_rows[coin_N >= TEST_FRACTION],
            train_rows[coin_N < TEST_FRACTION],
        )
        if not len(train_part) or not len(test_part):
            raise DataError(
                f"evaluate: {train_store.path} has {len(train_rows)} labelled records; expected "
                "more. Give a test store."
            )
        return train_part, test_part
    # Two parts of one store are allowed, shared records or persons are not. Ids of different stores
    # are keyed and cannot be compared.
    if train_store.store_id == test_store.store_id:
        shared = len(np.intersect1d(units(train_store), units(test_store)))
        if shared:
            raise DataError(
                f"evaluate: {test_store.path} shares records (or persons: {shared}) with the "
                "training store; expected none. Give only --train, which is then split."
            )
    return train_rows, _labelled_rows(test_store)


def units(store: Store) -> np.ndarray:
    """Return the unit of each record, or its id if it has none: int64 (N,)."""
    return np.where(store.index["unit"] >= 0, store.index["unit"], store.index["id"]).astype(
        np.int64
    )


def _labelled_rows(store: Store) -> np.ndarray:
    if store.multi_label:
        raise DataError(
            f"evaluate: {store.path} has several labels per record; expected one for probes. To "
            "score a multi-label run's own head, drop --train."
        )
    labels = store.labels
    rows = np.flatnonzero(labels >= 0)
    if not len(rows):
        raise DataError(
            f"evaluate: {store.path} has no labels; expected a class for each image. Import it "
            "with --label-from FIELD."
        )
    if store.label_names is not None and labels.max() >= len(store.label_names):
        top, num = int(labels.max()), len(store.label_names)
        raise DataError(
            f"evaluate: {store.path} has label {top} ({int((labels == top).sum())} images) but "
            f"{num} class names; expected labels 0 to {num - 1}. Import the source again."
        )
    return rows


def only(features: LabelledFeatures, name: str) -> LabelledFeatures:
    """Return the features of one encoder."""
    return replace(
        features, features={key: x for key, x in features.features.items() if key[0] == name}
    )


def check_shots(shots: tuple[int, ...]) -> None:
    """Raise ConfigError unless ``shots`` is not empty and each number is at least 1."""
    if not shots or not all(k >= 1 for k in shots):
        raise ConfigError(
            f"evaluate: shots={shots!r}; expected at least 1 image per class. Use 10."
        )


def draws_of(seed: int, draws: int) -> range:
    """Return the numbers of a seed's draws; seeds share none."""
    return range(seed * draws, (seed + 1) * draws)


def draw_shots(
    label_N: np.ndarray, k: int, seed: int, *, names: Sequence[str] | None = None
) -> np.ndarray:
    """Draw K records of each class uniformly without replacement, and return their sorted
    positions.

    Args:
        label_N: int64 labels, at least 0; the classes are those that occur.
        k: records per class.
        names: names of the classes, for the error.

    Raises:
        ConfigError: ``k`` is below 1.
        DataError: a class has fewer than ``k`` records.
    """
    if not k >= 1:
        raise ConfigError(f"few-shot: shots={k!r}; expected at least 1 image per class. Use 10.")
    classes, num_C = np.unique(label_N, return_counts=True)
    if num_C.min() < k:
        small = np.argsort(num_C, kind="stable")[: int((num_C < k).sum())]
        shown = ", ".join(f"{class_name(int(classes[c]), names)} has {num_C[c]}" for c in small[:5])
        more = f" and {len(small) - 5} more" if len(small) > 5 else ""
        raise DataError(
            f"few-shot: shots={k}, but {shown}{more}; expected {k} training images of each "
            f"class. Use --shots {num_C.min()}."
        )
    shuffled = np.random.Generator(np.random.PCG64(seed)).permutation(len(label_N))
    by_class = shuffled[np.argsort(label_N[shuffled], kind="stable")]
    first_C = np.cumsum(num_C) - num_C
    return np.sort(by_class[(first_C[:, None] + np.arange(k)).ravel()])


def class_name(label: int, names: Sequence[str] | None) -> str:
    """Return a class as text for errors."""
    return (
        f"{names[label]!r}" if names is not None and 0 <= label < len(names) else f"class {label}"
    )


def warmup_cosine(step: int, steps: int, warmup: int) -> float:
    """Return the learning-rate factor at ``step`` of ``steps``: linear up to 1, then half a cosine
    towards 0.

    >>> [round(warmup_cosine(t, 4, 2), 3) for t in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """
    if step < warmup:
        return (step + 1) / warmup
    return (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2


@dataclass(frozen=True)
class Epochs:
    """Passes over N records."""

    num_records: int
    batch_size: int
    """Maximum batch size."""
    epochs: int
    warmup_epochs: int
    seed: int
    """Seed of the order."""

    @property
    def batches(self) -> int:
        """Number of batches per epoch."""
        return math.ceil(self.num_records / self.batch_size)

    def order(self, epoch: int) -> np.ndarray:
        """Return a random permutation of the records, int64 (N,)."""
        return np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(
            self.num_records
        )

    def level(self, step: int) -> float:
        """Return the learning-rate factor in ``step``, counted over all epochs."""
        return warmup_cosine(step, self.batches * self.epochs, self.warmup_epochs * self.batches)
