"""Several labels a record: a set of classes for each, which may be empty. Equal sets are stored once.

    labels.npy    int32: of each set the number of its classes, then the classes, ascending; memory-mapped
    index.npy     the column ``label`` is the place of the record's set in labels.npy, -1 where the record has no answer

An empty set is an answer, "none of them"; no set is none.

Legend: B records, M labels of all of them, K classes.
"""

from pathlib import Path

import numpy as np

from dpvision.errors import DataError

LABELS_FILE = "labels.npy"
NOT_KNOWN = 255
"""What ``zero_one`` has in every class of a record without a set, or with a class out of range: no target, so that it takes no part."""
_MOST_NUMBERS = 1 << 31  # the index has 32 bits for a place
_REMEDY = "Import the source again, or restore the file."


class LabelSets:
    """The sets of a store, by their places in ``flat``, which is what labels.npy holds."""

    def __init__(self, flat: np.ndarray) -> None:
        self.flat = flat

    @classmethod
    def open(cls, path: Path, num_bytes: int) -> "LabelSets":
        """Sets of a file. Raises DataError when it is not there, is no such file, or has not ``num_bytes`` bytes."""
        try:
            found = path.stat().st_size
            flat = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"store: {path}: {error}; expected the labels of the store. {_REMEDY}") from None
        if found != num_bytes or flat.dtype != np.dtype("<i4") or flat.ndim != 1:
            got = f"{flat.dtype}{list(flat.shape)} in {found} bytes"
            raise DataError(f"store: {path}: {got}; expected a list of int32 in {num_bytes}, as when it was imported. {_REMEDY}")
        return cls(flat)

    def check(self, place_B: np.ndarray) -> None:
        """Refuse places at which no set lies. Raises DataError."""
        place = np.unique(place_B[place_B >= 0])
        inside = place < len(self.flat)
        if inside.all():
            count = self.flat[place].astype(np.int64)
            inside = (count >= 0) & (place + count < len(self.flat))
        if not inside.all() or (place_B < -1).any():
            raise DataError(f"store: the index names labels that {LABELS_FILE} does not have; expected the files of one import. {_REMEDY}")

    def listed(self, place_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All labels of records whose sets are at ``place_B``: which record (0 ... B - 1) and which class, int64 (M,) each, in order."""
        place_B = place_B.astype(np.int64)
        count_B = np.where(place_B >= 0, self.flat[place_B], 0).astype(np.int64) if len(self.flat) else np.zeros_like(place_B)
        record_M = np.repeat(np.arange(len(place_B)), count_B)
        within_M = np.arange(len(record_M)) - (np.cumsum(count_B) - count_B)[record_M]
        return record_M, self.flat[place_B[record_M] + 1 + within_M].astype(np.int64)


def zero_one(record_M: np.ndarray, class_M: np.ndarray, known_B: np.ndarray, num_classes: int) -> np.ndarray:
    """uint8 (B, K): 1 for each class of a record, 0 elsewhere; ``NOT_KNOWN`` throughout for a record that ``known_B`` denies or that has a
    class outside 0 ... K - 1.

    Args:
        record_M, class_M: as ``LabelSets.listed`` gives them.
    """
    target_BK = np.zeros((len(known_B), num_classes), dtype=np.uint8)
    inside_M = (class_M >= 0) & (class_M < num_classes)
    target_BK[record_M[inside_M], class_M[inside_M]] = 1
    target_BK[~known_B] = NOT_KNOWN
    target_BK[record_M[~inside_M]] = NOT_KNOWN
    return target_BK


class LabelSetWriter:
    """Numbers sets as they come, and writes the distinct ones. In memory it has each distinct set once."""

    def __init__(self) -> None:
        self._number: dict[frozenset[int], int] = {}

    def add(self, classes: frozenset[int]) -> int:
        """Number of a set, 0 for the first."""
        return self._number.setdefault(classes, len(self._number))

    def write(self, path: Path, class_of: np.ndarray | None = None) -> np.ndarray:
        """Write labels.npy; returns the place of each set by its number, int32, and -1 at the end, for records without one.

        Args:
            class_of: classes in the place of the numbers that were added.

        Raises:
            DataError: more numbers than the index can name.
        """
        parts, places, position = [], [], 0
        for classes in self._number:
            numbers = sorted(classes if class_of is None else class_of[list(classes)].tolist())
            parts.append(np.array([len(numbers), *numbers], dtype="<i4"))
            places.append(position)
            position += 1 + len(numbers)
        if position >= _MOST_NUMBERS:
            raise DataError(f"data import: {position} numbers of labels; expected fewer than {_MOST_NUMBERS}. Import fewer images.")
        np.save(path, np.concatenate(parts), allow_pickle=False)
        return np.array([*places, -1], dtype=np.int32)
