"""Stores of procedural images.

The demo's stand-in for a private set, and public sets for its probes.
"""

import contextlib
import io
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import TypeVar

import torch
from PIL import Image

from dpvision.data.importer import import_samples
from dpvision.data.ordered import ordered_map
from dpvision.data.sample import Sample, Source
from dpvision.data.store import Store
from dpvision.data.texture_store import check_first, texture_files
from dpvision.errors import DataError
from dpvision.synthetic.scenes import ATTRIBUTES, Scene, make_scenes

_SCENES_AT_ONCE, _TEXTURES_AT_ONCE = 64, 256

T = TypeVar("T")


def write_scenes(
    store_dir: str | Path,
    num: int,
    size_px: int = 48,
    *,
    first: int = 0,
    label: str = "shape",
    multi_label: bool = False,
    caption_of: Callable[[Scene], str] = attrgetter("caption"),
    keep: Callable[[Scene], bool] = lambda scene: True,
    public: bool = True,
    workers: int = 1,
    progress: Callable[[int], None] | None = None,
) -> Store:
    """Make a store of the captioned scenes ``first`` ... ``first + num - 1``.

    PNG files, with captions and labels.

    Scenes are public by nature; ``public=False`` treats them as a private set, with all its
    restrictions.

    Args:
        num: scenes to make, at least 1. Identical scenes become one record.
        label: the attribute used as the label, a key of ``scenes.ATTRIBUTES``; shape, colour and
            texture are those of the largest object. The store names its values as the classes.
        multi_label: label a scene with the attribute of all its objects.
        caption_of: caption of a scene; if None, its own sentence.
        keep: which of the scenes are stored; if None, all.
        workers: processes that draw; 1 draws in this process.

    Raises:
        DataError: ``num`` is below 1, ``label`` is no attribute, or as for
            ``importer.import_source``.
    """
    if label not in ATTRIBUTES:
        raise DataError(
            f"scenes: label={label!r}; expected one of {', '.join(ATTRIBUTES)}. Use colour, the "
            "easiest to learn."
        )
    if not num >= 1:
        raise DataError(f"scenes: num={num}; expected at least 1. Use 1000.")
    numbers = range(first, first + num)
    with _drawn(partial(make_scenes, size_px=size_px), numbers, _SCENES_AT_ONCE, workers) as scenes:
        kept = ((i, scene) for i, scene in zip(numbers, scenes, strict=True) if keep(scene))
        samples = (_sample(i, scene, label, multi_label, caption_of) for i, scene in kept)
        return import_samples(
            Source(samples, list(ATTRIBUTES[label]), licence="Apache-2.0 (procedural)"),
            store_dir,
            public=public,
            progress=progress,
        )


def write_textures(
    store_dir: str | Path,
    num: int,
    size_px: int = 64,
    *,
    first: int = 0,
    workers: int = 1,
    progress: Callable[[int], None] | None = None,
) -> Store:
    """Make a public store of textures ``first`` ... ``first + num - 1``.

    Their canonical views, as PNG files.

    Args:
        num: textures to make, at least 1.
        first: as ``texture_store.check_first``.
        workers: processes that draw; 1 draws in this process.

    Raises:
        DataError: ``num`` or ``first`` is out of range, or as for ``importer.import_source``.
    """
    if not num >= 1:
        raise DataError(f"synth: num={num}; expected at least 1. Use 1000.")
    check_first(first)
    with _drawn(
        partial(_draw_textures, size_px=size_px),
        range(first, first + num),
        _TEXTURES_AT_ONCE,
        workers,
    ) as textures:
        samples = (Sample(key, image, {}) for key, image in textures)
        return import_samples(
            samples, store_dir, public=True, licence="Apache-2.0 (procedural)", progress=progress
        )


@contextlib.contextmanager
def _drawn(
    draw: Callable[[range], list[T]], numbers: range, at_once: int, workers: int
) -> Iterator[Iterator[T]]:
    """Yield what ``draw`` makes of the numbers, ``at_once`` in a call, in order.

    Nothing is drawn before it is asked for.
    """
    parts = (numbers[i : i + at_once] for i in range(0, len(numbers), at_once))
    if workers == 1:
        yield chain.from_iterable(map(draw, parts))
        return
    with contextlib.closing(
        ordered_map(draw, parts, workers=workers, ahead=2 * workers, processes=True)
    ) as made:
        yield chain.from_iterable(made)


def _draw_textures(numbers: range, size_px: int) -> list[tuple[str, bytes]]:
    torch.set_num_threads(
        1
    )  # one thread per process: two pools on the same cores slow each other down
    return texture_files(numbers, size_px)


def _sample(
    i: int, scene: Scene, label: str, multi_label: bool, caption_of: Callable[[Scene], str]
) -> Sample:
    file = io.BytesIO()
    Image.fromarray(scene.image).save(file, "PNG", compress_level=1)
    labels = scene.all_of(label) if multi_label else scene.attributes[label]
    return Sample(f"scene-{i}", file.getvalue(), {"caption": caption_of(scene), "label": labels})
