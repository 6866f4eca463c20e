"""Records of a store as tensors: threads read, decode and augment; the order of the rows is kept.

A record's tensor depends on its bytes, on (seed, step, id) and on the settings: never on its
neighbours, its row, the number of workers or the size of the physical batch (docs/privacy.md).
Bytes that do not decode give ``valid`` False and zeros, and so does an image without a caption if
captions are requested; the record is neither replaced nor skipped. A shard that cannot be read is a
fault of the machine, not of a record, and raises DataError.

Where people are drawn, a row of a batch is one person and the views are those of K of their images
(``data.people``).

Legend: B records (people), V views, C channels, H height, W width, L tokens, K images of a person,
N classes.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dpvision.config import DataConfig
from dpvision.data.batch import Batch
from dpvision.data.keys import StepKey
from dpvision.data.ordered import ordered_map
from dpvision.data.store import Store
from dpvision.data.tokenizer import CaptionReader
from dpvision.data.transform import (
    decoded,
    evaluation_view,
    normalise,
    normalise_canvas,
    normalise_tensor,
)
from dpvision.devices import host_buffer
from dpvision.errors import DataError

_CHUNK = 64
"""Records per task of a thread; larger physical batches are joined from several tasks."""
_AHEAD_BATCHES = 2
_CPU = torch.device("cpu")
_Arrays = tuple[np.ndarray, ...]
"""In training batches id (B,), valid (B,), the rows whose labels apply, (B,) or (B, K), and with
captions tokens (B, V, L).
"""


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
    labels: bool = True,
    num_classes: int | None = None,
    normalised: bool = True,
) -> Iterator[Batch]:
    """Yield augmented batches of the given rows in order.

    The last one may be smaller, and no rows yield no batch.

    Each view is a crop (``transform.training_box``, bicubic) and a horizontal flip with probability
    1/2, drawn from ``key`` and the record's id in the streams "crop.V" and "flip.V". A view of a
    texture is drawn from the stream "look.V" instead.

    Args:
        rows: int64 positions in the store, (B,); or those of K images of each person, (B, K), whose
            V views each are the views of one row.
        key: seed and step.
        physical_batch_size: records (people) in a batch, at least 1; or one size per batch, which
            sum to the number of rows.
        workers: threads, at least 1. Neither this nor ``physical_batch_size`` changes a bit of any
            record.
        device: where textures are generated; other images are on the CPU in any case, in pinned
            memory if ``device`` is a GPU.
        captions: reads token_BVL (``tokenizer``); if None, no tokens.
        labels: whether to read labels; False for models that use none.
        num_classes: the declared K of a store with several labels per record; if None, such a store
            yields no labels.
        normalised: if False, images are yielded as uint8, for ``transform.normalise_tensor`` on the
            device: a quarter of the bytes to copy.

    Yields:
        Batch with image_BVCHW float32 of size ``image_size``, normalised, and label_B, or label_BV
        for people (None if the store has none, or without ``labels``). On the CPU, except generated
        images.

    Raises:
        DataError: a row is not in the store, or a shard or the file of captions cannot be read.
    """
    rows = _checked_rows(store, rows)
    parts = _sliced(rows, physical_batch_size)
    device = torch.device(device)
    if store.generated and device.type != "cpu" and captions is None:
        yield from _texture_batches(
            store, parts, key, data, image_size, device, normalised=normalised
        )
        return

    def labels_of(part: np.ndarray) -> Tensor | None:
        if not (labels and store.has_labels):
            return None
        if not store.multi_label:
            return torch.from_numpy(store.index["label"][part].astype(np.int64))
        return (
            None
            if num_classes is None
            else torch.from_numpy(store.targets(part.ravel(), num_classes)).unflatten(0, part.shape)
        )

    def augmented(part: np.ndarray, x_BVCHW: np.ndarray) -> _Arrays:
        if part.ndim == 1:
            return _augment(store, part, key, data, image_size, captions, x_BVCHW)
        return _augment_people(
            store, part, key, data, image_size, captions, x_BVCHW, labelled=num_classes is not None
        )

    views = data.views * (1 if rows.ndim == 1 else rows.shape[1])
    shape = (views, 3, image_size, image_size)
    dtype = torch.float32 if normalised else torch.uint8
    for _, x_BVCHW, (record_id, valid, used, *tokens) in _batched(
        augmented, parts, shape, workers, dtype, device
    ):
        label = labels_of(used)
        yield Batch(
            record_id_B=torch.from_numpy(record_id),
            valid_B=torch.from_numpy(valid),
            image_BVCHW=x_BVCHW,
            token_BVL=torch.from_numpy(tokens[0]) if tokens else None,
            label_B=label if used.ndim == 1 else None,
            label_BV=label.repeat_interleave(data.views, 1)
            if label is not None and used.ndim == 2
            else None,
        )


def image_batches(
    store: Store,
    rows: np.ndarray | None,
    image_size: int,
    data: DataConfig,
    *,
    batch_size: int,
    workers: int,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield images for evaluation, normalised.

    They are ``transform.evaluation_box`` resized to ``image_size`` (bicubic), or with
    ``data.own_sizes`` at their own resolution on a canvas of that size
    (``transform.evaluation_view``).

    Args:
        rows: int64 positions in the store; if None, all of them.

    Yields:
        x_BCHW float32, row_B int64, label_B int64 (-1 if unlabelled, and for every record of a
        store with several labels per record: see ``Store.targets``). Records that do not decode are
        absent.
    """
    rows = np.arange(store.num_records) if rows is None else _checked_rows(store, rows)

    def centred(part: np.ndarray, x_BCHW: np.ndarray) -> _Arrays:
        return (_centre(store, part, data, image_size, x_BCHW),)

    for part, x_BCHW, (valid,) in _batched(
        centred, _sliced(rows, batch_size), (3, image_size, image_size), workers
    ):
        if valid.any():
            kept = part[valid]
            label = np.full(len(kept), -1) if store.multi_label else store.index["label"][kept]
            yield (
                x_BCHW if valid.all() else x_BCHW[torch.from_numpy(valid)],
                torch.from_numpy(kept),
                torch.from_numpy(label.astype(np.int64)),
            )


