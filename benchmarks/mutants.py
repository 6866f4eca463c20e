"""Planted mistakes and repeated attacks: what was planted, what caught it, how long that took.

    python benchmarks/mutants.py [--json FILE]
    python benchmarks/mutants.py --page FILE

The first form runs tests/mutants, then tests/attacks, prints the tables and exits with 1 if a
mistake was not caught or an attack succeeded; the second writes the tables of docs/audits.md. A
case is a mistake of docs/pitfalls.md or a file of attacks; its metrics are how many were planted
(tests of attacks), how many each kind of error caught, failures and seconds.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from common import ROOT, row, write_result

PAGE = ROOT / "docs" / "audits.md"
BEGIN, END = "<!-- {}: written by benchmarks/mutants.py -->", "<!-- end of {} -->"
PACKAGES = ("torch", "numpy", "pytest")


def run_tests(folder: str) -> list[ElementTree.Element]:
    """Run the tests of a folder, slow ones too; return pytest's report of each."""
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", "not gpu", "-o", "junit_family=xunit1"]
        subprocess.run([*command, f"--junitxml={report}", folder], cwd=ROOT, check=False)
        return list(ElementTree.parse(report).iter("testcase"))


def counts(tests: list[ElementTree.Element], group: str) -> dict[str, Counter[str]]:
    """Return the metrics of each case: of a mutant, all its parameters; of an attack, its file."""
    found: dict[str, Counter[str]] = {}
    for test in tests:
        file = test.attrib["classname"].split(".")[-1]
        name = re.sub(r"\[.*", "", test.attrib["name"]).removeprefix("test_")
        if file == "test_catalogue" or test.find("skipped") is not None:
            continue
        of = found.setdefault(name if group == "mutant" else file, Counter())
        of["seconds"] += float(test.attrib["time"])
        of["failures"] += any(test.find(bad) is not None for bad in ("failure", "error"))
        of["tests"] += 1
        for caught in test.iter("property"):
            of[caught.attrib["value"]] += 1
    return found


def tables(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return the tables of mutants and of attacks."""
    groups: dict[str, dict[str, dict[str, float]]] = {"mutant": {}, "attack": {}}
    for r in rows:
        groups[r["variant"]].setdefault(r["case"], {})[r["metric"]] = r["value"]
    mutants = ["| mistake | planted | caught by | not caught | seconds |", "|---|---|---|---|---|"]
    for name, of in groups["mutant"].items():
        errors = {kind: n for kind, n in of.items() if kind.endswith("Error")}
        planted = sum(errors.values()) or of["tests"]
        kinds = ", ".join("the test's check" if k == "AssertionError" else k for k in errors)
        mutants.append(
            f"| `{name}` | {planted:.0f} | {kinds or 'refusal'} | {of['failures']:.0f} | "
            f"{of['seconds']:.1f} |"
        )
    attacks = ["| file | tests | attacks that succeed | seconds |", "|---|---|---|---|"]
    for name, of in groups["attack"].items():
        attacks.append(
            f"| `{name}.py` | {of['tests']:.0f} | {of['failures']:.0f} | {of['seconds']:.1f} |"
        )
    return {"mutants": "\n".join(mutants), "attacks": "\n".join(attacks)}


def write_page(result: Path) -> None:
    """Write the tables into docs/audits.md."""
    text = PAGE.read_text()
    for name, table in tables(json.loads(result.read_text())["rows"]).items():
        begin, end = BEGIN.format(name), END.format(name)
        before, rest = text.split(begin)
        text = f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}"
    PAGE.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    if args.page is not None:
        write_page(args.page)
        return 0
    rows = []
    for group, folder in (("mutant", "tests/mutants"), ("attack", "tests/attacks")):
        for case, of in counts(run_tests(folder), group).items():
            rows += [row(case, group, metric, [value]) for metric, value in of.items()]
        write_result(args.json, "mutants", rows, packages=PACKAGES)
    print(*tables(rows).values(), sep="\n\n")
    return int(any(r["metric"] == "failures" and r["value"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
