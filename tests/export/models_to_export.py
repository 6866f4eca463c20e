"""Small runs of every kind of model that can be exported, with a ledger and a statement."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dpvision.config import (
    ClassifierConfig,
    CrossDecoderConfig,
    CrossMAEConfig,
    ModelConfig,
    ResNetConfig,
    TimmConfig,
    ViTConfig,
)
from dpvision.models import make_model

from ..captioners import make_config, make_tokenizer, train_captioner
from ..statement.runs import MODEL, make_run, make_store

CLASSES = ["cat", "dog", 'bird "Amsel"']
_VIT = ViTConfig(image_size=32, patch_size=8, depth=2, width=32, num_heads=4)
_RESNET = ResNetConfig(image_size=16, depths=(1, 1), widths=(16, 32))
_TIMM = TimmConfig(name="vit_tiny_patch16_224", image_size=32, options=("depth=2",))
_CONVNET = TimmConfig(name="test_convnext", image_size=32)


def classifier(**more: Any) -> ClassifierConfig:
    return ClassifierConfig(num_classes=len(CLASSES), head_init="lecun", **more)


MODELS: dict[str, ModelConfig] = {
    "masked autoencoder (`vip.*`)": MODEL,
    "masked autoencoder of gradients": replace(MODEL, target="gradients"),
    "cross-attention autoencoder": CrossMAEConfig(
        encoder=replace(_VIT, qkv_bias=False),
        decoder=CrossDecoderConfig(depth=1, width=32, num_heads=2),
    ),
    "captioner (`dpcap.*`)": make_config().model,
    "classifier on our ViT, class token": classifier(encoder=_VIT, pooling="cls"),
    "classifier on our ViT, mean": classifier(encoder=_VIT, pooling="mean", loss="sigmoid"),
    "classifier on our ResNet": classifier(encoder=_RESNET),
    "classifier on a timm model": classifier(encoder=_TIMM, pooling="own"),
    "classifier on a timm model, mean": classifier(encoder=_TIMM, pooling="mean"),
    "classifier on a timm convnet": classifier(encoder=_CONVNET, pooling="own"),
    "LoRA on a timm model": classifier(
        encoder=_TIMM, pooling="own", tuned="lora", lora_rank=4, lora_scale=1.5, lora_on="both"
    ),
    "FiLM on a timm model": classifier(encoder=_TIMM, pooling="cls", tuned="film"),
}
"""Name of a row of docs/export.md -> the run's model."""


def make_exportable(root: Path, name: str, **more: Any) -> Path:
    """Make the run ``root`` of one of ``MODELS``, with its store beside it; additions are not
    zero.
    """
    cfg = MODELS[name]
    if not (root.parent / "store").exists():
        make_store(root.parent / "store")
    if name.startswith("captioner"):
        tensors = train_captioner().state_dict()
        more |= {"files": {"tokenizer.json": make_tokenizer().to_bytes()}}
    else:
        model, generator = make_model(cfg, 0), torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += 0.05 * noise  # biases, LoRA's B and FiLM's scales start at zero
        tensors = model.state_dict()
    if isinstance(cfg, ClassifierConfig):
        more["more"] = {"class_names": CLASSES} | more.get("more", {})
    run_id = f"{sorted(MODELS).index(name):016x}"
    return make_run(root, root.parent / "store", run_id=run_id, model=cfg, tensors=tensors, **more)


Made = Callable[[str], Path]
"""From a name in ``MODELS`` to its run, made once."""
