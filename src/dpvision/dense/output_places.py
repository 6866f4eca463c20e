"""Checks of the output paths of detection and segmentation."""

import hashlib
import re
from pathlib import Path

from dpvision.cli.scores import check_out
from dpvision.errors import ConfigError


def check_places(out: Path | None, sheet: Path | None, work: Path | None, private: bool) -> None:
    """Refuse unusable output paths before any work is done."""
    if out is not None:
        check_out(out, private)
    for name, place, within in (("sheet", sheet, True), ("work", work, False)):
        if place is None:
            continue
        parts = place.absolute().parent.parts if within else place.absolute().parts
        if private and "confidential" not in parts:
            raise ConfigError(
                f"evaluate: {name}={str(place)!r} depends on private images; expected a folder "
                "called confidential in its path. Use one, or give --public if the images need "
                "no protection."
            )
    if sheet is not None and (
        sheet.suffix != ".png" or sheet.is_dir() or not sheet.absolute().parent.is_dir()
    ):
        raise ConfigError(
            f"evaluate: sheet={str(sheet)!r}; expected a file that ends in .png in an existing "
            "folder. Change --sheet."
        )
    if work is not None and work.exists() and not work.is_dir():
        raise ConfigError(
            f"evaluate: work={str(work)!r}; expected a folder. Choose another --work."
        )


def folder_name(spec: str) -> str:
    """Return a readable folder name for an encoder's checkpoints, unique per encoder."""
    mark = hashlib.sha256(spec.encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9]+', '-', spec).strip('-')[-40:]}-{mark}"
