"""Frozen features: the encoder of a run, what it makes of a store, and embeddings on disk.

    encoder, preprocess = dpvision.load("runs/demo")
    feature_BD = encoder(torch.from_numpy(preprocess(picture))[None])

Legend: B records of a batch, N records in all, C channels, H height, W width, L tokens, D feature dimensions, G patches on a side.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from safetensors.numpy import save
from torch import Tensor, nn
from torch.nn import functional as F

from dpvision.checkpoint import Checkpoint, load_checkpoint
from dpvision.config import DataConfig, ModelConfig, RunConfig, from_dict
from dpvision.data.decode import BadPicture, decode
from dpvision.data.loader import pictures
from dpvision.data.open import is_store, open_store
from dpvision.data.sources import open_source
from dpvision.data.store import Store
from dpvision.data.transform import Preprocess, preprocess_of
from dpvision.errors import CheckpointError, ConfigError, DataError
from dpvision.files import replacing
from dpvision.models import Model, make_model
from dpvision.models.captioner import Captioner
from dpvision.models.packaged import TimmEncoder
from dpvision.models.resnet import ResNet
from dpvision.models.vit import ViT
from dpvision.train.folder import require_confidential
from dpvision.train.lineage import shaped_in_confidence

Pooling = Literal["mean", "2x2"]
POOLINGS: tuple[Pooling, ...] = get_args(Pooling)

FeatureFunction = Callable[[Tensor], dict[str, Tensor]]
"""x_BCHW, normalised -> named features x_BD of the same pictures: several poolings share one forward pass."""
Progress = Callable[[int], None]
"""Called after each batch with the number of pictures done so far."""


class Encoder(nn.Module):
    """An encoder that gives one feature vector per picture: of a transformer from the patch tokens after the final norm, of a convolutional
    network from its last map.

    ``pooling="mean"`` averages all places (D numbers); ``"2x2"`` averages each quadrant and joins the four (4 D numbers, row by row),
    which keeps where things are. A captioner's encoder offers a third set of features, "bridge": the mean of all its tokens, the class
    token among them, after the map to the decoder's width and without positions (what DP-Cap's few-shot probes look at).
    """

    def __init__(self, network: ViT | ResNet | TimmEncoder, pooling: Pooling = "mean", bridge: nn.Linear | None = None) -> None:
        super().__init__()
        if pooling not in POOLINGS:
            raise ConfigError(f"encoder: pooling={pooling!r}; expected one of {list(POOLINGS)}. Use 'mean' for one token's width.")
        self.network, self.pooling, self.bridge = network, pooling, bridge

    def places(self, x_BCHW: Tensor) -> Tensor:
        """One vector for each place of the picture, a patch or a place of the last map, in raster order: float32 (B, L, D)."""
        if isinstance(self.network, TimmEncoder):
            return self.network.places(x_BCHW).float()
        if isinstance(self.network, ResNet):
            return self.network(x_BCHW).flatten(2).transpose(1, 2).float()
        return self.network(x_BCHW)[:, 1:].float()

    def poolings(self, x_BCHW: Tensor) -> dict[str, Tensor]:
        """Features by the name of each pooling, from one forward pass."""
        if isinstance(self.network, ViT) and self.bridge is not None:
            token_BLD = self.network(x_BCHW)
            # A mean of affine images is the affine image of the mean.
            return self._of_places(token_BLD[:, 1:].float()) | {"bridge": self.bridge(token_BLD.mean(dim=1)).float()}
        return self._of_places(self.places(x_BCHW))

    @staticmethod
    def _of_places(place_BLD: Tensor) -> dict[str, Tensor]:
        side = math.isqrt(place_BLD.shape[1])
        place_BDGG = place_BLD.transpose(1, 2).unflatten(-1, (side, side))
        quadrant_BDQ = F.adaptive_avg_pool2d(place_BDGG, 2).flatten(2)
        return {"mean": place_BLD.mean(dim=1), "2x2": quadrant_BDQ.transpose(1, 2).flatten(1)}

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Features float32 of shape (B, D), or (B, 4 D) for ``pooling="2x2"``."""
        return self.poolings(x_BCHW)[self.pooling]


