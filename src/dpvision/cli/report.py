"""``dpvision report``: the guarantee, to read and to check."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dpvision.cli.output import RunPath, emit, parse
from dpvision.cli.paths import check_run, check_store
from dpvision.errors import ConfigError
from dpvision.report.schema import Tuning

if TYPE_CHECKING:
    from dpvision.report.gallery import Gallery


def run(argv: Sequence[str]) -> None:
    """Parse and run."""
    parse(report, "report", argv)


def report(
    run: RunPath,
    store: Path | None = None,
    public_store: Path | None = None,
    gallery: Path | None = None,
    beside: tuple[Path, ...] = (),
    gallery_num: int = 8,
    tuning: Tuning = "not_covered",
    json: bool = False,
) -> None:
    """Write the statement (statement.json), the page to read (report.html) and the operator's page (confidential/operator.html).

    Epsilon is computed from the executed steps in the ledger. Statement and report hold nothing that depends on private
    records; a run without a guarantee on a private store gets none.

    Args:
        run: Run folder.
        store: The store it was trained on: its ledgers are the truth, and they tell of other runs on the same records. Left
            out: the one the run was started with, where it is still there.
        public_store: Public store whose images the report shows: classified, reconstructed or compared, as the model allows.
        gallery: Store with captions: images, what people say of them and what this captioner says. From a private store on the operator's
            page only.
        beside: Runs of other captioners to show in the gallery; one that private images shaped stands on the operator's page only.
        gallery_num: Images of each kind in the gallery: drawn at random, and drawn from the tenth with the best captions.
        tuning: How settings and checkpoint were chosen: "none" (fixed beforehand), "public" (on public images only), or
            "not_covered" (by looking at private results: the statement says that the guarantee does not cover the choice).
        json: Print JSON.
    """
    if not gallery_num >= 1:
        raise ConfigError(f"report: gallery_num={gallery_num}; expected at least 1. Leave it out for 8.")
    if beside and gallery is None:
        raise ConfigError("report: --beside without --gallery; expected a store with captions to show them on. Add --gallery STORE.")
    check_run(run, *beside)
    check_store(store, public_store, gallery)
    from dpvision.report.gallery import gallery_of_run
    from dpvision.report.operator_page import make_operator_page
    from dpvision.report.page import make_report

    made = None if gallery is None else gallery_of_run(run, gallery, beside, count=gallery_num)
    operator = make_operator_page(run, store, gallery=made)
    page = make_report(run, public_store, store_dir=store, tuning=tuning, gallery=None if made is None else made.public_part())
    written = {"statement": run / "statement.json", "report": page, "operator": operator}
    text = "\n".join(f"{name:10} {path}" for name, path in written.items())
    if made is not None:
        text += f"\n{gallery_places(made)}"
    emit({name: str(path) for name, path in written.items()}, json, text)


def gallery_places(gallery: "Gallery") -> str:
    """Where a gallery stands, in words."""
    part = gallery.public_part()
    if part is None:
        return "gallery    on the operator's page only: its images are private, or their captions are"
    missing = [name for name in gallery.means if name not in part.means]
    return "gallery    on both pages" + (f"; {', '.join(missing)} on the operator's only" if missing else "")
