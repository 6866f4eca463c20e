"""Cosines and k-means of embeddings, exact: the same bits on every machine, whatever the number of
threads and the shape of a matrix product.

A float16 number of at most 1 is a multiple of 2^-24, and a product of two a multiple of 2^-48. The
sum of such products over two vectors of length 1 is never above 1, so float64 holds it and each of
its partial sums exactly, in any order. What follows from it by one division and one square root is
the same wherever IEEE arithmetic is. Matrix products in float32 only find candidates, with a margin
above their error: D products and sums of relative error 2^-24 each are off by at most D 2^-24.

Legend: N vectors, B of a block, K clusters, P nearest clusters, M pairs, D dimension.
"""

import math

import numpy as np

NUM_ROUNDS = 10
"""Rounds of k-means."""
_VALUES_AT_ONCE = 1 << 22
_UNIT = 0.01
"""Largest difference from 1 of a squared length; rounding to float16 changes it by 0.001."""


def margin(width: int) -> float:
    """Return what bounds the error of a float32 cosine, twice."""
    return (width + 8) * 2.0**-23


def squares(x_ND: np.ndarray) -> np.ndarray:
    """Return squared lengths, float64 (N,): exact for unit vectors, NaN if not finite."""
    return _dots(x_ND, x_ND)


def is_unit(square_N: np.ndarray) -> np.ndarray:
    """Return which squared lengths are those of unit vectors in float16, bool (N,)."""
    return np.abs(square_N - 1) <= _UNIT


def cosines(x_MD: np.ndarray, y_MD: np.ndarray) -> np.ndarray:
    """Return the cosine of each pair of unit vectors in float16, float64 (M,)."""
    return _dots(x_MD, y_MD) / np.sqrt(squares(x_MD) * squares(y_MD))


def _dots(x_MD: np.ndarray, y_MD: np.ndarray) -> np.ndarray:
    found_M = np.empty(len(x_MD))
    step = max(1, _VALUES_AT_ONCE // max(1, x_MD.shape[1]))
    for at in range(0, len(x_MD), step):
        here = slice(at, at + step)
        found_M[here] = np.einsum(
            "md,md->m", x_MD[here].astype(np.float64), y_MD[here].astype(np.float64)
        )
    return found_M


def nearest_clusters(x_ND: np.ndarray, centre_KD: np.ndarray, probes: int = 1) -> np.ndarray:
    """Return the clusters with the largest cosines, the largest first, int32 (N, P).

    Of equal cosines the smaller number comes first.

    Args:
        x_ND, centre_KD: unit vectors, float16.
        probes: P; no more than there are clusters.
    """
    num_clusters, width = centre_KD.shape
    probes = min(probes, num_clusters)
    found_NP = np.empty((len(x_ND), probes), dtype=np.int32)
    if num_clusters == 1:
        found_NP[:] = 0
        return found_NP
    centre_DK = scaled(centre_KD).T
    step = max(64, min(8192, _VALUES_AT_ONCE * 4 // num_clusters))
    for at in range(0, len(x_ND), step):
        x_BD = x_ND[at : at + step]
        cosine_BK = scaled(x_BD) @ centre_DK
        last_B = np.partition(cosine_BK, -probes, axis=1)[:, -probes]
        row_M, cluster_M = np.nonzero(cosine_BK >= (last_B - 2 * margin(width))[:, None])
        cosine_M = cosines(x_BD[row_M], centre_KD[cluster_M])
        order = np.lexsort((cluster_M, -cosine_M, row_M))
        row_M, cluster_M = row_M[order], cluster_M[order]
        place_M = np.arange(len(row_M)) - np.searchsorted(row_M, row_M)
        first = place_M < probes
        found_NP[at : at + step] = cluster_M[first].reshape(-1, probes)
    return found_NP


def scaled(x_ND: np.ndarray) -> np.ndarray:
    """Return float16 unit vectors in float32, divided by what is left of their lengths."""
    return x_ND.astype(np.float32) / np.sqrt(squares(x_ND)).astype(np.float32)[:, None]


def k_means(x_ND: np.ndarray, num_clusters: int, seed: int = 0) -> np.ndarray:
    """Return centres of unit vectors by spherical k-means (Dhillon and Modha 2001), unit vectors in
    float16 (K, D).

    It starts with vectors drawn by ``seed`` and takes ``NUM_ROUNDS`` rounds. A cluster without
    vectors keeps its centre.

    Args:
        x_ND: unit vectors, float16, N at least ``num_clusters``.
    """
    rng = np.random.default_rng(seed)
    centre_KD = x_ND[np.sort(rng.choice(len(x_ND), num_clusters, replace=False))].copy()
    for _ in range(NUM_ROUNDS if num_clusters > 1 else 1):
        cluster_N = nearest_clusters(x_ND, centre_KD)[:, 0]
        total_KD = np.zeros(centre_KD.shape)
        step = max(1, _VALUES_AT_ONCE // x_ND.shape[1])
        for at in range(0, len(x_ND), step):
            here_B = cluster_N[at : at + step]
            order = np.argsort(here_B, kind="stable")
            own, first = np.unique(here_B[order], return_index=True)
            block_BD = x_ND[at : at + step][order].astype(np.float64)
            total_KD[own] += np.add.reduceat(block_BD, first, axis=0)
        largest_K = np.abs(total_KD).max(axis=1)
        some_K = largest_K > 0
        total_KD = total_KD[some_K] / largest_K[some_K, None]
        # fsum rounds once: no order of additions
        length = [math.sqrt(math.fsum(row)) for row in (total_KD * total_KD).tolist()]
        centre_KD[some_K] = total_KD / np.array(length)[:, None]
    return centre_KD
