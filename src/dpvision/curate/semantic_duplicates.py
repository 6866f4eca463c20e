"""Images whose embeddings have a cosine above a threshold with an earlier one's, within clusters of
k-means: SemDeDup (Abbas et al. 2023, arXiv 2303.09540).

Embeddings are never in memory together. Clusters are fitted to a sample, every embedding is
assigned block by block, then copied to files of a few clusters each, and compared within each
cluster. A cluster that is larger than memory is read in blocks. All cosines that decide are exact
(``clusters``).

Of several the first in the order of the source is kept, where the paper keeps the one farthest from
the cluster's centre, which it found to matter little.

Legend: N records of a source, A of them with an embedding, K clusters, P probes, C entries of a
cluster, Q and B entries of two blocks, D dimension.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from dpvision.curate.clusters import (
    cosines,
    is_unit,
    k_means,
    margin,
    nearest_clusters,
    scaled,
    squares,
)
from dpvision.curate.embedding import Embedding
from dpvision.curate.pairs import Pairs
from dpvision.curate.record import Duplicates
from dpvision.errors import ConfigError, DataError

ALL_PAIRS = 1 << 14
"""Records up to which there is one cluster: all pairs are compared."""
SAMPLE_PER_CLUSTER = 64
_SEED = 0
_SAMPLE_BYTES = 1 << 29
_BLOCK_BYTES = 1 << 25
"""Embeddings that are read at once."""
_FILE_BYTES = 1 << 27
"""Embeddings of the clusters of a file, which are in memory together."""
_ROWS_AT_ONCE = 2048

Read = Callable[[int, int], np.ndarray]
"""From the first entry and the one after the last to the entries of a cluster."""


@dataclass(frozen=True)
class SemanticDuplicates:
    """Leave out an image whose embedding has a cosine above ``cosine`` with an earlier one's.

    One record can change the result without bound. Memory does not grow with the number of records;
    the disk takes a copy of the embeddings for each probe. An embedding that is zero or not finite
    matches nothing.
    """

    name: ClassVar[str] = "semantic_duplicates"
    fact: ClassVar[str] = "embedding"
    cosine: float = 0.9
    """Cosine above which images are duplicates, -1 to below 1. It depends on the encoder."""
    clusters: int | None = None
    """Clusters; if None, 1 up to 16,384 records, then sqrt(N / 2), which takes least time."""
    probes: int = 1
    """Clusters in which an image is compared with those assigned to them. More find pairs that a
    border parts.
    """
    encoder: str = "hog"
    """Encoder of the embeddings; the default needs no weights."""

    def __post_init__(self) -> None:
        if not -1 <= self.cosine < 1:
            raise ConfigError(
                f"{self.name}: cosine={self.cosine}; expected -1 <= cosine < 1. Use 0.9."
            )
        for name in ("clusters", "probes"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ConfigError(f"{self.name}: {name}={value}; expected 1 or more. Leave it out.")

    def stated(self) -> dict[str, str]:
        """As ``Embedding``."""
        return self.facts().stated()

    @property
    def stability(self) -> None:
        return None

    def facts(self) -> Embedding:
        return Embedding(self.encoder)

    def duplicates(
        self,
        column_N: np.ndarray,
        alive_N: np.ndarray,
        work: Path,
        progress: Callable[[int], None],
    ) -> Duplicates:
        """Find the records to leave out.

        The twin is the earliest record above the threshold among those compared.

        Raises:
            DataError: an embedding is not of length 1.
        """
        num, pairs = len(column_N), Pairs(len(column_N), work)
        num_alive = int(np.count_nonzero(alive_N))
        num_clusters = _num_clusters(num_alive, self.clusters)
        sample_SD = _sample(column_N, alive_N, num_alive, num_clusters)
        if not len(sample_SD):  # perhaps none of all has an embedding: any centre will do
            sample_SD = np.eye(1, column_N.shape[1], dtype=np.float16)
        centre_KD = k_means(sample_SD, min(num_clusters, len(sample_SD)), _SEED)
        count_K = _assign(column_N, alive_N, centre_KD, self.probes, work, progress)
        entry = _entry(column_N.shape[1])
        files = _distribute(column_N, count_K, self.probes, work)
        done, total = 0, max(1, int(count_K.sum()))
        for path, clusters in files:
            for size, read in _clusters_of(path, clusters, entry):
                _compare(size, read, self.cosine, pairs)
                done += size
                progress(num // 2 + (num - num // 2) * done // total)
            path.unlink(missing_ok=True)
        progress(num)
        return pairs.duplicates()


def _num_clusters(num: int, asked: int | None) -> int:
    if asked is not None:
        return asked
    return 1 if num <= ALL_PAIRS else math.isqrt(num // 2)


def _sample(
    column_N: np.ndarray, alive_N: np.ndarray, num_alive: int, num_clusters: int
) -> np.ndarray:
    """Return embeddings of records drawn with a fixed seed, float16 (S, D)."""
    width = column_N.shape[1]
    most = min(SAMPLE_PER_CLUSTER * num_clusters, _SAMPLE_BYTES // (2 * width))
    rng = np.random.default_rng(_SEED)
    wanted = (
        np.unique(rng.integers(0, num_alive, max(1, most)))
        if num_alive > most
        else np.arange(num_alive)
    )
    parts, before = [np.zeros((0, width), dtype=np.float16)], 0
    step = _rows_of_block(width)
    for start in range(0, len(column_N), step):
        alive = np.flatnonzero(alive_N[start : start + step])
        here = wanted[slice(*np.searchsorted(wanted, [before, before + len(alive)]))] - before
        before += len(alive)
        if len(here):
            x_BD = np.asarray(column_N[start + alive[here]])
            parts.append(x_BD[is_unit(squares(x_BD))])
    return np.concatenate(parts)


def _rows_of_block(width: int) -> int:
    return max(1, _BLOCK_BYTES // (2 * width))


def _entry(width: int) -> np.dtype:
    return np.dtype([("cluster", "<i4"), ("at_home", "?"), ("row", "<i8"), ("x", "<f2", (width,))])


def _assigned(probes: int) -> np.dtype:
    return np.dtype([("row", "<i8"), ("cluster", "<i4", (probes,))])


def _assign(
    column_N: np.ndarray,
    alive_N: np.ndarray,
    centre_KD: np.ndarray,
    probes: int,
    work: Path,
    progress: Callable[[int], None],
) -> np.ndarray:
    """Write the nearest clusters of each embedding to ``work``; return the entries of each cluster,
    int64 (K,).
    """
    count_K = np.zeros(len(centre_KD), dtype=np.int64)
    step, num = _rows_of_block(column_N.shape[1]), len(column_N)
    with (work / "assigned").open("wb") as file:
        for start in range(0, num, step):
            row_A = start + np.flatnonzero(alive_N[start : start + step])
            x_AD = np.asarray(column_N[row_A])
            square_A = squares(x_AD)
            other = np.isfinite(square_A) & (square_A != 0) & ~is_unit(square_A)
            if other.any():
                at = int(np.flatnonzero(other)[0])
                raise DataError(
                    f"semantic_duplicates: the embedding of record {row_A[at]} has length "
                    f"{math.sqrt(square_A[at]):.3g}; expected 1. Divide it by its length."
                )
            unit_A = is_unit(square_A)
            found_AP = nearest_clusters(x_AD[unit_A], centre_KD, probes)
            block = np.empty(len(found_AP), dtype=_assigned(found_AP.shape[1]))
            block["row"], block["cluster"] = row_A[unit_A], found_AP
            file.write(block.tobytes())
            count_K += np.bincount(found_AP.ravel(), minlength=len(count_K))
            progress(min(start + step, num) // 2)
    return count_K


def _distribute(
    column_N: np.ndarray, count_K: np.ndarray, probes: int, work: Path
) -> list[tuple[Path, int]]:
    """Copy the embeddings to files of some clusters each; return these and how many they hold."""
    width = column_N.shape[1]
    entry, assigned = _entry(width), _assigned(min(probes, len(count_K)))
    file_K, filled, number = np.zeros(len(count_K), dtype=np.int64), 0, 0
    for k, count in enumerate(count_K.tolist()):
        if filled and (filled + count) * entry.itemsize > _FILE_BYTES:
            filled, number = 0, number + 1
        filled += count
        file_K[k] = number
    step, at = _rows_of_block(width), 0
    while len(block := np.fromfile(work / "assigned", assigned, step, offset=at)):
        at += len(block) * assigned.itemsize
        x_BD = np.asarray(column_N[block["row"]])
        file_BP = file_K[block["cluster"]]
        for number in np.unique(file_BP).tolist():
            who, probe = np.nonzero(file_BP == number)
            found = np.empty(len(who), dtype=entry)
            found["row"], found["at_home"], found["x"] = block["row"][who], probe == 0, x_BD[who]
            found["cluster"] = block["cluster"][who, probe]
            with (work / f"clusters-{number}").open("ab") as file:
                file.write(found.tobytes())
    (work / "assigned").unlink()
    sizes = np.bincount(file_K)
    return [(work / f"clusters-{n}", int(size)) for n, size in enumerate(sizes)]


def _clusters_of(path: Path, num_clusters: int, entry: np.dtype) -> list[tuple[int, Read]]:
    """Return the size of each cluster of a file, and a function that reads it in the order of the
    source.
    """
    if not path.exists():
        return []
    if num_clusters == 1:  # in order already, and perhaps larger than memory
        size = path.stat().st_size // entry.itemsize
        return [
            (
                size,
                lambda start, stop: np.fromfile(
                    path, entry, stop - start, offset=start * entry.itemsize
                ),
            )
        ]
    found = np.fromfile(path, entry)
    order = np.argsort(found["cluster"], kind="stable")
    edges = np.flatnonzero(np.diff(found["cluster"][order])) + 1

    def reader(own: np.ndarray) -> Read:
        return lambda start, stop: found[own[start:stop]]

    return [(len(own), reader(own)) for own in np.split(order, edges)]


def _compare(size: int, read: Read, cosine: float, pairs: Pairs) -> None:
    """Compare each entry of a cluster with the earlier ones until one is above the threshold. Two
    that are guests are not compared: their clusters do that.
    """
    for q in range(0, size, _ROWS_AT_ONCE):
        asked = read(q, min(q + _ROWS_AT_ONCE, size))
        x_QD, twin_Q = scaled(asked["x"]), np.full(len(asked), -1, dtype=np.int64)
        for b in range(0, q + 1, _ROWS_AT_ONCE):
            base = asked if b == q else read(b, b + _ROWS_AT_ONCE)
            left = np.flatnonzero(twin_Q < 0)
            if not len(left):
                break
            y_BD = x_QD if b == q else scaled(base["x"])
            may_QB = x_QD[left] @ y_BD.T > cosine - margin(x_QD.shape[1])
            may_QB &= base["row"] < asked["row"][left, None]
            may_QB &= base["at_home"] | asked["at_home"][left, None]
            _take_first(may_QB, asked, base, left, cosine, twin_Q)
        found = twin_Q >= 0
        pairs.add(asked["row"][found], twin_Q[found])


def _take_first(
    may_QB: np.ndarray,
    asked: np.ndarray,
    base: np.ndarray,
    left: np.ndarray,
    cosine: float,
    twin_Q: np.ndarray,
) -> None:
    """Enter the first candidate of each that is above the threshold; ``may_QB`` is used up."""
    open_M = np.arange(len(left))
    while True:
        first_M = may_QB[open_M].argmax(axis=1)
        some = may_QB[open_M, first_M]
        open_M, first_M = open_M[some], first_M[some]
        if not len(open_M):
            return
        hit = cosines(asked["x"][left[open_M]], base["x"][first_M]) > cosine
        twin_Q[left[open_M[hit]]] = base["row"][first_M[hit]]
        open_M, first_M = open_M[~hit], first_M[~hit]
        may_QB[open_M, first_M] = False
