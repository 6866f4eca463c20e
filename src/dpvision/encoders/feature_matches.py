"""Find images of a public store that match images of a private one by an encoder's features: crops,
shifts, collages, which hashes miss.

The private store's features are in a temporary float16 file and are searched block by block (faiss,
exact inner products); the public store is streamed once, so memory grows with neither store. The
similarity threshold is measured on the public store alone: transformed copies of its images against
its other images.

Legend: N images, D feature dimension, B images of a block, C channels, H height, W width.
"""

import io
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from dpvision.config import DataConfig
from dpvision.data.decode import BadImage, decode
from dpvision.data.loader import image_batches
from dpvision.data.overlap import (
    SIGNED_AT_ONCE,
    Matches,
    Signatures,
    find_matches,
    matches_of,
    signature_blocks,
)
from dpvision.data.perceptual import RADIUS, SECOND_RADIUS, hashes_version
from dpvision.data.store import Store
from dpvision.data.transform import preprocess
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.feature_cache import FeatureCache, features_key
from dpvision.errors import ConfigError, DataError

SAMPLE = 1000
FALSE_ALARMS = 0.001
"""Allowed share of copies with a false match among ``SAMPLE`` other images; it grows in proportion
to the number of images.
"""
_BLOCK = 1 << 15
_BATCH = 64

Say = Callable[[str], None]


@dataclass(frozen=True)
class Threshold:
    """The cosine above which two images match, and its recall on copies of public images."""

    cosine: float
    centre_D: np.ndarray
    """Mean of the public images' features, float32, which is subtracted from all features."""
    recall: dict[str, float]
    """Share of copies found, by kind of copy."""
    num_images: int


@dataclass(frozen=True)
class Overlap:
    """Images of a public store that are also in a private one."""

    matches: Matches
    methods: list[str]
    """How they were found, in words."""
    threshold: Threshold | None = None
    """Of features, if they were compared."""


def find_overlap(
    public: Store,
    private: Store,
    encoder: Encoder | None = None,
    *,
    radius: int | None = RADIUS,
    cosine: float | None = None,
    batch_size: int = 256,
    workers: int = 2,
    say: Say = lambda text: None,
) -> Overlap:
    """Find public images that are in a private store: by bytes, by pixels, by perceptual hashes
    and, with an encoder, by features.

    Args:
        radius: bits in which perceptual hashes may differ; if None, they are not compared.
        cosine: cosine of features above which two images match; if None, it is measured.

    Raises:
        ConfigError, DataError: as ``find_matches``, ``measure_threshold`` and
            ``find_feature_matches``.
    """

    signed = [kept_signatures(store, workers=workers, say=say) for store in (public, private)]
    found = find_matches(*signed, radius=radius)
    methods = methods_of(radius)
    if encoder is None:
        return Overlap(found, methods)
    threshold = measure_threshold(encoder, public, say=say)
    if cosine is not None:
        threshold = replace(threshold, cosine=cosine)
    near = find_feature_matches(
        encoder, public, private, threshold, batch_size=batch_size, workers=workers, say=say
    )
    methods.append(
        f"features of {encoder.name} with a cosine above {threshold.cosine:.3f}, mirror images too"
    )
    return Overlap(found.joined(near), methods, threshold)


def methods_of(radius: int | None = RADIUS) -> list[str]:
    """Return how images are compared without an encoder, in words; ``radius`` as for
    ``find_overlap``.
    """
    near = f"perceptual hashes within {radius} and {SECOND_RADIUS} of 64 bits, mirror images too"
    return ["identical bytes", "identical pixels", *([] if radius is None else [near])]


def kept_signatures(store: Store, *, workers: int = 2, say: Say = lambda text: None) -> Signatures:
    """Return the signatures of a store's images from its cache, where they are kept for the next
    comparison if the disk has space.

    Raises: as ``data.overlap.signatures``.
    """
    cache, shape, dtype = FeatureCache(store.path), (store.num_records, 8), np.dtype(np.uint64)
    rows = np.arange(store.num_records)
    # Shards may lie outside the store: one that was replaced is read again.
    shards = [(stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, store.shard_paths)]
    key = features_key(f"signatures {shards}, imagehash {hashes_version()}", store, rows)

    def blocks(first: int) -> Iterator[np.ndarray]:
        done = first
        for part in signature_blocks(store, rows, first, workers=workers):
            yield part
            done += len(part)
            say(f"{store.path.name}: {done:,} of {len(rows):,} images")

    table_N8, num_bytes = cache.load_array(key, shape, dtype), 64 * len(rows)
    if table_N8 is None and len(rows) and cache.has_room(key, num_bytes):
        table_N8 = cache.save_array(key, shape, dtype, blocks, step=SIGNED_AT_ONCE)
    if table_N8 is None:  # no space, or no image
        table_N8 = np.concatenate([np.zeros((0, 8), dtype=dtype), *blocks(0)])
    return Signatures.of(table_N8)


