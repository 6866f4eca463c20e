"""What a file of timm weights says of its model and images: a hub folder's config.json beside it,
or the metadata that dpvision writes into exports; and the names of EfficientNet-PyTorch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dpvision.encoders.hub_folder import image_settings, licence_of, read_json
from dpvision.errors import CheckpointError

_NAMES = ("model.safetensors", "pytorch_model.bin")
_STATED = ("input_size", "fixed_input_size")
"""What timm needs of a folder's pretrained_cfg; ``images`` has mean and std."""
_RESERVED = {
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "checkpoint_path",
    "cache_dir",
}
"""Arguments of ``timm.create_model`` that read files, or are set here."""
_STEM = "_conv_stem.weight"
_OUTER = {
    "_conv_stem": "conv_stem",
    "_bn0": "bn1",
    "_conv_head": "conv_head",
    "_bn1": "bn2",
    "_fc": "classifier",
}
_SEPARABLE = {
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn1",
    "_project_conv": "conv_pw",
    "_bn2": "bn2",
}
_INVERTED = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}
_SQUEEZE = {"_se_reduce": "se.conv_reduce", "_se_expand": "se.conv_expand"}


@dataclass(frozen=True)
class TimmFile:
    """Weights of a timm model, and what was said beside them. Made by ``timm_file``."""

    path: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of ``timm.create_model``: of the folder's pretrained_cfg, and its model_args."""
    images: Mapping[str, Any] = field(default_factory=dict)
    """Image settings, as fields of ``Encoder``."""
    licence: str | None = None

    @property
    def says(self) -> bool:
        """Whether a config.json or the file's metadata says which model or normalisation it is."""
        return bool(self.options or self.images)

    @property
    def image_size(self) -> int | None:
        """Side of the images that the folder states, in pixels."""
        return (self.options.get("pretrained_cfg_overlay", {}).get("input_size") or (None,))[-1]

    @property
    def words(self) -> tuple[str, ...]:
        """The model_args that shape the encoder, as ``TimmConfig.options``."""
        left_out = {"pretrained_cfg_overlay", "num_classes", "in_chans", "img_size"}
        given = self.options.items()
        return tuple(f"{n}={json.dumps(v)}" for n, v in given if n not in left_out)


def timm_file(name: str, given: Path) -> TimmFile:
    """Return the file of weights that a folder in timm's layout has, or ``given`` itself, with what
    is said of its model.

    Args:
        name: timm's name of the model, with or without a tag.
        given: a file, or a folder with config.json and the weights.

    Raises:
        CheckpointError: the folder has no weights, or its config.json or the file's metadata is
            damaged or of another model.
    """
    path = given
    if given.is_dir():
        path = next((given / n for n in _NAMES if (given / n).is_file()), given / _NAMES[0])
    images: dict[str, Any] = {}
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, "pt") as file:
                images = image_settings(file.metadata() or {}, str(path))
        except (OSError, SafetensorError):
            return TimmFile(path)  # reading the tensors gives the error
    about = path.parent / "config.json"
    config = read_json(about) if about.is_file() else {}
    if not isinstance(config.get("architecture"), str):
        return TimmFile(path, images=images)  # not timm's
    base, theirs = (n.partition(".")[0] for n in (name, config["architecture"]))
    if base != theirs:
        raise CheckpointError(
            f"weights: {about} is of the model {theirs}; expected {base}. Use "
            f"timm:{theirs}@{given}, or move the file out of this folder."
        )
    args, cfg = config.get("model_args") or {}, config.get("pretrained_cfg", config)
    try:
        stated = {name: cfg[name] for name in _STATED if cfg.get(name) is not None}
        if "input_size" in stated:
            channels, height, width = stated["input_size"]
            if channels != 3 or type(width) is not int or height != width:
                raise ValueError(f"input_size={stated['input_size']}")
        if reserved := sorted(_RESERVED & args.keys()):
            raise ValueError(f"model_args has {reserved[0]}")
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"weights: {about} ({error}); expected what timm writes beside weights. Copy the "
            "folder again."
        ) from None
    colours = {f"dpvision.{name}": json.dumps(cfg.get(name)) for name in ("mean", "std")}
    images = image_settings(colours, str(about)) | images
    options = {"pretrained_cfg_overlay": stated, **args}
    return TimmFile(path, options, images, licence_of(path.parent))


def from_efficientnet_pytorch(name: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under timm's names if they have those of EfficientNet-PyTorch, else as given.

    EfficientNet-PyTorch numbers all blocks in one row, timm within stages; a block's first
    convolution widens it, except in the first stage, where there is none.

    Args:
        name: timm's name of the model.
    """
    if not any(one.endswith(_STEM) for one in given):
        return given
    prefix = next(one for one in given if one.endswith(_STEM)).removesuffix(_STEM)
    with torch.device("meta"):
        stages = list(getattr(timm.create_model(name.partition(".")[0]), "blocks", ()))
    places = [f"blocks.{s}.{b}" for s, stage in enumerate(stages) for b in range(len(stage))]
    made = {}
    for one, tensor in given.items():
        parts = one.removeprefix(prefix).split(".")
        if parts[0] == "_blocks" and parts[1].isdigit() and int(parts[1]) < len(places):
            inverted = f"{prefix}_blocks.{parts[1]}._expand_conv.weight" in given
            inner = (_INVERTED if inverted else _SEPARABLE) | _SQUEEZE
            parts = [places[int(parts[1])], *(inner.get(part, part) for part in parts[2:])]
        made[".".join([_OUTER.get(parts[0], parts[0]), *parts[1:]])] = tensor
    return made
