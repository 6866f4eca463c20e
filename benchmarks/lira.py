"""The likelihood-ratio membership attack (LiRA) on heads, classifiers, captioners and encoders, at
two epsilons and without the noise.

    python benchmarks/lira.py [--quick] [--cases NAMES] [--json FILE]
    python benchmarks/lira.py --page FILE [FILE ...]

The first form audits each case by `black_box` with 16 shadow models (an hour of one core;
--quick: five shadow models, a case, a minute). All 17 models are attacked, each with the others as
its shadows, so that rates at few false positives are of 17 times the canaries; "allowed" is the
plan's limit, which holds for each. A row's case is what is trained, its variant epsilon. The second
form writes the table of docs/audits.md and the figure from results.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from audits import ATTACKED, BEGIN, END, NO_NOISE, PAGE, SCENES, config_of, terms_of
from common import ROOT, row, write_result
from matplotlib.figure import Figure

from dpvision.audit import black_box
from dpvision.audit.bound import area_above
from dpvision.audit.lira import Scored, likelihood_ratios
from dpvision.data.synthetic_store import write_scenes
from dpvision.privacy.composition import curve
from dpvision.privacy.plan import DPPlan

FIGURE = ROOT / "docs" / "images" / "lira.png"
PACKAGES = ("torch", "numpy", "scipy", "dp-accounting", "timm")
SHADOWS = 16
FPRS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
VARIANTS = ("1", "8", NO_NOISE)
LONGER = {"encoder": {"privacy.steps": 600, "optim.learning_rate": 1e-2}}
"""Settings with which canaries are found without noise, if only a few."""
CASES = (SCENES, *(case for case in ATTACKED if case != "head"))


def each_attacked(models: list[Scored]) -> tuple[np.ndarray, np.ndarray]:
    """Return the likelihood ratios of all models' canaries, each model with the others as its
    shadows, and their coins.
    """
    ratios = []
    for i, model in enumerate(models):
        rest = models[:i] + models[i + 1 :]
        score_SM, inside_SM = (
            np.array([getattr(m, name) for m in rest]) for name in ("score_M", "inside_M")
        )
        ratios.append(likelihood_ratios(model.score_M, score_SM, inside_SM))
    return np.concatenate(ratios), np.concatenate([m.inside_M for m in models])


def attacked(case: str, variant: str, shadows: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a case at an epsilon."""
    name = "head" if case == SCENES else case
    recipe, canaries, settings = ATTACKED[name]
    settings = {**settings, **LONGER.get(name, {})}
    data = folder / "scenes" if case == SCENES else None
    if data is not None and not data.exists():
        write_scenes(data, 2000, 32, label="colour")
    config, start = config_of(recipe, float(variant.split(",")[0]), **settings), time.monotonic()
    factor = 1e-6 if variant == NO_NOISE else 1.0
    keep = folder / f"{case} {variant}"
    with terms_of(lambda terms: [(of, factor * std) for of, std in terms]):
        result = black_box(config, None, canaries, data=data, shadows=shadows, keep=keep)
    num = result["bound"]["canaries"]
    models = [Scored.read(path, num) for path in sorted(keep.glob("model-*.json"))]
    ratio, inside = each_attacked(models)
    ins, outs = ratio[inside], np.sort(ratio[~inside])[::-1]
    allowed = curve(((DPPlan.from_dict(result["executed"]), result["executed"]["steps"]),), FPRS)
    found = {
        "models": float(len(models)),
        "canaries": float(num),
        "outside": float(len(outs)),
        "epsilon_low_of_plan": result["bound"]["epsilon_low_of_plan"],
        "auc": area_above(ins, outs),
        "limit_of_auc": allowed.auc,
        "passed": float(result["passed"]),
        "seconds": time.monotonic() - start,
    }
    for fpr in FPRS:
        found[f"tpr_at_fpr_{fpr:g}"] = float(np.mean(ins > outs[int(fpr * len(outs))]))
        found[f"limit_of_tpr_at_fpr_{fpr:g}"] = allowed.tpr_at_fpr[fpr]
    for metric, value in found.items():
        yield row(case, variant, metric, [value])


