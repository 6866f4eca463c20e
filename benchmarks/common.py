"""What all benchmarks share: one JSON format, so that dated results can be compared (docs:
CONTRIBUTING, "Benchmarks").
"""

import datetime
import json
import platform
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
T = TypeVar("T")
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Work:
    """Where a miniature of the papers' rows works."""

    folder: Path
    """Stores, runs, features and scores, which are used again where they are complete."""
    data: Path
    """Public image sets: a folder each, with train.parquet and test.parquet (image, label)."""

    def kept(self, name: str, make: Callable[[], T]) -> T:
        """Return what ``make`` returns, made of numbers, computed once per work folder."""
        file = self.folder / "scores" / f"{name}.json"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            found = json.dumps(make())
            file.write_text(found)
        return json.loads(file.read_text())


def row(case: str, variant: str, metric: str, values: Sequence[float]) -> dict[str, Any]:
    """One line of a result: the median of repeated measurements, with the smallest and the
    largest.
    """
    ordered = sorted(values)
    return {
        "case": case,
        "variant": variant,
        "metric": metric,
        "value": ordered[len(ordered) // 2],
        "low": ordered[0],
        "high": ordered[-1],
    }


def write_result(
    path: Path | None,
    benchmark: str,
    rows: Sequence[dict[str, Any]],
    *,
    packages: Sequence[str],
    device: str = "cpu",
) -> None:
    """Print the rows and, with a path, write them with device, versions, commit and date.

    Args:
        path: JSON file to write, e.g. benchmarks/results/2026-11-20-draws.json; None prints only.
        benchmark: name of the script.
        rows: as made by ``row``.
        packages: distributions whose versions matter for these figures.
        device: "cpu", or the accelerator's name.
    """
    for r in rows:
        print(
            f"{r['case']:<28} {r['variant']:<22} {r['metric']:<20} {r['value']:.4g}  "
            f"[{r['low']:.4g}, {r['high']:.4g}]"
        )
    if path is None:
        return
    result = {
        "benchmark": benchmark,
        "device": cpu_name() if device == "cpu" else device,
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in packages},
        },
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "rows": list(rows),
    }
    path.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")


def cpu_name() -> str:
    """Name and number of the cores, and whether they have AVX-512: clouds hide the model."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    names = [
        line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")
    ]
    wide = ", AVX-512" if " avx512f " in text else ""
    return f"{names[0]} x {len(names)}{wide}" if names else platform.machine()


def commit() -> str:
    """Commit of the code measured, "+" where the working tree differs; "unknown" outside a
    checkout.
    """
    shown = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--abbrev=12"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return shown.stdout.strip() or "unknown"
