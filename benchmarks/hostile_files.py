"""Hostile files: 10,000 mutated files of every kind that dpvision reads (tests/fuzz).

    python benchmarks/hostile_files.py [--cases N] [--processes P] [--json FILE]
    python benchmarks/hostile_files.py --target NAME --case K
    python benchmarks/hostile_files.py --page FILE

The first form runs all targets, N cases of each or as many as their table says, and prints those
that failed; the second repeats one case, prints its result and keeps its files; the third writes
the table of docs/audits.md from a result. A case's number gives the same file on every machine with
the same libraries.
"""

import argparse
import json
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import ROOT, row, write_result

sys.path.insert(0, str(ROOT / "tests" / "fuzz"))
from cases import run_cases
from targets import TARGETS

PAGE = ROOT / "docs" / "audits.md"
BEGIN, END = (
    "<!-- hostile files: written by benchmarks/hostile_files.py -->",
    "<!-- end of hostile files -->",
)
OUTCOMES = ("read", "refused", "counted", "FAILED")
PACKAGES = ("pillow", "simplejpeg", "pyarrow", "safetensors", "tokenizers", "torch", "pydicom")


def measured(names: list[str], cases: int | None, processes: int) -> list[dict[str, Any]]:
    """Run the cases in ``processes`` children at a time, and return their results."""

    def run(part: int) -> list[dict[str, Any]]:
        mine = names[part::processes]
        jobs = [(name, k) for name in mine for k in range(cases or TARGETS[name].cases)]
        made = []
        with tempfile.TemporaryDirectory(prefix="dpvision-fuzz-") as work:
            for result in run_cases(jobs, Path(work).resolve()):
                made.append(result)
                if result["outcome"] == "FAILED" or result["case"] < 0:
                    print(json.dumps(result), flush=True)
        return made

    with ThreadPoolExecutor(processes) as pool:
        return [result for part in pool.map(run, range(processes)) for result in part]


def rows_of(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return counts, seconds and the highest peak of each target as rows."""
    rows = []
    for name in TARGETS:
        mine = [r for r in results if r["target"] == name]
        if not mine:
            continue
        counts = Counter("FAILED" if r["case"] < 0 else r["outcome"] for r in mine)
        found = {
            "cases": float(sum(r["case"] >= 0 for r in mine)),
            **{outcome: float(counts[outcome]) for outcome in OUTCOMES},
            "seconds": sum(r["seconds"] for r in mine),
            "slowest_s": max(r["seconds"] for r in mine),
            "peak_mb": max(r["peak_mb"] for r in mine),
        }
        rows += [row(name, "", metric, [value]) for metric, value in found.items()]
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the table of the page."""
    found: dict[str, dict[str, float]] = {}
    for r in rows:
        found.setdefault(r["case"], {})[r["metric"]] = r["value"]
    sums = {name: sum(f[name] for f in found.values()) for name in ("cases", *OUTCOMES, "seconds")}
    sums |= {name: max(f[name] for f in found.values()) for name in ("slowest_s", "peak_mb")}
    lines = ["| target | cases | read | refused | counted | failed | seconds | slowest | peak MB |"]
    lines.append("|---|" + "---|" * 8)
    for name, f in {**found, "all": sums}.items():
        counts = " | ".join(f"{f[metric]:,.0f}" for metric in ("cases", *OUTCOMES))
        lines.append(
            f"| {name} | {counts} | {f['seconds']:.0f} | {f['slowest_s']:.1f} | "
            f"{f['peak_mb']:.0f} |"
        )
    return "\n".join(lines)


def write_page(result: Path) -> None:
    """Write the table into docs/audits.md."""
    before, rest = PAGE.read_text().split(BEGIN)
    made = table(json.loads(result.read_text())["rows"])
    PAGE.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=list(TARGETS))
    parser.add_argument("--case", type=int)
    parser.add_argument("--cases", type=int)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path)
    args = parser.parse_args()
    names = [args.target] if args.target else list(TARGETS)
    if args.page is not None:
        write_page(args.page)
    elif args.case is not None:
        work = Path(tempfile.mkdtemp(prefix="dpvision-fuzz-")).resolve()
        for result in run_cases([(args.target, args.case)], work):
            print(json.dumps(result, indent=1))
        print(work / "a" / "b" / "case")
    else:
        results = measured(names, args.cases, args.processes)
        rows = rows_of(results)
        write_result(args.json, "hostile_files", rows, packages=PACKAGES)
        sys.exit(any(r["metric"] == "FAILED" and r["value"] for r in rows))


if __name__ == "__main__":
    main()
