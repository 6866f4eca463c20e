"""Checkpoints published by papers' authors: masked autoencoders and ViP, SimCLR's ResNet-50, TAN's
NF-ResNets.

Legend: B images, L tokens, D width, C channels, H height, W width.
"""

import math
from pathlib import Path

import timm
import torch
import torchvision
from torch import Tensor, nn

from dpvision.config import ViTConfig
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.pooled import frozen, pooled_network
from dpvision.encoders.third_party import check_fit, encoder_from, without_wrapper
from dpvision.encoders.weights_file import open_weights
from dpvision.errors import CheckpointError, ConfigError
from dpvision.models.vit import ViT
from dpvision.runs.lineage import undeclared_weights

MEAN, STD = (
    (0.485, 0.456, 0.406),
    (0.229, 0.224, 0.225),
)  # ImageNet's, with which all of these were trained or converted
_NUM_HEADS = {
    "mae": {768: 12, 1024: 16, 1280: 16},
    "vip": {192: 12, 384: 12, 576: 12, 768: 12, 1024: 16},
}
"""Heads of the published encoders by width, which the shapes do not show: MAE's Base, Large and
Huge, ViP's Nano to Large.
"""
_HEAD_WIDTH = 64  # of other widths
_POSITION_TOLERANCE = 1e-4  # the published tables were made in float32 or in float64
_NOT_ENCODER = ("decoder_", "mask_token", "head.", "fc_norm.")
_OUR_NAMES = {
    "attn.proj": "attention.out",
    "attn.qkv": "attention.qkv",
    "mlp.fc1": "mlp.0",
    "mlp.fc2": "mlp.2",
}
_TAN_DEFAULT = "nf_resnet50"
_TAN_EPS = 1e-6
_TAN_MARK = ".expand.weight"  # the residual gain of TAN's blocks; timm calls it skipinit_gain


def released_encoder(kind: str, path: Path, device: str | torch.device = "cpu") -> Encoder:
    """Load a published checkpoint as a frozen encoder on ``device``. Pickles are opened as
    ``unpickle`` describes.

    Args:
        kind: "mae" or "vip": a masked autoencoder's state dict with fixed sin-cos positions (He et
            al. 2022; Yu et al. 2024), its size inferred from the shapes, its decoder and head left
            out; heads as published, of width 64 at other widths. "simclr": a ResNet-50 with
            torchvision's names. "tan": an NF-ResNet or ResNet by Sander et al. (2022).
        path: the file; for "tan" also ``FILE@NAME``, where NAME is a model of timm or torchvision;
            by default the paper's ``nf_resnet50``.

    Raises:
        ConfigError: no such model.
        CheckpointError: the file cannot be read, or a tensor does not fit (names the first).
    """
    if kind in ("mae", "vip"):
        return _masked_autoencoder(kind, path, device)
    if kind == "simclr":
        shown = f"simclr:{path.name}"
        weights = open_weights(path, undeclared_weights(shown))
        return encoder_from(
            "torchvision", "resnet50", shown, weights, str(path), image_size=224, device=device
        )
    if kind == "tan":
        return _tan(path, device)
    raise ConfigError(
        f"encoder: released kind={kind!r}; expected vip, mae, simclr or tan. Use one of them."
    )


def _masked_autoencoder(kind: str, path: Path, device: str | torch.device) -> Encoder:
    weights = open_weights(path, undeclared_weights(f"{kind}:{path.name}"))
    given = without_wrapper(weights.tensors, ["patch_embed.proj.weight"], str(path))
    vit = ViT(_config(kind, given, path))
    published = {_published_name(name): tensor for name, tensor in vit.state_dict().items()}
    published["patch_embed.proj.weight"] = torch.empty_like(
        given["patch_embed.proj.weight"], device="meta"
    )
    published["cls_token"] = vit.cls_token[None, None]
    published["pos_embed"] = torch.cat([torch.zeros_like(vit.position_LD[:1]), vit.position_LD])[
        None
    ]
    check_fit(given, published, str(path), ignored=_NOT_ENCODER)
    off = (given["pos_embed"].float() - published["pos_embed"]).abs().max().item()
    if not off <= _POSITION_TOLERANCE:
        raise CheckpointError(
            f"weights: {path}: pos_embed differs from the fixed sin-cos table by {off:.3g}; "
            f"expected at most {_POSITION_TOLERANCE}. Its positions are trained: open it with "
            "timm:NAME@FILE."
        )
    ours = {
        name: given[_published_name(name)].reshape(tensor.shape).float()
        for name, tensor in vit.state_dict().items()
    }
    vit.load_state_dict(ours)
    return frozen(
        pooled_network(vit),
        device,
        name=f"{kind}:{path.name}",
        image_size=vit.cfg.image_size,
        mean=MEAN,
        std=STD,
        family="transformer",
        blocks=vit.forward_blocks,
        lineage=weights.lineage,
    )


