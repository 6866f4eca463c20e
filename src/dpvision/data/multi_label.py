"""Several labels per record: a set of classes, which may be empty. Equal sets are stored once.

    labels.npy    int32: for each set the number of its classes, then the classes, ascending;
                  memory-mapped
    index.npy     the column ``label`` is the position of the record's set in labels.npy, -1 if the
                  record is unlabelled

An empty set means none of the classes; an unlabelled record has no set.

Legend: B records, M labels of all these records, K classes.
"""

from pathlib import Path
from tokenize import TokenError

import numpy as np

from dpvision.errors import DataError

LABELS_FILE = "labels.npy"
NOT_KNOWN = 255
"""Target of every class for a record that is unlabelled or has a class out of range; such a record
contributes zero.
"""
_MOST_NUMBERS = 1 << 31  # the index has 32 bits for a position
_REMEDY = "Import the source again, or restore the file."

NO_ARRAY = (OSError, ValueError, EOFError, SyntaxError, OverflowError, TokenError)
"""What numpy raises for a file that is no .npy file."""


class LabelSets:
    """The label sets of a store, by position in ``flat``, the array of labels.npy."""

    def __init__(self, flat: np.ndarray) -> None:
        self.flat = flat

    @classmethod
    def open(cls, path: Path, num_bytes: int) -> "LabelSets":
        """Open labels.npy.

        Raises DataError if it is missing, is another kind of file, or does not have ``num_bytes``
        bytes.
        """
        try:
            found = path.stat().st_size
            flat = np.load(path, mmap_mode="r", allow_pickle=False)
        except NO_ARRAY as error:
            raise DataError(
                f"store: {path}: {error}; expected the labels of the store. {_REMEDY}"
            ) from None
        if found != num_bytes or flat.dtype != np.dtype("<i4") or flat.ndim != 1:
            got = f"{flat.dtype}{list(flat.shape)} in {found} bytes"
            raise DataError(
                f"store: {path}: {got}; expected a list of int32 in {num_bytes}, as when it was "
                f"imported. {_REMEDY}"
            )
        return cls(flat)

    def check(self, place_B: np.ndarray) -> None:
        """Raise DataError if a position holds no set."""
        place = np.unique(place_B[place_B >= 0])
        inside = place < len(self.flat)
        if inside.all():
            count = self.flat[place].astype(np.int64)
            inside = (count >= 0) & (place + count < len(self.flat))
        if not inside.all() or (place_B < -1).any():
            raise DataError(
                f"store: the index names labels that {LABELS_FILE} does not have; expected the "
                f"files of one import. {_REMEDY}"
            )

    def numbered(self, number_of: np.ndarray) -> "LabelSets":
        """Return the sets with class k renumbered as ``number_of[k]``, at the same positions.

        Each set is ascending.
        """
        flat, at = np.array(self.flat), 0
        while at < len(flat):
            end = at + 1 + int(flat[at])
            flat[at + 1 : end] = np.sort(number_of[flat[at + 1 : end]])
            at = end
        return LabelSets(flat)

    def listed(self, place_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """All labels of the records with sets at ``place_B``, in order.

        Record (0 ... B - 1) and class of each, int64 (M,).
        """
        place_B = place_B.astype(np.int64)
        count_B = (
            np.where(place_B >= 0, self.flat[place_B], 0).astype(np.int64)
            if len(self.flat)
            else np.zeros_like(place_B)
        )
        record_M = np.repeat(np.arange(len(place_B)), count_B)
        within_M = np.arange(len(record_M)) - (np.cumsum(count_B) - count_B)[record_M]
        return record_M, self.flat[place_B[record_M] + 1 + within_M].astype(np.int64)


def zero_one(
    record_M: np.ndarray, class_M: np.ndarray, known_B: np.ndarray, num_classes: int
) -> np.ndarray:
    """Targets, uint8 (B, K): 1 for each class of a record, 0 elsewhere.

    ``NOT_KNOWN`` throughout where ``known_B`` is False or a class is outside 0 ... K - 1.

    Args:
        record_M, class_M: as returned by ``LabelSets.listed``.
    """
    target_BK = np.zeros((len(known_B), num_classes), dtype=np.uint8)
    inside_M = (class_M >= 0) & (class_M < num_classes)
    target_BK[record_M[inside_M], class_M[inside_M]] = 1
    target_BK[~known_B] = NOT_KNOWN
    target_BK[record_M[~inside_M]] = NOT_KNOWN
    return target_BK


class LabelSetWriter:
    """Numbers distinct sets in order of arrival, and writes them.

    Holds each distinct set once in memory.
    """

    def __init__(self) -> None:
        self._number: dict[frozenset[int], int] = {}

    def add(self, classes: frozenset[int]) -> int:
        """Return the number of a set, 0 for the first."""
        return self._number.setdefault(classes, len(self._number))

    def write(self, path: Path, class_of: np.ndarray | None = None) -> np.ndarray:
        """Write labels.npy; return the position of each set by its number, int32.

        -1 is appended for unlabelled records.

        Args:
            class_of: class of each number that was added; if None, the numbers are the classes.

        Raises:
            DataError: more numbers than the index can address.
        """
        parts, places, position = [], [], 0
        for classes in self._number:
            numbers = sorted(classes if class_of is None else class_of[list(classes)].tolist())
            parts.append(np.array([len(numbers), *numbers], dtype="<i4"))
            places.append(position)
            position += 1 + len(numbers)
        if position >= _MOST_NUMBERS:
            raise DataError(
                f"data import: {position} label entries; expected fewer than {_MOST_NUMBERS}. "
                "Import fewer images."
            )
        np.save(path, np.concatenate(parts), allow_pickle=False)
        return np.array([*places, -1], dtype=np.int32)