def by_case(rows: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, float]]:
    """Return figures by case and variant, in the order of the cases."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for r in rows:
        found.setdefault((r["case"], r["variant"]), {})[r["metric"]] = r["value"]
    order = [(case, variant) for case in CASES for variant in VARIANTS]
    return {key: found[key] for key in order if key in found}


def table(found: dict[tuple[str, str], dict[str, float]]) -> str:
    """Return the table of the page."""
    lines = [
        "| trained | epsilon | AUC | allowed | TPR at 1% | allowed | TPR at 0.1% | allowed | bound "
        "of the plan | passed | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (case, variant), f in found.items():
        pairs = [
            f"{f[name]:.3f} | {f[f'limit_of_{name}']:.3f}"
            for name in ("auc", "tpr_at_fpr_0.01", "tpr_at_fpr_0.001")
        ]
        lines.append(
            f"| {case} | {variant} | {' | '.join(pairs)} | {f['epsilon_low_of_plan']:.2f} | "
            f"{'yes' if f['passed'] else 'NO'} | {f['seconds']:.0f} |"
        )
    return "\n".join(lines)


def draw(found: dict[tuple[str, str], dict[str, float]], path: Path) -> None:
    """Draw the ROC curves with the plan's limits, on logarithmic axes."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, variant in zip(figure.subplots(1, len(VARIANTS), sharey=True), VARIANTS, strict=True):
        shown = {case: found[case, variant] for case in CASES if (case, variant) in found}
        for case, f in shown.items():
            tpr = [max(f[f"tpr_at_fpr_{fpr:g}"], 1e-4) for fpr in FPRS]
            axes.plot(FPRS, tpr, marker=".", label=case)
        limit = [[f[f"limit_of_tpr_at_fpr_{fpr:g}"] for fpr in FPRS] for f in shown.values()]
        axes.plot(FPRS, np.max(limit, axis=0), "k--", label="the largest limit of the plans")
        axes.plot(FPRS, FPRS, "0.7", label="chance")
        axes.set(xscale="log", yscale="log", xlabel="false-positive rate", ylim=(5e-4, 1.2))
        axes.set_title(f"epsilon {variant}")
    figure.axes[0].set_ylabel("true-positive rate")
    figure.axes[0].legend(fontsize="x-small")
    figure.savefig(path, dpi=150)


def write_page(paths: list[Path]) -> None:
    """Write the table into docs/audits.md, and the figure."""
    rows = [r for path in paths for r in json.loads(path.read_text())["rows"]]
    found, text = by_case(rows), PAGE.read_text()
    begin, end = BEGIN.format("lira").replace("audits.py", "lira.py"), END.format("lira")
    before, rest = text.split(begin)
    PAGE.write_text(f"{before}{begin}\n\n{table(found)}\n\n{end}{rest.split(end)[1]}")
    draw(found, FIGURE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--page", type=Path, nargs="+")
    args = parser.parse_args()
    if args.page is not None:
        write_page(args.page)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in args.cases[: 1 if args.quick else None]:
            for variant in VARIANTS:
                rows += attacked(case, variant, 5 if args.quick else SHADOWS, Path(folder))
                print(table(by_case(rows)).splitlines()[-1], flush=True)
    write_result(args.json, "lira", rows, packages=PACKAGES)
    wrong = [
        key
        for key, f in by_case(rows).items()
        if bool(f["passed"]) == (key[1] == NO_NOISE)
        and key != ("encoder", NO_NOISE)  # hardly found
    ]
    sys.exit(f"Not as expected: {wrong}" if wrong else 0)


if __name__ == "__main__":
    main()
