"""Images of coloured shapes with a mask of ids beside each, and an untrained small encoder: for
tests of segmentation.
"""

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dpvision.config import ViTConfig
from dpvision.encoders.encoder import Encoder
from dpvision.encoders.pooled import PooledNetwork, pooled_network
from dpvision.eval.dense.semantic_data import ClassMap, SemanticFolder, open_folder
from dpvision.models.layers import init_weights
from dpvision.models.vit import ViT

IDS = (7, 21, 90)
"""Of background, disc and square, in masks; 0 is ignored."""
NAMES = ("background", "disc", "square")
CLASSES = ClassMap(NAMES, {i: k for k, i in enumerate(IDS)}, frozenset([0]))
_COLOURS = np.array([(60, 60, 60), (220, 40, 40), (40, 90, 230)])


def draw(number: int, width: int = 48, height: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 (H, W, 3) and ids uint8 (H, W): a red disc and a blue square on grey, their
    places by ``number``.
    """
    rng = np.random.default_rng(number)
    y, x = np.mgrid[:height, :width]
    ids = np.full((height, width), IDS[0], dtype=np.uint8)
    cy, cx, r = rng.integers(10, height - 10), rng.integers(10, width - 10), rng.integers(7, 10)
    ids[(y - cy) ** 2 + (x - cx) ** 2 <= r**2] = IDS[1]
    top, left = rng.integers(0, height - 14), rng.integers(0, width - 14)
    ids[top : top + 13, left : left + 13] = IDS[2]
    colour = np.zeros((height, width, 3))
    for k, i in enumerate(IDS):
        colour[ids == i] = _COLOURS[k]
    pixels = np.clip(colour + rng.normal(0, 12, colour.shape), 0, 255).astype(np.uint8)
    return pixels, ids


def write_shapes(root: Path, count: int, first: int = 0, *, shuffled: bool = False) -> Path:
    """``root/images``, ``root/masks`` and ``root/classes.json``; shuffled: each image has another's
    mask.
    """
    for name in ("images", "masks"):
        (root / name).mkdir(parents=True)
    drawn = [draw(first + n) for n in range(count)]
    for n, (pixels, _) in enumerate(drawn):
        Image.fromarray(pixels).save(root / "images" / f"{n:03}.png")
        Image.fromarray(drawn[(n + 1) % count][1] if shuffled else drawn[n][1]).save(
            root / "masks" / f"{n:03}.png"
        )
    (root / "classes.json").write_text(
        json.dumps({"0": "unlabeled"} | {str(i): name for i, name in zip(IDS, NAMES, strict=True)})
    )
    return root


def shapes(root: Path, count: int, first: int = 0, *, shuffled: bool = False) -> SemanticFolder:
    """The same, opened."""
    write_shapes(root, count, first, shuffled=shuffled)
    return open_folder(root / "images", root / "masks", CLASSES, name=root.name)


def tiny_encoder(seed: int = 0, **more: object) -> Encoder:
    """A transformer of 8 px patches with random weights."""
    config: dict = {
        "image_size": 32,
        "patch_size": 8,
        "depth": 3,
        "width": 32,
        "num_heads": 2,
    } | more
    vit = ViT(ViTConfig(**config))
    init_weights(vit, torch.Generator().manual_seed(seed))
    encoder = pooled_network(vit).eval().requires_grad_(False)
    return Encoder(
        "tiny",
        config["image_size"],
        (0.5, 0.4, 0.3),
        (0.2, 0.25, 0.3),
        encoder.poolings,
        "transformer",
        lambda: _copy(encoder),
    )


def _copy(encoder: PooledNetwork) -> PooledNetwork:
    import copy

    return copy.deepcopy(encoder).train().requires_grad_(True)
