"""``dpvision synth``: procedural textures, to look at, to train on as they are made, or as files."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console

from dpvision.cli.output import emit, pairs, parse
from dpvision.errors import ConfigError

OutPath = Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="STORE")]


def run(argv: Sequence[str]) -> None:
    """Parse and run."""
    parse(synth, "synth", argv)


def synth(
    store: OutPath = None,
    num: int = 1_300_000,
    first: int = 0,
    size_px: int = 64,
    files: bool = False,
    sheet: Path | None = None,
    sheet_num: int = 96,
    instance: int | None = None,
    workers: int = 2,
    json: bool = False,
) -> None:
    """Procedural textures for a warm start: endless, public, the same on every machine of a kind, free of anybody's licence.

    A store of them holds no images: training makes them as it goes, a new look at each in every step. `dpvision train
    synthetic.vip_micro` makes its own. With --files they are written as images in shards, for other tools.

      dpvision synth --sheet textures.png                    look at them
      dpvision synth stores/textures --num 1300000           a store for training; takes no space
      dpvision synth stores/files --num 50000 --files        50,000 PNG files in shards

    Args:
        store: New folder for the store; left out, nothing but the sheet is made.
        num: Number of textures.
        first: Number of the first one; other numbers are other textures.
        size_px: Side of the written files and of the sheet's images. Training makes them at the model's size.
        files: Write the images as files.
        sheet: Write a contact sheet (PNG) here.
        sheet_num: Images on the sheet.
        instance: Show this look (place, zoom, turn, light) on the sheet instead of the straight one.
        workers: Processes that draw, with --files.
        json: Print JSON.
    """
    if store is None and sheet is None:
        raise ConfigError("synth: nothing to make; expected a store, --sheet, or both. Say e.g. --sheet textures.png.")
    from dpvision.data.inspect import texture_sheet
    from dpvision.data.synthetic_store import write_textures
    from dpvision.data.texture_store import write_texture_store

    start, result = time.monotonic(), dict[str, Any]()
    if sheet is not None:
        image = texture_sheet(sheet_num, size_px, first=first, instance=instance)
        sheet.parent.mkdir(parents=True, exist_ok=True)
        image.save(sheet)
        result["sheet"] = str(sheet)
    if store is not None:
        if files:
            with Console(stderr=True).status("drawing") as status:
                made = write_textures(
                    store, num, size_px, first=first, workers=workers,
                    progress=lambda n: status.update(f"drawing: {n:,} of {num:,} textures, {n / (time.monotonic() - start):,.0f}/s"),
                )  # fmt: skip
        else:
            made = write_texture_store(store, num, first=first, size_px=size_px)
        result |= {"store": str(made.path), "num_records": made.num_records, "visibility": made.visibility, "files": files}
    text = pairs(result)
    if store is not None:
        text += f"\nNext: dpvision train synthetic.vip_micro --data {store} --privacy.dataset-size {num}"
    emit(result, json, text)
