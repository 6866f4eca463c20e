"""Frozen features of a store's records: by several encoders at once, or as one memory-mapped array,
cached in the store's folder; and the public centre that heads subtract from them.

In an array, row i belongs to record ``rows[i]``. A record that does not decode has a row of NaN and
contributes zero to everything computed from it (docs/privacy.md). Batches are padded to one size,
so that a record's features do not depend on the other records of its batch.

Rows of length 1, and features that would take more than 2 GiB for the declared number of records,
are stored as float16: half the disk space and half the reading, which bounds the speed of many
steps. Rounding is a function of the record alone, with a relative error of 1 / 2048, far below the
noise of a million records. Values above 65504 overflow, and their record counts as non-finite.

Legend: N records, B images of a batch, D feature dimension, C channels, H height, W width.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dpvision.config import DataConfig
from dpvision.data.loader import image_batches
from dpvision.data.store import Store
from dpvision.devices import keep_freed_memory
from dpvision.encoders.encoder import Encoder, FeatureFunction
from dpvision.encoders.feature_cache import (
    FEATURES_VERSION,
    FeatureCache,
    features_key,
    score_key,
)
from dpvision.encoders.identity import fingerprint
from dpvision.errors import DataError
from dpvision.privacy.printed import size
from dpvision.synthetic.textures import textures

_CPU_ROWS = 32
_WHOLE_BYTES = 2 << 30
"""Size of float32 features above which they are stored as float16. Also the limit in memory if the
disk has no space.
"""
NUM_TEXTURES = 256
_FIRST_TEXTURE = 1_000_000
"""First texture number; lower ones are used to learn patches."""
_TEXTURES = 32
_TIMED_PIXELS = 100_000
"""Of the images whose time is measured: fewer small ones take up to six times as long each."""

Progress = Callable[[int], None]
"""Called after each batch with the number of images done so far."""


@dataclass(frozen=True)
class Extraction:
    """Hardware settings, which do not change a feature."""

    batch_size: int = 256
    workers: int = 2
    device: str | torch.device = "cpu"
    progress: Progress | None = None
    """Called with the number of finished records."""


def rows_of_pass(encoder: Encoder, most: int, device: str | torch.device) -> int:
    """Return the number of images to compute at a time: 32 of a network on a CPU, where more are no
    faster and all places are checked.
    """
    return (
        min(most, _CPU_ROWS)
        if encoder.family != "fixed" and torch.device(device).type == "cpu"
        else most
    )


def feature_array(
    encoder: Encoder,
    pooling: str,
    width: int,
    store: Store,
    rows: np.ndarray,
    *,
    dataset_size: int | None = None,
    keep: bool = True,
    batch_size: int = 256,
    workers: int = 2,
    device: str | torch.device = "cpu",
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Return features of ``rows`` under the evaluation transform, read-only, float32 or float16 (N,
    D).

    Args:
        width: D.
        rows: sorted int64 positions in the store.
        dataset_size: declared number of records, which determines the precision: one more record
            must not change the features of all others. If None, the number of rows.
        keep: whether to use the store's cache. A change of encoder, preprocessing, store or rows
            gives another cache entry.
        progress: called with the number of finished records, first before anything is computed (not
            0 if an interrupted extraction is continued). Never called if everything is cached.

    Raises:
        DataError: a shard cannot be read, or there is no space for the features.
    """
    dtype = feature_dtype(encoder, dataset_size or len(rows), width)
    how = Extraction(batch_size, workers, device, progress)
    if keep and (kept := _kept_array(encoder, pooling, width, store, rows, dtype, how)) is not None:
        return kept
    num_bytes = len(rows) * width * dtype.itemsize
    if num_bytes > _WHOLE_BYTES:
        raise DataError(
            f"features: no space under {store.path}/confidential; expected "
            f"{size(num_bytes)} free. Free space, or move the store."
        )
    blocks = list(_blocks(encoder, pooling, width, store, rows, dtype, how))
    return np.concatenate(blocks) if blocks else np.empty((0, width), dtype)


