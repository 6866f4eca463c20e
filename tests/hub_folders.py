"""Small folders in the layouts of model hubs, with random weights, for the tests of several
packages.
"""

import json
from pathlib import Path
from typing import Any

import torch

_SIZE = 32
_VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": _SIZE,
    "patch_size": 8,
}
_TEXT = {key: _VIT[key] for key in ("hidden_size", "num_attention_heads", "intermediate_size")} | {
    "num_hidden_layers": 2,
    "vocab_size": 400,
    "max_position_embeddings": 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MAE_DECODER = {
    "decoder_hidden_size": 16,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 32,
}
_CONVNEXT = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}
_SWIN = {
    "image_size": 64,
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
_SQUARE = {"size": {"height": _SIZE, "width": _SIZE}}
_CROPPED = {"size": {"shortest_edge": 40}, "crop_size": {"height": _SIZE, "width": _SIZE}}
_LARGER = {"size": {"height": 64, "width": 64}}
FAMILIES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", _VIT, "ViTImageProcessorPil", _SQUARE),
    "vit_mae": (
        "ViTMAEForPreTraining",
        _VIT | _MAE_DECODER,
        "ViTImageProcessorPil",
        _SQUARE | {"resample": 3},
    ),
    "dinov2": ("Dinov2Model", _VIT, "BitImageProcessorPil", _CROPPED),
    "dinov2_with_registers": (
        "Dinov2WithRegistersModel",
        _VIT | {"num_register_tokens": 3},
        "BitImageProcessorPil",
        _CROPPED,
    ),
    "dinov3_vit": (
        "DINOv3ViTModel",
        _VIT | {"num_register_tokens": 3},
        "DINOv3ViTImageProcessor",
        _SQUARE,
    ),
    "dinov3_convnext": (
        "DINOv3ConvNextModel",
        _CONVNEXT,
        "DINOv3ViTImageProcessor",
        {"size": {"height": 96, "width": 96}},
    ),
    "clip": (
        "CLIPModel",
        {"vision_config": _VIT, "text_config": _TEXT, "projection_dim": 16},
        "CLIPImageProcessorPil",
        _CROPPED | {"size": {"shortest_edge": _SIZE}},
    ),
    "siglip": (
        "SiglipModel",
        {"vision_config": _VIT, "text_config": _TEXT | {"projection_size": 32}},
        "SiglipImageProcessorPil",
        _SQUARE,
    ),
    "convnext": (
        "ConvNextForImageClassification",
        _CONVNEXT,
        "ConvNextImageProcessorPil",
        {"size": {"shortest_edge": 96}},
    ),
    "convnextv2": (
        "ConvNextV2Model",
        _CONVNEXT,
        "ConvNextImageProcessorPil",
        {"size": {"shortest_edge": 384}},
    ),
    "swin": ("SwinForImageClassification", _SWIN, "ViTImageProcessorPil", _LARGER),
    "swinv2": ("Swinv2Model", _SWIN, "ViTImageProcessorPil", _LARGER | {"resample": 3}),
}
"""Model type -> transformers' class, its config, and the image processor with its settings."""


def write_folder(path: Path, kind: str, *, name: str | None = None) -> Path:
    """Write a folder as ``save_pretrained`` does, of a model of this type with random weights.

    Args:
        name: another class of transformers that is saved for the same config.
    """
    import transformers

    cls, settings, processor, images = FAMILIES[kind]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(kind))
        config = transformers.AutoConfig.for_model(kind, **settings)
        if name is not None:
            cls, config = name, getattr(config, "vision_config", config)
        model = getattr(transformers, cls)(config)
        for parameter in model.parameters():  # far from its initialisation: layers differ
            parameter.data += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(path)
    getattr(transformers, processor)(**images).save_pretrained(path)
    if kind in ("clip", "siglip"):
        write_tokenizer(path)
    return path


def write_tokenizer(path: Path, vocab_size: int = 300) -> None:
    """Write a tokenizer of characters and a few words, with the special tokens of ``_TEXT``."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    more = [chr(0x4E00 + number) for number in range(vocab_size - 300)]
    made.train_from_iterator(
        ["this is a photo of a red green blue yellow square on the left right", *letters, *more],
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["[PAD]", "[BOS]", "[EOS]", "[UNK]"],
            show_progress=False,
        ),
    )
    made.post_processor = processors.TemplateProcessing(
        single="[BOS] $A [EOS]", special_tokens=[("[BOS]", 1), ("[EOS]", 2)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]"
    ).save_pretrained(path)


def edit_json(path: Path, **changes: Any) -> None:
    """Replace values of a JSON object in a file; None removes one."""
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: v for key, v in values.items() if v is not None}))
