"""The encoder, and the whole network, of a training run."""

from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from dpvision.checkpoint import Checkpoint, load_checkpoint
from dpvision.config import RunConfig, from_dict
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.pooled import attends, frozen, pooled_model
from dpvision.errors import CheckpointError, ConfigError
from dpvision.models import Model, make_model
from dpvision.models.vit import ViT

Network = TypeVar("Network", bound=nn.Module)


def run_encoder(
    run_or_checkpoint: str | Path, *, ema: bool = False, untrained: bool = False, device: str | torch.device = "cpu"
) -> Encoder:
    """The encoder of a run, or its architecture with the weights that it was initialised with.

    Raises:
        ConfigError: it is the run of a head. CheckpointError: as for ``load_model``.
    """
    checkpoint = load_checkpoint(run_or_checkpoint)
    about = checkpoint.manifest["config"].get("model", {})
    if about.get("kind") == "head":
        below = about.get("encoder", {}).get("spec")
        raise ConfigError(
            f"encoder: {run_or_checkpoint} is a head on frozen features, no encoder; expected what it stands on. Say {below!r}; the head "
            "itself is scored by `dpvision evaluate RUN --test STORE` and opened by dpvision.load_classifier."
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
        mean=config.data.mean,
        std=config.data.std,
        resize=config.data.resize,
        crop=config.data.crop,
        family="transformer" if attends(network) else "convnet",
        blocks=network.forward_blocks if isinstance(network, ViT) else None,
        lineage=() if untrained else tuple(checkpoint.manifest["lineage"]),
        weights="random" if untrained else "trained",
    )


def load_model(checkpoint: Checkpoint, *, ema: bool = False) -> tuple[Model, RunConfig]:
    """The whole network of a checkpoint in memory, decoder or head included, and the config of its run.

    Args:
        ema: the averaged weights instead of the last ones.

    Raises:
        CheckpointError: it does not fit its config, or it has no average.
    """
    config = from_dict(RunConfig, checkpoint.manifest["config"], f"{checkpoint.path}: config")
    return filled(make_model(config.model, config.seed), checkpoint, ema=ema), config


def filled(network: Network, checkpoint: Checkpoint, *, ema: bool = False) -> Network:
    """``network`` with a checkpoint's weights; raises as ``load_model``."""
    weights = checkpoint.ema if ema else checkpoint.model
    if weights is None:
        raise CheckpointError(f"checkpoint: {checkpoint.path} has no averaged weights; expected ema.safetensors. Leave ema out.")
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        raise CheckpointError(f"checkpoint: {checkpoint.path} does not fit its config ({error}). Use the version that wrote it.") from None
    return network