def feature_blocks(
    encoder: Encoder,
    pooling: str,
    width: int,
    store: Store,
    rows: np.ndarray,
    how: Extraction,
    *,
    keep: bool = True,
) -> Iterator[np.ndarray]:
    """Yield the rows of ``feature_array`` block by block, for a single pass; they need not fit on
    disk or in memory.
    """
    dtype = feature_dtype(encoder, len(rows), width)
    if keep and (kept := _kept_array(encoder, pooling, width, store, rows, dtype, how)) is not None:
        yield from (kept[i : i + how.batch_size] for i in range(0, len(rows), how.batch_size))
    elif len(rows):
        yield from _blocks(encoder, pooling, width, store, rows, dtype, how)


def _kept_array(
    encoder: Encoder,
    pooling: str,
    width: int,
    store: Store,
    rows: np.ndarray,
    dtype: np.dtype,
    how: Extraction,
) -> np.ndarray | None:
    """Return the array from the store's cache, computing it if necessary; None if there is no
    space.
    """
    cache, shape = FeatureCache(store.path), (len(rows), width)
    key = score_key(
        "array", features_key(fingerprint(encoder, how.device), store, rows), pooling, dtype.str
    )
    kept = cache.load_array(key, shape, dtype)
    if kept is not None or not cache.has_room(key, shape[0] * shape[1] * dtype.itemsize):
        return kept

    return cache.save_array(
        key,
        shape,
        dtype,
        partial(_blocks, encoder, pooling, width, store, rows, dtype, how),
        step=how.batch_size,
        progress=how.progress,
    )


def feature_dtype(encoder: Encoder, num_records: int, width: int) -> np.dtype:
    """Return the dtype in which features of a declared number of records are stored: float32 or
    float16.
    """
    return np.dtype(
        np.float32
        if 4 * num_records * width <= _WHOLE_BYTES and not encoder.standard_rows
        else np.float16
    )


