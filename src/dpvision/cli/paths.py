"""Check paths on the command line before slow imports. Their contents are checked when they are
opened.
"""

from pathlib import Path

from dpvision.data.no_store import check_is_store
from dpvision.errors import CheckpointError, ConfigError, DataError


def check_store(*paths: Path | None) -> None:
    """Raise DataError for a path without a store, as ``check_is_store``; None is ignored."""
    for path in paths:
        if path is not None:
            check_is_store(path)


def check_source(source: str | Path) -> None:
    """Raise DataError for a path that does not exist. A name with a * is a pattern, which the
    import expands; a URL is looked up by it.
    """
    path = Path(source)
    if "://" not in str(source) and "*" not in path.name and not path.exists():
        raise DataError(
            f"source: {path}: no such file or folder; expected a folder of images, .parquet "
            "files or uncompressed .tar files. Check it."
        )


def check_run(*paths: Path) -> None:
    """Raise CheckpointError for a path that does not exist."""
    for path in paths:
        if not path.exists():
            raise CheckpointError(
                f"run: {path}: no such folder; expected a run folder or a checkpoint folder. "
                "List yours with ls runs, or train one first."
            )


def check_captioner(captioner: Path) -> None:
    """Raise CheckpointError for a path that does not exist, unless it is ``dpcap:FILE``."""
    if not str(captioner).startswith("dpcap:"):
        check_run(captioner)


def check_sheet(path: Path | None, command: str) -> None:
    """Raise ConfigError for a contact sheet that is not to be an image file of a usual kind; None
    is ignored.
    """
    if path is not None and path.suffix.lower() not in (".png", ".jpg", ".jpeg", ".webp"):
        raise ConfigError(
            f"{command}: sheet={path}; expected a file name with .png, .jpg or .webp. Use "
            "sheet.png."
        )


def check_sheet_size(path: Path, command: str, width_px: int, height_px: int) -> None:
    """Raise ConfigError for a contact sheet that is larger than the format of the file allows."""
    most = {".webp": 16_383, ".jpg": 65_500, ".jpeg": 65_500}.get(path.suffix.lower())
    if most is not None and max(width_px, height_px) > most:
        got = f"sheet={path} of {width_px:,} x {height_px:,} px"
        raise ConfigError(
            f"{command}: {got}; expected at most {most:,} px a side for {path.suffix}. Use .png, "
            "or fewer images."
        )
