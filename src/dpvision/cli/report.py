"""``dpvision report``: the guarantee, to read and to check."""

from collections.abc import Sequence
from pathlib import Path

from dpvision.cli.output import RunPath, emit, parse
from dpvision.report.operator_page import make_operator_page
from dpvision.report.page import make_report
from dpvision.report.words import Tuning


def run(argv: Sequence[str]) -> None:
    """Parse and run."""
    parse(report, "report", argv)


def report(
    run: RunPath, store: Path | None = None, public_store: Path | None = None, tuning: Tuning = "not_covered", json: bool = False
) -> None:
    """Write the statement (statement.json), the page to read (report.html) and the operator's page (confidential/operator.html).

    Epsilon is computed from the executed steps in the ledger. Statement and report hold nothing that depends on private
    records; a run without a guarantee on a private store gets none.

    Args:
        run: Run folder.
        store: The store it was trained on: its ledgers are the truth, and they tell of other runs on the same records. Left
            out: the one the run was started with, where it is still there.
        public_store: Public store whose pictures the report reconstructs and compares.
        tuning: How settings and checkpoint were chosen: "none" (fixed beforehand), "public" (on public pictures only), or
            "not_covered" (by looking at private results: the statement says that the guarantee does not cover the choice).
        json: Print JSON.
    """
    operator = make_operator_page(run, store)
    page = make_report(run, public_store, store_dir=store, tuning=tuning)
    written = {"statement": run / "statement.json", "report": page, "operator": operator}
    emit({name: str(path) for name, path in written.items()}, json, "\n".join(f"{name:10} {path}" for name, path in written.items()))
