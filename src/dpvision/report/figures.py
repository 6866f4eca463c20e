"""Figures of the report as SVG, whose colours follow the page's light or dark theme."""

import io
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dpvision.privacy.printed import up, up_delta

# Placeholders that are replaced by CSS variables in the SVG, so that one figure works in both
# themes.
INK, MUTED, GRID, ACCENT, SECOND = "#010203", "#010204", "#010205", "#010206", "#010207"
SERIES = tuple(f"#0103{i:02d}" for i in range(1, 7))
"""Colours of series, distinguishable for colour-blind readers on light and dark (page.css)."""
_THEME = {INK: "--ink", MUTED: "--muted", GRID: "--line", ACCENT: "--accent", SECOND: "--second"}
_THEME |= {color: f"--series-{i}" for i, color in enumerate(SERIES, 1)}
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # keep text as text: selectable, accessible, in the page's font
    "font.family": "DejaVu Sans",
    "font.size": 10.5,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "ytick.major.size": 0,
    "lines.linewidth": 2,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
}
_SIZE = (4.7, 3.3)
_MOST_POINTS = 400
_TITLE_CHARACTERS = 50
"""Characters of a bold line that fit into a figure."""


def epsilon_figure(points: Sequence[tuple[int, float]], stated: int, target: float | None) -> str:
    """Plot epsilon against steps as SVG.

    Args:
        points: (steps, epsilon) from (0, 0) to all planned steps, ascending, ``stated`` among them.
        stated: steps whose epsilon is stated (``DPPlan.stated_steps``).
        target: target epsilon, or None.
    """
    steps, epsilon = np.array(points, dtype=np.float64).T
    spent = dict(points)[
        stated
    ]  # never interpolated: between two points a concave curve lies above their line
    done = steps <= stated
    alt = (
        f"Epsilon grows from {up(epsilon[1], 2)} after {steps[1]:,.0f} steps to {up(spent, 2)} "
        f"after the {stated:,} planned ones"
    )
    with svg_axes(alt + (f"; the target is {up(target)}." if target else ".")) as (ax, svg):
        ax.plot(steps[done], epsilon[done], color=ACCENT)
        ax.fill_between(steps[done], epsilon[done], color=ACCENT, alpha=0.12, linewidth=0)
        if not done.all():
            ax.plot(
                [stated, *steps[~done]],
                [spent, *epsilon[~done]],
                color=ACCENT,
                linestyle=(0, (2, 2)),
                linewidth=1.4,
            )
        ax.plot([stated], [spent], "o", color=ACCENT, markersize=6, clip_on=False, zorder=3)
        top = max(target or 0.0, float(epsilon[-1]))
        if target:
            ax.axhline(target, color=SECOND, linewidth=1.4, linestyle=(0, (5, 3)))
            ax.text(0, target + 0.025 * top, f"target {up(target)}", color=SECOND, va="bottom")
        ax.annotate(
            f"{up(spent, 2)} stated",
            (stated, spent),
            (-7, -32),
            textcoords="offset points",
            ha="right",
            va="top",
            color=INK,
            weight="bold",
        )
        ax.set(xlim=(0, steps[-1]), ylim=(0, 1.13 * top), xlabel="steps", ylabel="epsilon")
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        ax.xaxis.set_major_formatter(FuncFormatter(thousands))
    return svg[0]


def profile_figure(profile: Sequence[Sequence[float]], epsilon: float, delta: float) -> str:
    """Plot the privacy profile as SVG: every pair (epsilon, delta) that holds, with the stated one
    marked.
    """
    x, y = np.array(profile, dtype=np.float64).T
    ends = (
        f"delta falls from {up_delta(y[0])} at epsilon 0 to {up_delta(y[-1])} at epsilon "
        f"{up(x[-1], 1)}"
    )
    alt = f"Privacy profile: {ends}; stated is {up(epsilon, 2)} at {up_delta(delta)}."
    with svg_axes(alt) as (ax, svg):
        ax.semilogy(x, y, color=ACCENT)
        ax.plot(
            [epsilon, epsilon, 0],
            [1e-12, delta, delta],
            color=SECOND,
            linewidth=1.2,
            linestyle=(0, (5, 3)),
        )
        ax.plot([epsilon], [delta], "o", color=SECOND, markersize=6, zorder=3)
        ax.annotate(
            "stated",
            (epsilon, delta),
            (8, 4),
            textcoords="offset points",
            color=SECOND,
            weight="bold",
        )
        ax.set(xlim=(0, x[-1]), ylim=(1e-10, 1), xlabel="epsilon", ylabel="delta")
        ax.set_yticks(
            [10.0**-k for k in range(0, 11, 2)], ["1", *(f"1e-{k}" for k in range(2, 11, 2))]
        )
        ax.minorticks_off()
    return svg[0]


