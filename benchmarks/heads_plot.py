"""Accuracy against epsilon for every head, one panel for each private set and encoder (Mehta et al.
2022, figure 1b).

    python benchmarks/heads_plot.py RESULT.json [...] --out docs/images/heads.png

RESULTs are what benchmarks/heads.py wrote; bars are 95% intervals over seeds of the noise, the last
point of each line is without noise.
"""

import argparse
import json
import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SETS = ("cifar10", "mednist", "pets_sample")
CASE = re.compile(rf"({'|'.join(SETS)}) by (\w+), epsilon ([\w.]+)$")
LOOK = {
    "one_step": ("#888888", "o"),
    "many_steps, lamb": ("#d95f02", "s"),
    "many_steps, adam": ("#e6ab02", "^"),
    "many_steps, momentum": ("#a6761d", "v"),
    "least_squares": ("#1b9e77", "D"),
    "feature_covariance": ("#7570b3", "P"),
    "prototypes": ("#e7298a", "X"),
}


def curves(
    paths: list[Path],
) -> dict[tuple[str, str], dict[str, list[tuple[float, float, float, float]]]]:
    """(epsilon, value, low, high) by (set, encoder) and head."""
    found: dict[tuple[str, str], dict[str, list[tuple[float, float, float, float]]]] = {}
    for path in paths:
        for r in json.loads(path.read_text())["rows"]:
            if (match := CASE.match(r["case"])) and r["variant"] in LOOK:
                panel = found.setdefault((match[1], match[2]), {})
                panel.setdefault(r["variant"], []).append(
                    (float(match[3]), r["value"], r["low"], r["high"])
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    found = curves(args.results)
    sets, encoders = (
        [s for s in SETS if any(key[0] == s for key in found)],
        list(dict.fromkeys(key[1] for key in found)),
    )
    figure, axes = plt.subplots(
        len(encoders), len(sets), figsize=(4.2 * len(sets), 3.1 * len(encoders)), squeeze=False
    )
    ticks = sorted(
        {point[0] for panel in found.values() for points in panel.values() for point in points}
    )
    for row, encoder in zip(axes, encoders, strict=True):
        for axis, name in zip(row, sets, strict=True):
            panel = found.get((name, encoder))
            if panel is None:
                axis.axis("off")
                continue
            for head, points in panel.items():
                colour, marker = LOOK[head]
                at = [ticks.index(p[0]) for p in points]
                values = [p[1] for p in points]
                # Clipped at the axis: an interval of five seeds can reach below zero.
                bars = [
                    [p[1] - max(p[2], 0) for p in points],
                    [min(p[3], 100) - p[1] for p in points],
                ]
                axis.errorbar(
                    at,
                    values,
                    bars,
                    color=colour,
                    marker=marker,
                    markersize=4,
                    linewidth=1.2,
                    elinewidth=0.7,
                    label=head,
                )
            axis.set_title(f"{name}, features of {encoder}", fontsize=9)
            axis.set_xticks(
                range(len(ticks)),
                ["none" if t == float("inf") else f"{t:g}" for t in ticks],
                fontsize=8,
            )
            axis.tick_params(axis="y", labelsize=8)
            axis.grid(alpha=0.25)
            axis.set_xlabel("epsilon", fontsize=8)
            axis.set_ylabel("test accuracy, %", fontsize=8)
    handles, labels = next(axis for axis in axes.flat if axis.lines).get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(args.out, dpi=110)


if __name__ == "__main__":
    main()