@torch.inference_mode()
def seconds_per_image(encoder: Encoder, device: str | torch.device = "cpu") -> float:
    """Measure the seconds per image for features on this machine, without decoding, on random
    images of the encoder's largest size.
    """
    side = encoder.image_size
    count = 32 if encoder.family == "fixed" else max(2, _TIMED_PIXELS // side**2)
    generator = torch.Generator().manual_seed(0)
    x_BCHW = torch.rand(count, 3, side, side, generator=generator).to(device)
    seconds = []
    for _ in range(2):  # the first pass warms up
        start = time.perf_counter()
        for features_BD in encoder.poolings(x_BCHW).values():
            features_BD.sum().item()  # waits for the GPU
        seconds.append(time.perf_counter() - start)
    return min(seconds) / count


@torch.inference_mode()
def _blocks(
    encoder: Encoder,
    pooling: str,
    width: int,
    store: Store,
    rows: np.ndarray,
    dtype: np.dtype,
    how: Extraction,
    first: int = 0,
) -> Iterator[np.ndarray]:
    """Yield the rows from ``first`` on in batches that start at multiples of the batch size, so
    that a record has the same batch, and thus the same bits, after an interruption.
    """
    if torch.device(how.device).type == "cpu":
        keep_freed_memory()
    done = first
    batch_size = how.batch_size
    if how.progress is not None:
        how.progress(done)
    found = image_batches(
        store,
        rows[first:],
        encoder.image_size,
        encoder.data,
        batch_size=batch_size,
        workers=how.workers,
    )
    for x_BCHW, row_B, _ in found:
        missing = batch_size - len(x_BCHW)
        padded = (
            torch.cat([x_BCHW, x_BCHW.new_zeros(missing, *x_BCHW.shape[1:])]) if missing else x_BCHW
        )
        x_BD = encoder(padded.to(how.device), pooling)[: len(x_BCHW)].float().cpu().numpy()
        place_B = np.searchsorted(rows, row_B.numpy())
        end = min((int(place_B[-1]) // batch_size + 1) * batch_size, len(rows))
        piece = np.full((end - done, width), np.nan, dtype=dtype)
        with np.errstate(
            over="ignore"
        ):  # values that overflow become infinite and exclude their record
            piece[place_B - done] = x_BD
        yield piece
        done = end
        if how.progress is not None:
            how.progress(done)
    if done < len(rows):
        yield np.full((len(rows) - done, width), np.nan, dtype=dtype)


@torch.inference_mode()
def collect_features(
    functions: dict[str, FeatureFunction],
    store: Store,
    data: DataConfig,
    image_size: int,
    *,
    rows: np.ndarray | None = None,
    batch_size: int = 256,
    workers: int = 2,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> tuple[dict[tuple[str, str], Tensor], Tensor, Tensor]:
    """Compute features of a store's images under the evaluation transform. Images that do not
    decode are left out.

    Args:
        functions: by name; their weights must be on ``device``.
        data: preprocessing of the images.
        rows: int64 positions in the store; if None, all.

    Returns:
        Features x_ND, float32, by (function's name, feature's name); label_N, int64 (-1 without a
        label); row_N, int64. All on the CPU.

    Raises:
        DataError: no image could be read.
    """
    if torch.device(device).type == "cpu":
        keep_freed_memory()
    total = store.num_records if rows is None else len(rows)
    found: dict[tuple[str, str], Tensor] = {}
    label_N, row_N, done = (
        torch.empty(total, dtype=torch.int64),
        torch.empty(total, dtype=torch.int64),
        0,
    )
    for x_BCHW, row_B, label_B in image_batches(
        store, rows, image_size, data, batch_size=batch_size, workers=workers
    ):
        here = slice(done, done + len(x_BCHW))
        label_N[here], row_N[here] = label_B, row_B
        x_BCHW = x_BCHW.to(device)
        for function_name, function in functions.items():
            for name, x_BD in function(x_BCHW).items():
                if (function_name, name) not in found:
                    found[function_name, name] = torch.empty(total, x_BD.shape[1])
                found[function_name, name][here] = x_BD.float().cpu()
        done = here.stop
        if progress is not None:
            progress(done)
    if done == 0:
        raise DataError(
            f"features: {store.path} has no readable image among {total}; expected one or more. "
            "Import the source again."
        )
    return {key: x_ND[:done] for key, x_ND in found.items()}, label_N[:done], row_N[:done]


def kept_centre(
    encoder: Encoder,
    pooling: str,
    store: Store,
    *,
    keep: bool = True,
    device: str | torch.device = "cpu",
) -> Tensor:
    """Return ``texture_centre``, from the store's cache if ``keep``: at 224 px the textures alone
    take 20 s of a core.
    """
    key = score_key("centre", fingerprint(encoder, device), FEATURES_VERSION, pooling)
    cache = FeatureCache(store.path)
    if keep and (kept := cache.load(key)) is not None:
        return kept["centre_D"]
    centre_D = texture_centre(encoder, pooling, device)
    if keep:
        cache.save(key, {"centre_D": centre_D})
    return centre_D


@torch.inference_mode()
def texture_centre(encoder: Encoder, pooling: str, device: str | torch.device = "cpu") -> Tensor:
    """Return a public centre to subtract from features: the encoder's mean over 256 procedural
    textures, float32 (D,), on the CPU.

    Features of most encoders share a large common component, which carries no class information yet
    takes up most of a clipped record's norm. This mean has nearly the same direction and costs no
    privacy.
    """
    mean, std = (torch.tensor(v)[:, None, None] for v in (encoder.mean, encoder.std))
    total: Tensor | None = None
    for start in range(_FIRST_TEXTURE, _FIRST_TEXTURE + NUM_TEXTURES, _TEXTURES):
        pixel_BCHW = (
            textures(torch.arange(start, start + _TEXTURES), encoder.image_size).float() / 255
        )
        part_D = encoder(((pixel_BCHW - mean) / std).to(device), pooling).double().sum(dim=0).cpu()
        total = part_D if total is None else total + part_D
    assert total is not None
    return (total / NUM_TEXTURES).float()