def load(run_or_checkpoint: str | Path, *, ema: bool = False, pooling: Pooling = "mean") -> tuple[Encoder, Preprocess]:
    """Encoder of a run's newest checkpoint, frozen and in evaluation mode, and the preprocessing it was trained with.

    Args:
        run_or_checkpoint: run folder, or one checkpoint folder.
        ema: take the averaged weights instead of the last ones.
        pooling: how places become one vector; see ``Encoder``.

    Returns:
        encoder, on the CPU: normalised pictures float32 (B, 3, H, W) -> features float32 (B, D);
        preprocess: one PIL image, or uint8 array (H, W, 3) -> float32 (3, H, W).

    Raises:
        CheckpointError: there is none, it was altered, it does not fit its config, or it has no average.
        ConfigError: unknown pooling.
    """
    encoder, config = load_encoder(load_checkpoint(run_or_checkpoint), ema=ema, pooling=pooling)
    return encoder, preprocess_of(config.model.encoder.image_size, config.data)


def load_encoder(checkpoint: Checkpoint, *, ema: bool = False, pooling: Pooling = "mean") -> tuple[Encoder, RunConfig]:
    """Like ``load``, from a checkpoint in memory, with the whole config of its run."""
    model, config = load_model(checkpoint, ema=ema)
    return _frozen(model, pooling), config


def load_model(checkpoint: Checkpoint, *, ema: bool = False) -> tuple[Model, RunConfig]:
    """The whole network of a checkpoint in memory, decoder or head included, and the config of its run; raises as ``load``."""
    config = from_dict(RunConfig, checkpoint.manifest["config"], f"{checkpoint.path}: config")
    weights = checkpoint.ema if ema else checkpoint.model
    if weights is None:
        raise CheckpointError(f"checkpoint: {checkpoint.path} has no averaged weights; expected ema.safetensors. Leave ema out.")
    model = make_model(config.model, config.seed)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"checkpoint: {checkpoint.path} does not fit its config ({error}). Use the version that wrote it.") from None
    return model, config


def initial_encoder(cfg: ModelConfig, seed: int, pooling: Pooling = "mean") -> Encoder:
    """The encoder of an untrained model: what a run without a parent starts from."""
    return _frozen(make_model(cfg, seed), pooling)


def trained_in_confidence(manifest: dict[str, Any]) -> bool:
    """Whether private pictures shaped these weights without a guarantee: then all that is computed with them is private too."""
    return shaped_in_confidence(manifest["lineage"])


def _frozen(model: Model, pooling: Pooling) -> Encoder:
    bridge = model.decoder.bridge if isinstance(model, Captioner) else None
    return Encoder(model.encoder, pooling, bridge).eval().requires_grad_(False)