def _texture_batches(
    store: Store,
    parts: list[np.ndarray],
    key: StepKey,
    data: DataConfig,
    image_size: int,
    device: torch.device,
    *,
    normalised: bool = True,
) -> Iterator[Batch]:
    """Yield views of textures generated on ``device``.

    A GPU generates them faster than threads could copy them.
    """
    for part in parts:
        x_BVCHW, valid_B = store.views(part, key, data, image_size, device)
        record_id_B = torch.from_numpy(store.index["id"][part].astype(np.int64))
        x_BVCHW = normalise_tensor(x_BVCHW, data.mean, data.std) if normalised else x_BVCHW
        yield Batch(record_id_B=record_id_B, valid_B=valid_B, image_BVCHW=x_BVCHW)


def _checked_rows(store: Store, rows: np.ndarray) -> np.ndarray:
    rows = np.asarray(rows, dtype=np.int64)
    if len(rows) and not (rows.min() >= 0 and rows.max() < store.num_records):
        got = f"{rows.min()} to {rows.max()}"
        raise DataError(
            f"loader: rows={got}; expected 0 to {store.num_records - 1}. Use the plan made for "
            "this store."
        )
    return rows


def _sliced(rows: np.ndarray, batch_size: int | Sequence[int]) -> list[np.ndarray]:
    sizes = (
        [min(batch_size, len(rows) - i) for i in range(0, len(rows), batch_size)]
        if isinstance(batch_size, int)
        else batch_size
    )
    return np.split(rows, np.cumsum(sizes)[:-1]) if len(sizes) else []


