"""Small runs of every kind of model that can be exported, with a ledger and a statement."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import torchvision
from safetensors.torch import save_file

from dpvision.adapt.session import adapt, new_head_session
from dpvision.config import (
    ClassifierConfig,
    CrossDecoderConfig,
    CrossMAEConfig,
    HeadConfig,
    ModelConfig,
    ResNetConfig,
    TimmConfig,
    ViTConfig,
)
from dpvision.export.write import Exported, Format
from dpvision.models import make_model

from ..adapt.runs_of_heads import head_config, write_digits
from ..captioners import make_config, make_tokenizer, train_captioner
from ..eval.labelled import write_store
from ..hub_folders import write_folder
from ..statement.runs import MODEL, make_run, make_store

NEEDS = {"onnx": "onnxscript", "peft": "peft", "transformers": "transformers"}
"""Format -> its library, of an extra."""
CLASSES = ["cat", "dog", 'bird "Amsel"']
_VIT = ViTConfig(image_size=32, patch_size=8, depth=2, width=32, num_heads=4)
_RESNET = ResNetConfig(image_size=16, depths=(1, 1), widths=(16, 32))
_TIMM = TimmConfig(name="vit_tiny_patch16_224", image_size=32, options=("depth=2",))
_CONVNET = TimmConfig(name="test_convnext", image_size=32)
_NORMED = TimmConfig(name="test_efficientnet", image_size=32)


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
    "FiLM on a timm convnet with BatchNorm": classifier(
        encoder=_NORMED, pooling="own", tuned="film"
    ),
    "FiLM on a timm model": classifier(encoder=_TIMM, pooling="cls", tuned="film"),
}
"""Name of a row of docs/export.md -> the run's model."""
PATCHES_PX = {"patches": 64, "patches+scattering": 32, "patches+scattering+zooms": 32}
"""Largest resolution of heads on patches: a trace of all resolutions takes a minute."""
NUM_RECORDS, NUM_DECLARED = 203, 204
"""Private digits of a head's store, and their declared number."""
HEADS: dict[str, tuple[str, bool]] = {
    "head on a timm model, any scale": ("timm:test_vit@{timm}", False),
    "head on a timm model, length 1": ("timm:test_vit@{timm}", True),
    "head on a timm convnet": ("timm:test_efficientnet@{timm}", True),
    "head on a timm model, stages": ("timm:test_resnet@{timm}", True),
    "head on a masked autoencoder, any scale": ("{mae}", False),
    "head on a masked autoencoder, length 1": ("{mae}", True),
    "head on a masked autoencoder, public statistics": ("{mae}", True),
    "head on a torchvision model": ("torchvision:resnet18@{torchvision}", True),
    "head on hog": ("hog", True),
    "head on pixels": ("pixels", True),
    "head on patches": ("patches", True),
    "head on patches and scattering": ("patches+scattering", True),
    "head on patches and scattering, zooms": ("patches+scattering+zooms", True),
    "head on `hf:`, ViT": ("hf:{vit}", True),
    "head on `hf:`, CLIP": ("hf:{clip}", True),
    "head on `hf:`, ConvNeXt": ("hf:{convnext}", True),
    "head on `hf:`, Swin": ("hf:{swin}", True),
}
"""Name of a row -> the encoder of a head (``dpvision adapt``), and whether features are scaled to
length 1.
"""


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
            for buffer_name, buffer in model.named_buffers():
                if "running_" in buffer_name:  # BatchNorm's statistics
                    buffer += 0.5 * torch.rand(buffer.shape, generator=generator)
        tensors = model.state_dict()
    if isinstance(cfg, ClassifierConfig):
        more["more"] = {"class_names": CLASSES} | more.get("more", {})
    run_id = f"{sorted(MODELS).index(name):016x}"
    return make_run(root, root.parent / "store", run_id=run_id, model=cfg, tensors=tensors, **more)


def make_head(root: Path, name: str, mae: Path) -> Path:
    """Make the run ``root`` of one of ``HEADS`` by a private step on digits.

    Args:
        mae: a run of a masked autoencoder.
    """
    spec, unit = HEADS[name]
    files = {"timm": root.parent / f"{root.name}-timm.safetensors", "mae": mae}
    files["torchvision"] = root.parent / f"{root.name}-torchvision.safetensors"
    torch.manual_seed(0)
    if "{timm}" in spec:
        name_of_model = spec.removeprefix("timm:").partition("@")[0]
        save_file(timm.create_model(name_of_model).state_dict(), files["timm"])
    if "{torchvision}" in spec:
        save_file(torchvision.models.resnet18().state_dict(), files["torchvision"])
    for kind in ("vit", "clip", "convnext", "swin"):
        files[kind] = root.parent / f"{root.name}-{kind}"
        if f"{{{kind}}}" in spec:
            write_folder(files[kind], kind)
    store = write_digits(root.parent / f"{root.name}-digits", 0, NUM_RECORDS)
    config = head_config(store, "many_steps", spec=spec.format(**files))
    assert isinstance(config.model, HeadConfig)
    pooling = "stages" if name.endswith("stages") else None
    size = PATCHES_PX.get(spec, 0)
    encoder = replace(config.model.encoder, image_size=size, pooling=pooling)
    theirs = "@" in spec or spec.startswith("hf:")
    centre = "none" if theirs else "textures"  # a centre takes minutes at 224 px
    public_store = None
    if name.endswith("public statistics"):
        noise = np.random.default_rng(0).integers(0, 256, (100, 8, 8, 3), dtype=np.uint8)
        public_store = str(write_store(root.parent / "public", list(noise), [None] * 100).path)
    features = replace(config.model.features, unit=unit, centre=centre, public_store=public_store)
    declared = "made here; MIT; this test" if theirs else None
    model = replace(config.model, encoder=encoder, features=features)
    privacy = replace(
        config.privacy, dataset_size=NUM_DECLARED, expected_batch_size=float(NUM_DECLARED)
    )
    config = replace(config, model=model, privacy=privacy, public_weights=declared)
    with new_head_session(config, root) as session:
        adapt(session)
    return root


Made = Callable[[str], Path]
"""From a name in ``MODELS`` to its run, made once."""
Copies = Callable[[str, Format, Path], Exported]
"""From a name in ``MODELS``, a format and a new folder to a copy there of the export, made once."""
