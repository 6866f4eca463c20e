"""docs/papers.md from papers.json, which holds the papers' rows, and from benchmarks/results."""

import json
import math
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from common import RESULTS, ROOT

from dpvision.errors import DataError

PAGE = ROOT / "docs" / "papers.md"
FACTS: dict[str, Any] = json.loads((ROOT / "benchmarks" / "papers.json").read_text())
TABLES = [(paper, table) for paper in FACTS["papers"] for table in paper["tables"]]
ROWS: dict[str, dict[str, Any]] = {r["row"]: r for _, table in TABLES for r in table["rows"]}
DIGITS = {
    "count": 0,
    "percent": 1,
    "accuracy_percent": 1,
    "epsilon": 2,
    "AP box": 1,
    "AP mask": 1,
    "mIoU": 1,
}
"""Decimal places of a figure by its metric; 3 otherwise."""


class Figure(NamedTuple):
    """One figure of ours; percent in percent."""

    label: str
    result: str
    value: float
    low: float
    high: float
    metric: str

    def text(self) -> str:
        """Return the figure, with its range where that shows."""
        digits = DIGITS.get(self.metric, 3)
        value, low, high = (f"{x:,.{digits}f}" for x in (self.value, self.low, self.high))
        spread = "" if low == high else f" ({low} to {high})"
        label = f"{self.label}: " if self.label else ""
        return f"{label}{value}{spread}"


def results_of(row: str) -> list[str]:
    """Return the results in which a row's figures stand."""
    return [key for _, key, *_ in ROWS[row].get("ours", [])]


def result_files(key: str) -> list[Path]:
    """Return the files of a result: those that papers.json names, else the newest of its runs."""
    named = FACTS["results"][key].get("file")
    if named is None:
        return sorted(RESULTS.glob(f"*-papers-{key}.json"))[-1:]
    return [RESULTS / name for name in ([named] if isinstance(named, str) else named)]


def figures(row: dict[str, Any]) -> list[Figure]:
    """Return our figures of a row: the middle, least and greatest over a result's files.

    Raises:
        DataError: a result has no such figure.
    """
    found = []
    for label, key, *name in row.get("ours", []):
        files = result_files(key)
        same = [
            entry
            for file in files
            for entry in json.loads(file.read_text())["rows"]
            if [entry["case"], entry["variant"], entry["metric"]] == name
        ]
        if not files:
            continue  # its miniature has not been run
        if not same:
            raise DataError(
                f"papers: {row['row']}: no {name} in {key}; expected its figure. Run --rows "
                f"{row['row']} again, or correct papers.json."
            )
        values = sorted(entry["value"] for entry in same)
        low, high = min(e["low"] for e in same), max(e["high"] for e in same)
        found.append(Figure(label, key, values[len(values) // 2], low, high, name[2]))
    return found


def at_chance(row: dict[str, Any], figure: Figure) -> bool:
    """Return whether a share of ``row["of"]`` answers may be chance: at most two standard errors
    above it.
    """
    if "chance" not in row:
        return False
    share = row["chance"] / 100
    return figure.value <= 100 * (share + 2 * math.sqrt(share * (1 - share) / row["of"]))


def state(row: dict[str, Any]) -> str:
    """Return "none", "exact", "chance" or "miniature"."""
    found = figures(row)
    if not found:
        return "none"
    if all(FACTS["results"][figure.result].get("kind") == "exact" for figure in found):
        return "exact"
    return "chance" if at_chance(row, found[-1]) else "miniature"


def here(row: dict[str, Any]) -> str:
    """Return the cell of our figures, or the reason why there are none."""
    parts = []
    for key, same in groupby(figures(row), key=lambda figure: figure.result):
        parts.append("; ".join(figure.text() for figure in same) + f" [{key}](#{key})")
    if not parts and "why" in row:
        parts = [FACTS["reasons"][row["why"]]]
    elif not parts:
        parts = [f"not run yet: `python benchmarks/papers.py --rows {row['row']}`"]
    elif "chance" in row:
        parts.append(f"{'**at chance**' if state(row) == 'chance' else 'chance'}, {row['chance']}")
    return "; ".join([*parts, *([row["note"]] if "note" in row else [])])


def page() -> str:
    """Return docs/papers.md."""
    states = [state(row) for row in ROWS.values()]
    lines = [
        "# The papers' rows",
        "",
        "After this page you know what each row of the papers' tables and figures reports, which "
        "recipe runs it, and what was measured here. `python benchmarks/papers.py --page` writes "
        "this page from `benchmarks/papers.json` and `benchmarks/results/`.",
        "",
        f"Of {len(states)} rows, {states.count('exact')} are recomputed (parameters, epsilons), "
        f"{states.count('miniature')} have a miniature, {states.count('chance')} have one at "
        f"chance, and {states.count('none')} have no figure. No row was reproduced at full size.",
        "",
        "Scores are percent where nothing else is named. A miniature measures the same quantity "
        "on small public data: compare its rows with one another, never with the paper's figure. "
        "Its name leads to its size, data, seeds and command.",
    ]
    for paper in FACTS["papers"]:
        lines += ["", f"## {paper['paper']}", "", f"{paper['title']}."]
        for table in paper["tables"]:
            lines += [
                "",
                f"### {paper['paper']}, {table['table']}",
                "",
                f"{table['what'][0].upper()}{table['what'][1:]}. At full size: "
                f"`{table['command']}`",
                "",
                "| row | | paper | recipe | here |",
                "|---|---|---|---|---|",
            ]
            for row in table["rows"]:
                recipe = f"`{row['recipe']}`" if "recipe" in row else ""
                lines.append(
                    f"| {row['row']} | {row['what']} | {row['paper']} | {recipe} | {here(row)} |"
                )
    lines += ["", "## The results", "", "A result lies in `benchmarks/results/`."]
    used = {figure.result for row in ROWS.values() for figure in figures(row)}
    for key, result in FACTS["results"].items():
        if key in used:
            lines += ["", f"### {key}", "", _described(key, result)]
    return "\n".join(lines) + "\n"


def _described(key: str, result: dict[str, Any]) -> str:
    files = result_files(key)
    named = ", ".join(f"`{file.name}`" for file in files)
    parts = [f"{result['how'][0].upper()}{result['how'][1:]}."]
    if "question" in result:
        parts.append(f"**{result['question']}** {result['answer']}")
    log = f" ([log](log/{result['log']}))" if "log" in result else ""
    made = f", by {result['by']}" if "by" in result and f"-papers-{key}." not in named else ""
    row = next(row for row in ROWS if key in results_of(row))
    again = f" `python benchmarks/papers.py --rows {row}` runs it." if "module" in result else ""
    return f"{' '.join(parts)} {named}{log}{made}.{again}"
