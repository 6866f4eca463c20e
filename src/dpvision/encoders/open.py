"""From what a person types to an encoder: a run, a library's model, a file of weights, or features that need no training."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dpvision.checkpoint import load_checkpoint
from dpvision.data.store import Store
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.fixed import FIXED, fixed_encoder
from dpvision.errors import ConfigError
from dpvision.features import PooledNetwork, initial_encoder, load_encoder
from dpvision.models.packaged import TimmEncoder
from dpvision.models.vit import ViT
from dpvision.train.unprotected import runs_with_these_weights

_FORMS = (
    "a run folder, random:RUN, {timm,torchvision}:NAME, {vip,mae,simclr,tan}:FILE, pixels, hog, scattering, patches or patches+scattering"
)


def open_encoder(spec: str, *, ema: bool = False, device: str | torch.device = "cpu", image_size: int | None = None) -> Encoder:
    """The encoder that ``spec`` names, frozen, on ``device``.

    Args:
        spec: a run or checkpoint folder; ``random:RUN``, its architecture with its initial weights; ``timm:NAME`` or
            ``torchvision:NAME``, with ``@FILE`` for weights of a file; ``vip:FILE``, ``mae:FILE``, ``simclr:FILE``, ``tan:FILE``, released
            checkpoints; ``pixels``, ``hog``, ``scattering``, ``patches``, ``patches+scattering``.
        ema: a run's averaged weights.
        image_size: for what takes images of any size (pixels, hog, scattering; most convnets), and the highest resolution of patches;
            others keep their own.

    Raises:
        ConfigError: no such form. CheckpointError: the file or the run cannot be read, or does not fit.
    """
    kind, _, rest = spec.partition(":")
    if kind in ("timm", "torchvision"):
        from dpvision.encoders.packaged import library_encoder

        name, _, file = rest.partition("@")
        return library_encoder(kind, name, Path(file) if file else None, image_size=image_size, device=device)
    if kind in ("vip", "mae", "simclr", "tan"):
        from dpvision.encoders.released import released_encoder

        return released_encoder(kind, Path(rest), device=device)
    if spec in FIXED:
        return fixed_encoder(spec, image_size, device=device)
    if kind == "random" and rest:
        return run_encoder(rest, untrained=True, device=device)
    if spec and Path(spec).exists():  # an empty text would be the working directory
        return run_encoder(spec, ema=ema, device=device)
    raise ConfigError(f"encoder: {spec!r}; expected {_FORMS}. Correct it.")


def run_encoder(
    run_or_checkpoint: str | Path, *, ema: bool = False, untrained: bool = False, device: str | torch.device = "cpu"
) -> Encoder:
    """The encoder of a run, or its architecture with the weights that it was initialised with.

    Raises:
        ConfigError: it is the run of a head. CheckpointError: as for ``features.load``.
    """
    checkpoint = load_checkpoint(run_or_checkpoint)
    model = checkpoint.manifest["config"].get("model", {})
    if model.get("kind") == "head":
        below = model.get("encoder", {}).get("spec")
        raise ConfigError(
            f"encoder: {run_or_checkpoint} is a head on frozen features, no encoder; expected what it stands on. Say {below!r}; the head "
            "itself is scored by `dpvision evaluate RUN --test STORE`."
        )
    encoder, config = load_encoder(checkpoint, ema=ema and not untrained)
    if untrained:
        encoder = initial_encoder(config.model, config.seed)
    encoder = encoder.to(device)
    network = encoder.network
    name = "random weights" if untrained else "encoder, averaged weights" if ema else "encoder"
    return Encoder(
        name=name,
        image_size=config.model.encoder.image_size,
        mean=config.data.mean,
        std=config.data.std,
        poolings=encoder.poolings,
        family="transformer" if isinstance(network, ViT) or (isinstance(network, TimmEncoder) and network.attends) else "convnet",
        backbone=_copier(encoder),
        blocks=network.forward_blocks if isinstance(network, ViT) else None,
        lineage=() if untrained else tuple(checkpoint.manifest["lineage"]),
        weights="random" if untrained else "trained",
    )


def trained_on(encoder: Encoder, images: dict[str, Any]) -> Encoder:
    """An encoder that an evaluation is about to train further: ``images`` is the lineage entry of what it will see."""
    return replace(encoder, lineage=(*encoder.lineage, images))


def recognised(encoder: Encoder, *stores: Store) -> Encoder:
    """An encoder with what is known beside ``stores`` of its weights: runs without a guarantee that wrote them are added to its lineage.

    Raises:
        PrivacyError: a file of digests beside a store is damaged.
    """
    for store in stores:
        for entry in runs_with_these_weights(store, encoder.tensors()):
            if not any(known["run_id"] == entry["run_id"] for known in encoder.lineage):
                encoder = trained_on(encoder, entry)
    return encoder


def _copier(encoder: PooledNetwork) -> Callable[[], PooledNetwork]:
    """A function that gives trainable copies of an encoder."""
    return lambda: copy.deepcopy(encoder).cpu().train().requires_grad_(True)