def _config(kind: str, given: dict[str, Tensor], path: Path) -> ViTConfig:
    """Infer the encoder's config from the shapes of its tensors."""

    def shape(name: str, ndim: int) -> tuple[int, ...]:
        got = tuple(given[name].shape) if name in given else "nothing"
        if len(got) != ndim or isinstance(got, str):
            raise CheckpointError(
                f"weights: {path}: {name}={got}; expected {ndim} dimensions. Choose a masked "
                "autoencoder's file."
            )
        return got

    width, channels, patch, other_side = shape("patch_embed.proj.weight", 4)
    _, num_tokens, _ = shape("pos_embed", 3)
    hidden, _ = shape("blocks.0.mlp.fc1.weight", 2)
    grid = math.isqrt(num_tokens - 1)
    where = (
        f"weights: {path}: patch_embed.proj.weight={(width, channels, patch, other_side)}, "
        f"{num_tokens} positions"
    )
    if (
        channels != 3
        or patch != other_side
        or grid**2 != num_tokens - 1
        or width % _HEAD_WIDTH != 0
    ):
        rule = (
            "expected RGB, square patches and images, a class token, and a width that is a "
            f"multiple of {_HEAD_WIDTH}"
        )
        raise CheckpointError(f"{where}; {rule}. Open another model with timm:NAME@FILE.")
    num_heads = _NUM_HEADS[kind].get(width, width // _HEAD_WIDTH)
    depth = len({name.split(".")[1] for name in given if name.startswith("blocks.")})
    return ViTConfig(
        image_size=grid * patch,
        patch_size=patch,
        depth=depth,
        width=width,
        num_heads=num_heads,
        mlp_ratio=hidden / width,
    )


def _published_name(ours: str) -> str:
    name = ours.replace("patch_embed.", "patch_embed.proj.")
    for published, own in _OUR_NAMES.items():
        name = name.replace(own, published)
    return name


def _tan(path: Path, device: str | torch.device) -> Encoder:
    file, mark, name = str(path).rpartition("@")
    if not mark:
        file, name = str(path), _TAN_DEFAULT
    kind = (
        "timm"
        if name in timm.list_models() or name not in torchvision.models.list_models()
        else "torchvision"
    )
    shown = f"tan:{Path(file).name}@{name}"
    weights = open_weights(file, undeclared_weights(shown))
    rename, options = (
        (_from_tan, {"skipinit": True})
        if any(n.endswith(_TAN_MARK) for n in weights.tensors)
        else (None, {})
    )
    return encoder_from(
        kind,
        name,
        shown,
        weights,
        file,
        image_size=224,
        device=device,
        rename=rename,
        options=options,
    )


@torch.no_grad()
def _from_tan(model: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors of TAN's normaliser-free blocks to timm's names and parametrisation; the
    function is the same.

    Both standardise the weight w of each output channel over its n numbers. TAN: (w - mean) /
    sqrt(n var' + eps) x gain, var' with n - 1; timm: (w - mean) / sqrt(var + eps) x gain x scale.
    Only the gains differ, so each is multiplied by the ratio.
    """
    made = {name.replace(_TAN_MARK, ".skipinit_gain"): tensor for name, tensor in given.items()}
    for name, conv in model.named_modules():
        weight, gain = made.get(f"{name}.weight"), made.get(f"{name}.gain")
        if weight is None or gain is None or not hasattr(conv, "scale"):
            continue
        w_ON = weight.double().flatten(1)
        timms = (w_ON.var(dim=1, correction=0) + conv.eps).sqrt() / conv.scale
        tans = (w_ON.shape[1] * w_ON.var(dim=1) + _TAN_EPS).sqrt()
        made[f"{name}.gain"] = (gain.double() * (timms / tans).reshape(-1, 1, 1, 1)).to(gain.dtype)
    return made
