"""transformers' layout, written by its own ``save_pretrained``: ViT and ViTMAE.

Legend: B images, L tokens, D width, C channels, H height, W width.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dpvision.errors import ConfigError
from dpvision.export.product import Product, refused
from dpvision.models.layers import NORM_EPS
from dpvision.models.mae import MAE
from dpvision.models.vit import CHANNELS, ViT
from dpvision.weights import pack

_BICUBIC = 3
_FILE = "model.safetensors"
_LOADS = """import transformers
from PIL import Image, ImageOps

processor = transformers.AutoImageProcessor.from_pretrained(".")
model = transformers.{name}.from_pretrained("."{more}).eval()
image = ImageOps.exif_transpose(Image.open("photo.jpg")).convert("RGB")
"""
_NO_POOLER = {"ViTModel": {"add_pooling_layer": False}}
_USES = {
    "ViTForImageClassification": "logit_BK = model(**processor(image, return_tensors='pt')).logits",
    "ViTModel": """found = model(**processor(image, return_tensors="pt"))
feature_BD = found.last_hidden_state[:, 1:].mean(1)  # of the patches
""",
    "ViTMAEForPreTraining": """model.config.mask_ratio = 0.0  # for features: all patches are seen
found = model.vit(**processor(image, return_tensors="pt"))
feature_BD = found.last_hidden_state[:, 1:].mean(1)  # of the patches
""",
}


def how_to_load(product: Product) -> str:
    """Return Python that loads the export, run in its folder."""
    name = _class(product)
    more = ", add_pooling_layer=False" if name in _NO_POOLER else ""
    return _LOADS.format(name=name, more=more) + _USES[name]


def write(product: Product, folder: Path, metadata: dict[str, str]) -> None:
    """Write config.json, model.safetensors and preprocessor_config.json.

    Raises:
        ConfigError: transformers has no class for this model or its preprocessing, or is not
            installed.
    """
    library, name, vit = _library(), _class(product), product.encoder
    assert isinstance(vit, ViT)
    shared: dict[str, Any] = {
        "hidden_size": vit.cfg.width,
        "num_hidden_layers": vit.cfg.depth,
        "num_attention_heads": vit.cfg.num_heads,
        "intermediate_size": int(vit.cfg.width * vit.cfg.mlp_ratio),
        "layer_norm_eps": NORM_EPS,
        "image_size": vit.cfg.image_size,
        "patch_size": vit.cfg.patch_size,
        "num_channels": CHANNELS,
        "qkv_bias": vit.cfg.qkv_bias,
        "dpvision": metadata,
    }
    with torch.no_grad():
        if isinstance(product.trained, MAE) and name == "ViTMAEForPreTraining":
            model = _autoencoder(library, product.trained, shared)
        elif name == "ViTModel":
            config = library.ViTConfig(**shared)
            model = library.ViTModel(config, **_NO_POOLER[name])
            _copy_encoder(vit, model)
        else:
            names = dict(enumerate(product.class_names))
            config = library.ViTConfig(
                **shared, id2label=names, label2id={name: k for k, name in names.items()}
            )
            model = library.ViTForImageClassification(config)
            _copy_encoder(vit, model.vit)
            assert product.head is not None
            model.classifier.load_state_dict(product.head.state_dict())
    model.save_pretrained(str(folder))
    tensors = load_file(folder / _FILE)
    (folder / _FILE).write_bytes(pack(tensors, product.lineage, {"format": "pt"} | metadata))
    _processor(library, product).save_pretrained(str(folder))


def read(product: Product, folder: Path) -> Callable[[Tensor], Tensor]:
    """Return the exported model as transformers loads it."""
    name = _class(product)
    made = getattr(_library(), name)
    model = made.from_pretrained(str(folder), local_files_only=True, **_NO_POOLER.get(name, {}))
    model.eval()
    if name == "ViTForImageClassification":
        return lambda x: model(x).logits
    if name == "ViTMAEForPreTraining":
        model.config.mask_ratio = 0.0
        model = model.vit
    return lambda x: model(x).last_hidden_state[:, 1:].mean(1)


def _class(product: Product) -> str:
    """Return the name of the class that holds the model.

    Raises:
        ConfigError: there is none.
    """
    if not isinstance(product.encoder, ViT):
        what = f"the encoder ({type(product.encoder).__name__}) is no ViT of dpvision"
        raise refused("transformers", what, "Use onnx, or timm for one of timm's models.")
    if product.kind == "classifier":
        if product.pooling != "cls" or product.unit:
            what = f"pooling={product.pooling!r}{', unit length' if product.unit else ''}"
            raise refused("transformers", what, "Use safetensors or onnx.")
        return "ViTForImageClassification"
    trained = product.trained
    pixels = isinstance(trained, MAE) and trained.cfg.target != "gradients"
    return "ViTMAEForPreTraining" if pixels else "ViTModel"


def _autoencoder(library: Any, mae: MAE, shared: dict[str, Any]) -> Any:
    cfg = mae.cfg
    config = library.ViTMAEConfig(
        **shared,
        decoder_hidden_size=cfg.decoder_width,
        decoder_num_hidden_layers=cfg.decoder_depth,
        decoder_num_attention_heads=cfg.decoder_num_heads,
        decoder_intermediate_size=int(cfg.decoder_width * cfg.encoder.mlp_ratio),
        mask_ratio=cfg.mask_ratio,
        norm_pix_loss=cfg.target == "normalised_pixels",
    )
    model = library.ViTMAEForPreTraining(config)
    _copy_encoder(mae.encoder, model.vit)
    theirs = model.decoder
    theirs.decoder_embed.load_state_dict(mae.decoder_embed.state_dict())
    theirs.mask_token.copy_(mae.mask_token)
    theirs.decoder_pos_embed.copy_(_with_class_token(mae.decoder_position_LD))
    _copy_blocks(mae.decoder_blocks, theirs.decoder_layers)
    theirs.decoder_norm.load_state_dict(mae.decoder_norm.state_dict())
    # ours predicts (channel, row, column), theirs (row, column, channel)
    side = cfg.encoder.patch_size
    for part in ("weight", "bias"):
        values = getattr(mae.head, part).unflatten(0, (CHANNELS, side, side))
        getattr(theirs.decoder_pred, part).copy_(values.movedim(0, 2).flatten(0, 2))
    return model


def _copy_encoder(vit: ViT, model: Any) -> None:
    kernel = model.embeddings.patch_embeddings.projection
    kernel.weight.copy_(vit.patch_embed.weight.reshape(kernel.weight.shape))
    kernel.bias.copy_(vit.patch_embed.bias)
    model.embeddings.cls_token.copy_(vit.cls_token)
    model.embeddings.position_embeddings.copy_(_with_class_token(vit.position_LD))
    _copy_blocks(vit.blocks, model.layers)
    model.layernorm.load_state_dict(vit.norm.state_dict())


def _copy_blocks(ours: Iterable[Any], theirs: Iterable[Any]) -> None:
    for block, layer in zip(ours, theirs, strict=True):
        layer.layernorm_before.load_state_dict(block.norm1.state_dict())
        layer.layernorm_after.load_state_dict(block.norm2.state_dict())
        layer.mlp.fc1.load_state_dict(block.mlp[0].state_dict())
        layer.mlp.fc2.load_state_dict(block.mlp[2].state_dict())
        layer.attention.o_proj.load_state_dict(block.attention.out.state_dict())
        qkv: nn.Linear = block.attention.qkv
        attention = layer.attention
        for i, part in enumerate((attention.q_proj, attention.k_proj, attention.v_proj)):
            part.weight.copy_(qkv.weight.chunk(3)[i])
            if qkv.bias is not None:
                part.bias.copy_(qkv.bias.chunk(3)[i])


def _with_class_token(position_LD: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(position_LD[:1]), position_LD])[None]


def _processor(library: Any, product: Product) -> Any:
    """Return the image processor: the whole image, or the centre crop of a resized one."""
    data, size = product.data, product.image_size
    crop = {"height": size, "width": size}
    to: dict[str, int] = crop
    if data.resize is None:
        to = {"shortest_edge": size}
    elif data.crop == "centre":
        to = {"height": data.resize, "width": data.resize}
    return library.ViTImageProcessor(
        size=to,
        do_center_crop=True,
        crop_size=crop,
        resample=_BICUBIC,
        image_mean=list(data.mean),
        image_std=list(data.std),
    )


def _library() -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            "export: --to transformers needs transformers, which is not installed; expected the "
            "extra hf. Use pip install 'dpvision[hf]'."
        ) from None
    transformers.utils.logging.disable_progress_bar()
    return transformers
