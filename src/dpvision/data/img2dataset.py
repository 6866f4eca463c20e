"""Folders that img2dataset wrote (Beaumont 2021).

Each shard is NAME.tar with NAME.parquet, a row for each address that was tried, or NAME.parquet
with the images in it; NAME_stats.json, written last, counts what came and what failed.
"""

from collections.abc import Collection, Sequence
from pathlib import Path, PurePath
from typing import Any

from dpvision.errors import DataError

STATUS = "status"
"""Column of what became of an address."""


def has_status(columns: Collection[str]) -> bool:
    """Return whether the rows of a parquet file say what became of an address."""
    return {"url", STATUS, "error_message"} <= set(columns)


def failure(status: Any) -> str:
    """Return why a row has no image."""
    known = ("failed_to_download", "failed_to_resize")
    return status.replace("_", " ") if status in known else "no image"


def stats_of(path: PurePath) -> PurePath:
    """Return the path of a shard's counts."""
    return path.with_name(f"{path.stem}_stats.json")


def rows_only(
    source: str | Path, packed: Sequence[PurePath], counted: Collection[PurePath]
) -> bool:
    """Return whether the parquet files only describe the tars beside them.

    Args:
        packed: tars and parquet files.
        counted: those of their ``stats_of`` that exist.

    Raises:
        DataError: there are counts, but a shard is not complete.
    """
    stems = [path.with_suffix("") for path in packed]
    if not counted:
        return False
    for path in packed:
        lacks = [f"{path.stem}{kind}" for kind in (".tar", ".parquet") if kind != path.suffix]
        if stems.count(path.with_suffix("")) == 2:
            lacks = []
        if stats_of(path) not in counted:
            lacks.append(stats_of(path).name)
        if lacks:
            raise DataError(
                f"source: {source}: {path.name} without {' and '.join(lacks)}; expected three "
                "files of each shard, which img2dataset writes. Run it again so that it ends this "
                f"shard, or move {path.stem}.* away."
            )
    return True
