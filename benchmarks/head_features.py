"""Frozen features of images by public encoders, kept as .npy: what benchmarks/heads.py adapts.

Sets: cifar10, mednist, pets_sample (parquet files of --data); scenes (ours) and digits
(scikit-learn's), on which settings are chosen. Every set is seen as the product's evaluation sees
it: shorter side to the encoder's size, centre crop, the encoder's normalisation.

The mean of the encoder's features of procedural textures, which are public, is taken off; features
of more than ``WIDEST`` numbers are mapped on the textures' first ``WIDEST`` principal directions,
so that one core can invert covariances by the hundred.

Legend: N records, B images at once, D numbers of a feature, C channels, H height, W width.
"""

import io
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image
from sklearn.datasets import load_digits

from dpvision.encoders.encoder import Encoder
from dpvision.encoders.open import open_encoder
from dpvision.synthetic.scenes import make_scene
from dpvision.synthetic.textures import textures

WIDEST = 512
SCENES = {"train": range(10_000_000, 10_020_000), "test": range(10_040_000, 10_042_000)}
NUM_TEXTURES = 4000
REAL, PUBLIC = ("cifar10", "mednist", "pets_sample"), ("scenes", "digits")
Pictures = Iterator[tuple[Image.Image | np.ndarray, int | tuple[int, int]]]


@dataclass(frozen=True, eq=False)
class Task:
    """Records to adapt to, and others to test on."""

    train_ND: np.ndarray
    train_N: np.ndarray
    test_MD: torch.Tensor
    test_M: torch.Tensor
    num_classes: int

    def first(self, count: int) -> "Task":
        """The task with fewer records to adapt to."""
        return Task(
            self.train_ND[:count], self.train_N[:count], self.test_MD, self.test_M, self.num_classes
        )


def images_of(data: Path, name: str, split: str) -> Pictures:
    """Images and labels; of scenes both attributes of the largest object, shape and colour."""
    if name == "scenes":
        for i in SCENES[split]:
            scene = make_scene(i, 32)
            yield scene.image, (scene.attributes["shape"], scene.attributes["colour"])
    elif name == "digits":
        image_NHW, label_N = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(label_N))
        for i in order[:1300] if split == "train" else order[1300:]:
            yield (
                np.repeat((image_NHW[i].reshape(8, 8, 1) * 15.9).astype(np.uint8), 3, axis=2),
                int(label_N[i]),
            )
    else:
        table = pq.read_table(data / name / f"{split}.parquet")
        for image, label in zip(
            table["image"].to_pylist(), table["label"].to_pylist(), strict=True
        ):
            yield Image.open(io.BytesIO(image["bytes"])), int(label)


@torch.inference_mode()
def embed(encoder: Encoder, pictures: Pictures) -> tuple[np.ndarray, np.ndarray]:
    """Features of the quadrants where the encoder has them, else its default ones: float16 (N, D),
    and labels.
    """
    prepare = encoder.preprocess
    features, labels = [], []
    while part := list(itertools.islice(pictures, 500)):
        x_BCHW = torch.from_numpy(np.stack([prepare(picture) for picture, _ in part]))
        found = encoder.poolings(x_BCHW)
        features.append(found.get("2x2", next(iter(found.values()))).numpy().astype(np.float16))
        labels += [label for _, label in part]
    return np.concatenate(features), np.array(labels, dtype=np.int64)


class Features:
    """Features by encoder and set, computed at their first use and kept under ``work``.

    Args:
        data: folder of the real sets.
        encoders: what ``open_encoder`` takes, by short name.
    """

    def __init__(self, work: Path, data: Path, encoders: dict[str, str]) -> None:
        self.work, self.data, self.encoders = work, data, encoders
        self._open: dict[str, Encoder] = {}
        self._maps: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}

    def task(self, encoder: str, name: str, attribute: str = "label") -> Task:
        """One set by one encoder; ``attribute`` of scenes: shape, colour, or both (as many classes
        as pairs).
        """
        (x_ND, y_N), (x_MD, y_M) = (
            self._mapped(encoder, name, split) for split in ("train", "test")
        )
        if name == "scenes":
            y_N, y_M = (
                {"shape": y[:, 0], "colour": y[:, 1], "both": 10 * y[:, 0] + y[:, 1]}[attribute]
                for y in (y_N, y_M)
            )
        # The label set of these tasks is known to everybody; a private one would be declared.
        return Task(x_ND, y_N, torch.from_numpy(x_MD), torch.from_numpy(y_M), int(y_N.max()) + 1)

    def _mapped(self, encoder: str, name: str, split: str) -> tuple[np.ndarray, np.ndarray]:
        x_ND, label_N = self._kept(
            f"{encoder}-{name}-{split}",
            lambda: embed(self._encoder(encoder), images_of(self.data, name, split)),
        )
        if encoder not in self._maps:
            self._maps[encoder] = self._public_map(encoder)
        centre_D, map_DE = self._maps[encoder]
        x_ND = x_ND.astype(np.float32) - centre_D
        return x_ND if map_DE is None else x_ND @ map_DE, label_N

    def _public_map(self, encoder: str) -> tuple[np.ndarray, np.ndarray | None]:
        def pictures() -> Pictures:
            for start in range(0, NUM_TEXTURES, 500):
                number = torch.arange(start, start + 500) + 90_000_000
                for image_CHW in textures(number, 32, instance_N=number).numpy():
                    yield image_CHW.transpose(1, 2, 0), 0

        x_ND = self._kept(f"{encoder}-textures", lambda: embed(self._encoder(encoder), pictures()))[
            0
        ].astype(np.float32)
        centre_D = x_ND.mean(axis=0)
        if len(centre_D) <= WIDEST:
            return centre_D, None
        return centre_D, np.linalg.svd(x_ND - centre_D, full_matrices=False)[2][:WIDEST].T.copy()

    def _kept(
        self, name: str, make: Callable[[], tuple[np.ndarray, np.ndarray]]
    ) -> tuple[np.ndarray, np.ndarray]:
        paths = self.work / f"{name}.npy", self.work / f"{name}-labels.npy"
        if not paths[1].exists():
            self.work.mkdir(parents=True, exist_ok=True)
            for path, value in zip(paths, make(), strict=True):
                np.save(path, value)
        return np.load(paths[0]), np.load(paths[1])

    def _encoder(self, name: str) -> Encoder:
        if name not in self._open:
            self._open[name] = open_encoder(self.encoders[name], image_size=32)
        return self._open[name]