def make_copies(pixels_HWC: np.ndarray) -> dict[str, np.ndarray]:
    """Return transformed copies of an image as they occur in republished images, by name: uint8
    RGB.
    """
    image = Image.fromarray(pixels_HWC)
    width, height = image.size

    def cropped(left: float, top: float, right: float, bottom: float) -> Image.Image:
        box = (
            round(left * width),
            round(top * height),
            max(1, round(right * width)),
            max(1, round(bottom * height)),
        )
        return image.crop(box)

    half = image.resize((max(1, width // 2), max(1, height // 2)), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=30)
    copies = {
        "jpeg, quality 30": Image.open(file).convert("RGB"),
        "half the size": half,
        "mirror image": image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        "brighter": image.point(lambda value: min(255, round(1.25 * value))),
        "shifted by 1/16": cropped(1 / 16, 1 / 16, 1, 1),
        "centre, 80%": cropped(0.1, 0.1, 0.9, 0.9),
        "corner, 70%": cropped(0, 0, 0.7, 0.7),
    }
    return {name: np.asarray(copy) for name, copy in copies.items()}


def measure_threshold(
    encoder: Encoder,
    public: Store,
    *,
    sample: int = SAMPLE,
    false_alarms: float = FALSE_ALARMS,
    device: str | torch.device = "cpu",
    say: Say = lambda text: None,
) -> Threshold:
    """Find the smallest cosine at which at most ``false_alarms`` of all copies match an image other
    than their original.

    The result depends only on the public store and public settings.

    Args:
        sample: number of images, spread evenly over the store.

    Raises:
        DataError: fewer than ten readable images.
    """
    rows = np.unique(
        np.linspace(0, public.num_records - 1, min(sample, public.num_records)).astype(np.int64)
    )
    prepare = preprocess(encoder.image_size, encoder.mean, encoder.std)
    own: list[np.ndarray] = []
    copied: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for at in range(0, len(rows), _BATCH):
        originals = [
            pixels
            for data in public.read_many(rows[at : at + _BATCH])
            if (pixels := _pixels(data)) is not None
        ]
        if not originals:
            continue
        copies = [make_copies(pixels) for pixels in originals]
        own.append(
            _features(encoder, torch.from_numpy(np.stack([prepare(p) for p in originals])), device)
        )
        for name in copies[0]:
            shown = torch.from_numpy(np.stack([prepare(c[name]) for c in copies]))
            copied.setdefault(name, []).append(
                (_features(encoder, shown, device), _features(encoder, shown.flip(-1), device))
            )
        say(f"measuring the threshold: {at + len(originals):,} of {len(rows):,} public images")
    raw_ND = np.concatenate(own) if own else np.zeros((0, 1), dtype=np.float32)
    if len(raw_ND) < 10:
        raise DataError(
            f"overlap: {public.path} has {len(raw_ND)} readable images; expected ten or more for "
            "the threshold. Drop --encoder."
        )
    centre_D = raw_ND.mean(axis=0)
    x_ND = _unit(raw_ND, centre_D)
    # A duplicate within the public store is a true copy, not a false alarm.
    same_NN = x_ND @ x_ND.T > 1 - 1e-4
    true, other = {}, []
    for name, parts in copied.items():
        ways = (_unit(np.concatenate(both), centre_D) @ x_ND.T for both in zip(*parts, strict=True))
        cosine_NN = np.maximum(*ways)  # as in the search
        true[name] = np.diag(cosine_NN).copy()
        cosine_NN[same_NN] = -1.0
        other.append(cosine_NN.max(axis=1))
    cosine = float(np.quantile(np.concatenate(other), 1 - false_alarms, method="higher"))
    return Threshold(
        cosine,
        centre_D,
        {name: float((values > cosine).mean()) for name, values in true.items()},
        len(x_ND),
    )


def find_feature_matches(
    encoder: Encoder,
    public: Store,
    private: Store,
    threshold: Threshold,
    *,
    batch_size: int = 256,
    workers: int = 2,
    device: str | torch.device = "cpu",
    say: Say = lambda text: None,
) -> Matches:
    """Find public images whose features, or whose mirror image's features, have a cosine above the
    threshold with a private image's.

    Raises:
        ConfigError: faiss is not installed, or the threshold is out of range.
        DataError: no readable image in a store.
    """
    cosine = threshold.cosine
    if not -1 <= cosine < 1:
        raise ConfigError(
            f"overlap: threshold={cosine}; expected -1 <= cosine < 1. Omit it to have it "
            "measured on the public store."
        )
    try:
        import faiss
    except ImportError:
        raise ConfigError(
            "overlap: faiss is not installed; --encoder needs it. In a checkout: pip install "
            "'.[overlap]'"
        ) from None
    faiss.omp_set_num_threads(torch.get_num_threads())
    folder = private.path / "confidential"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = matches_of(
        np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), "features", np.zeros(0)
    )
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        kept = Path(scratch) / "features.f16"
        private_rows = []
        with kept.open("wb") as file:
            for x_BD, row_B in _blocks(
                encoder, private, threshold, False, batch_size, workers, device, say, "private"
            ):
                file.write(x_BD.astype(np.float16).tobytes())
                private_rows.append(row_B)
        row_N = np.concatenate(private_rows) if private_rows else np.zeros(0, dtype=np.int64)
        if not len(row_N):
            raise DataError(
                f"overlap: {private.path} has no readable image; expected one or more. Import "
                "the source again."
            )
        base_ND = np.memmap(kept, dtype=np.float16, mode="r").reshape(len(row_N), -1)
        for x_BD, row_B in _blocks(
            encoder, public, threshold, True, batch_size, workers, device, say, "public"
        ):
            best_B, near_B = (
                np.full(len(x_BD), -2.0, dtype=np.float32),
                np.zeros(len(x_BD), dtype=np.int64),
            )
            for at in range(0, len(base_ND), _BLOCK):
                part_ND = np.ascontiguousarray(base_ND[at : at + _BLOCK], dtype=np.float32)
                value_B1, index_B1 = faiss.knn(x_BD, part_ND, 1, metric=faiss.METRIC_INNER_PRODUCT)
                better = value_B1[:, 0] > best_B
                best_B[better], near_B[better] = value_B1[better, 0], at + index_B1[better, 0]
            hit = best_B > cosine
            found = found.joined(
                matches_of(row_B[hit], row_N[near_B[hit]], "features", 1 - best_B[hit])
            )
    return found


def _blocks(
    encoder: Encoder,
    store: Store,
    threshold: Threshold,
    mirrored: bool,
    batch_size: int,
    workers: int,
    device: str | torch.device,
    say: Say,
    what: str,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield features of length 1, float32 (B, D), and rows of about ``_BLOCK`` readable images at a
    time, with their mirror images.
    """
    data = DataConfig(mean=encoder.mean, std=encoder.std)
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    done = 0
    for x_BCHW, row_B, _ in image_batches(
        store, None, encoder.image_size, data, batch_size=batch_size, workers=workers
    ):
        for shown in (x_BCHW, x_BCHW.flip(-1)) if mirrored else (x_BCHW,):
            parts.append(
                (_unit(_features(encoder, shown, device), threshold.centre_D), row_B.numpy())
            )
        done += len(row_B)
        say(f"features of {what} images: {done:,} of {store.num_records:,}")
        if sum(len(rows) for _, rows in parts) >= _BLOCK:
            yield np.concatenate([x for x, _ in parts]), np.concatenate([rows for _, rows in parts])
            parts = []
    if parts:
        yield np.concatenate([x for x, _ in parts]), np.concatenate([rows for _, rows in parts])


@torch.inference_mode()
def _features(encoder: Encoder, x_BCHW: Tensor, device: str | torch.device) -> np.ndarray:
    """Return features by the default pooling, float32 (B, D)."""
    return encoder(x_BCHW.to(device)).float().cpu().numpy()


def _unit(x_BD: np.ndarray, centre_D: np.ndarray) -> np.ndarray:
    """Return centred features of length 1. Non-finite ones become zero and match nothing."""
    x_BD = x_BD - centre_D
    with np.errstate(invalid="ignore", divide="ignore"):
        x_BD = x_BD / np.linalg.norm(x_BD, axis=1, keepdims=True)
    return np.nan_to_num(x_BD, nan=0.0, posinf=0.0, neginf=0.0)


def _pixels(data: bytes) -> np.ndarray | None:
    try:
        return decode(data)
    except BadImage:
        return None
