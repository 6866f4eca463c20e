"""LoRA in PEFT's layout: the low-rank additions and the head alone, on a model of timm's.

Legend: B images, C channels, H height, W width.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors.torch import load_file
from torch import Tensor

from dpvision.errors import ConfigError
from dpvision.export.product import Product, refused
from dpvision.export.to_timm import POOLS, pooled_timm, with_head
from dpvision.models.timm_encoder import TimmEncoder
from dpvision.models.tuned import LoRA
from dpvision.weights import pack

_FILE = "adapter_model.safetensors"
_LOADS = """import peft, timm

base = timm.create_model({name!r}, pretrained=True{more})
base.reset_classifier({classes}{pool})
model = peft.PeftModel.from_pretrained(base, ".").eval()
logit_BK = model(x_BCHW)  # images as under Preprocessing
"""


def how_to_load(product: Product) -> str:
    """Return Python that loads the export, run in its folder."""
    cfg = _lora_encoder(product).cfg
    arguments: dict[str, Any] = dict(cfg.arguments)
    known = timm.get_pretrained_cfg(cfg.name)
    if known is not None and known.fixed_input_size:
        arguments["img_size"] = cfg.image_size
    of = f"weights:timm:{cfg.name}@"
    if files := [
        entry["store_id"] for entry in product.lineage if entry["store_id"].startswith(of)
    ]:
        # the weights that the run started from, where they are a file
        arguments["pretrained_cfg_overlay"] = {"file": files[0].removeprefix(of)}
    pool = "" if product.pooling == "own" else f", global_pool={POOLS[product.pooling]!r}"
    more = "".join(f", {name}={value!r}" for name, value in arguments.items())
    classes = len(product.class_names)
    return _LOADS.format(name=cfg.name, classes=classes, more=more, pool=pool)


def write(product: Product, folder: Path, metadata: dict[str, str]) -> None:
    """Write adapter_config.json and adapter_model.safetensors by PEFT's own ``save_pretrained``.

    Raises:
        ConfigError: the run has no LoRA on one of timm's models, or PEFT is not installed.
    """
    peft, encoder = _library(), _lora_encoder(product)
    found = {n: m for n, m in encoder.model.named_modules() if isinstance(m, LoRA)}
    rank, scale = next((len(lora.down), lora.scale) for lora in found.values())
    base = _base(product)
    head = next(name for name, part in base.named_modules() if part is base.get_classifier())
    asked = peft.LoraConfig(
        r=rank,
        lora_alpha=scale * rank,
        target_modules=list(found),
        modules_to_save=[head],
        inference_mode=True,
    )
    adapted = peft.get_peft_model(base, asked)
    adapted.peft_config["default"].base_model_name_or_path = encoder.cfg.name
    with torch.no_grad():
        for name, lora in found.items():
            theirs = adapted.base_model.model.get_submodule(name)
            theirs.lora_A["default"].weight.copy_(lora.down)
            theirs.lora_B["default"].weight.copy_(lora.up)
    adapted.save_pretrained(str(folder), save_embedding_layers=False)  # else it asks the hub
    tensors = load_file(folder / _FILE)
    (folder / _FILE).write_bytes(pack(tensors, product.lineage, {"format": "pt"} | metadata))


def read(product: Product, folder: Path) -> Callable[[Tensor], Tensor]:
    """Return the exported model as PEFT loads it, on the run's frozen weights."""
    base = _base(product)
    torch.nn.init.zeros_(base.get_classifier().weight)  # comes from the file
    return _library().PeftModel.from_pretrained(base, str(folder)).eval()


def _lora_encoder(product: Product) -> TimmEncoder:
    """Return the encoder with its additions."""
    encoder: Any = getattr(getattr(product.trained, "network", None), "encoder", None)
    known = isinstance(encoder, TimmEncoder) and timm.is_model(encoder.cfg.name)
    if not known or not any(isinstance(part, LoRA) for part in encoder.modules()):
        what = "no low-rank additions (tuned=lora) to one of timm's models"
        raise refused("peft", what, "Use timm, onnx or safetensors, which hold whole models.")
    return encoder


def _base(product: Product) -> Any:
    """Return timm's model with the run's frozen weights, without additions."""
    model = pooled_timm("peft", replace(product, encoder=_lora_encoder(product)))
    for name, part in [*model.named_modules()]:
        if isinstance(part, LoRA):
            owner, _, child = name.rpartition(".")
            setattr(model.get_submodule(owner), child, part.frozen)
    with_head(model, product)
    return model.eval()


def _library() -> Any:
    try:
        import peft
    except ImportError:
        raise ConfigError(
            "export: --to peft needs peft, which is not installed; expected the extra loops. Use "
            "pip install 'dpvision[loops]'."
        ) from None
    return peft