def frozen_features(
    encoder: Callable[[Tensor], Tensor],
    store: Store,
    data: DataConfig,
    image_size: int,
    *,
    rows: np.ndarray | None = None,
    batch_size: int = 256,
    workers: int = 2,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> tuple[Tensor, Tensor]:
    """Features and labels of a store's pictures under the evaluation transform.

    Args:
        encoder: any function x_BCHW -> x_BD; its weights have to be on ``device``.
        data: normalisation constants are taken from it.
        rows: int64 positions in the store; None: all.

    Returns:
        x_ND float32 and label_N int64 (-1 where there is none), both on the CPU. Pictures that do not decode are absent.

    Raises:
        DataError: no picture could be read.
    """
    named, label_N, _ = collect_features(
        {"features": lambda x: {"": encoder(x)}},
        store,
        data,
        image_size,
        rows=rows,
        batch_size=batch_size,
        workers=workers,
        device=device,
        progress=progress,
    )
    return named["features", ""], label_N


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
    """Features of several functions from one pass over a store.

    Returns:
        features x_ND float32 by (function's name, feature's name); label_N int64; row_N int64, all on the CPU.

    Raises:
        DataError: no picture could be read.
    """
    total = store.num_records if rows is None else len(rows)
    found: dict[tuple[str, str], Tensor] = {}
    label_N, row_N, done = torch.empty(total, dtype=torch.int64), torch.empty(total, dtype=torch.int64), 0
    for x_BCHW, row_B, label_B in pictures(store, rows, image_size, data, batch_size=batch_size, workers=workers):
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
        raise DataError(f"features: {store.path} has no readable picture among {total}; expected one or more. Import the source again.")
    return {key: x_ND[:done] for key, x_ND in found.items()}, label_N[:done], row_N[:done]


@dataclass(frozen=True)
class Embeddings:
    """What ``write_embeddings`` wrote."""

    path: Path
    num: int
    width: int
    visibility: Literal["private", "public"]
    """Embeddings of private pictures are as private as the pictures, whatever guarantee the encoder has; so are those of public pictures
    by an encoder that private pictures shaped without a guarantee, and those of a store that was cleared of private twins."""
    left_out: int
    """Pictures that could not be decoded."""


def write_embeddings(
    run_or_checkpoint: str | Path,
    source: str | Path,
    out: str | Path,
    *,
    ema: bool = False,
    pooling: Pooling = "mean",
    batch_size: int = 256,
    workers: int = 2,
    progress: Progress | None = None,
    release_private_outputs: bool = False,
) -> Embeddings:
    """Features of a store, or of anything that ``data import`` takes, in one file.

    The file has ``features`` float32 (N, D). From a store also ``id`` int64 (N,), the records' own ids, and ``label`` int64 (N,), -1 where
    there is none, or zeros and ones uint8 (N, K) where records may have several (``Store.targets``); from another source the pictures'
    names: the array ``key`` in .npz, a JSON list under ``key`` in the metadata of .safetensors. A source that is not a store counts as
    private.

    Args:
        out: ends in .npz or .safetensors; replaced if it exists. Features of private images must lie under a folder called confidential.
        release_private_outputs: write them anywhere: no guarantee covers what an encoder makes of a private image.

    Raises:
        ConfigError: another ending, or a place outside of every folder called confidential. CheckpointError: as in ``load``. DataError: no
            picture, or the file cannot be written.
    """
    out = Path(out)
    if out.suffix not in (".npz", ".safetensors"):
        raise ConfigError(f"embed: out={str(out)!r}; expected a name that ends in .npz or .safetensors. Rename it.")
    checkpoint = load_checkpoint(run_or_checkpoint)
    encoder, config = load_encoder(checkpoint, ema=ema, pooling=pooling)
    keys: list[str] | None = None
    store = open_store(source) if is_store(source) else None
    private = store is None or store.results_visibility == "private" or trained_in_confidence(checkpoint.manifest)
    if private and not release_private_outputs:
        require_confidential(out, "embed", "features of private images", ", or say --release-private-outputs")
    if store is not None:
        size = config.model.encoder.image_size
        named, label_N, row_N = collect_features(
            {"encoder": lambda x: {pooling: encoder(x)}},
            store,
            config.data,
            size,
            batch_size=batch_size,
            workers=workers,
            progress=progress,
        )
        features = named["encoder", pooling].numpy()
        label = label_N.numpy() if not store.multi_label else _zeros_and_ones(store, row_N.numpy())
        arrays = {"features": features, "id": store.index["id"][row_N.numpy()].astype(np.int64), "label": label}
        total = store.num_records
    else:
        features, keys, total = _embed_source(encoder, config, source, batch_size, workers, progress)
        arrays = {"features": features}
    _write_arrays(out, arrays, keys)
    return Embeddings(out, len(features), features.shape[1], "private" if private else "public", total - len(features))


def _zeros_and_ones(store: Store, row_N: np.ndarray) -> np.ndarray:
    """uint8 (N, K): K are the store's named classes, or those up to the largest number."""
    classes = store.classes(np.arange(store.num_records))[1]
    return store.targets(row_N, len(store.label_names) if store.label_names is not None else int(classes.max(initial=-1)) + 1)


@torch.inference_mode()
def _embed_source(
    encoder: Encoder, config: RunConfig, source: str | Path, batch_size: int, workers: int, progress: Progress | None
) -> tuple[np.ndarray, list[str], int]:
    """Features and keys of the readable pictures of a source, and how many pictures there were."""
    prepare = preprocess_of(config.model.encoder.image_size, config.data)
    keys: list[str] = []
    parts: list[np.ndarray] = []
    total = 0

    def readable() -> Iterator[tuple[str, np.ndarray]]:
        nonlocal total
        for sample in open_source(source, workers=workers).samples:
            total += 1
            if sample.problem is None:
                try:
                    yield sample.key, prepare(decode(sample.image))
                except BadPicture:
                    continue

    batch: list[np.ndarray] = []

    def finish_batch() -> None:
        parts.append(encoder(torch.from_numpy(np.stack(batch))).numpy())
        batch.clear()
        if progress is not None:
            progress(len(keys))

    for key, x_CHW in readable():
        keys.append(key)
        batch.append(x_CHW)
        if len(batch) == batch_size:
            finish_batch()
    if batch:
        finish_batch()
    if not parts:
        raise DataError(f"embed: {source} has no readable picture; expected one or more. Correct the path.")
    return np.concatenate(parts), keys, total


def _write_arrays(out: Path, arrays: dict[str, Any], keys: list[str] | None) -> None:
    try:
        with replacing(out) as partial, open(partial, "wb") as file:
            if out.suffix == ".npz":
                np.savez(file, allow_pickle=False, **(arrays if keys is None else arrays | {"key": np.array(keys)}))
            else:
                file.write(save(arrays, metadata=None if keys is None else {"key": json.dumps(keys)}))
    except OSError as error:
        raise DataError(f"embed: {out} ({error.strerror or error}); expected a writable place with space. Choose another --out.") from None
