"""Paths on the command line, checked before anything slow is imported; what lies there is checked when it is opened."""

from pathlib import Path

from dpvision.errors import CheckpointError, DataError


def check_store(*paths: Path | None) -> None:
    """Raise DataError where no store can be; None is one that was not asked for."""
    for path in paths:
        if path is not None and not path.exists():
            raise DataError(f"store: {path}: no such folder; expected a store. Make one with `dpvision data import SOURCE STORE`.")


def check_source(path: Path) -> None:
    """Raise DataError where nothing to import can be. A name with a * in it is a pattern, which the import looks up."""
    if "*" not in path.name and not path.exists():
        raise DataError(
            f"source: {path}: nothing there; expected a folder of images, .parquet files or uncompressed .tar files. Correct the path."
        )


def check_run(*paths: Path) -> None:
    """Raise CheckpointError where no run and no checkpoint can be."""
    for path in paths:
        if not path.exists():
            raise CheckpointError(
                f"run: {path}: no such folder; expected a run folder or a checkpoint folder. Train first, or correct the path."
            )
