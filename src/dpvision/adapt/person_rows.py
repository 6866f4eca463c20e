"""One row of features for each person, for a plan that draws people (decision 0034). Heads then
treat people as they treat records.

A person's labelled images are put in the order of hashes of (seed, image id). The first image gives
the person's label, and the first k images with this label give the row, the mean of their features:

    x_p = sum_j f_pj / m_p,    over the m_p <= k of these images whose features are finite

Label and row depend on that person's images and on public numbers only, bit for bit. A person
without such an image has a row of NaN, or none, and contributes exactly zero.

Legend: P people, M images that take part, D feature dimension, B people of a block, H of these with
a next image.
"""

from dataclasses import dataclass

import numpy as np

from dpvision.data.keys import StepKey
from dpvision.data.people import People
from dpvision.data.store import Store

_PIECE_BYTES = 1 << 22


@dataclass(frozen=True, eq=False)
class PersonImages:
    """The images of each person that take part; people without a labelled image are left out."""

    row_M: np.ndarray
    """Sorted int64 rows of the store."""
    place_M: np.ndarray
    """int64 positions in ``row_M``, those of a person side by side, in the order of their
    hashes.
    """
    start_P: np.ndarray
    """int64 (P + 1,): person p has the images ``place_M[start_P[p] : start_P[p + 1]]``, at least
    one.
    """

    @classmethod
    def chosen(cls, store: Store, count: int, seed: int) -> "PersonImages":
        """Choose at most ``count`` images of each person of ``store``, in which every record has
        one (``store_checks.check_people``).
        """
        people = People.of(store)
        label_N = np.asarray(store.index["label"])[
            people.row_N
        ]  # equal exactly for equal labels, also where a record may have several
        person_N, id_N = (
            np.repeat(np.arange(len(people)), np.diff(people.start_P)),
            people.record_id_N,
        )
        order = np.lexsort(
            (id_N, StepKey(seed, 0).uniform_numpy(id_N, "person", 1)[:, 0], person_N)
        )
        order = order[label_N[order] >= 0]
        order = order[label_N[order] == label_N[order][_first(person_N[order])]]
        order = order[np.arange(len(order)) - _first(person_N[order]) < count]
        row_M, place_M = np.unique(people.row_N[order], return_inverse=True)
        start_P = np.flatnonzero(_first(person_N[order]) == np.arange(len(order)))
        return cls(row_M.astype(np.int64), place_M, np.append(start_P, len(order)))

    @property
    def label_row_P(self) -> np.ndarray:
        """int64 (P,): a row of the store with the label of each person."""
        return self.row_M[self.place_M[self.start_P[:-1]]]


def _first(person_N: np.ndarray) -> np.ndarray:
    """Position of the first entry of each entry's person, where entries of a person are side by
    side.
    """
    starts = np.r_[True, person_N[1:] != person_N[:-1]][: len(person_N)]
    return np.maximum.accumulate(np.where(starts, np.arange(len(person_N)), 0))


class PersonFeatures:
    """The rows of people, computed from the features of their images when they are read: a slice or
    index array gives float32 (B, D).
    """

    ndim = 2
    dtype = np.dtype(np.float32)

    def __init__(self, image_MD: np.ndarray, images: PersonImages) -> None:
        self.image_MD = image_MD
        """Features of the images at ``images.row_M``, float32 or float16, in memory or
        memory-mapped.
        """
        self._place_M, self._start_P = images.place_M, images.start_P

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self.image_MD.shape[1]

    def __len__(self) -> int:
        return len(self._start_P) - 1

    def __getitem__(self, here: slice | np.ndarray) -> np.ndarray:
        start_B, stop_B = self._start_P[:-1][here], self._start_P[1:][here]
        x_BD = np.empty((len(start_B), self.shape[1]), dtype=self.dtype)
        step = max(1, _PIECE_BYTES // (8 * max(1, self.shape[1])))
        for at in range(0, len(x_BD), step):
            x_BD[at : at + step] = self._means(start_B[at : at + step], stop_B[at : at + step])
        return x_BD

    def _means(self, start_B: np.ndarray, stop_B: np.ndarray) -> np.ndarray:
        """Return the mean rows, float64 (B, D). Each is summed in its own order, one image at a
        time, whatever else is in the block.
        """
        total_BD, count_B = np.zeros((len(start_B), self.shape[1])), np.zeros(len(start_B))
        for j in range(int((stop_B - start_B).max(initial=0))):
            more_H = np.flatnonzero(start_B + j < stop_B)
            x_HD = self.image_MD[self._place_M[start_B[more_H] + j]]
            good_H = np.isfinite(x_HD).all(axis=1)
            total_BD[more_H[good_H]] += x_HD[good_H]
            count_B[more_H[good_H]] += 1
        return total_BD / np.where(count_B > 0, count_B, np.nan)[:, None]
