"""Encoders in folders that transformers' ``save_pretrained`` wrote, with transformers' own classes.
Nothing is downloaded and no code of a folder runs.

Legend: B images, L tokens, D width, C channels, H height, W width.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpvision.encoders.encoder import Encoder, Family
from dpvision.encoders.hub_folder import licence_of, open_folder, read_json
from dpvision.encoders.hugging_face_images import image_fields
from dpvision.encoders.pooled import PooledNetwork, frozen
from dpvision.encoders.weights_file import WeightsFile
from dpvision.errors import CheckpointError, ConfigError
from dpvision.runs.lineage import undeclared_weights


def _plain(model: Any, x_BCHW: Tensor, **more: Any) -> Any:
    return model(x_BCHW, **more)


def _all_in_order(model: Any, x_BCHW: Tensor, **more: Any) -> Any:
    """Run ViTMAE without masking: the order of ``noise`` is that in which patches are kept."""
    noise_L = torch.arange(model.embeddings.patch_embeddings.num_patches, device=x_BCHW.device)
    return model(x_BCHW, noise=noise_L.float().expand(x_BCHW.shape[0], -1), **more)


@dataclass(frozen=True)
class _Tower:
    """An image encoder of transformers."""

    model: str
    """Name of its class in transformers."""
    family: Family = "transformer"
    has_class_token: bool = True
    options: tuple[tuple[str, Any], ...] = ()
    """Arguments of the class."""
    last_norm: str | None = None
    """Norm that the class applies to the class token alone; here to all tokens."""
    run: Callable[..., Any] = _plain


_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_NO_POOLER = (("add_pooling_layer", False),)
_CLIP = _Tower("CLIPVisionModel", last_norm="post_layernorm")
_SIGLIP = _Tower("SiglipVisionModel", has_class_token=False)
_TOWERS = {
    "vit": _Tower("ViTModel", options=_NO_POOLER),
    "vit_mae": _Tower("ViTMAEModel", run=_all_in_order),
    "dinov2": _Tower("Dinov2Model"),
    "dinov2_with_registers": _Tower("Dinov2WithRegistersModel"),
    "dinov3_vit": _Tower("DINOv3ViTModel"),
    "dinov3_convnext": _Tower("DINOv3ConvNextModel", "convnet"),
    "clip": _CLIP,
    "clip_vision_model": _CLIP,
    "siglip": _SIGLIP,
    "siglip_vision_model": _SIGLIP,
    "convnext": _Tower("ConvNextModel", "convnet", False),
    "convnextv2": _Tower("ConvNextV2Model", "convnet", False),
    "swin": _Tower("SwinModel", has_class_token=False, options=_NO_POOLER),
    "swinv2": _Tower("Swinv2Model", has_class_token=False, options=_NO_POOLER),
}
"""By the ``model_type`` of config.json."""


@dataclass(frozen=True)
class HubFolder:
    """A folder that ``save_pretrained`` wrote. Made by ``read_folder``."""

    path: Path
    kind: str
    """``model_type`` of its config.json."""
    config: Any
    """Its config of transformers; of a model with a text tower, the whole."""
    images: dict[str, Any]
    """Its preprocessing, as fields of ``Encoder``."""
    weights: WeightsFile
    licence: str | None

    def model(self, name: str, config: Any, **options: Any) -> Any:
        """Return transformers' model ``name`` of a config with these weights, float32, in
        evaluation mode.

        Raises:
            CheckpointError: the weights do not fit the config.
        """
        with quiet_transformers() as transformers, fitting(self.path, "weights"):
            made, info = getattr(transformers, name).from_pretrained(
                None,
                config=config,
                state_dict=dict(self.weights.tensors),
                dtype=torch.float32,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused here
                **options,
            )
            for tensor, got, wanted in sorted(info["mismatched_keys"]):
                raise ValueError(f"{tensor}={tuple(got)}, by config.json {tuple(wanted)}")
            if lacking := sorted(info["missing_keys"]):
                raise ValueError(f"no tensor {lacking[0]!r}")
        return made.eval()


def hugging_face_encoder(folder: Path, device: str | torch.device = "cpu") -> Encoder:
    """Load the image encoder of a folder that ``save_pretrained`` wrote, frozen, on ``device``.

    The folder has config.json, the weights and preprocessor_config.json; of a model with a text
    tower the image tower is used. Size, normalisation, resizing and crop are the folder's.

    Raises:
        ConfigError: transformers is not installed, the model is no image encoder that this opens,
            or its preprocessing cannot be done here.
        CheckpointError: the folder cannot be read, or its parts do not fit each other.
    """
    found = read_folder(folder, tuple(_TOWERS))
    tower = _TOWERS[found.kind]
    config = getattr(found.config, "vision_config", found.config)
    if found.kind == "vit_mae":
        config.mask_ratio = 0.0
    model = found.model(tower.model, config, **dict(tower.options))
    prefix = tower.has_class_token + getattr(config, "num_register_tokens", 0)

    def output(model: Any, x_BCHW: Tensor) -> Tensor:
        last = tower.run(model, x_BCHW).last_hidden_state
        return last if tower.last_norm is None else getattr(model, tower.last_norm)(last)

    def blocks(x_BCHW: Tensor) -> list[Tensor]:
        states = tower.run(model, x_BCHW, output_hidden_states=True).hidden_states[1:]
        # registers are left out: the contract is one class token, then patches
        return [torch.cat([state[:, :1], state[:, prefix:]], dim=1) for state in states]

    pooled = PooledNetwork(model, output, prefix=prefix, has_class_token=tower.has_class_token)
    size = found.images["image_size"]
    with fitting(found.path, f"image_size={size}"), torch.inference_mode():
        pooled.eval()(torch.zeros(1, 3, size, size))
    return frozen(
        pooled,
        device,
        name=f"hf:{found.path.name}",
        family=tower.family,
        blocks=blocks if tower.family == "transformer" and tower.has_class_token else None,
        lineage=found.weights.lineage,
        licence=found.licence,
        **found.images,
    )


def read_folder(folder: Path, kinds: tuple[str, ...]) -> HubFolder:
    """Read config and weights of a folder.

    Args:
        kinds: the model types that the caller can use.

    Raises:
        ConfigError: transformers is not installed, or the model is of another type.
        CheckpointError: it is not such a folder, or cannot be read.
    """
    folder = folder.resolve()
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"encoder: hf:{folder} has no config.json; expected a folder that save_pretrained "
            "wrote. Copy the whole folder: config.json, preprocessor_config.json and the weights."
        )
    if not any((folder / name).is_file() for name in _PROCESSORS):
        raise CheckpointError(
            f"encoder: hf:{folder} has no {_PROCESSORS[0]}; expected it beside the weights, with "
            "size and normalisation of the images. Copy it from where the weights are from, or "
            "save the model's image processor there by save_pretrained."
        )
    kind = read_json(folder / "config.json").get("model_type")
    if kind not in kinds:
        raise ConfigError(
            f"encoder: hf:{folder} has model_type={kind!r}; expected one of "
            f"{', '.join(kinds)}. Choose another model; a timm model opens as timm:NAME@DIR."
        )
    licence = licence_of(folder)
    weights = open_folder(folder, undeclared_weights(f"hf:{folder.name}", licence))
    local = {"local_files_only": True, "trust_remote_code": False}
    with quiet_transformers() as transformers:
        with fitting(folder, "config.json"):
            config = transformers.AutoConfig.from_pretrained(folder, **local)
        with fitting(folder, "preprocessor_config.json"):
            settings = transformers.AutoImageProcessor.from_pretrained(folder, **local).to_dict()
    images = image_fields(settings, f"hf:{folder}")
    return HubFolder(folder, kind, config, images, weights, licence)


@contextlib.contextmanager
def fitting(folder: Path, what: str) -> Iterator[None]:
    """Turn whatever transformers raises about a part of a folder into a CheckpointError."""
    try:
        yield
    except Exception as error:  # errors of many types, by the kind of damage
        said = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"encoder: hf:{folder}: {what} ({said}); expected what save_pretrained wrote. Copy the "
            "whole folder again: config.json, preprocessor_config.json and the weights."
        ) from None


@contextlib.contextmanager
def quiet_transformers() -> Iterator[Any]:
    """Import transformers, and give it without progress bars and reports on unused tensors.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            "encoder: transformers is not installed; expected it for hf:DIR. pip install "
            "'dpvision[hf]'"
        ) from None
    logs = transformers.utils.logging
    level, bars = logs.get_verbosity(), logs.is_progress_bar_enabled()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield transformers
    finally:
        logs.set_verbosity(level)
        if bars:
            logs.enable_progress_bar()
