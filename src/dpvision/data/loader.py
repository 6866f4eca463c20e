"""Records of a store as tensors: threads read, decode and augment; the order of the rows is kept.

A record's tensor depends on its bytes, on (seed, step, id) and on the settings: never on its neighbours, its row, the number of workers or
the size of the physical batch (docs/privacy.md). Bytes that do not decode give ``valid`` False and zeros, and so does an image without a
caption if captions are requested; the record is neither replaced nor skipped. A shard that cannot be read is a fault of the machine, not
of a record, and raises DataError.

Legend: B records, V views, C channels, H height, W width, L tokens.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from dpvision.config import DataConfig
from dpvision.data.batch import Batch
from dpvision.data.caption_reader import CaptionReader
from dpvision.data.keys import StepKey
from dpvision.data.ordered import ordered_map
from dpvision.data.store import Store
from dpvision.data.transform import decoded, evaluation_view, normalise, normalise_canvas
from dpvision.errors import DataError

_CHUNK = 64
"""Records per task of a thread; larger physical batches are joined from several tasks."""
_AHEAD_BATCHES = 2
_Arrays = tuple[np.ndarray, ...]
"""valid (B,), and with captions tokens (B, V, L)."""


def physical_batches(
    store: Store,
    rows: np.ndarray,
    key: StepKey,
    data: DataConfig,
    image_size: int,
    *,
    physical_batch_size: int | Sequence[int],
    workers: int,
    device: str | torch.device = "cpu",
    captions: CaptionReader | None = None,
    num_classes: int | None = None,
) -> Iterator[Batch]:
    """Yield augmented batches of the given rows in order; the last one may be smaller, and no rows yield no batch.

    Each view is a crop (``transform.training_box``, bicubic) and a horizontal flip with probability 1/2, drawn from ``key`` and the
    record's id in the streams "crop.V" and "flip.V". A view of a texture is drawn from the stream "look.V" instead.

    Args:
        rows: int64 positions in the store.
        key: seed and step.
        physical_batch_size: records in a batch, at least 1; or one size per batch, which sum to the number of rows.
        workers: threads, at least 1. Neither this nor ``physical_batch_size`` changes a bit of any record.
        device: where textures are generated; other images are on the CPU in any case.
        captions: reads token_BVL (``caption_reader``); if None, no tokens.
        num_classes: the declared K of a store with several labels per record; if None, such a store yields no labels.

    Yields:
        Batch with image_BVCHW float32 of size ``image_size``, normalised, and label_B (None if the store has none).

    Raises:
        DataError: a row is not in the store, or a shard or the file of captions cannot be read.
    """
    rows = _checked_rows(store, rows)
    parts = _sliced(rows, physical_batch_size)
    device = torch.device(device)
    if store.generated and device.type != "cpu" and captions is None:
        yield from _texture_batches(store, parts, key, data, image_size, device)
        return
    has_labels = bool(store.labelled.any()) if len(rows) else False

    def labels(part: np.ndarray) -> Tensor | None:
        if not has_labels:
            return None
        if not store.multi_label:
            return torch.from_numpy(store.index["label"][part].astype(np.int64))
        return None if num_classes is None else torch.from_numpy(store.targets(part, num_classes))

    def augmented(part: np.ndarray, x_BVCHW: np.ndarray) -> _Arrays:
        return _augment(store, part, key, data, image_size, captions, x_BVCHW)

    for part, x_BVCHW, (valid, *tokens) in _batched(augmented, parts, (data.views, 3, image_size, image_size), workers):
        yield Batch(
            record_id_B=torch.from_numpy(store.index["id"][part].astype(np.int64)),
            valid_B=torch.from_numpy(valid),
            image_BVCHW=torch.from_numpy(x_BVCHW),
            token_BVL=torch.from_numpy(tokens[0]) if tokens else None,
            label_B=labels(part),
        )


def pictures(
    store: Store, rows: np.ndarray | None, image_size: int, data: DataConfig, *, batch_size: int, workers: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield images for evaluation: ``transform.evaluation_box`` resized to ``image_size`` (bicubic), normalised; with ``data.own_sizes``
    at their own resolution on a canvas of ``image_size`` (``transform.evaluation_view``).

    Args:
        rows: int64 positions in the store; if None, all of them.

    Yields:
        x_BCHW float32, row_B int64, label_B int64 (-1 if unlabelled, and for every record of a store with several labels per record: see
        ``Store.targets``). Records that do not decode are absent.
    """
    rows = np.arange(store.num_records) if rows is None else _checked_rows(store, rows)

    def centred(part: np.ndarray, x_BCHW: np.ndarray) -> _Arrays:
        return (_centre(store, part, data, image_size, x_BCHW),)

    for part, x_BCHW, (valid,) in _batched(centred, _sliced(rows, batch_size), (3, image_size, image_size), workers):
        if valid.any():
            kept = part[valid]
            label = np.full(len(kept), -1) if store.multi_label else store.index["label"][kept]
            x_BCHW = x_BCHW if valid.all() else x_BCHW[valid]
            yield torch.from_numpy(x_BCHW), torch.from_numpy(kept), torch.from_numpy(label.astype(np.int64))


