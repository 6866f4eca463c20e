"""``dpvision compare``: several runs on one page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from dpvision.cli.output import emit, parse
from dpvision.cli.paths import check_run


def run(argv: Sequence[str]) -> None:
    """Parse and run."""
    parse(compare, "compare", argv)


def compare(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")],
    out: Path | None = None,
    json: bool = False,
) -> None:
    """Plot training curves and scores of several runs on one page, to see whether larger models,
    larger batches or a warm start help.

    Losses depend on the images, so the page is written into the first run's confidential/ folder. A
    path outside a folder of that name is refused unless all images of the runs are public.

      dpvision compare runs/small runs/large runs/large-random
      dpvision compare runs/* --out runs/confidential/compare.html

    Args:
        runs: Run folders.
        out: File to write (.html).
        json: Print JSON.
    """
    check_run(*runs)
    from dpvision.report.compare_page import make_compare_page

    page = make_compare_page(runs, out)
    emit({"page": str(page), "runs": [str(run) for run in runs]}, json, f"page  {page}")
