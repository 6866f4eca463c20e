"""Labelled stores and small encoders for the protocols' tests."""

import copy
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn

from dpvision.config import MAEConfig, ViTConfig
from dpvision.data.importer import import_samples
from dpvision.data.person_names import PersonRule
from dpvision.data.sources import Sample
from dpvision.data.store import Store
from dpvision.encoders.encoder import Encoder
from dpvision.eval.probes.protocol import Task
from dpvision.models import make_model

MEAN = STD = (0.5, 0.5, 0.5)


def write_store(
    path: Path,
    images: Sequence[np.ndarray],
    labels: Sequence[str | None],
    person: Sequence[str] | None = None,
    *,
    public: bool = True,
) -> Store:
    """Store of uint8 images (H, W, 3)."""
    samples = []
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        fields = {"label": label, "person": person[i] if person else None}
        samples.append(
            Sample(
                f"k{i}",
                file.getvalue(),
                {name: value for name, value in fields.items() if value is not None},
            )
        )
    return import_samples(
        samples, path, public=public, people=PersonRule("person" if person else None)
    )


def write_digits(path: Path, start: int, stop: int) -> Store:
    """scikit-learn's handwritten digits of 8 px as grey images."""
    pixels, labels = load_digits(return_X_y=True)
    grey = (pixels[start:stop].reshape(-1, 8, 8, 1) * 15.9).astype(np.uint8)
    return write_store(
        path, list(grey.repeat(3, axis=3)), [str(label) for label in labels[start:stop]]
    )


def write_colours(
    path: Path, per_class: int, seed: int, person: Sequence[str] | None = None
) -> Store:
    """Three classes that differ in their colour, with noise."""
    rng = np.random.Generator(np.random.PCG64(seed))
    label = np.arange(3 * per_class) % 3
    images = rng.normal(100, 25, (len(label), 8, 8, 3))
    images[np.arange(len(label)), :, :, label] += 60
    return write_store(
        path, list(images.clip(0, 255).astype(np.uint8)), [f"c{c}" for c in label], person
    )


@dataclass(frozen=True)
class OfUnits(Task):
    """A task whose training rows have other units than its store's."""

    of_N: np.ndarray | None = None

    @property
    def unit_N(self) -> np.ndarray:
        assert self.of_N is not None
        return self.of_N


class MeanToken(nn.Module):
    """The mean patch token of a vision transformer."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.vit(x_BCHW)[:, 1:].mean(dim=1)


def vit_encoder(seed: int = 0, depth: int = 2) -> Encoder:
    """A small transformer with random weights for images of 8 px."""
    cfg = ViTConfig(image_size=8, patch_size=2, depth=depth, width=32, num_heads=2)
    model = make_model(
        MAEConfig(encoder=cfg, decoder_depth=1, decoder_width=16, decoder_num_heads=2), seed
    )
    net = MeanToken(model.encoder).eval()

    def poolings(x_BCHW: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"mean": net(x_BCHW)}

    return Encoder(
        "vit",
        8,
        MEAN,
        STD,
        poolings,
        "transformer",
        lambda: copy.deepcopy(net).train(),
        model.encoder.forward_blocks,
    )


def conv_encoder(seed: int = 0) -> Encoder:
    """A small convolutional network with batch normalisation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, 2, 1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        ).eval()

    def poolings(x_BCHW: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"mean": net(x_BCHW)}

    return Encoder("conv", 8, MEAN, STD, poolings, "convnet", lambda: copy.deepcopy(net).train())
