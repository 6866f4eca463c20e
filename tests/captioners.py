"""A captioner that was trained for a second or two on coloured squares, and runs of it: shared by
the tests of several rooms.
"""

import functools
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from dpvision.checkpoint import save_checkpoint, state_tensors
from dpvision.config import (
    CaptionerConfig,
    CrossDecoderConfig,
    DataConfig,
    PrivacyConfig,
    RunConfig,
    ViTConfig,
    to_dict,
)
from dpvision.data.importer import import_samples
from dpvision.data.sources import Sample
from dpvision.data.store import Store
from dpvision.data.tokenizer import CaptionTokenizer, train_tokenizer
from dpvision.files import write_json
from dpvision.models import make_model
from dpvision.models.captioner import Captioner, losses

COLOURS = {
    "red": (210, 40, 40),
    "green": (40, 190, 60),
    "blue": (50, 60, 220),
    "yellow": (230, 210, 40),
}
SIDES = ("left", "right")
VOCAB_SIZE, NUM_TOKENS, SIZE = 275, 18, 16
DATA = DataConfig(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))


def image(number: int, size_px: int = SIZE) -> tuple[np.ndarray, str]:
    """Image ``number``, a square on grey with a little noise, uint8 (H, W, 3), and its caption."""
    colour, side = list(COLOURS)[number % 4], SIDES[number // 4 % 2]
    rng = np.random.Generator(np.random.PCG64(number))
    pixels = np.full((size_px, size_px, 3), 120.0)
    half = size_px // 2
    left = 0 if side == "left" else half
    pixels[size_px // 4 : -size_px // 4, left + 1 : left + half - 1] = COLOURS[colour]
    return (pixels + rng.normal(0, 6, pixels.shape)).clip(0, 255).astype(
        np.uint8
    ), f"a {colour} square on the {side}"


def png(number: int) -> bytes:
    """Image ``number`` as a file."""
    file = io.BytesIO()
    Image.fromarray(image(number)[0]).save(file, "PNG")
    return file.getvalue()


def write_squares(path: Path, numbers: Sequence[int], *, public: bool = True) -> Store:
    """Store of images with two captions each."""
    samples = []
    for number in numbers:
        caption = image(number)[1]
        samples.append(
            Sample(
                f"square-{number}",
                png(number),
                {"captions": [caption, caption.replace("a ", "there is a ", 1)]},
            )
        )
    return import_samples(samples, path, public=public)


def make_tokenizer() -> CaptionTokenizer:
    return train_tokenizer([image(number)[1] for number in range(64)], VOCAB_SIZE)


def make_config(**model: Any) -> RunConfig:
    return RunConfig(
        recipe="dpcap.micro",
        privacy=PrivacyConfig(
            dataset_size=60, expected_batch_size=20, steps=4, noise_multiplier=2.0
        ),
        data=DATA,
        model=CaptionerConfig(
            **{
                "encoder": ViTConfig(
                    image_size=SIZE,
                    patch_size=4,
                    depth=1,
                    width=32,
                    num_heads=2,
                    qkv_bias=False,
                    train_cls=False,
                ),
                "decoder": CrossDecoderConfig(depth=1, width=32, num_heads=2),
                "vocab_size": VOCAB_SIZE,
                "num_tokens": NUM_TOKENS,
            }
            | model
        ),
    )


@functools.cache
def train_captioner(steps: int = 120) -> Captioner:
    """A captioner that has learned what is where. The same on every machine up to rounding."""
    tokenizer, model = make_tokenizer(), make_model(make_config().model, seed=0)
    assert isinstance(model, Captioner)
    pixels, captions = zip(*map(image, range(64)), strict=True)
    x_BCHW = (torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2) / 255 - 0.5) / 0.25
    token_BL = torch.from_numpy(
        np.stack([tokenizer.encode(caption, NUM_TOKENS) for caption in captions])
    )
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=4e-3, weight_decay=0.0
    )
    for _ in range(steps):
        loss = losses(model, x_BCHW, token_BL).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def lineage(visibility: str, guarantee: dict[str, Any] | None) -> list[dict[str, Any]]:
    return [{"store_id": "5" * 32, "visibility": visibility, "run_id": "r", "guarantee": guarantee}]


def write_checkpoint(
    folder: Path,
    model: Captioner,
    *,
    history: list[dict[str, Any]],
    tokenizer: CaptionTokenizer | None,
    config: RunConfig | None = None,
) -> Path:
    """A checkpoint folder as training leaves it; averaged weights are those of a captioner that has
    learned nothing.
    """
    config = config or make_config()
    manifest = {
        "run_id": "r",
        "ledger_steps": 4,
        "updates": 4,
        "config": to_dict(config),
        "plan": {},
        "ledger_digest": "d",
        "lineage": history,
    }
    files = None if tokenizer is None else {"tokenizer.json": tokenizer.to_bytes()}
    return save_checkpoint(
        folder,
        manifest,
        state_tensors(model),
        ema=make_model(config.model, 1).state_dict(),
        files=files,
    )


def write_run(
    root: Path,
    model: Captioner,
    *,
    visibility: str = "private",
    guarantee: dict[str, Any] | None = None,
    tokenizer: CaptionTokenizer | None = None,
) -> Path:
    """A run folder with one checkpoint; with a ``guarantee``, or not."""
    config = make_config()
    base = root / "confidential" if visibility == "private" and guarantee is None else root
    folder = base / "checkpoints" / "step-00000004"
    write_checkpoint(
        folder,
        model,
        history=lineage(visibility, guarantee),
        tokenizer=tokenizer or make_tokenizer(),
        config=config,
    )
    write_json(base / "config.json", to_dict(config))
    about = {
        "store_id": "5" * 32,
        "store_visibility": visibility,
        "results_visibility": visibility,
        "guarantee": "dp" if guarantee else "none",
    }
    write_json(base / "run.json", {"format": "dpvision-run-1", "run_id": "r", **about})
    return root
