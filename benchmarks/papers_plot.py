"""ViP's Figure 5 from the result of the miniature vip_sizes: masked loss against parameters, a line
per start, with the least and the greatest loss of the seeds.

    python benchmarks/papers_plot.py benchmarks/results/2026-11-22-vip_sizes.json --out FILE.svg
"""

import argparse
import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

MASKED_LOSS = "masked loss"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = json.loads(args.result.read_text())["rows"]
    size_of = {r["case"]: r["value"] for r in rows if r["variant"] == "parameters"}
    arms: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for r in rows:
        if r["variant"] == MASKED_LOSS:
            arms.setdefault(r["case"].partition(", ")[2], []).append((size_of[r["case"]], r))
    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set(xscale="log", xlabel="parameters", ylabel=MASKED_LOSS)
    for arm, points in arms.items():
        sizes, found = zip(*sorted(points, key=lambda point: point[0]), strict=True)
        (line,) = axes.plot(sizes, [r["value"] for r in found], marker="o", label=arm)
        lows, highs = ([r[name] for r in found] for name in ("low", "high"))
        axes.vlines(sizes, lows, highs, color=line.get_color())
    axes.legend()
    figure.savefig(args.out)


if __name__ == "__main__":
    main()
