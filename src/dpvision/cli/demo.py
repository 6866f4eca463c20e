"""``dpvision demo``: the whole way in a few minutes, with the same commands that a real run uses."""

from collections.abc import Sequence
from pathlib import Path

from dpvision.cli.output import parse
from dpvision.cli.paths import check_source


def run(argv: Sequence[str]) -> None:
    """Parse and run."""
    parse(demo, "demo", argv)


def demo(data: Path | None = None, stores: Path = Path("stores"), runs: Path = Path("runs"), json: bool = False) -> None:
    """The whole way in a few minutes: a private store, a plan, private training, a score, a private classifier, the statement.

    Procedural scenes play the private images; public scenes, others of the same kind, serve the probe and the report's
    reconstructions. With --data your own images are imported as private and trained on instead.

    Args:
        data: Folder of images, parquet file or WebDataset tars of your own.
        stores: Folder for the stores.
        runs: Folder for the run.
        json: Print JSON.
    """
    if data is not None:
        check_source(data)
    from dpvision.cli.demo_steps import run_demo

    run_demo(data, stores, runs, json=json)
