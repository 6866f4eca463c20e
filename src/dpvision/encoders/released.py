"""Encoders of published checkpoints: ViP, masked autoencoders and DP-Cap (``papers``), SimCLR's
ResNet-50, TAN's NF-ResNets.
"""

from pathlib import Path

import timm
import torch
import torchvision
from torch import Tensor, nn

from dpvision.config import CaptionerConfig, ViTConfig, from_dict
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.papers import PUBLISHED, paper_checkpoint
from dpvision.encoders.pooled import frozen, pooled_model, pooled_network
from dpvision.encoders.third_party import encoder_from
from dpvision.encoders.trained import filled
from dpvision.encoders.weights_file import open_weights
from dpvision.errors import ConfigError
from dpvision.models.captioner import Captioner
from dpvision.models.vit import ViT
from dpvision.runs.lineage import undeclared_weights

_TAN_DEFAULT = "nf_resnet50"
_TAN_EPS = 1e-6
_TAN_MARK = ".expand.weight"  # the residual gain of TAN's blocks; timm calls it skipinit_gain


def released_encoder(kind: str, rest: str, device: str | torch.device = "cpu") -> Encoder:
    """Load a published checkpoint as a frozen encoder on ``device``. Pickles are opened as
    ``unpickle`` describes.

    Args:
        kind: "vip", "mae" or "dpcap", as ``papers.paper_checkpoint``; "simclr": a ResNet-50 with
            torchvision's names; "tan": an NF-ResNet or ResNet by Sander et al. (2022).
        rest: the file, with what may follow it: for "tan" ``FILE@NAME``, where NAME is a model of
            timm or torchvision; by default the paper's ``nf_resnet50``.

    Raises:
        ConfigError: no such model.
        CheckpointError: the file cannot be read, or a tensor does not fit (names the first).
    """
    if kind in PUBLISHED:
        return _paper(kind, rest, device)
    if kind == "simclr":
        shown = f"simclr:{Path(rest).name}"
        weights = open_weights(rest, undeclared_weights(shown))
        return encoder_from(
            "torchvision", "resnet50", shown, weights, rest, image_size=224, device=device
        )
    if kind == "tan":
        return _tan(rest, device)
    raise ConfigError(
        f"encoder: released kind={kind!r}; expected vip, mae, dpcap, simclr or tan. Use one of "
        "them."
    )


def _paper(kind: str, rest: str, device: str | torch.device) -> Encoder:
    """Return the encoder of a file of ViP, a masked autoencoder or DP-Cap; a captioner's offers the
    pooling "bridge".
    """
    checkpoint = paper_checkpoint(kind, rest, whole=False)
    about = checkpoint.manifest["config"]
    if kind == "dpcap":
        captioner = Captioner(from_dict(CaptionerConfig, about["model"], checkpoint.path.name))
        network = pooled_model(filled(captioner, checkpoint))
        vit = captioner.encoder
    else:
        vit = ViT(from_dict(ViTConfig, about["model"]["encoder"], checkpoint.path.name))
        vit.load_state_dict(
            {name.removeprefix("encoder."): value for name, value in checkpoint.model.items()}
        )
        network = pooled_network(vit)
    return frozen(
        network,
        device,
        name=about["recipe"],
        image_size=vit.cfg.image_size,
        mean=tuple(about["data"]["mean"]),
        std=tuple(about["data"]["std"]),
        family="transformer",
        blocks=vit.forward_blocks,
        lineage=tuple(checkpoint.manifest["lineage"]),
    )


def _tan(rest: str, device: str | torch.device) -> Encoder:
    file, mark, name = rest.rpartition("@")
    if not mark:
        file, name = rest, _TAN_DEFAULT
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
