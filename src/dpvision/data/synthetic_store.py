"""Stores of procedural pictures: the demo's stand-in for a private set, and public sets for its probes."""

import contextlib
import io
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

from PIL import Image

from dpvision.data.importer import import_samples
from dpvision.data.sources import Sample
from dpvision.data.store import Store
from dpvision.errors import DataError
from dpvision.synthetic.scenes import LABELS, Scene, make_scene


def write_scenes(
    store_dir: str | Path,
    num: int,
    size_px: int = 48,
    *,
    first: int = 0,
    public: bool = True,
    workers: int = 1,
    progress: Callable[[int], None] | None = None,
) -> Store:
    """Store of the captioned scenes ``first`` ... ``first + num - 1`` as PNG files; the label is the shape of the largest object.

    Scenes are public by nature; ``public=False`` lets them stand in for a private set, with everything that this forbids.

    Args:
        num: scenes to make, at least 1. Scenes that happen to be identical become one record.
        workers: processes that draw. One draws in this process.

    Raises:
        DataError: ``num`` is below 1, or as for ``importer.import_source``.
    """
    if not num >= 1:
        raise DataError(f"scenes: num={num}; expected at least 1. Ask for some.")
    with contextlib.ExitStack() as stack:
        draw, numbers = partial(make_scene, size_px=size_px), range(first, first + num)
        scenes: Iterator[Scene] = map(draw, numbers)
        if workers > 1:
            # spawn: a forked child would inherit the locks of other threads. It imports numpy and the scenes, not torch
            pool = stack.enter_context(ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")))
            scenes = pool.map(draw, numbers, chunksize=64)
        samples = map(_sample, numbers, scenes)
        return import_samples(
            samples, store_dir, public=public, label_names=list(LABELS), licence="Apache-2.0 (procedural)", progress=progress
        )


def _sample(i: int, scene: Scene) -> Sample:
    file = io.BytesIO()
    Image.fromarray(scene.image).save(file, "PNG", compress_level=1)
    return Sample(f"scene-{i}", file.getvalue(), {"caption": scene.caption, "label": scene.label})
