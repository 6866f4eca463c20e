"""``dpvision demo``: the whole way in a few minutes, with the same code that a real run uses."""

import sys
import time
from functools import partial
from pathlib import Path

from dpvision.cli.output import emit, parse, private_scores
from dpvision.cli.paths import check_source
from dpvision.errors import ConfigError, DataError, RunStopped
from dpvision.privacy.printed import duration
from dpvision.runs.folder import STOPPED


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
    from dpvision.cli.scores import scores_table
    from dpvision.demo import Place, on_images, on_scenes

    def say(text: str) -> None:
        print(text, file=sys.stderr if json else sys.stdout, flush=True)

    start, place = time.monotonic(), Place(stores, runs, say)
    try:
        if data is None or classes is None:
            classifier, captioner = on_scenes(place)
            found = {"classifier": classifier.to_dict(), "captioner": captioner.to_dict()}
            lines = [
                "Open in a browser:",
                f"  {classifier.report}",
                f"  {captioner.report}",
                f"Then: dpvision verify {classifier.run / 'statement.json'} --run "
                f"{classifier.run} --store {classifier.store}",
            ]
        else:
            own = on_images(data, classes, place)
            page = str(own.operator_page)
            say(private_scores(scores_table(own.scores), [page], show_confidential))
            found = {"classifier": own.to_dict() | {"operator_page": page}}
            del found["classifier"]["scores"]
            lines = [
                "The page under confidential/ shows private images and scores and must not leave:",
                f"  {own.report}",
                f"  {page}",
                f"Then: dpvision ledger {own.store}   docs/adapt.md: more private images, "
                "pretrained weights, another epsilon",
            ]
    except RunStopped as stopped:
        say(str(stopped))
        sys.exit(STOPPED)
    seconds = time.monotonic() - start
    lines[0] = f"Done in {duration(seconds)}. {lines[0]}"
    emit({**found, "seconds": seconds}, json, "\n".join(lines))


run = partial(parse, demo, "demo")
