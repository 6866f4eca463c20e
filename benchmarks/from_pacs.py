"""Run examples/from_pacs on MedNIST written as DICOM files of patients, by the wheel of this tree.

    python benchmarks/from_pacs.py --data DATA [--patients 2400] [--json FILE]
    python benchmarks/from_pacs.py --page FILE

DATA has mednist/train.parquet. The first form prints the seconds of each command and the test
figures; the second writes the table of docs/from_pacs.md from a result. dpvision is imported from a
wheel that is built here; what it needs is that of this environment.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, row, write_result

PAGE = ROOT / "docs" / "from_pacs.md"
BEGIN, END = "<!-- written by benchmarks/from_pacs.py -->", "<!-- end -->"
EXAMPLE = ROOT / "examples" / "from_pacs"


def wheel(folder: Path) -> Path:
    """Return a folder with dpvision as its wheel installs it."""
    uv = str(Path(sys.executable).with_name("uv"))
    # By way of an sdist: a wheel of the tree would take what an earlier one left in build/.
    build = [uv, "build", "--quiet", "--out-dir", str(folder), str(ROOT)]
    subprocess.run(build, check=True)
    (made,) = folder.glob("*.whl")
    install = [uv, "pip", "install", "--quiet", "--no-deps", "--target", str(folder / "site")]
    subprocess.run([*install, str(made)], check=True)
    return folder / "site"


def timed(folder: Path, environment: dict[str, str]) -> dict[str, float]:
    """Run the example in ``folder``; return the seconds of each command."""
    seconds: dict[str, float] = {}
    command, start = "write_export.py", time.monotonic()
    with subprocess.Popen(
        ["bash", "export_to_document.sh"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("+ dpvision "):
                seconds[command] = time.monotonic() - start
                words = line.split()[2:]
                command = " ".join(words[: 2 if words[0] == "data" else 1])
                command += " --release" if "--release" in words else ""
                start = time.monotonic()
        seconds[command] = time.monotonic() - start
    if process.returncode:
        sys.exit(process.returncode)
    return seconds


def figures(run: Path) -> list[dict[str, Any]]:
    """Return the rows of the test figures: confidential ones and the released ones."""
    (scored,) = json.loads((run / "confidential" / "class_scores.json").read_text()).values()
    (released,) = json.loads((run / "released_scores.json").read_text())["releases"]
    rows = []
    for kind, one in [
        *(("confidential", one) for one in scored["rows"] if one["name"] == "all"),
        *(("released", one) for one in released["rows"] if one["name"] == "all"),
    ]:
        rows.append(row(one["group"], kind, "persons", [one.get("units", one.get("count"))]))
        for name, of in one["figures"].items():
            if of is not None:
                rows.append(row(one["group"], kind, name, [of["low"], of["value"], of["high"]]))
    return rows


def measure(data: Path, patients: int, path: Path | None) -> None:
    with tempfile.TemporaryDirectory() as name:
        site, folder = wheel(Path(name, "wheel")), Path(name, "from_pacs")
        shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("pacs", "stores", "runs"))
        environment = {
            **os.environ,
            "PYTHONPATH": str(site),
            "PYTHON": sys.executable,
            "NUM": str(patients),
            "MEDNIST": str((data / "mednist" / "train.parquet").resolve()),
        }
        seconds = timed(folder, environment)
        rows = [row(command, "example", "seconds", [s]) for command, s in seconds.items()]
        rows += figures(folder / "runs" / "finder")
    write_result(path, "from_pacs", rows, packages=("dpvision", "torch", "pydicom"))


def tables(rows: list[dict[str, Any]]) -> list[str]:
    """Return the page's tables."""
    lines = ["| command | seconds |", "|---|---|"]
    lines += [f"| `{r['case']}` | {r['value']:.0f} |" for r in rows if r["metric"] == "seconds"]
    names = ("AUROC", "sensitivity at 90%", "accuracy", "Brier score", "calibration error")
    lines += ["", f"| figures | group | persons | {' | '.join(names)} |", "|---" * 8 + "|"]
    found = {(r["variant"], r["case"], r["metric"]): r for r in rows}
    for kind, group, metric in found:
        if metric == "persons":
            cells = [f"{found[kind, group, metric]['value']:,.0f}"]
            for name in names:
                one = found.get((kind, group, name))
                cells.append(
                    "" if one is None else "{value:.3f} [{low:.3f}, {high:.3f}]".format(**one)
                )
            lines.append(f"| {kind} | {group} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("data"))
    parser.add_argument("--patients", type=int, default=2400)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, help="a result, from which to write the page's tables")
    args = parser.parse_args()
    if args.page is None:
        measure(args.data, args.patients, args.json)
        return
    before, rest = PAGE.read_text().split(BEGIN)
    made = "\n".join(tables(json.loads(args.page.read_text())["rows"]))
    PAGE.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
