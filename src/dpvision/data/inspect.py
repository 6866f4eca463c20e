"""Summarise a store: counts, sizes, a sheet of images.

Summaries of a private store are for the operator only.
"""

from collections import Counter
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from dpvision.data.decode import BadImage, decode
from dpvision.data.store import Store
from dpvision.data.texture_store import check_first
from dpvision.data.transform import centre_box
from dpvision.errors import ConfigError
from dpvision.synthetic.textures import textures

SAMPLED = 1000
_QUANTILES = (0, 5, 50, 95, 100)


def inspect_store(store: Store, seed: int = 0) -> dict[str, Any]:
    """Return counts and distributions of a store, ready for JSON.

    Image sizes and captions per record come from at most ``SAMPLED`` records. For a private store
    the result is a function of private data: show it on the terminal or write it under
    ``confidential/``.
    """
    index = store.index
    place_M, class_M = store.classes(np.arange(store.num_records))
    labels, counts = np.unique(class_M, return_counts=True)
    per_record_N = np.bincount(place_M, minlength=store.num_records)
    names = store.label_names
    _, per_unit = np.unique(index["unit"][index["unit"] >= 0], return_counts=True)
    rows = _sample(store, SAMPLED, seed)
    widths, heights = _sizes(store, rows)
    return {
        "store_id": store.store_id,
        "visibility": store.visibility,
        "num_records": store.num_records,
        "num_shards": len(store.shard_paths),
        "picture_bytes": int(index["size"].sum(dtype=np.int64)),
        "labels": {
            (names[k] if names else str(k)): n
            for k, n in zip(labels.tolist(), counts.tolist(), strict=True)
        },
        "without_label": int((~store.labelled).sum()),
        "multi_label": store.multi_label,
        "labels_per_record": _quantiles(per_record_N[store.labelled])
        if store.multi_label
        else None,
        "unit_field": store.meta.get("unit_field"),
        "units": len(per_unit),
        "without_unit": int((index["unit"] < 0).sum()),
        "records_per_unit": _quantiles(per_unit),
        "sampled": len(rows),
        "undecodable": len(rows) - len(widths),
        "width_px": _quantiles(widths),
        "height_px": _quantiles(heights),
        "captions_per_record": dict(
            sorted(Counter(str(len(store.captions(row))) for row in rows.tolist()).items())
        ),
    }


def contact_sheet(
    store: Store, num: int = 64, *, tile_px: int = 96, columns: int = 8, seed: int = 0
) -> Image.Image:
    """Make a sheet of ``num`` random records as square tiles (centre crops).

    Each has its label names below.

    The sheet of a private store shows private images: keep it under ``confidential/``.
    """
    rows = _sample(store, num, seed)
    strip_px = 14 if store.labelled[rows].any() else 0
    columns = min(columns, len(rows))
    sheet = Image.new(
        "RGB", (columns * tile_px, -(-len(rows) // columns) * (tile_px + strip_px)), "white"
    )
    draw = ImageDraw.Draw(sheet)
    for place, (row, data) in enumerate(zip(rows.tolist(), store.read_many(rows), strict=True)):
        left, top = place % columns * tile_px, place // columns * (tile_px + strip_px)
        try:
            image = Image.fromarray(decode(data))
        except BadImage:
            draw.line(
                [(left, top), (left + tile_px, top + tile_px)], fill="red"
            )  # a struck-out tile
            continue
        size = (tile_px - 2, tile_px - 2)
        sheet.paste(
            image.resize(size, Image.Resampling.BICUBIC, box=centre_box(*image.size)),
            (left + 1, top + 1),
        )
        labels = store.classes(np.array([row]))[1].tolist()
        name = " ".join(
            ", ".join(
                store.label_names[label] if store.label_names else str(label) for label in labels
            ).split()
        )
        if name:
            while len(name) > 1 and draw.textlength(name) > tile_px - 4:
                name = name[:-1]
            draw.text((left + 2, top + tile_px), name, fill="black")
    return sheet


def texture_sheet_size(num: int, size_px: int, columns: int = 12) -> tuple[int, int]:
    """Return width and height in pixels of ``texture_sheet``.

    Raises ConfigError unless ``num`` is 1 to 10,000.
    """
    if not 1 <= num <= 10_000:
        raise ConfigError(
            f"synth: sheet_num={num}; expected 1 to 10,000 images on a sheet. Use 96."
        )
    return min(columns, num) * (size_px + 2) - 2, -(-num // columns) * (size_px + 2) - 2


def texture_sheet(
    num: int, size_px: int, *, first: int = 0, instance: int | None = None, columns: int = 12
) -> Image.Image:
    """Make a sheet of the textures ``first`` ... ``first + num - 1``, row by row.

    Args:
        num: 1 to 10,000.
        first: as ``texture_store.check_first``.
        instance: seed of the random view of each texture, between -2^62 and 2^62; if None, the
            canonical view.

    Raises:
        ConfigError: ``num``, ``size_px`` or ``instance`` is out of range.
        DataError: ``first`` is out of range.
    """
    size = texture_sheet_size(num, size_px, columns)
    check_first(first)
    if instance is not None and not abs(instance) < 1 << 62:
        raise ConfigError(
            f"synth: instance={instance}; expected a number between -2^62 and 2^62. Number the "
            "views from 0."
        )
    number_N = torch.arange(first, first + num)
    look_N = None if instance is None else torch.full_like(number_N, instance)
    made = textures(number_N, size_px, instance_N=look_N).permute(0, 2, 3, 1).numpy()
    sheet = Image.new("RGB", size, "white")
    for i, x_HWC in enumerate(made):
        sheet.paste(
            Image.fromarray(x_HWC), (i % columns * (size_px + 2), i // columns * (size_px + 2))
        )
    return sheet


def _sample(store: Store, num: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(store.num_records, size=min(num, store.num_records), replace=False))


def _sizes(store: Store, rows: np.ndarray) -> tuple[list[int], list[int]]:
    sizes = []
    for row in rows.tolist():
        try:
            height, width, _ = decode(store.read(row)).shape
        except BadImage:
            continue
        sizes.append((width, height))
    return [w for w, _ in sizes], [h for _, h in sizes]


def _quantiles(values: Any) -> dict[str, float] | None:
    if not len(values):
        return None
    return {
        f"p{q}": float(v)
        for q, v in zip(_QUANTILES, np.percentile(values, _QUANTILES), strict=True)
    }
