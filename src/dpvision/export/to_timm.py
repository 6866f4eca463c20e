"""timm's hub layout: config.json and model.safetensors, for ``timm.create_model("local-dir:DIR")``.

Legend: B images, C channels, H height, W width.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import save_for_hf
from torch import Tensor, nn

from dpvision.config import ViTConfig
from dpvision.data.transform import kept_share
from dpvision.export.product import Product, refused
from dpvision.models.timm_encoder import TimmEncoder
from dpvision.models.vit import ViT
from dpvision.weights import pack

LOADS = """import timm
from PIL import Image, ImageOps

model = timm.create_model("local-dir:.", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
image = ImageOps.exif_transpose(Image.open("photo.jpg")).convert("RGB")
"""
USES = {
    "encoder": "feature_BD = model(transform(image)[None])",
    "classifier": "logit_BK = model(transform(image)[None])",
    "captioner": "feature_BD = model(transform(image)[None])  # of the encoder alone",
}
_OF_OTHER_WEIGHTS = {
    "tag",
    "license",
    "description",
    "origin_url",
    "paper_name",
    "paper_ids",
    "notes",
}
"""Fields of ``pretrained_cfg`` that describe the weights that timm has for an architecture."""
POOLS = {"mean": "avg", "cls": "token"}
_NAMES = {"attention.out": "attn.proj", "attention.qkv": "attn.qkv", "mlp.0": "mlp.fc1"} | {
    "mlp.2": "mlp.fc2",
    "patch_embed.": "patch_embed.proj.",
}
"""Our names of a vision transformer's parts -> timm's."""


def write(product: Product, folder: Path, metadata: dict[str, str]) -> None:
    """Write timm's layout.

    Raises:
        ConfigError: timm has no such model, pooling or scaling.
    """
    if product.unit:
        raise refused(
            "timm",
            "features are scaled to length 1 before the head",
            "Use safetensors or onnx, or adapt with --model.no-unit.",
        )
    model = pooled_timm("timm", product)
    with_head(model, product)
    save(model, product, folder, metadata)


def how_to_load(product: Product) -> str:
    """Return Python that loads the export, run in its folder."""
    return LOADS + USES[product.kind]


def read(product: Product, folder: Path) -> Callable[[Tensor], Tensor]:
    """Return the exported model as timm loads it."""
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


def pooled_timm(to: str, product: Product) -> Any:
    """Return the product's encoder as timm's model with its pooling, without a classifier.

    Args:
        to: the format, for the error.

    Raises:
        ConfigError: timm has no such model or pooling.
    """
    encoder: Any = product.encoder
    if isinstance(encoder, ViT):
        model = _as_timm(encoder)
    else:
        model = copy.deepcopy(encoder.model if isinstance(encoder, TimmEncoder) else encoder)
        model.to(memory_format=torch.contiguous_format)  # a frozen convnet's are channels-last
    about = getattr(model, "pretrained_cfg", None) or {}
    if not timm.is_model(about.get("architecture", "")):
        what = getattr(getattr(encoder, "cfg", None), "name", type(encoder).__name__)
        raise refused(to, f"the encoder ({what}) is none of timm's models", "Use onnx.")
    if product.pooling != "own":
        try:
            model.reset_classifier(0, global_pool=POOLS[product.pooling])
        except (KeyError, AssertionError, TypeError, ValueError):
            raise refused(to, f"pooling={product.pooling!r}", "Use onnx.") from None
    return model


def with_head(model: Any, product: Product) -> None:
    """Give a timm model the product's head, in place.

    Raises:
        ConfigError: its classifier is no linear map.
    """
    if product.head is None:
        return
    model.reset_classifier(len(product.class_names))
    target = model.get_classifier()
    if not isinstance(target, nn.Linear | nn.Conv2d) or target.bias is None:
        what = f"the model's classifier ({type(target).__name__}) is not linear"
        raise refused("timm", what, "Use onnx.")
    with torch.no_grad():
        target.weight.copy_(product.head.weight.reshape(target.weight.shape))
        target.bias.copy_(product.head.bias)


def save(model: Any, product: Product, folder: Path, metadata: dict[str, str]) -> None:
    """Write a timm model by timm's own function, then its tensors again with their lineage."""
    data, side = product.data, product.image_size
    model.pretrained_cfg = {
        name: value for name, value in model.pretrained_cfg.items() if name not in _OF_OTHER_WEIGHTS
    }
    save_for_hf(
        model,
        str(folder),
        model_config={"label_names": list(product.class_names), "dpvision": metadata},
        data_config={
            "input_size": (3, side, side),
            "mean": data.mean,
            "std": data.std,
            "interpolation": "bicubic",
            "crop_pct": kept_share(side, data),
            "crop_mode": "center" if data.resize is None else "squash",
        },
        safe_serialization=True,
    )
    packed = pack(model.state_dict(), product.lineage, metadata)
    (folder / "model.safetensors").write_bytes(packed)


def _as_timm(vit: ViT) -> Any:
    """Return our vision transformer as timm's, its fixed positions as trained ones."""
    cfg: ViTConfig = vit.cfg
    model: Any = timm.create_model(
        "vit_base_patch16_224",
        num_classes=0,
        img_size=cfg.image_size,
        patch_size=cfg.patch_size,
        depth=cfg.depth,
        embed_dim=cfg.width,
        num_heads=cfg.num_heads,
        mlp_ratio=cfg.mlp_ratio,
        qkv_bias=cfg.qkv_bias,
    )
    tensors: dict[str, Tensor] = {}
    for name, tensor in vit.named_parameters():
        for ours, theirs in _NAMES.items():
            name = name.replace(ours, theirs)
        tensors[name] = tensor
    position_LD = torch.cat([torch.zeros_like(vit.position_LD[:1]), vit.position_LD])
    tensors |= {"pos_embed": position_LD[None], "cls_token": vit.cls_token[None, None]}
    kernel = tensors["patch_embed.proj.weight"]
    tensors["patch_embed.proj.weight"] = kernel.unflatten(1, (3, cfg.patch_size, cfg.patch_size))
    model.load_state_dict(tensors)
    return model
