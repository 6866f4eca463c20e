"""Features of a store, or of files, written to one file for other tools.

Legend: N records, B images of a batch, D feature dimension, K classes, C channels, H height, W
width.
"""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.numpy import save

from dpvision.data.declared import check_declared
from dpvision.data.decode import BadImage
from dpvision.data.open import is_store, open_store
from dpvision.data.sources import open_source
from dpvision.data.store import Store
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.feature_file import Progress, collect_features
from dpvision.encoders.open import open_encoder
from dpvision.errors import ConfigError, DataError
from dpvision.files import replacing
from dpvision.runs.folder import require_confidential


@dataclass(frozen=True)
class Embeddings:
    """Description of the file that ``write_embeddings`` wrote."""

    path: Path
    num: int
    width: int
    visibility: Literal["private", "public"]
    """Embeddings of private images are private, whatever guarantee the encoder has. So are
    embeddings of public images by an encoder trained on private images without a guarantee, and
    those of a store that was cleared of private twins.
    """
    left_out: int
    """Number of images that could not be decoded."""


def write_embeddings(
    spec: str | Path,
    source: str | Path,
    out: str | Path,
    *,
    ema: bool = False,
    pooling: str | None = None,
    batch_size: int = 256,
    workers: int = 2,
    progress: Progress | None = None,
    release_private_outputs: bool = False,
) -> Embeddings:
    """Write features of a store, or of any source that ``data import`` accepts, to one file.

    The file has ``features``, float32 (N, D). For a store it also has ``id``, int64 (N,), the
    record ids, and ``label``: int64 (N,), -1 without a label, or zeros and ones, uint8 (N, K), for
    multi-label records (``Store.targets``). For another source it has the images' names: the array
    ``key`` in .npz, or a JSON list under ``key`` in the metadata of .safetensors. A source that is
    not a store counts as private.

    Args:
        spec: an encoder, as for ``open_encoder``.
        pooling: if None, the encoder's default.
        out: ends in .npz or .safetensors; replaced if it exists. For private images its path needs
            a folder named confidential.
        release_private_outputs: write them anywhere. No guarantee covers an encoder's output on a
            private image.

    Raises:
        ConfigError: another file extension, no such encoder or pooling, or a path outside folders
            named confidential.
        CheckpointError: as in ``open_encoder``.
        DataError: no image, or the file cannot be written.
    """
    out = Path(out)
    if out.suffix not in (".npz", ".safetensors"):
        raise ConfigError(
            f"embed: out={str(out)!r}; expected a name that ends in .npz or .safetensors. Rename "
            "it."
        )
    encoder = open_encoder(spec, ema=ema)
    store = open_store(source) if is_store(source) else None
    private = store is None or store.results_visibility == "private" or encoder.confidential
    if private and not release_private_outputs:
        require_confidential(
            out, "embed", "features of private images", ", or give --release-private-outputs"
        )
    with _writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    if store is not None:
        check_declared(
            encoder.window, False, store, "embed", "the images that the encoder was trained on"
        )
        functions = {"": lambda x_BCHW: {"": encoder(x_BCHW, pooling)}}
        found, label_N, row_N = collect_features(
            functions,
            store,
            encoder.data,
            encoder.image_size,
            batch_size=batch_size,
            workers=workers,
            progress=progress,
        )
        features, rows, keys, total = found["", ""].numpy(), row_N.numpy(), None, store.num_records
        label = _zeros_and_ones(store, rows) if store.multi_label else label_N.numpy()
        arrays = {
            "features": features,
            "id": store.index["id"][rows].astype(np.int64),
            "label": label,
        }
    else:
        features, keys, total = _embed_source(
            encoder, pooling, source, batch_size, workers, progress
        )
        arrays = {"features": features}
    _write_arrays(out, arrays, keys)
    return Embeddings(
        out,
        len(features),
        features.shape[1],
        "private" if private else "public",
        total - len(features),
    )


def _zeros_and_ones(store: Store, row_N: np.ndarray) -> np.ndarray:
    """Return labels as uint8 (N, K), where K is the number of named classes, or the largest class
    number + 1.
    """
    classes = store.classes(np.arange(store.num_records))[1]
    return store.targets(
        row_N,
        len(store.label_names)
        if store.label_names is not None
        else int(classes.max(initial=-1)) + 1,
    )


@torch.inference_mode()
def _embed_source(
    encoder: Encoder,
    pooling: str | None,
    source: str | Path,
    batch_size: int,
    workers: int,
    progress: Progress | None,
) -> tuple[np.ndarray, list[str], int]:
    """Return features and keys of the readable images of a source, and the number of all its
    images.
    """
    keys: list[str] = []
    parts: list[np.ndarray] = []
    total = 0

    def readable() -> Iterator[tuple[str, np.ndarray]]:
        nonlocal total
        for sample in open_source(source, for_import=False, workers=workers).samples:
            total += 1
            if sample.problem is None:
                with contextlib.suppress(BadImage):
                    yield sample.key, encoder.preprocess(sample.image)

    images = readable()
    while batch := list(islice(images, batch_size)):
        keys += [key for key, _ in batch]
        parts.append(
            encoder(torch.from_numpy(np.stack([x_CHW for _, x_CHW in batch])), pooling).numpy()
        )
        if progress is not None:
            progress(len(keys))
    if not parts:
        raise DataError(
            f"embed: {source} has no readable image; expected one or more. Give another SOURCE."
        )
    return np.concatenate(parts), keys, total


def _write_arrays(out: Path, arrays: dict[str, Any], keys: list[str] | None) -> None:
    with _writing(out), replacing(out) as partial, open(partial, "wb") as file:
        if out.suffix == ".npz":
            np.savez(
                file,
                allow_pickle=False,
                **(arrays if keys is None else arrays | {"key": np.array(keys)}),
            )
        else:
            file.write(save(arrays, metadata=None if keys is None else {"key": json.dumps(keys)}))


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"embed: {out} ({error.strerror or error}); expected a writable path with free "
            "space. Choose another OUT."
        ) from None