def bars_figure(
    groups: Sequence[tuple[str, Sequence[tuple[str, float, float, float, bool]]]],
    chances: Sequence[float],
    images: str = "public images",
) -> str:
    """Plot scores as SVG: horizontal bars with intervals, in groups, each with a line at chance.

    Args:
        groups: (title, bars). A bar is (label, value, low, high, whether to highlight it), with
            shares in [0, 1].
        chances: score of guessing in each group.
        images: description of the test data, for the alt text.
    """
    said = [
        f"{title}: {', '.join(f'{name} {value:.1%}' for name, value, *_ in bars)}; chance "
        f"{chance:.1%}"
        for (title, bars), chance in zip(groups, chances, strict=True)
    ]
    wrapped = [textwrap.wrap(title, _TITLE_CHARACTERS) for title, _ in groups]
    rows = sum(
        len(lines) + len(bars) + 0.4 for lines, (_, bars) in zip(wrapped, groups, strict=True)
    )
    with svg_axes(f"Scores on {images}. {'; '.join(said)}.", (_SIZE[0], 0.27 * rows + 0.55)) as (
        ax,
        svg,
    ):
        y, most = 0.0, max(high for _, bars in groups for *_, high, _ in bars)
        for lines, (_, bars), chance in zip(wrapped, groups, chances, strict=True):
            for i, line in enumerate(lines):
                ax.text(0, y + i, line, color=INK, weight="bold", va="center")
            y += len(lines) - 1
            for i, (name, value, low, high, matters) in enumerate(bars):
                bar, ink = (ACCENT, INK) if matters else (MUTED, MUTED)
                at = y + 1 + i
                ax.barh(at, value, height=0.68, color=bar, alpha=1.0 if matters else 0.4)
                ax.plot([low, high], [at, at], color=INK, linewidth=1.4, solid_capstyle="butt")
                ax.annotate(
                    f"{value:.1%}  {name}",
                    (high, at),
                    (5, 0),
                    textcoords="offset points",
                    va="center",
                    color=ink,
                )
            ax.plot(
                [chance, chance],
                [y + 0.5, y + len(bars) + 0.5],
                color=SECOND,
                linewidth=1.4,
                linestyle=(0, (4, 2)),
            )
            y += len(bars) + 1.4
        ax.annotate(
            "chance",
            (chances[-1], y - 0.72),
            (0, 0),
            textcoords="offset points",
            color=SECOND,
            ha="center",
            va="center",
        )
        ax.set(xlim=(0, 1.8 * most), ylim=(y - 0.4, -0.6), xticks=[], yticks=[])
        ax.spines["bottom"].set_visible(False)
        ax.grid(False)
    return svg[0]


def series_figure(
    x: np.ndarray,
    series: dict[str, np.ndarray],
    *,
    xlabel: str,
    ylabel: str,
    reference: tuple[str, float] | None = None,
    log: bool = False,
    limits: tuple[float, float] | None = None,
) -> str:
    """Plot one or two series over a run as SVG, averaged to at most 400 points.

    Args:
        x: float64 (N,), e.g. steps.
        series: values by name, float64 (N,), NaN for missing values.
        reference: name and value of a constant to compare with.
        log: whether the vertical axis is logarithmic.
        limits: of the vertical axis; if None, fitted to the series.
    """
    alt = "; ".join(
        f"{ylabel}, {name}: from {_first(v):.4g} to {_first(v[::-1]):.4g}, median {_median(v):.4g}"
        for name, v in series.items()
    )
    with svg_axes(f"{alt}{f'; {reference[0]} is {reference[1]:.4g}' if reference else ''}.") as (
        ax,
        svg,
    ):
        for (name, values), color in zip(series.items(), (ACCENT, MUTED), strict=False):
            ax.plot(_thinned(x), _thinned(values), color=color, label=name, linewidth=1.6)
        if reference is not None:
            ax.axhline(
                reference[1], color=SECOND, linewidth=1.4, linestyle=(0, (5, 3)), label=reference[0]
            )
        if log:
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter(FuncFormatter(thousands))
            ax.yaxis.set_minor_formatter(
                FuncFormatter(lambda x, _: f"{x:.3g}" if f"{x:.0e}"[0] in "25" else "")
            )
        if len(series) > 1 or reference is not None:
            ax.legend(
                loc="lower left",
                bbox_to_anchor=(-0.02, 1.0),
                ncols=3,
                labelcolor=MUTED,
                handlelength=1.4,
                borderpad=0,
                columnspacing=1.2,
            )
        ax.set(xlabel=xlabel, ylabel=ylabel, xlim=(0, x[-1]) if x[-1] > 0 else None, ylim=limits)
        ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.xaxis.set_major_formatter(FuncFormatter(thousands))
    return svg[0]


@contextmanager
def svg_axes(alt: str, size: tuple[float, float] = _SIZE) -> Iterator[tuple[Axes, list[str]]]:
    """Yield axes in the report's style, and a list that contains the SVG after the block.

    Args:
        alt: alt text of the figure.
        size: width and height in inches, for text of 10.5 points.
    """
    svg: list[str] = []
    # The salt makes ids (clip paths, markers) unique among the figures of a page.
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": alt}):
        figure = Figure(
            figsize=size, layout="constrained"
        )  # without pyplot: no display, no global state
        yield figure.subplots(), svg
        buffer = io.StringIO()
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    svg.append(_for_page(buffer.getvalue(), alt))


def _for_page(text: str, alt: str) -> str:
    """Return the svg element alone, with theme variables for colours, no fixed size, and the alt
    text.
    """
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(
        r' id="[a-zA-Z0-9.]+_[0-9]+"', "", text
    )  # ids that repeat in every figure; clip paths and markers keep theirs
    for color, variable in _THEME.items():
        text = text.replace(color, f"var({variable})")
    text = re.sub(r"'DejaVu Sans'(, [^;\"]*)?", "var(--sans)", text)
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {box[0]} role="img" aria-label="{escape(alt)}">'
    )
    return re.sub(r"<svg[^>]*>", lambda _: head, text, count=1).strip()


def _thinned(values: np.ndarray) -> np.ndarray:
    if len(values) <= _MOST_POINTS:
        return values
    return np.array([_median(part) for part in np.array_split(values, _MOST_POINTS)])


def _median(values: np.ndarray) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")


def _first(values: np.ndarray) -> float:
    return float(next((v for v in values if np.isfinite(v)), float("nan")))


def thousands(x: float, position: Any = None) -> str:
    """Format a tick's number with commas."""
    return f"{x:,.6g}"
