"""Planted mistakes and repeated attacks: what was planted, what caught it, how long that took.

    python benchmarks/mutants.py [--json FILE] [--only attacks/test_noise.py ...]
    python benchmarks/mutants.py --page FILE

The first form runs the files of tests/mutants, then those of tests/attacks and those that
docs/attacks.md names, prints the tables and exits with 1 if a mistake was not caught or an attack
succeeded. FILE is written after each file of tests; with --only, it keeps its other lines. The
second form writes the tables of
docs/audits.md. A case is a mistake of docs/pitfalls.md or a file of attacks; its metrics are how
many were planted (tests of attacks), how many each kind of error caught, failures and seconds.
"""

import argparse
import contextlib
import io
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

PAGE, ATTACKS = ROOT / "docs" / "audits.md", ROOT / "docs" / "attacks.md"
BEGIN, END = "<!-- {}: written by benchmarks/mutants.py -->", "<!-- end of {} -->"
PACKAGES = ("torch", "numpy", "pytest")


def attack_files() -> list[str]:
    """Return the files under tests/ that repeat the attacks of docs/attacks.md."""
    own = [f"attacks/{p.name}" for p in sorted((ROOT / "tests" / "attacks").glob("test_*.py"))]
    others = set(re.findall(r"`tests/(\w+/test_\w+\.py)`", ATTACKS.read_text()))
    named = sorted(f for f in others - set(own) if not f.startswith("mutants/"))
    return [*own, *named]


def run_tests(file: str) -> list[ElementTree.Element]:
    """Run the tests of a file under tests/, slow ones too; return pytest's report of each."""
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", "not gpu", "-o", "junit_family=xunit1"]
        subprocess.run([*command, f"--junitxml={report}", f"tests/{file}"], cwd=ROOT, check=False)
        if report.exists():
            return list(ElementTree.parse(report).iter("testcase"))
    died = ElementTree.Element("testcase", name="test_process_died", time="0")
    ElementTree.SubElement(died, "error")
    return [died]


def counts(tests: list[ElementTree.Element], file: str | None = None) -> dict[str, Counter[str]]:
    """Return the metrics of each case: of a mutant, all its parameters; or of a whole file."""
    found: dict[str, Counter[str]] = {}
    for test in tests:
        if test.find("skipped") is not None:
            continue
        name = re.sub(r"\[.*", "", test.attrib["name"]).removeprefix("test_")
        of = found.setdefault(file or name, Counter())
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
    for name, of in sorted(groups["attack"].items()):
        attacks.append(
            f"| `{name}` | {of['tests']:.0f} | {of['failures']:.0f} | {of['seconds']:.1f} |"
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
    parser.add_argument("--only", nargs="+", help="files under tests/")
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    if args.page is not None:
        write_page(args.page)
        return 0
    kept = args.only and args.json is not None and args.json.exists()
    rows = json.loads(args.json.read_text())["rows"] if kept else []
    mutants = [f"mutants/{p.name}" for p in sorted((ROOT / "tests" / "mutants").glob("test_*.py"))]
    for group, files in (("mutant", mutants), ("attack", attack_files())):
        for file in files:
            if file.endswith("/test_catalogue.py") or (args.only and file not in args.only):
                continue
            found = counts(run_tests(file), file if group == "attack" else None)
            rows = [r for r in rows if r["variant"] != group or r["case"] not in found]
            for case, of in found.items():
                rows += [row(case, group, metric, [value]) for metric, value in of.items()]
            with contextlib.redirect_stdout(io.StringIO()):  # the tables are printed below
                write_result(args.json, "mutants", rows, packages=PACKAGES)
    print(*tables(rows).values(), sep="\n\n")
    return int(any(r["metric"] == "failures" and r["value"] for r in rows))


if __name__ == "__main__":
    sys.exit(main())