def _texture_batches(
    store: Store, parts: list[np.ndarray], key: StepKey, data: DataConfig, image_size: int, device: torch.device
) -> Iterator[Batch]:
    """Yield views of textures generated on ``device``: a GPU generates them faster than threads could copy them."""
    mean, std = (torch.tensor(v, device=device)[:, None, None] for v in (data.mean, data.std))
    for part in parts:
        x_BVCHW, valid_B = store.views(part, key, data, image_size, device)
        record_id_B = torch.from_numpy(store.index["id"][part].astype(np.int64)).to(device)
        yield Batch(record_id_B=record_id_B, valid_B=valid_B, image_BVCHW=(x_BVCHW.float() / 255 - mean) / std)


def _checked_rows(store: Store, rows: np.ndarray) -> np.ndarray:
    rows = np.asarray(rows, dtype=np.int64)
    if len(rows) and not (rows.min() >= 0 and rows.max() < store.num_records):
        got = f"{rows.min()} to {rows.max()}"
        raise DataError(f"loader: rows={got}; expected 0 to {store.num_records - 1}. Use the plan made for this store.")
    return rows


def _sliced(rows: np.ndarray, batch_size: int | Sequence[int]) -> list[np.ndarray]:
    sizes = [min(batch_size, len(rows) - i) for i in range(0, len(rows), batch_size)] if isinstance(batch_size, int) else batch_size
    return np.split(rows, np.cumsum(sizes)[:-1]) if len(sizes) else []


def _batched(
    work: Callable[[np.ndarray, np.ndarray], _Arrays], parts: list[np.ndarray], shape: tuple[int, ...], workers: int
) -> Iterator[tuple[np.ndarray, np.ndarray, _Arrays]]:
    """Apply ``work`` to chunks in threads; yield each part of the rows, its float32 images (B, *shape) and the joined results of ``work``.

    ``work`` gets a chunk of rows and the part of the images that it has to fill: joining finished images would leave the reader's thread a
    copy of every one, more than it can make for 16 threads.
    """
    largest = max(map(len, parts), default=1)
    chunk = min(_CHUNK, -(-largest // workers))
    filled: deque[np.ndarray] = deque()

    def chunks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for part in parts:
            x = np.empty((len(part), *shape), dtype=np.float32)
            filled.append(x)
            for i in range(0, len(part), chunk):
                yield part[i : i + chunk], x[i : i + chunk]

    ahead = workers + _AHEAD_BATCHES * -(-largest // chunk)
    done = ordered_map(lambda item: work(*item), chunks(), workers=workers, ahead=ahead)
    for part in parts:
        pieces = [next(done) for _ in range(0, len(part), chunk)]
        yield part, filled.popleft(), tuple(map(np.concatenate, zip(*pieces, strict=True)))


def _augment(
    store: Store, rows: np.ndarray, key: StepKey, data: DataConfig, image_size: int, captions: CaptionReader | None, out_BVCHW: np.ndarray
) -> _Arrays:
    image_BVCHW, valid_B = store.views(rows, key, data, image_size)
    valid, tokens = valid_B.numpy(), []
    if captions is not None:
        token_BVL, has_caption = captions.read(store, rows, key, data.views)
        valid &= has_caption
        tokens.append(token_BVL)
    normalise(np.moveaxis(image_BVCHW.numpy(), 2, -1), data.mean, data.std, out_BVCHW)
    out_BVCHW[~valid] = 0
    return valid, *tokens


def _centre(store: Store, rows: np.ndarray, data: DataConfig, image_size: int, out_BCHW: np.ndarray) -> np.ndarray:
    valid = np.zeros(len(rows), dtype=bool)
    for b, image in enumerate(decoded(store.read_many(rows))):
        if image is not None:
            valid[b] = True
            pixels_HWC, side = evaluation_view(image, image_size, data)
            normalise_canvas(pixels_HWC, side, data.mean, data.std, out_BCHW[b])
    out_BCHW[~valid] = 0
    return valid
