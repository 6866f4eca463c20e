"""``dpvision synth``: procedural textures, as a store, as files or on a contact sheet."""

import time
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

import tyro
from rich.console import Console

from dpvision.cli.output import emit, pairs, parse
from dpvision.cli.paths import check_sheet, check_sheet_size
from dpvision.environment import own_cores
from dpvision.errors import ConfigError
from dpvision.recipes import get_recipe

OutPath = Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="STORE")]


def synth(
    store: OutPath = None,
    num: int = 1_300_000,
    first: int = 0,
    size_px: int = 64,
    files: bool = False,
    sheet: Path | None = None,
    sheet_num: int = 96,
    instance: int | None = None,
    workers: int | None = None,
    json: bool = False,
) -> None:
    """Make procedural textures for a warm start: unlimited, public, free of licences, and identical
    on machines of the same kind.

    A store of textures contains no images: training renders them on the fly, with a new view of
    each in every step. `dpvision train synthetic.vip_micro` makes its own store. With --files they
    are written as images in shards, for other tools.

      dpvision synth --sheet textures.png                    a contact sheet
      dpvision synth stores/textures --num 1300000           a store for training; takes no space
      dpvision synth stores/files --num 50000 --files        50,000 PNG files in shards

    Args:
        store: New folder for the store; if omitted, only the sheet is made.
        num: Number of textures; in a store without --files at most 2^28.
        first: Number of the first texture; different numbers give different textures.
        size_px: Side of the written files and of the sheet's images. Training renders them at the
            model's size.
        files: Write the images as files.
        sheet: Write a contact sheet (.png, .jpg, .webp) here.
        sheet_num: Images on the sheet.
        instance: Show this view (position, zoom, rotation, light) on the sheet instead of the
            canonical one.
        workers: Processes that render, with --files; if None, the cores of this machine.
        json: Print JSON.
    """
    if store is None and sheet is None:
        raise ConfigError(
            "synth: no output; expected a store, --sheet, or both. For example: dpvision synth "
            "--sheet textures.png."
        )
    check_sheet(sheet, "synth")
    from dpvision.data.inspect import texture_sheet, texture_sheet_size
    from dpvision.data.synthetic_store import write_textures
    from dpvision.data.texture_store import write_texture_store

    start, result = time.monotonic(), dict[str, Any]()
    if sheet is not None:
        check_sheet_size(sheet, "synth", *texture_sheet_size(sheet_num, size_px))
        image = texture_sheet(sheet_num, size_px, first=first, instance=instance)
        sheet.parent.mkdir(parents=True, exist_ok=True)
        image.save(sheet)
        result["sheet"] = str(sheet)
    if store is not None:
        if files:
            with Console(stderr=True).status("drawing") as status:
                made = write_textures(
                    store,
                    num,
                    size_px,
                    first=first,
                    workers=workers or own_cores(),
                    progress=lambda n: status.update(
                        f"drawing: {n:,} of {num:,} textures, "
                        f"{n / (time.monotonic() - start):,.0f}/s"
                    ),
                )
        else:
            made = write_texture_store(store, num, first=first, size_px=size_px)
        result |= {
            "store": str(made.path),
            "num_records": made.num_records,
            "visibility": made.visibility,
            "files": files,
        }
    text = pairs(result)
    if store is not None:
        batch = (
            ""
            if num >= get_recipe("synthetic.vip_micro").privacy.expected_batch_size
            else f" --privacy.expected-batch-size {num}"
        )
        text += (
            "\n"
            f"Next: dpvision train synthetic.vip_micro --data {quote(str(store))} "
            f"--privacy.dataset-size {num}{batch}"
        )
    emit(result, json, text)


run = partial(parse, synth, "synth")
