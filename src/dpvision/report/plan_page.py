"""Page of ``dpvision plan --page``: sliders over a precomputed grid, and the figures of
``dpvision.plan.tables``.
"""

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from dpvision.plan.tables import Table, batches_near, noises_near, steps_near
from dpvision.privacy.plan import DPPlan
from dpvision.privacy.printed import percent_up, short, up, up_to
from dpvision.report.figures import INK, MUTED, SERIES, svg_axes, thousands
from dpvision.report.html import render, write_page

_Line = tuple[str, np.ndarray, np.ndarray]
_ATTACKS = (0.001, 0.01, 0.1)


def make_plan_page(
    path: Path,
    name: str | None,
    plan: DPPlan,
    facts: Mapping[str, Any],
    tables: Mapping[str, Table],
) -> Path:
    """Write the page and return its path. Its one script reads the grid in the page; it makes no
    network requests.

    Args:
        path: file to write.
        name: of the recipe; None for settings without one.
        plan: with a guarantee.
        facts: from ``planner.what_if``.
        tables: from ``tables.all_tables``.

    Raises:
        CheckpointError: the file cannot be written.
    """
    script = (Path(__file__).parent / "plan_page.js").read_text()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parameters = (facts["signal"] or {}).get("num_parameters")
    html = render(
        "plan_page.html",
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        grid=Markup(
            json.dumps(grid_of(name, plan, tables["grid"], parameters)).replace("<", "\\u003c")
        ),
        name=name,
        plan=plan,
        facts=facts,
        parameters=parameters,
        sliders=_sliders(plan),
        figures=_figures(plan, tables),
        compute=[_compute_row(row) for row in tables["compute_rows"].rows],
        attacks=[
            (f"{rate:.1%}", percent_up(float(_at(tables["tradeoff"], rate)))) for rate in _ATTACKS
        ],
    )
    return write_page(path, html)


def grid_of(name: str | None, plan: DPPlan, table: Table, parameters: int | None) -> dict[str, Any]:
    """Return what the page's script reads: the values of the sliders, and epsilon by (batch, noise,
    steps).
    """
    axes: dict[str, Sequence[float]] = {
        "batch": batches_near(plan),
        "noise": noises_near(plan),
        "steps": steps_near(plan),
    }
    shape = tuple(len(values) for values in axes.values())
    epsilon = table.column("epsilon").reshape(shape).tolist()
    return {
        **axes,
        "epsilon": [
            [[up_to(6, e) if math.isfinite(e) else None for e in row] for row in block]
            for block in epsilon
        ],
        "start": [
            axes["batch"].index(plan.expected_batch_size),
            axes["noise"].index(plan.noise.multiplier),
            axes["steps"].index(plan.steps),
        ],
        "records": plan.dataset_size,
        "parameters": parameters,
        "command": _command(name, plan),
    }


def _command(name: str | None, plan: DPPlan) -> str:
    """Return the command line without noise, batch and steps."""
    words = [
        f"dpvision plan {name}" if name else "dpvision plan",
        f"--dataset-size {plan.dataset_size}",
        f"--delta {plan.delta!r}",
    ]
    if plan.sampler.law != "poisson":
        words.append(f"--sampling {plan.sampler.law}")
    if plan.unit.is_person:
        words.append(
            f"--num-units {plan.unit.num_people} --max-records-per-unit {plan.unit.max_records}"
        )
    return " ".join(words)


def _sliders(plan: DPPlan) -> list[tuple[str, str, int, int]]:
    """Id, label, largest index and starting index of each slider that can move."""
    grid: tuple[tuple[str, str, Sequence[float], float], ...] = (
        ("batch", "expected batch size", batches_near(plan), plan.expected_batch_size),
        ("noise", "noise multiplier", noises_near(plan), plan.noise.multiplier),
        ("steps", "steps", steps_near(plan), plan.steps),
    )
    return [
        (key, label, len(values) - 1, values.index(start)) for key, label, values, start in grid
    ]


