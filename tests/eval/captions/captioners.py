"""Captioners that were never trained, with weights far enough from zero to have opinions, and the
tokenizer that they share.
"""

import functools
from pathlib import Path

import torch

from dpvision.config import (
    CaptionerConfig,
    CrossDecoderConfig,
    DataConfig,
    PrivacyConfig,
    RunConfig,
    ViTConfig,
    to_dict,
)
from dpvision.data.tokenizer import CaptionTokenizer, train_tokenizer
from dpvision.eval.captions.open_captioner import OpenCaptioner
from dpvision.files import write_json
from dpvision.models import make_model
from dpvision.models.captioner import Captioner
from dpvision.synthetic.scenes import make_scene

from ...captioners import lineage, write_checkpoint

VOCAB_SIZE = 330


@functools.cache
def words_of_scenes() -> CaptionTokenizer:
    """Byte-level BPE of the sentences of 400 scenes."""
    return train_tokenizer([make_scene(i, 16).caption for i in range(400)], VOCAB_SIZE)


def model_config(num_tokens: int = 40) -> CaptionerConfig:
    """Images of 16 px, two blocks on each side."""
    return CaptionerConfig(
        encoder=ViTConfig(
            image_size=16,
            patch_size=8,
            depth=2,
            width=24,
            num_heads=3,
            qkv_bias=False,
            train_cls=False,
        ),
        decoder=CrossDecoderConfig(depth=2, width=16, num_heads=4),
        vocab_size=VOCAB_SIZE,
        num_tokens=num_tokens,
    )


def make_captioner(seed: int = 1, num_tokens: int = 40) -> Captioner:
    """A captioner whose words depend on the image and on one another."""
    model = make_model(model_config(num_tokens), seed)
    assert isinstance(model, Captioner)
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(
                0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * seed + i))
            )
    return model.eval().requires_grad_(False)


def open_made(seed: int = 1, num_tokens: int = 40, *, confidential: bool = False) -> OpenCaptioner:
    """It with its tokenizer."""
    return OpenCaptioner(
        "captioner",
        make_captioner(seed, num_tokens),
        words_of_scenes(),
        DataConfig(),
        confidential,
        seed=0,
    )


def write_captioner_run(
    root: Path, *, guarantee: bool = True, with_tokenizer: bool = True, store: Path | None = None
) -> Path:
    """A run folder with one checkpoint of a captioner."""
    config = RunConfig(
        recipe="dpcap.micro",
        privacy=PrivacyConfig(
            dataset_size=60, expected_batch_size=20, steps=4, noise_multiplier=2.0
        ),
        model=model_config(),
        data=DataConfig(tokenizer="words.json", store=None if store is None else str(store)),
    )
    base = root if guarantee else root / "confidential"
    (root / "confidential").mkdir(parents=True)
    history = lineage("private", {"epsilon": 8.0} if guarantee else None)
    folder, words = (
        base / "checkpoints" / "step-00000004",
        words_of_scenes() if with_tokenizer else None,
    )
    write_checkpoint(folder, make_captioner(), history=history, tokenizer=words, config=config)
    write_json(base / "config.json", to_dict(config))
    return root
