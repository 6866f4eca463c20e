"""A public store of scenes and canaries, for runs whose canaries are included by coins.

A canary is a mosaic of random colours with a random label and a random caption: a record unlike all
others, which a network can fit only by having seen it. Those in the data and those left out have
the same law.
"""

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from dpvision.config import ClassifierConfig, HeadConfig, RunConfig
from dpvision.data.importer import import_samples
from dpvision.data.sample import Sample, Source
from dpvision.data.store import Store
from dpvision.synthetic.scenes import ATTRIBUTES, make_scene

_CANARY = "canary-"
_TILES = 8
"""Tiles of a mosaic along each side."""
_WORDS = (4, 8)
"""Fewest and most words of a canary's caption."""
_NAMED = sorted({word for words in ATTRIBUTES.values() for word in words})


def write_canaries(folder: Path, config: RunConfig, num_canaries: int, num_scenes: int) -> Store:
    """Make a public store of scenes and canaries, with the labels and captions of the config's
    model.

    Args:
        folder: a new one.
        num_canaries: their pixels, labels and words follow from the config's seed.
    """
    model = config.model
    classes = model.num_classes if isinstance(model, ClassifierConfig | HeadConfig) else None
    several = isinstance(model, ClassifierConfig | HeadConfig) and model.multi_label
    size = 32 if isinstance(model, HeadConfig) else max(model.encoder.image_size, 16)

    def label(number: int) -> dict[str, object]:
        if classes is None:
            return {}
        return {"label": [number % classes] if several else number % classes}

    def samples() -> Iterator[Sample]:
        for i in range(num_scenes):
            scene = make_scene(i, size)
            fields = {"caption": scene.caption, **label(scene.attributes["colour"])}
            yield Sample(f"scene-{i}", _png(scene.image), fields)
        rng = np.random.default_rng(config.seed)
        for i in range(num_canaries):
            tiles = rng.integers(0, 256, (_TILES, _TILES, 3), dtype=np.uint8)
            place = np.arange(size) * _TILES // size
            words = rng.choice(_NAMED, rng.integers(*_WORDS, endpoint=True))
            fields = {"caption": " ".join(words), **label(int(rng.integers(classes or 1)))}
            yield Sample(f"{_CANARY}{i}", _png(tiles[place][:, place]), fields)

    names = None if classes is None else [str(k) for k in range(classes)]
    return import_samples(Source(samples(), names), folder, public=True)


def canary_rows(store: Store) -> np.ndarray:
    """Return the rows of the canaries, int64 (M,), sorted."""
    keys = (store.key(row) for row in range(store.num_records))
    return np.array([row for row, key in enumerate(keys) if key.startswith(_CANARY)])


def _png(image_HWC: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image_HWC).save(file, "PNG", compress_level=1)
    return file.getvalue()
