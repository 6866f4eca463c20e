"""Files of ``dpvision plan --page`` and ``--csv``."""

import csv
import io
from pathlib import Path
from typing import Any

from rich.console import Console

from dpvision.config import PrivacyConfig
from dpvision.files import write_file
from dpvision.plan.tables import Table, all_tables
from dpvision.privacy.plan import draft_plan


def write_tables(
    page: Path | None,
    folder: Path | None,
    name: str | None,
    config: PrivacyConfig,
    facts: dict[str, Any],
) -> tuple[dict[str, Any], str]:
    """Write the page and the tables, and return the tables ready for JSON, and what was written.

    Args:
        page: .html file, or None.
        folder: of the .csv files, or None.
        name: the recipe's name, if there is one.
        facts: from ``planner.what_if``.

    Raises:
        ConfigError: the plan has no guarantee, or no tables.
        CheckpointError: a file cannot be written.
    """
    plan = draft_plan(config)
    with Console(stderr=True).status("computing tables"):
        tables = all_tables(plan)
    written = []
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for table in tables.values():
            write_file(folder / f"{table.name}.csv", _csv(table))
        written.append(f"{len(tables)} tables in {folder}")
    if page is not None:
        from dpvision.report.plan_page import make_plan_page

        written.append(str(make_plan_page(page, name, plan, facts, tables)))
    shown = {
        table.name: {"columns": table.columns, "rows": table.rows} for table in tables.values()
    }
    return shown, f"Written: {', '.join(written)}"


def _csv(table: Table) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(["" if value is None else value for value in row] for row in table.rows)
    return text.getvalue().encode()
