"""Matches of ``data overlap`` side by side, for the operator to check."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from dpvision.data.decode import BadImage, decode
from dpvision.data.overlap import HOWS, Matches
from dpvision.data.store import Store
from dpvision.report.html import render, strip_of, write_page

_SIDE_PX = 112
_WORDS = {
    "bytes": ("Identical files", "{:.0f}"),
    "pixels": ("Identical pixels in other files", "{:.0f}"),
    "perceptual": ("Near perceptual hashes", "{:.0f} of 64 bits differ"),
    "features": ("Near features", "1 - cosine {:.3f}"),
}


@dataclass(frozen=True)
class Pair:
    """One match on the page."""

    strip: str
    """Both images, the public one first: a data: URI."""
    names: tuple[str, str]
    distance: str


def write_overlap_page(
    path: Path, public: Store, private: Store, found: Matches, methods: list[str], *, most: int = 60
) -> Path:
    """Write the page, which is confidential because it shows private images.

    Args:
        most: maximum number of pairs shown per kind, spread evenly from the nearest to the
            farthest.

    Raises:
        CheckpointError: the file cannot be written.
    """
    kinds = []
    for how, (title, distance) in _WORDS.items():
        here = np.flatnonzero(found.how_M == HOWS.index(how))
        here = here[np.argsort(found.distance_M[here], kind="stable")]
        shown = (
            here[np.unique(np.linspace(0, len(here) - 1, min(most, len(here))).astype(np.int64))]
            if len(here)
            else here
        )
        pairs = [
            _pair(public, private, found, m, "" if how in ("bytes", "pixels") else distance)
            for m in shown.tolist()
        ]
        kinds.append((title, len(here), pairs))
    return write_page(
        path,
        render(
            "overlap_page.html",
            public=public.path.name,
            private=private.path.name,
            kinds=kinds,
            methods=methods,
        ),
    )


def _pair(public: Store, private: Store, found: Matches, m: int, distance: str) -> Pair:
    stores = ((public, int(found.public_M[m])), (private, int(found.private_M[m])))
    strip = strip_of(np.stack([_tile(store.read(row)) for store, row in stores]))
    first, second = (store.record(row).key for store, row in stores)
    return Pair(strip, (first, second), distance.format(float(found.distance_M[m])))


def _tile(data: bytes) -> np.ndarray:
    """Return the whole image padded with grey to a square; all grey if unreadable (identical bytes
    need not be an image).
    """
    try:
        image = Image.fromarray(decode(data))
    except BadImage:
        image = Image.new("RGB", (1, 1), "grey")
    method = (
        Image.Resampling.NEAREST if max(image.size) < _SIDE_PX // 2 else Image.Resampling.LANCZOS
    )
    return np.asarray(ImageOps.pad(image, (_SIDE_PX, _SIDE_PX), method=method, color="grey"))
