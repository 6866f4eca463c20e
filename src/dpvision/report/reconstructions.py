"""Reconstructions of masked images by a masked autoencoder, before and after a run, as strips for a
page.

Legend: B images, L patches, C channels, H height, W width.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dpvision.checkpoint import Checkpoint, load_checkpoint
from dpvision.config import MAEConfig, RunConfig
from dpvision.data.keys import StepKey
from dpvision.data.loader import image_batches
from dpvision.data.store import Store
from dpvision.errors import CheckpointError, ConfigError, DataError
from dpvision.models import mae, make_model
from dpvision.models.layers import unpatchify
from dpvision.report.html import pixels_of, strip_of
from dpvision.runs.folder import settings_of_checkpoint

WARM_START = "the warm start"
INITIAL = "random initial weights"
LOST_START = "random initial weights (its warm start is not available)"


@dataclass(frozen=True)
class Reconstructions:
    """Strips of the same images, as data: URIs of PNG images."""

    seen: str
    """The visible patches; hidden ones are transparent."""
    fills: dict[str, str]
    """By model, in the order of training: the same with its predictions in the hidden patches."""
    original: str
    count: int
    mask_ratio: float
    borrowed: bool = False
    """Whether brightness and contrast of each hidden patch are the original's, because the model
    predicts normalised pixels.
    """

    @property
    def filled(self) -> str:
        """Strip with the predictions of the last model."""
        return list(self.fills.values())[-1]


def reconstruct_some(run: str | Path, store: Store, count: int = 8) -> Reconstructions | None:
    """Return masked images of ``store`` as reconstructed by the run's initial and final weights.

    "Before" is the checkpoint of ``init_from`` if it still matches the run's lineage, otherwise the
    weights initialised by the seed. The strip's name says which.

    Args:
        run: run or checkpoint folder.
        store: its images will be in the result.

    Returns:
        None if the run's model does not reconstruct pixels.

    Raises:
        CheckpointError: there is no checkpoint, or it was altered.
        DataError: no image could be read.
    """
    checkpoint = load_checkpoint(run)
    config = settings_of_checkpoint(checkpoint)
    if not isinstance(config.model, MAEConfig) or config.model.target == "gradients":
        return None
    parent = None if config.init_from is None else _parent(checkpoint, config)
    start = INITIAL if config.init_from is None else LOST_START if parent is None else WARM_START
    return reconstruct(
        {f"Before: {start}": parent, "After the run": checkpoint}, config, store, count
    )


def reconstruct(
    models: Mapping[str, Checkpoint | None], config: RunConfig, store: Store, count: int = 8
) -> Reconstructions:
    """Return the same masked images as reconstructed by each of several models.

    The choice of images and their masks depend only on the store's size, the images' ids and the
    config's seed.

    Args:
        models: one or more checkpoints by row name; None stands for the weights initialised by the
            config's seed.
        config: of the masked autoencoder, shared by all models.
        store: ``count`` images spread over it will be in the result.

    Raises:
        ConfigError: the config is not of a masked autoencoder.
        CheckpointError: a checkpoint is of another architecture.
        DataError: no image could be read.
    """
    if not isinstance(config.model, MAEConfig):
        raise ConfigError(
            f"reconstructions: model.kind={config.model.kind!r}; expected 'mae'. Choose a run of "
            "a vip recipe."
        )
    patch_size = config.model.encoder.patch_size
    rows = np.unique(np.linspace(0, store.num_records - 1, count).astype(np.int64))
    found = next(
        image_batches(
            store,
            rows,
            config.model.encoder.image_size,
            config.data,
            batch_size=len(rows),
            workers=1,
        ),
        None,
    )
    if found is None:
        raise DataError(
            f"report: none of {len(rows)} images of {store.path} could be read; expected "
            "readable ones. Import the source again."
        )
    x_BCHW, row_B, _ = found
    record_id_B = torch.from_numpy(store.index["id"][row_B.numpy()].astype(np.int64))
    fills = {}
    for name, checkpoint in models.items():
        model = _model(config, checkpoint)
        order_BL = StepKey(config.seed, 0).bits(record_id_B, "report", model.num_patches)
        filled_BCHW, mask_BL = mae.reconstruct(model, x_BCHW, order_BL)
        fills[name] = strip_of(pixels_of(filled_BCHW, config.data.mean, config.data.std))
    hidden_BCHW = (
        unpatchify(mask_BL[..., None].float().expand(-1, -1, 3 * patch_size**2), patch_size) > 0.5
    )
    original = pixels_of(x_BCHW, config.data.mean, config.data.std)
    alpha = np.where(hidden_BCHW[:, :1].permute(0, 2, 3, 1).numpy(), 0, 255).astype(np.uint8)
    seen = np.concatenate([original, alpha], axis=-1)
    borrowed = config.model.target != "pixels"
    return Reconstructions(
        strip_of(seen), fills, strip_of(original), len(original), config.model.mask_ratio, borrowed
    )


def _model(config: RunConfig, checkpoint: Checkpoint | None) -> mae.MAE:
    model = make_model(config.model, config.seed)
    assert isinstance(model, mae.MAE)
    if checkpoint is not None:
        try:
            model.load_state_dict(checkpoint.model)
        except RuntimeError:
            raise CheckpointError(
                f"reconstructions: {checkpoint.path} has another architecture than "
                f"{config.recipe}; expected the same. Use a run of it."
            ) from None
    return model.eval()


def _parent(checkpoint: Checkpoint, config: RunConfig) -> Checkpoint | None:
    """Return the checkpoint that the run started from, or None if it is gone or does not match the
    run's lineage.

    The lineage also excludes weights that were not checked when this run began: images shown must
    come from nothing more private than the run itself.
    """
    assert config.init_from is not None
    try:
        parent = load_checkpoint(config.init_from)
    except CheckpointError:
        return None
    return parent if parent.manifest["lineage"] == checkpoint.manifest["lineage"][:-1] else None
