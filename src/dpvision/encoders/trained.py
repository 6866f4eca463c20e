"""Load the encoder or the whole network of a training run."""

from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from dpvision.checkpoint import Checkpoint, load_checkpoint
from dpvision.config import RunConfig
from dpvision.data.declared import window_of
from dpvision.data.transform import in_use
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.pooled import attends, frozen, pooled_model
from dpvision.errors import CheckpointError, ConfigError
from dpvision.models import Model, make_model
from dpvision.models.vit import ViT
from dpvision.runs.folder import settings_of_checkpoint
from dpvision.runs.lineage import lineage_of_results

Network = TypeVar("Network", bound=nn.Module)


def run_encoder(
    run_or_checkpoint: str | Path,
    *,
    ema: bool = False,
    untrained: bool = False,
    device: str | torch.device = "cpu",
) -> Encoder:
    """Load the encoder of a run, or its architecture with its initial weights.

    Raises:
        ConfigError: the run is of a head.
        CheckpointError: as for ``load_model``.
    """
    checkpoint = load_checkpoint(run_or_checkpoint)
    about = checkpoint.manifest["config"].get("model", {})
    if about.get("kind") == "head":
        below = about.get("encoder", {}).get("spec")
        raise ConfigError(
            f"encoder: {run_or_checkpoint} is a head on frozen features; expected an encoder. "
            f"Use its encoder {below!r}; `dpvision evaluate RUN --test STORE` scores the head "
            "itself, and dpvision.load_classifier opens it."
        )
    model, config = load_model(checkpoint, ema=ema and not untrained)
    if untrained:
        model = make_model(config.model, config.seed)
    network = model.encoder
    return frozen(
        pooled_model(model),
        device,
        name="random weights" if untrained else "encoder, averaged weights" if ema else "encoder",
        image_size=config.model.encoder.image_size,
        **in_use(config.data),
        family="transformer" if attends(network) else "convnet",
        blocks=network.forward_blocks if isinstance(network, ViT) else None,
        lineage=()
        if untrained
        else tuple(lineage_of_results(checkpoint.manifest["lineage"], checkpoint.path)),
        weights="random" if untrained else "trained",
        window=window_of(checkpoint.manifest),
    )


def load_model(checkpoint: Checkpoint, *, ema: bool = False) -> tuple[Model, RunConfig]:
    """Return the whole network of a checkpoint, including decoder or head, and the config of its
    run.

    Args:
        ema: whether to use the averaged weights instead of the last ones.

    Raises:
        CheckpointError: the weights do not fit the config, or there are no averaged weights.
    """
    config = settings_of_checkpoint(checkpoint)
    return filled(make_model(config.model, config.seed), checkpoint, ema=ema), config


def filled(network: Network, checkpoint: Checkpoint, *, ema: bool = False) -> Network:
    """Load a checkpoint's weights into ``network`` and return it. Raises like ``load_model``."""
    weights = checkpoint.ema if ema else checkpoint.model
    if weights is None:
        raise CheckpointError(
            f"checkpoint: {checkpoint.path} has no averaged weights; expected ema.safetensors. "
            "Drop --ema."
        )
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(
            f"checkpoint: {checkpoint.path} does not fit its config ({error}). Use the version "
            "that wrote it."
        ) from None
    return network
