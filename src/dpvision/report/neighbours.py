"""A few images of a store, each with its nearest neighbours in an encoder's feature space.

Legend: N candidates, Q queries, K neighbours, D feature dimension, B images, H height, W width.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dpvision.checkpoint import load_checkpoint
from dpvision.data.loader import image_batches
from dpvision.data.store import Store
from dpvision.encoders.classifier import is_head
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.feature_file import collect_features
from dpvision.encoders.trained import run_encoder
from dpvision.report.html import pixels_of, strip_of

NUM_CANDIDATES = 500


@dataclass(frozen=True)
class Neighbours:
    """A grid with a row per query and a group of columns per encoder. Images are data: URIs of PNG
    images.
    """

    names: tuple[str, ...]
    """Names of the encoders."""
    rows: tuple[tuple[str, tuple[str, ...]], ...]
    """(query, strip of its k nearest by each encoder, nearest first)."""
    k: int
    num_candidates: int
    """Number of images that were searched for neighbours."""
    same_class: tuple[float, ...] | None
    """Share of the k nearest that have the image's class, by encoder, over all candidates; None if
    some have no label.
    """
    chance: float | None
    """The same share for random neighbours."""
    pooling: str


def neighbours_of_run(
    run: str | Path, store: Store, *, num_queries: int = 6, k: int = 6
) -> Neighbours | None:
    """Return nearest neighbours by a run's encoder, and by the same architecture with random
    weights.

    Args:
        run: run or checkpoint folder.
        store: its images will be in the result.

    Returns:
        None if the store has too few images to compare, or the run is a head on an encoder that it
        did not train.

    Raises:
        CheckpointError: there is no checkpoint, or it was altered.
        DataError: no image could be read.
    """
    if is_head(load_checkpoint(run)):
        return None  # it did not train its encoder
    encoders = {
        "By the encoder": run_encoder(run),
        "By random weights": run_encoder(run, untrained=True),
    }
    return find_neighbours(encoders, store, num_queries=num_queries, k=k)


def find_neighbours(
    encoders: dict[str, Encoder], store: Store, *, num_queries: int = 6, k: int = 6
) -> Neighbours | None:
    """Return nearest neighbours by each of several encoders, among at most 500 images spread over
    ``store``.

    The choice of candidates and queries depends only on the number of images.

    Args:
        encoders: by name in the grid; with the same image size and normalisation. The default
            pooling of each is used.

    Returns, raises: as ``neighbours_of_run``.
    """
    first = next(iter(encoders.values()))
    assert all(
        (e.image_size, e.mean, e.std) == (first.image_size, first.mean, first.std)
        for e in encoders.values()
    )
    rows = np.unique(np.linspace(0, store.num_records - 1, NUM_CANDIDATES).astype(np.int64))
    functions = {name: encoder.poolings for name, encoder in encoders.items()}
    found, label_N, row_N = collect_features(
        functions, store, first.data, first.image_size, rows=rows, workers=1
    )
    if len(row_N) < 2:
        return None
    pooling = next(pooling for name, pooling in found if name == next(iter(encoders)))
    k, query_Q = (
        min(k, len(row_N) - 1),
        np.unique(np.linspace(0, len(row_N) - 1, num_queries + 2)[1:-1].astype(np.int64)),
    )
    nearest = {
        name: nearest_others(found[name, next(p for n, p in found if n == name)], k)
        for name in encoders
    }
    needed = np.unique(
        np.concatenate(
            [query_Q, *(near_NK[query_Q].numpy().ravel() for near_NK in nearest.values())]
        )
    )
    image_of = _images(store, row_N.numpy()[needed], first)
    image = dict(zip(needed.tolist(), image_of, strict=True))
    grid = tuple(
        (
            strip_of(image[q][None]),
            tuple(
                strip_of(np.stack([image[n] for n in near_NK[q].tolist()]))
                for near_NK in nearest.values()
            ),
        )
        for q in query_Q.tolist()
    )
    shares = chance = None
    if (label_N >= 0).all():
        shares = tuple(
            float((label_N[near_NK] == label_N[:, None]).double().mean())
            for near_NK in nearest.values()
        )
        per_class = torch.bincount(label_N).double()
        chance = float((per_class * (per_class - 1)).sum() / (len(label_N) * (len(label_N) - 1)))
    return Neighbours(tuple(encoders), grid, k, len(row_N), shares, chance, pooling)


def nearest_others(feature_ND: Tensor, k: int) -> Tensor:
    """Return for each row the ``k`` < N other rows with the greatest cosine, greatest first: int64
    (N, K).
    """
    unit_ND = F.normalize(feature_ND.float(), dim=1)
    cosine_NN = (unit_ND @ unit_ND.T).fill_diagonal_(-torch.inf)
    return cosine_NN.topk(k, dim=1).indices


def _images(store: Store, rows: np.ndarray, encoder: Encoder) -> np.ndarray:
    """Return the rows' images as the encoder's input, uint8 (B, H, W, 3)."""
    parts = [
        x
        for x, _, _ in image_batches(
            store, rows, encoder.image_size, encoder.data, batch_size=256, workers=1
        )
    ]
    return pixels_of(torch.cat(parts), encoder.mean, encoder.std)