def _figures(plan: DPPlan, tables: Mapping[str, Table]) -> dict[str, Markup | None]:
    stated = plan.stated_epsilon
    assert plan.epsilon is not None and stated is not None, "a plan with a guarantee has epsilons"
    by_records, by_steps, curves = (
        tables["epsilon_by_records"],
        tables["epsilon_by_steps"],
        tables["rdp_curves"],
    )
    profile, roc, people = tables["accountants"], tables["tradeoff"], tables["images_of_a_person"]
    both = ("PLD", "epsilon"), ("Renyi", "epsilon_rdp")
    order = curves.column("order")
    drawn = {
        "epsilon_by_records": lines_figure(
            [
                (label, by_records.column("dataset_size"), by_records.column(name))
                for label, name in both
            ],
            "records",
            "epsilon",
            log="xy",
            mark=(plan.dataset_size, plan.epsilon),
        )
        if by_records.rows
        else None,
        "batch_by_epochs": _epochs_figure(plan, tables["batch_by_epochs"]),
        "epsilon_by_steps": lines_figure(
            [(label, by_steps.column("steps"), by_steps.column(name)) for label, name in both],
            "steps",
            "epsilon",
            mark=(plan.steps, plan.epsilon),
        ),
        "rdp_curves": lines_figure(
            [
                (f"{int(name.removeprefix('steps_')):,} steps", order, curves.column(name))
                for name in curves.columns[1:]
            ],
            "order",
            "Renyi divergence",
            log="xy",
        ),
        "accountants": lines_figure(
            [
                (label, profile.column("epsilon"), profile.column(name))
                for label, name in (("PLD", "delta"), ("Renyi", "delta_rdp"))
            ],
            "epsilon",
            "delta",
            log="y",
            mark=(stated, plan.delta),
        ),
        "tradeoff": lines_figure(
            [
                (
                    "best attack, at most",
                    roc.column("false_positive_rate"),
                    roc.column("true_positive_rate"),
                ),
                ("guessing", roc.column("false_positive_rate"), roc.column("false_positive_rate")),
            ],
            "false-positive rate",
            "true-positive rate",
            log="xy",
        ),
        "images_of_a_person": lines_figure(
            [("one person", people.column("images"), people.column("epsilon"))],
            "images of a person",
            "epsilon",
            log="xy",
            mark=(plan.unit.clipped, stated),
        ),
    }
    return {name: None if svg is None else Markup(svg) for name, svg in drawn.items()}


def _epochs_figure(plan: DPPlan, table: Table) -> str | None:
    noise, batch, epochs = (
        table.column(name) for name in ("noise_multiplier", "expected_batch_size", "epochs")
    )
    lines = [
        (f"noise {level:.3g}", batch[noise == level], epochs[noise == level])
        for level in dict.fromkeys(noise.tolist())
    ]
    if not any(np.isfinite(y).sum() > 1 for _, _, y in lines):
        return None
    return lines_figure(
        lines,
        "expected batch size",
        "epochs",
        log="xy",
        mark=(plan.expected_batch_size, plan.steps * plan.expected_batch_size / plan.dataset_size),
    )


def lines_figure(
    lines: Sequence[_Line],
    xlabel: str,
    ylabel: str,
    *,
    log: str = "",
    mark: tuple[float, float] | None = None,
) -> str:
    """Plot lines as SVG.

    Args:
        lines: label, x and y of each, float64 of one shape; points that are not finite are left
            out.
        log: "", "x", "y" or "xy": the logarithmic axes.
        mark: a point to mark: the plan.
    """
    shown = [(label, x[np.isfinite(y)], y[np.isfinite(y)]) for label, x, y in lines]
    shown = [(label, x, y) for label, x, y in shown if len(x)]
    said = "; ".join(
        f"{label}: {up(y[0])} at {x[0]:.4g}, {up(y[-1])} at {x[-1]:.4g}" for label, x, y in shown
    )
    with svg_axes(f"{ylabel.capitalize()} against {xlabel}. {said}.") as (ax, svg):
        for i, (label, x, y) in enumerate(shown):
            ax.plot(
                x,
                y,
                color=MUTED if label == "guessing" else SERIES[i % len(SERIES)],
                label=label,
                linewidth=1.7,
            )
        if mark is not None:
            ax.plot(
                *([v] for v in mark),
                "o",
                color=INK,
                markersize=5,
                zorder=4,
                label="this plan",
                linestyle="none",
            )
        ax.set(xlabel=xlabel, ylabel=ylabel)
        for axis, which in ((ax.xaxis, "x"), (ax.yaxis, "y")):
            if which in log:
                (ax.set_xscale if which == "x" else ax.set_yscale)("log")
                axis.set_major_locator(LogLocator(numticks=6))
                axis.set_minor_formatter(NullFormatter())
            else:
                axis.set_major_locator(MaxNLocator(5))
                (ax.set_xlim if which == "x" else ax.set_ylim)(0)
            axis.set_major_formatter(FuncFormatter(_tick))
        columns = 3 if max(len(label) for label, _, _ in shown) < 14 else 2
        ax.legend(
            loc="lower left",
            bbox_to_anchor=(-0.02, 1.0),
            ncols=columns,
            labelcolor=MUTED,
            handlelength=1.2,
            borderpad=0,
            columnspacing=1.2,
        )
    return svg[0]


def _tick(x: float, position: Any = None) -> str:
    if 1e4 <= x < 1e15:
        for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
            if x >= size:
                return f"{x / size:,.4g}{unit}"
    return short(x) if 0 < abs(x) < 1e-3 else thousands(x)


def _compute_row(row: tuple[float | None, ...]) -> list[str]:
    steps, epochs, noise, ratio, signal, gradients = (float(value or 0) for value in row)
    return [
        f"{epochs:,.3g}",
        f"{steps:,.0f}",
        f"{noise:.4g}",
        f"{ratio:.2f}",
        f"{signal:.2f}",
        f"{gradients:,.3g}",
    ]


def _at(roc: Table, rate: float) -> float:
    return float(
        np.interp(
            math.log(rate),
            np.log(roc.column("false_positive_rate")),
            roc.column("true_positive_rate"),
        )
    )
