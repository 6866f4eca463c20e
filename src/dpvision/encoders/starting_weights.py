"""Initial weights of a run as a checkpoint: from another run, from a timm model in a file or in
timm's caches, or from a paper's file.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch

from dpvision.checkpoint import Checkpoint, load_checkpoint
from dpvision.config import (
    ClassifierConfig,
    EncoderConfig,
    RunConfig,
    TimmConfig,
    from_dict,
    to_dict,
)
from dpvision.encoders.batch_statistics import check_statistics
from dpvision.encoders.papers import PUBLISHED, paper_checkpoint
from dpvision.encoders.third_party import check_fit, without_wrapper
from dpvision.encoders.timm_file import TimmFile, from_efficientnet_pytorch, timm_file
from dpvision.encoders.weights_file import open_weights
from dpvision.errors import CheckpointError, ConfigError
from dpvision.models.timm_cache import find_timm_weights, timm_licence
from dpvision.models.timm_encoder import TimmEncoder, is_timm_name
from dpvision.runs.lineage import named_weights, undeclared_weights

_TIMM = "timm:"
_FROZEN = ("hf:", "onnx:")
_CLASSIFIERS = ("head.", "fc.", "classifier.")


def open_parent(init_from: str) -> Checkpoint:
    """Open the checkpoint that ``RunConfig.init_from`` names, for ``train.start``.

    Args:
        init_from: a run or checkpoint folder; ``timm:NAME``, with weights from timm's caches;
            ``timm:NAME@FILE``; or ``vip:FILE``, ``mae:FILE``, ``dpcap:FILE``. For timm the
            normalisation of images is the one stated beside the file (``timm_file``), else that of
            the tag in NAME, else timm's default for the name.

    Returns:
        A run's checkpoint unchanged; a paper's file as ``paper_checkpoint`` gives it. For timm's
        weights a checkpoint in memory: the encoder under a classifier's names, without its
        classifier, and a manifest with the encoder's config, the normalisation, and the lineage.
        The lineage is the file's own, or one entry: declared by name for weights from timm's
        caches, undeclared for weights from a file.

    Raises:
        ConfigError: timm has no model of that name, or the encoder stays frozen.
        CheckpointError: the weights are missing, unreadable, or do not fit the model.
    """
    if init_from.startswith(_FROZEN):
        raise ConfigError(
            f"run: init_from={init_from!r}; expected a run or a timm model: encoders of "
            f"{' and '.join(_FROZEN)} stay frozen. Train a head on it: dpvision adapt "
            "--encoder."
        )
    kind, colon, rest = init_from.partition(":")
    if colon and kind in PUBLISHED:
        return paper_checkpoint(kind, rest)
    if not init_from.startswith(_TIMM):
        return load_checkpoint(init_from)
    name, _, given = init_from.removeprefix(_TIMM).partition("@")
    stated = timm_file(name, Path(given)) if given else None
    file, places = (stated.path, []) if stated else find_timm_weights(name)
    encoder, mean, std = timm_encoder(name, stated)
    if file is None:
        raise CheckpointError(
            f"run: init_from={init_from!r}: no weights in {' or '.join(places)}; expected them "
            "there. Nothing is downloaded: get them with timm on a machine with a network, or "
            f"give timm:{name}@FILE."
        )
    body = encoder.model.state_dict()
    shown = f"{_TIMM}{name}" + (f"@{file.name}" if given else "")
    weights = open_weights(
        file,
        undeclared_weights(shown, stated.licence)
        if stated
        else named_weights(shown, timm_licence(name)),
    )
    tensors = from_efficientnet_pytorch(name, weights.tensors)
    tensors = without_wrapper(tensors, body, str(file))
    # BatchNorm's counts, which some files lack, are not used: its statistics are fixed.
    counts = {n: torch.zeros(()) for n in body if n.endswith("num_batches_tracked")}
    tensors = counts | tensors
    check_fit(tensors, body, str(file), ignored=_CLASSIFIERS)
    if stated is not None and not stated.says:
        check_statistics(name, {n: tensors[n] for n in body}, mean, std, str(file))
    model = {"kind": "classifier", "encoder": to_dict(encoder.cfg)}
    manifest = {
        "config": {"model": model, "data": {"mean": list(mean), "std": list(std)}},
        "lineage": list(weights.lineage),
    }
    return Checkpoint(
        file, manifest, {f"encoder.model.{n}": tensors[n].float() for n in body}, None, None
    )


def timm_encoder(
    name: str, stated: TimmFile | None = None
) -> tuple[TimmEncoder, tuple[float, ...], tuple[float, ...]]:
    """Return a timm model on the meta device, at its default image size, with the mean and standard
    deviation of its images.

    Args:
        name: may have a tag.
        stated: what its file says instead of timm.

    Raises:
        ConfigError: timm has no model of that name.
    """
    base = name.partition(".")[0]
    if not is_timm_name(base):
        raise ConfigError(
            f"run: init_from='timm:{name}'; expected one of timm's models. `dpvision doctor "
            f"{base}` lists similar names."
        )
    try:
        known = timm.get_pretrained_cfg(name, allow_unregistered=True)
    except RuntimeError as error:
        raise ConfigError(
            f"run: init_from='timm:{name}' ({error}); expected a tag that timm has. Drop the "
            "part after the dot."
        ) from None
    size, mean, std = (
        (224, (0.5,) * 3, (0.5,) * 3)
        if known is None
        else (known.input_size[-1], known.mean, known.std)
    )
    options: tuple[str, ...] = ()
    if stated is not None:
        options, size = stated.words, stated.image_size or size
        mean, std = stated.images.get("mean", mean), stated.images.get("std", std)
    with torch.device("meta"):
        return TimmEncoder(TimmConfig(name=base, image_size=size, options=options)), mean, std


def adapted(config: RunConfig, init_from: str) -> RunConfig:
    """Return a classifier's recipe with the encoder of ``init_from`` and its normalisation.

    The image size is the recipe's for a timm encoder, and the encoder's for a run.

    Args:
        config: of kind "classifier".
        init_from: as for ``open_parent``.

    Raises:
        ConfigError: the recipe is of another kind.
        CheckpointError: as ``open_parent``.
    """
    if not isinstance(config.model, ClassifierConfig):
        raise ConfigError(
            f"run: model.kind={config.model.kind!r}; expected 'classifier', which trains an "
            "encoder. Use a classifier's recipe."
        )
    theirs: dict[str, Any] = open_parent(init_from).manifest["config"]
    encoder: EncoderConfig = from_dict(
        ClassifierConfig, {"encoder": theirs["model"]["encoder"]}, init_from
    ).encoder
    pooling = config.model.pooling
    if isinstance(encoder, TimmConfig):
        encoder = replace(encoder, image_size=config.model.encoder.image_size)
    elif pooling == "own":
        pooling = "mean"
    data = replace(
        config.data, mean=tuple(theirs["data"]["mean"]), std=tuple(theirs["data"]["std"])
    )
    return replace(
        config,
        model=replace(config.model, encoder=encoder, pooling=pooling),
        data=data,
        init_from=init_from,
    )
