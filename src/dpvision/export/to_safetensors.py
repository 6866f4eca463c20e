"""Safetensors with one modelling file in plain PyTorch, which needs no dpvision: our vision
transformers and captioners, and heads on timm's models (in timm's layout, in a folder below).

Legend: B images, C channels, H height, W width.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpvision.encoders.classifier import ImageClassifier
from dpvision.export import modelling
from dpvision.export.product import Product, captions_to_check, refused
from dpvision.export.to_timm import pooled_timm, save
from dpvision.models.captioner import Captioner
from dpvision.models.vit import ViT
from dpvision.weights import pack

LOADS = """from modelling import load  # in this folder

model = load(".")
"""
USES = {
    "encoder": "feature_BD = model(model.preprocess(image)[None])",
    "classifier": "probability_BK = model.probabilities(model.preprocess(image)[None])",
    "captioner": "ids = model.caption(model.preprocess(image)[None])  # for tokenizer.json",
}


def write(product: Product, folder: Path, metadata: dict[str, str]) -> None:
    """Write model.safetensors, config.json and modelling.py; a captioner's tokenizer.json; one of
    timm's models under encoder/.

    Raises:
        ConfigError: the encoder is neither ours nor timm's, or its pooling cannot be expressed.
    """
    vit = product.encoder
    tensors: dict[str, Tensor] = {}
    about: dict[str, Any] = {"kind": "timm"}
    if isinstance(vit, ViT):
        if product.pooling not in ("mean", "cls"):
            raise refused("safetensors", f"pooling={product.pooling!r}", "Use onnx.")
        tensors = {f"encoder.{n}": t for n, t in vit.named_parameters()}
        tensors["encoder.position"] = vit.position_LD
        about = asdict(vit.cfg)
    else:
        save(pooled_timm("safetensors", product), product, folder / "encoder", metadata)
    config = {
        "kind": product.kind,
        "encoder": about,
        "pooling": product.pooling,
        "unit": product.unit,
        "width": about["width"] if product.head is None else product.head.in_features,
        **product.properties,
    }
    if product.head is not None:
        tensors |= {f"head.{n}": t for n, t in product.head.named_parameters()}
    if product.unit:
        assert isinstance(product.trained, ImageClassifier)
        centre_D = product.trained.head.get_buffer("centre")
        spread_D = dict(product.trained.head.named_buffers()).get("spread")
        tensors["centre"] = centre_D
        tensors["spread"] = torch.ones_like(centre_D) if spread_D is None else spread_D
    if isinstance(product.trained, Captioner):
        made = product.trained
        for part in ("word_embed", "word_norm", "word_head"):
            tensors |= {f"{part}.{n}": t for n, t in getattr(made, part).named_parameters()}
        tensors |= dict(made.decoder.named_parameters())
        tensors["position"] = made.decoder.position_LD
        tensors["word_position"] = made.word_position_LD
        config |= {
            "decoder": asdict(made.cfg.decoder),
            "vocab_size": made.cfg.vocab_size,
            "num_tokens": made.cfg.num_tokens,
        }
        assert product.tokenizer is not None
        (folder / "tokenizer.json").write_bytes(product.tokenizer)
    (folder / "model.safetensors").write_bytes(pack(tensors, product.lineage, metadata))
    text = json.dumps(config, indent=1, ensure_ascii=False, allow_nan=False)
    (folder / "config.json").write_text(text + "\n")
    shutil.copyfile(str(modelling.__file__), folder / "modelling.py")


def how_to_load(product: Product) -> str:
    """Return Python that loads the export, run in its folder."""
    return LOADS + USES[product.kind]


def read(product: Product, folder: Path) -> Callable[[Tensor], Tensor]:
    """Return the exported model as a function, loaded by its modelling file."""
    model = modelling.load(folder)
    if not isinstance(model, modelling.Captioner):
        return model
    assert isinstance(product.trained, Captioner)
    trained = product.trained
    return lambda x: model.decode(captions_to_check(trained, len(x)), model.encode(x))
