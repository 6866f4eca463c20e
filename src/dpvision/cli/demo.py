"""``dpvision demo``: the whole way in a few minutes, with the same code that a real run uses."""

from collections.abc import Sequence
from pathlib import Path

from dpvision.cli.output import parse
from dpvision.cli.paths import check_source
from dpvision.errors import ConfigError, DataError


def run(argv: Sequence[str]) -> None:
    """Parse and run."""
    parse(demo, "demo", argv)


def demo(
    data: Path | None = None,
    classes: Path | None = None,
    stores: Path = Path("stores"),
    runs: Path = Path("runs"),
    show_confidential: bool = False,
    json: bool = False,
) -> None:
    """The whole way in a few minutes: a private classifier, a private captioner, and a report of
    each.

    Procedural scenes play the private images; other scenes, public ones, are for tests and for the
    reports. With --data your own images are imported as private, and a private classifier is
    trained on four fifths of them at epsilon 2. Scores on the rest stay under confidential/. Each
    repetition is charged to your images again: `dpvision ledger STORE` shows the total.

      dpvision demo
      dpvision demo --data MY_IMAGES --classes classes.txt

    Args:
        data: Folder of images, parquet file or WebDataset tars of your own.
        classes: Needed with --data: file with the names of the classes (of the class folders, say),
            one a line.
        stores: Folder for the stores.
        runs: Folder for the runs.
        show_confidential: With --data: print private scores also where the output is no terminal,
            as in a job's log.
        json: Print JSON.
    """
    if data is None and classes is not None:
        raise ConfigError(
            "demo: --classes without --data; expected images that they belong to. Add --data "
            "FOLDER, or leave it out."
        )
    if data is not None:
        check_source(data)
        if classes is None:
            raise ConfigError(
                "demo: --data without --classes; expected a file with the names of the classes, "
                "one a line. Add --classes FILE."
            )
    if classes is not None and not classes.is_file():
        raise DataError(
            f"demo: {classes}: no such file; expected the names of the classes, one a line. "
            "Correct the path."
        )
    from dpvision.cli.demo_images import run_on_images
    from dpvision.cli.demo_steps import Place, run_demo

    place = Place(stores, runs, json)
    if data is None or classes is None:
        run_demo(place)
    else:
        run_on_images(data, classes, place, show_confidential)
