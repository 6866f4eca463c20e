"""Our own architectures as safetensors, with one modelling file that needs no dpvision.

Legend: B images, C channels, H height, W width.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from dpvision.export import modelling
from dpvision.export.product import Product, captions_to_check, refused
from dpvision.models.captioner import Captioner
from dpvision.models.layers import LinearHead
from dpvision.models.vit import ViT
from dpvision.weights import pack

LOADS = """from modelling import load  # in this folder; needs torch, safetensors and Pillow

model = load(".")
"""
USES = {
    "encoder": "feature_BD = model(model.preprocess(image)[None])",
    "classifier": "probability_BK = model.probabilities(model.preprocess(image)[None])",
    "captioner": "ids = model.caption(model.preprocess(image)[None])  # for tokenizer.json",
}
_NAMES = ("cls_token", "patch_embed", "blocks", "norm")


def write(product: Product, folder: Path, metadata: dict[str, str]) -> None:
    """Write model.safetensors, config.json and modelling.py, and a captioner's tokenizer.json.

    Raises:
        ConfigError: the encoder or its pooling is not of modelling.py.
    """
    vit = product.encoder
    if not isinstance(vit, ViT):
        raise refused(
            "safetensors",
            f"the encoder is a {type(vit).__name__}",
            "Use onnx, or timm for one of timm's models; safetensors holds dpvision's vision "
            "transformers and captioners.",
        )
    if product.pooling not in ("mean", "cls"):
        raise refused("safetensors", f"pooling={product.pooling!r}", "Use onnx.")
    tensors = {f"encoder.{n}": t for n, t in vit.state_dict().items() if n.startswith(_NAMES)}
    tensors["encoder.position"] = vit.position_LD
    config = {
        "kind": product.kind,
        "encoder": asdict(vit.cfg),
        "pooling": product.pooling,
        "unit": product.unit,
        **product.properties,
    }
    if product.head is not None:
        tensors |= {f"head.{n}": t for n, t in product.head.state_dict().items()}
    if product.unit:
        tensors["centre"] = _centre(product.trained)
    if isinstance(product.trained, Captioner):
        made = product.trained
        for part in ("word_embed", "word_norm", "word_head"):
            tensors |= {f"{part}.{n}": t for n, t in getattr(made, part).state_dict().items()}
        tensors |= {n: t for n, t in made.decoder.state_dict().items() if n != "position_LD"}
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


def _centre(trained: nn.Module) -> Tensor:
    return next((m.centre for m in trained.modules() if isinstance(m, LinearHead)), torch.zeros(0))
