"""The people of a store, and which images of a person are used in a step.

Where a plan draws people, one of them is one record of the clipped sum: the losses of k images are
averaged before the clip. Which k depends on (seed, step) and on that person's images only (decision
0034).

Legend: P people of the store, N images of the store, B drawn people, M images of the drawn people,
K images of a person in a step.
"""

from dataclasses import dataclass

import numpy as np

from dpvision.data.keys import StepKey
from dpvision.data.store import Store


@dataclass(frozen=True, eq=False)
class People:
    """All people of a store, in ascending order of their ids."""

    id_P: np.ndarray
    """int64: a person's id, a keyed hash of the name."""
    row_N: np.ndarray
    """int64 rows of the images, those of a person side by side."""
    start_P: np.ndarray
    """int64 (P + 1,): person p has the rows ``row_N[start_P[p] : start_P[p + 1]]``."""
    record_id_N: np.ndarray
    """int64 ids of the images at ``row_N``."""

    @classmethod
    def of(cls, store: Store) -> "People":
        """Collect the people of ``store``, in which every record has one.

        ``store_checks.check_people`` checks that.
        """
        unit_N = np.asarray(store.index["unit"]).astype(np.int64)
        row_N = np.argsort(unit_N, kind="stable")
        id_P, start_P = np.unique(unit_N[row_N], return_index=True)
        return cls(
            id_P,
            row_N,
            np.append(start_P, len(row_N)),
            np.asarray(store.index["id"])[row_N].astype(np.int64),
        )

    def __len__(self) -> int:
        return len(self.id_P)

    def images(self, place_B: np.ndarray, key: StepKey, count: int) -> np.ndarray:
        """Choose ``count`` images of each of the people at ``place_B`` for a step.

        int64 rows (B, K).

        A person's images are put in the order of hashes of (seed, step, image id); the first K are
        chosen, starting over after the last.
        """
        size_B = self.start_P[place_B + 1] - self.start_P[place_B]
        first_B = np.cumsum(size_B) - size_B
        person_M = np.repeat(np.arange(len(place_B)), size_B)
        at_M = np.arange(len(person_M)) - first_B[person_M] + self.start_P[place_B][person_M]
        id_M = self.record_id_N[at_M]
        order_M = np.lexsort((id_M, key.uniform_numpy(id_M, "person", 1)[:, 0], person_M))
        chosen_BK = first_B[:, None] + np.arange(count) % np.maximum(size_B, 1)[:, None]
        return self.row_N[at_M[order_M]][chosen_BK]