def _batched(
    work: Callable[[np.ndarray, np.ndarray], _Arrays],
    parts: list[np.ndarray],
    shape: tuple[int, ...],
    workers: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device = _CPU,
) -> Iterator[tuple[np.ndarray, Tensor, _Arrays]]:
    """Apply ``work`` to chunks in threads.

    Yields each part of the rows, its images (B, *shape) and the joined results of ``work``.

    ``work`` gets a chunk of rows and the part of the images that it has to fill: joining finished
    images would leave the reader's thread a copy of every one, more than it can make for 16
    threads. The memory is what ``device`` reads from without another copy (``host_buffer``).
    """
    largest = max(map(len, parts), default=1)
    images = max((part[0].size for part in parts if len(part)), default=1)
    chunk = max(1, min(_CHUNK // images, -(-largest // workers)))
    filled: deque[Tensor] = deque()

    def chunks() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for part in parts:
            x = host_buffer((len(part), *shape), dtype, device)
            filled.append(x)
            pixels = x.numpy()
            for i in range(0, len(part), chunk):
                yield part[i : i + chunk], pixels[i : i + chunk]

    ahead = workers + _AHEAD_BATCHES * -(-largest // chunk)
    done = ordered_map(lambda item: work(*item), chunks(), workers=workers, ahead=ahead)
    for part in parts:
        pieces = [next(done) for _ in range(0, len(part), chunk)]
        yield part, filled.popleft(), tuple(map(np.concatenate, zip(*pieces, strict=True)))


def _augment(
    store: Store,
    rows: np.ndarray,
    key: StepKey,
    data: DataConfig,
    image_size: int,
    captions: CaptionReader | None,
    out_BVCHW: np.ndarray,
) -> _Arrays:
    """Fill ``out_BVCHW``: normalised if it is float32, as they are if it is uint8.

    Zeros where the record is not valid.
    """
    image_BVCHW, valid_B = store.views(rows, key, data, image_size)
    valid, tokens = valid_B.numpy(), []
    if captions is not None:
        token_BVL, has_caption = captions.read(store, rows, key, data.views)
        valid &= has_caption
        tokens.append(token_BVL)
    if out_BVCHW.dtype == np.uint8:
        np.copyto(out_BVCHW, image_BVCHW.numpy())
    else:
        normalise(np.moveaxis(image_BVCHW.numpy(), 2, -1), data.mean, data.std, out_BVCHW)
    out_BVCHW[~valid] = 0
    return store.index["id"][rows].astype(np.int64), valid, rows, *tokens


def _augment_people(
    store: Store,
    row_BK: np.ndarray,
    key: StepKey,
    data: DataConfig,
    image_size: int,
    captions: CaptionReader | None,
    out_BVCHW: np.ndarray,
    *,
    labelled: bool,
) -> _Arrays:
    """Return views of K images of each person, side by side: (B, K x V, ...).

    An image that does not decode, or has no caption or (with ``labelled``) no label, is left out:
    the person's other images take its place, in order. A person without any is not valid.
    """
    pixels = np.empty((*row_BK.shape, data.views, *out_BVCHW.shape[2:]), dtype=out_BVCHW.dtype)
    columns = [
        _augment(store, row_B, replace(key, image=k), data, image_size, captions, pixels[:, k])
        for k, row_B in enumerate(row_BK.T)
    ]
    _, valid_BK, *values = (np.stack(column, axis=1) for column in zip(*columns, strict=True))
    if labelled:
        valid_BK &= store.index["label"][row_BK] >= 0
    count_B = valid_BK.sum(1)
    good_first_BK = np.argsort(~valid_BK, axis=1, kind="stable")
    place_BK = np.take_along_axis(
        good_first_BK, np.arange(row_BK.shape[1]) % np.maximum(count_B, 1)[:, None], axis=1
    )
    pixels, used_BK, *tokens = (
        value[np.arange(len(row_BK))[:, None], place_BK] for value in (pixels, *values)
    )
    out_BVCHW[...] = pixels.reshape(out_BVCHW.shape)
    joined = [value.reshape(len(row_BK), -1, *value.shape[3:]) for value in tokens]
    person_B = store.index["unit"][row_BK[:, 0]].astype(np.int64)
    return person_B, count_B > 0, used_BK, *joined


def _centre(
    store: Store, rows: np.ndarray, data: DataConfig, image_size: int, out_BCHW: np.ndarray
) -> np.ndarray:
    valid = np.zeros(len(rows), dtype=bool)
    for b, image in enumerate(decoded(store.read_many(rows))):
        if image is not None:
            valid[b] = True
            pixels_HWC, side = evaluation_view(image, image_size, data)
            normalise_canvas(pixels_HWC, side, data.mean, data.std, out_BCHW[b])
    out_BCHW[~valid] = 0
    return valid
